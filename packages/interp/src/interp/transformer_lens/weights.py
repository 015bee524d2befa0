"""A `Decoder`'s weights, as views in TransformerLens's shapes. Missing biases are new zeros."""

from __future__ import annotations

from torch import Tensor, nn

from interp.decoder.decoder import Decoder
from interp.decoder.modules.attention import DecoderAttention
from interp.decoder.modules.block import DecoderBlock
from interp.decoder.modules.mlp import DecoderMLP


def collect_named_weights(decoder: Decoder) -> dict[str, Tensor]:
    """Return all weights by name, such as "blocks.0.attn.W_Q", in the layout of `x @ W`.

    The weights of norms and experts, and the latent projections of DeepSeek, are left out.
    """
    weights = {"embed.W_E": decoder.embed.weight}
    if decoder.position is not None:
        weights["pos_embed.W_pos"] = decoder.position.weight
    for i, block in enumerate(decoder.layers):
        block_weights = _collect_block_weights(block)
        weights |= {f"blocks.{i}.{name}": weight for name, weight in block_weights.items()}
    return weights | {
        "unembed.W_U": decoder.unembed.weight.mT,
        "unembed.b_U": _get_bias(decoder.unembed),
    }


def _collect_block_weights(block: DecoderBlock) -> dict[str, Tensor]:
    weights = _collect_attention_weights(block.attention)
    mlp = block.mlp
    if isinstance(mlp, DecoderMLP):
        weights |= {"mlp.W_in": mlp.up.weight.mT, "mlp.b_in": _get_bias(mlp.up)}
        weights |= {"mlp.W_out": mlp.down.weight.mT, "mlp.b_out": _get_bias(mlp.down)}
        if mlp.gate is not None:
            weights["mlp.W_gate"] = mlp.gate.weight.mT
    return weights


def _collect_attention_weights(attention: DecoderAttention) -> dict[str, Tensor]:
    """Return W_O, and W_Q, W_K and W_V of projections that are `nn.Linear`, with their biases.

    W_O is (heads, d_head, d_model), and the others are (heads or kv_heads, d_model, d_head).
    """
    weights = {
        "attn.W_O": attention.o.weight.mT.unflatten(0, (attention.heads, -1)),
        "attn.b_O": _get_bias(attention.o),
    }
    for part, linear in (("Q", attention.q), ("K", attention.k), ("V", attention.v)):
        if isinstance(linear, nn.Linear):
            heads = attention.heads if part == "Q" else attention.kv_heads
            weights[f"attn.W_{part}"] = linear.weight.unflatten(0, (heads, -1)).mT
            weights[f"attn.b_{part}"] = _get_bias(linear).unflatten(0, (heads, -1))
    return weights


def _get_bias(linear: nn.Linear) -> Tensor:
    if linear.bias is not None:
        return linear.bias
    return linear.weight.new_zeros(linear.out_features)
