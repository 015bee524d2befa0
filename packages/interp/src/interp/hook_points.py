"""TransformerLens's hook names for the sites of a `Decoder`, as used by `record` and `patch`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from interp.decoder.modules.block import DecoderBlock
from interp.decoder.modules.mlp import DecoderMLP


@dataclass(frozen=True)
class HookPoint:
    """The argument `hook` of hook functions that are written for TransformerLens."""

    #: The name of the hook, such as "blocks.0.attn.hook_z".
    name: str

    def layer(self) -> int:
        """Return the layer in the name of a hook in a block."""
        return int(self.name.split(".")[1])


def bind_hook(
    function: Callable[..., Tensor | None], name: str
) -> Callable[[Tensor], Tensor | None]:
    """Return a function of the activation alone that passes a `HookPoint` to `function` as `hook`.

    As in TransformerLens, `function` may return None to keep the activation, including its changes
    in place. A function without a parameter `hook` is returned unchanged.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a built-in function, such as torch.zeros_like
        return function
    if "hook" not in parameters:
        return function
    hook = HookPoint(name)

    def call_with_hook(activation: Tensor) -> Tensor:
        result = function(activation, hook=hook)
        return activation if result is None else result

    return call_with_hook


def hook_points(
    model: nn.Module, patterns: Iterable[str], names: str
) -> dict[str, tuple[str, int]]:
    """Return (site, number of heads) by hook name, for all hook names that match the patterns.

    The number is 0 if the activation is not split into heads. Raises ValueError for a pattern
    without a match, for `names` other than "transformer_lens", and for a model that is not a
    `Decoder`.
    """
    blocks = getattr(model, "blocks", None)
    # Decoder is not imported, because the module that defines it imports `interp.tap`.
    is_decoder = isinstance(blocks, nn.ModuleList) and all(
        isinstance(block, DecoderBlock) for block in blocks
    )
    if names != "transformer_lens" or not is_decoder:
        raise ValueError(
            f"names={names!r} of a {type(model).__name__} are unknown; pass names="
            "'transformer_lens' and a Decoder, as from describe()"
        )
    known = _all_points(cast(Iterable[DecoderBlock], blocks))
    points: dict[str, tuple[str, int]] = {}
    for pattern in patterns:
        regex = re.escape(pattern).replace(r"\*\*", ".+").replace(r"\*", "[^.]+")
        matches = [name for name in known if re.fullmatch(regex, name)]
        if not matches:
            kinds = dict.fromkeys(re.sub(r"^blocks\.\d+", "blocks.*", name) for name in known)
            raise ValueError(f"no hook is named {pattern!r}; this model has {', '.join(kinds)}")
        points |= {name: known[name] for name in matches}
    return points


def _all_points(blocks: Iterable[DecoderBlock]) -> dict[str, tuple[str, int]]:
    points = {"hook_embed": ("embed_norm", 0)}
    for i, block in enumerate(blocks):
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
