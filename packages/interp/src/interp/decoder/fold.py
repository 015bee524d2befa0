"""Rewrite weights so that circuits can be read off them while the function stays the same.

`fold_decoder` does all of it, for any family. Parameters are replaced, never written
to: a shared weight keeps its value for the others.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from interp.decoder.decoder import Decoder


@torch.no_grad()
def fold_norm(norm: nn.Module, *readers: nn.Linear) -> None:
    """Move `norm.weight` and `norm.bias` into `readers`, which must be all that reads the norm.

    For y = weight * n(x) + bias, W y + b = (W * weight) n(x) + (W bias + b). Any norm of that
    form will do; the result is checked on a random vector. Raises ValueError, with nothing
    changed, for other norms.
    """
    gain, shift = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if gain is None:
        return
    for reader in readers:
        if reader.in_features != gain.numel():
            raise ValueError(
                f"a reader takes {reader.in_features} features, the norm gives {gain.numel()}"
            )
    # In the precision of the weights; the seed is local, so that nobody's random numbers move.
    generator = torch.Generator(gain.device).manual_seed(0)
    x = torch.randn(3, gain.numel(), generator=generator, device=gain.device).to(gain.dtype)
    bare = {"weight": torch.ones_like(gain)}
    bare |= {} if shift is None else {"bias": torch.zeros_like(shift)}
    normed, scaled = norm(x), torch.func.functional_call(norm, bare, (x,)) * gain
    error = (scaled + (0 if shift is None else shift) - normed).abs().max()
    if error > torch.finfo(gain.dtype).eps ** 0.5 * normed.abs().max():
        raise ValueError(f"{type(norm).__name__} is not weight * n(x) + bias, so it does not fold")
    for reader in readers:
        if shift is not None:
            added = reader.weight @ shift
            _set(reader, "bias", added if reader.bias is None else reader.bias + added)
        _set(reader, "weight", reader.weight * gain)
    for name, value in bare.items():
        _set(norm, name, value)


@torch.no_grad()
def center_writes(*writers: nn.Linear | nn.Embedding) -> None:
    """Subtract from everything that `writers` add to the stream its mean over d_model.

    Keeps the function where every reader of the stream subtracts that mean itself: layer norm,
    not RMS norm.
    """
    for writer in writers:
        dim = 1 if isinstance(writer, nn.Embedding) else 0
        _set(writer, "weight", writer.weight - writer.weight.mean(dim, keepdim=True))
        if isinstance(writer, nn.Linear) and writer.bias is not None:
            _set(writer, "bias", writer.bias - writer.bias.mean())


@torch.no_grad()
def center_unembed(unembed: nn.Linear) -> None:
    """Subtract the mean over the vocabulary; logits shift together, log-probabilities stay."""
    _set(unembed, "weight", unembed.weight - unembed.weight.mean(0, keepdim=True))
    if unembed.bias is not None:
        _set(unembed, "bias", unembed.bias - unembed.bias.mean())


@torch.no_grad()
def fold_value_bias(value: nn.Linear, output: nn.Linear, *, d_head: int | None = None) -> None:
    """Move the bias of the values into the output projection's: pattern rows sum to 1.

    With grouped queries give `d_head`: each value head's bias counts for all that share it.
    """
    if value.bias is None:
        return
    bias = value.bias
    if value.out_features != output.in_features:
        if d_head is None or output.in_features % value.out_features:
            raise ValueError(
                f"values of {value.out_features} features feed an output of {output.in_features}; "
                "with grouped queries give d_head="
            )
        shared = output.in_features // value.out_features
        bias = bias.unflatten(0, (-1, d_head)).repeat_interleave(shared, 0).flatten()
    added = output.weight @ bias
    _set(output, "bias", added if output.bias is None else output.bias + added)
    _set(value, "bias", torch.zeros_like(value.bias))


def fold_decoder(model: Decoder) -> Decoder:
    """A copy of any family with all that folds folded, which gives the same log-probabilities.

    Norms before a reader are folded, norms after a writer and those of queries and keys stay. The
    stream is centered where every reader subtracts its mean (layer norm), the unembedding where no
    cap follows it; otherwise the logits themselves stay. The original stays as it is.
    """
    source = None if model.source is None else model.source.all_copied()
    model = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    model.source = source  # folded weights do not follow those of the described model
    for block in model.layers:
        attention = block.attention
        fold_norm(block.norm1, attention.q, attention.k, attention.v)
        fold_norm(block.norm2, *_mlp_readers(block.mlp))
        fold_value_bias(attention.v, attention.o, d_head=attention.d_head)
    norms = [model.norm, *(n for block in model.layers for n in (block.norm1, block.norm2))]
    outs = [n for block in model.layers for n in (block.attention_out, block.mlp_out)]
    if all(isinstance(n, nn.LayerNorm) for n in norms) and all(
        isinstance(n, nn.Identity) for n in outs
    ):
        tables = [model.embed] if model.position is None else [model.embed, model.position]
        center_writes(*tables)
        for block in model.layers:
            writers = [m for n, m in block.mlp.named_modules() if n.rpartition(".")[2] == "down"]
            center_writes(block.attention.o, *(m for m in writers if isinstance(m, nn.Linear)))
    fold_norm(model.norm, model.unembed)
    if model.settings.logit_cap is None:
        center_unembed(model.unembed)
    return model


def _mlp_readers(mlp: nn.Module) -> list[nn.Linear]:
    """What reads the stream in an MLP, or in all experts, their router and their shared one."""
    readers = ("gate", "up", "router", "shared_gate")
    return [
        module
        for name, module in mlp.named_modules()
        if name.rpartition(".")[2] in readers and isinstance(module, nn.Linear)
    ]


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    old = getattr(module, name)
    setattr(module, name, nn.Parameter(value, requires_grad=old is not None and old.requires_grad))
