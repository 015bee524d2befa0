"""Folding of norms and biases into weights, which preserves the log-probabilities of a decoder.

Parameters are replaced, never changed in place, so other modules that share a weight do not change.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from interp.decoder.decoder import Decoder
from interp.decoder.modules.attention import DecoderAttention, LatentProjection


def _fold_norm(norm: nn.Module, *readers: nn.Linear) -> None:
    """Move the norm's weight and bias into `readers`, the modules that read its output.

    For y = weight * n(x) + bias, W y + b = (W * weight) n(x) + (W bias + b). The output of a layer
    norm n has mean 0, so the mean of each row of W * weight has no effect and is subtracted.
    """
    gain, shift = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if gain is None:
        return
    for reader in readers:
        if shift is not None:
            added = reader.weight @ shift
            _set_parameter(reader, "bias", added if reader.bias is None else reader.bias + added)
        weight = reader.weight * gain
        if isinstance(norm, nn.LayerNorm):
            weight = weight - weight.mean(1, keepdim=True)
        _set_parameter(reader, "weight", weight)
    _set_parameter(norm, "weight", torch.ones_like(gain))
    if shift is not None:
        _set_parameter(norm, "bias", torch.zeros_like(shift))


def _center_outputs(*modules: nn.Linear | nn.Embedding) -> None:
    """Subtract the mean over the features from the outputs of `modules`.

    For outputs that are added to the stream, the function stays the same if every reader of the
    stream subtracts this mean, as layer norm does and RMS norm does not. For logits, the
    log-probabilities stay the same.
    """
    for module in modules:
        dim = 1 if isinstance(module, nn.Embedding) else 0
        _set_parameter(module, "weight", module.weight - module.weight.mean(dim, keepdim=True))
        if isinstance(module, nn.Linear) and module.bias is not None:
            _set_parameter(module, "bias", module.bias - module.bias.mean())


def _fold_value_bias(attention: DecoderAttention) -> None:
    """Move the bias of the values into the bias of the output projection.

    If values are clamped or the attention has sinks, nothing is moved: the function is preserved
    only if the rows of a pattern sum to 1. The bias of a value head counts once per query head.
    """
    value, output = attention.v, attention.o
    is_linear = attention.sinks is None and attention.settings.clip is None
    if value.bias is None or not is_linear:
        return
    shared = attention.heads // attention.kv_heads
    bias = value.bias.unflatten(0, (attention.kv_heads, -1)).repeat_interleave(shared, 0).flatten()
    added = output.weight @ bias
    _set_parameter(output, "bias", added if output.bias is None else output.bias + added)
    _set_parameter(value, "bias", torch.zeros_like(value.bias))


@torch.no_grad()
def fold_decoder(model: Decoder) -> Decoder:
    """Return a copy of any decoder with folded norms and biases and the same log-probabilities.

    Norms of the stream are folded into their readers; norms of outputs, queries and keys are kept.
    Norms before attention are kept if positions are added to the inputs of queries and keys. The
    bias of the values is folded into the bias of the output projection, unless values are clamped
    or there are sinks. The stream is centered if every reader subtracts its mean (layer norm) and
    no norm follows a writer. The unembedding is centered if the logits have no cap. Raises
    RuntimeError if the described model has changed.
    """
    model.require_fresh()
    source = None if model.source is None else model.source.derive_with_copies()
    # The copy has separate parameters, which share memory until they are folded. If both decoders
    # had the same parameters, .to() of the copy would convert the original.
    parameters = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
    model = copy.deepcopy(model, parameters)
    model.source = source  # Folded weights are copies.
    for block in model.layers:
        attention = block.attention
        readers: list[nn.Linear] = []
        for part in (attention.q, attention.k, attention.v):
            readers += part.readers if isinstance(part, LatentProjection) else [part]
        # Queries and keys may read the norm's output plus a position, which has no gain.
        if not model.settings.positions_in_attention:
            _fold_norm(block.norm1, *readers)
        _fold_norm(block.norm2, *_find_linears(block.mlp, "gate", "up", "router"))
        _fold_value_bias(attention)
    if _can_center(model):
        _center_outputs(model.embed)
        if model.position is not None and not model.settings.positions_in_attention:
            _center_outputs(model.position)
        for block in model.layers:
            _center_outputs(block.attention.o, *_find_linears(block.mlp, "down"))
    _fold_norm(model.norm, model.unembed)
    if model.settings.logit_cap is None:
        _center_outputs(model.unembed)
    return model


def _can_center(model: Decoder) -> bool:
    """Return True if only layer norms read the stream and no norm follows a writer."""
    stream_norms: list[nn.Module] = [model.norm]
    output_norms: list[nn.Module] = [model.embed_norm]
    for block in model.layers:
        stream_norms += [block.norm1, block.norm2]
        output_norms += [block.attention_out, block.mlp_out]
    return all(isinstance(norm, nn.LayerNorm) for norm in stream_norms) and all(
        isinstance(norm, nn.Identity) for norm in output_norms
    )


def _find_linears(mlp: nn.Module, *names: str) -> list[nn.Linear]:
    """Return the linear layers with these names in an MLP, or in all experts of a mixture."""
    return [
        module
        for name, module in mlp.named_modules()
        if name.rpartition(".")[2] in names and isinstance(module, nn.Linear)
    ]


def _set_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    old = getattr(module, name)
    setattr(module, name, nn.Parameter(value, requires_grad=old is not None and old.requires_grad))
