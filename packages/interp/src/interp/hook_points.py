"""Hook names of TransformerLens for a `Decoder`, for `record` and `patch` with `names=`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from interp.decoder.decoder import Decoder
from interp.decoder.modules.mlp import DecoderMLP


def hook_points(
    model: nn.Module, patterns: Iterable[str], names: str
) -> dict[str, tuple[str, int]]:
    """Return the site of each hook name that matches, and the number of heads it is split into.

    The number is 0 for sites without heads. Raises ValueError for unknown names.
    """
    if names != "transformer_lens" or not isinstance(model, Decoder):
        raise ValueError(
            f"names={names!r} of a {type(model).__name__} are unknown; pass names="
            "'transformer_lens' and a Decoder, as from describe()"
        )
    known = _all_points(model)
    points: dict[str, tuple[str, int]] = {}
    for pattern in patterns:
        regex = re.escape(pattern).replace(r"\*\*", ".+").replace(r"\*", "[^.]+")
        matches = [name for name in known if re.fullmatch(regex, name)]
        if not matches:
            kinds = dict.fromkeys(re.sub(r"^blocks\.\d+", "blocks.*", name) for name in known)
            raise ValueError(f"no hook is named {pattern!r}; this model has {', '.join(kinds)}")
        points |= {name: known[name] for name in matches}
    return points


def _all_points(model: Decoder) -> dict[str, tuple[str, int]]:
    points = {"hook_embed": ("embed_norm", 0)}
    for i, block in enumerate(model.layers):
        name, attention = f"blocks.{i}", block.attention
        points[f"{name}.hook_resid_pre"] = f"{name}:input", 0
        for part in "qkv":
            heads = attention.heads if part == "q" else attention.kv_heads
            points[f"{name}.attn.hook_{part}"] = f"{name}.attention.{part}", heads
        points[f"{name}.attn.hook_pattern"] = f"{name}.attention.pattern", 0
        points[f"{name}.attn.hook_z"] = f"{name}.attention.o:input", attention.heads
        points[f"{name}.hook_attn_out"] = f"{name}.attention_out", 0
        if not block.parallel:
            points[f"{name}.hook_resid_mid"] = f"{name}.mid", 0
        if isinstance(block.mlp, DecoderMLP):
            read = "up" if block.mlp.gate is None else "gate"
            points[f"{name}.mlp.hook_pre"] = f"{name}.mlp.{read}", 0
            points[f"{name}.mlp.hook_post"] = f"{name}.mlp.down:input", 0
        points[f"{name}.hook_mlp_out"] = f"{name}.mlp_out", 0
        points[f"{name}.hook_resid_post"] = name, 0
    return points
