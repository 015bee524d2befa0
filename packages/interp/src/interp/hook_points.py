"""TransformerLens's hook names for the sites of a `Decoder`, as used by `record` and `patch`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from interp.decoder.modules.block import DecoderBlock
from interp.decoder.modules.mlp import DecoderMLP


@dataclass(frozen=True)
class Activation:
    """An activation that TransformerLens names, as a function of the tensor at a site."""

    site: str

    def read(self, tensor: Tensor) -> Tensor:
        """Return the activation."""
        return tensor

    def write(self, value: Tensor, tensor: Tensor) -> Tensor:
        """Return the tensor at the site for a new value of the activation."""
        return value


@dataclass(frozen=True)
class Heads(Activation):
    """Queries, keys, values or z, (batch, seq, heads, d_head)."""

    heads: int

    def read(self, tensor: Tensor) -> Tensor:
        """Split the features into heads."""
        return tensor.unflatten(-1, (self.heads, -1))

    def write(self, value: Tensor, tensor: Tensor) -> Tensor:
        """Join the heads."""
        return value.flatten(-2)


@dataclass(frozen=True)
class Scale(Activation):
    """The numbers by which a norm divides the positions of its input, (batch, seq, 1)."""

    norm: nn.Module

    def read(self, tensor: Tensor) -> Tensor:
        """Return the root of the mean square, after centering if the norm is a layer norm."""
        # In half precision, squares overflow and sums lose digits. Norms compute in float32, too.
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        square = center(self.norm, wide).square().mean(-1, keepdim=True)
        return (square + cast(float, self.norm.eps)).sqrt().to(tensor)

    def write(self, value: Tensor, tensor: Tensor) -> Tensor:
        """Return the tensor unchanged, or raise ValueError if the scale was changed."""
        if not torch.equal(value, self.read(tensor)):
            raise ValueError(
                f"the scale of the norm that reads {self.site!r} cannot be changed; change the "
                "residual stream instead"
            )
        return tensor


def center(norm: nn.Module, x: Tensor) -> Tensor:
    """Return `x` without its mean if the norm is a layer norm, and `x` otherwise."""
    return x - x.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else x


@dataclass(frozen=True)
class HookPoint:
    """The argument `hook` of hook functions that are written for TransformerLens."""

    #: The name of the hook, such as "blocks.0.attn.hook_z".
    name: str

    def layer(self) -> int:
        """Return the index of the layer, which is a part of the name of a hook in a block."""
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


def find_hook_points(
    model: nn.Module, patterns: Iterable[str], names: str
) -> dict[str, Activation]:
    """Return the activations by hook name, for all hook names that match the patterns.

    Raises ValueError for a pattern without a match, for `names` other than "transformer_lens", and
    for a model that is not a `Decoder`.
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
    known = _build_points(model)
    points: dict[str, Activation] = {}
    for pattern in patterns:
        regex = re.escape(pattern).replace(r"\*\*", ".+").replace(r"\*", "[^.]+")
        matches = [name for name in known if re.fullmatch(regex, name)]
        if not matches:
            kinds = dict.fromkeys(re.sub(r"^blocks\.\d+", "blocks.*", name) for name in known)
            raise ValueError(f"no hook is named {pattern!r}; this model has {', '.join(kinds)}")
        points |= {name: known[name] for name in matches}
    return points


def _build_points(decoder: Any) -> dict[str, Activation]:
    points = {"hook_embed": Activation("embed_norm")}
    if decoder.position is not None and not decoder.settings.positions_in_attention:
        points["hook_pos_embed"] = Activation("position")
    for i, block in enumerate(decoder.blocks):
        name = f"blocks.{i}"
        attention = block.attention
        points[f"{name}.hook_resid_pre"] = Activation(f"{name}:input")
        points |= _build_scale_point(f"{name}.ln1", f"{name}.norm1", block.norm1)
        for part in "qkv":
            heads = attention.heads if part == "q" else attention.kv_heads
            points[f"{name}.attn.hook_{part}"] = Heads(f"{name}.attention.{part}", heads)
        points[f"{name}.attn.hook_pattern"] = Activation(f"{name}.attention.pattern")
        points[f"{name}.attn.hook_z"] = Heads(f"{name}.attention.o:input", attention.heads)
        points[f"{name}.hook_attn_out"] = Activation(f"{name}.attention_out")
        if not block.parallel:
            points[f"{name}.hook_resid_mid"] = Activation(f"{name}.mid")
        points |= _build_scale_point(f"{name}.ln2", f"{name}.norm2", block.norm2)
        if isinstance(block.mlp, DecoderMLP):
            read = "up" if block.mlp.gate is None else "gate"
            points[f"{name}.mlp.hook_pre"] = Activation(f"{name}.mlp.{read}")
            points[f"{name}.mlp.hook_post"] = Activation(f"{name}.mlp.down:input")
        points[f"{name}.hook_mlp_out"] = Activation(f"{name}.mlp_out")
        points[f"{name}.hook_resid_post"] = Activation(name)
    return points | _build_scale_point("ln_final", "norm", decoder.norm)


def _build_scale_point(name: str, module: str, norm: nn.Module) -> dict[str, Activation]:
    if isinstance(norm, nn.Identity):
        return {}
    return {f"{name}.hook_scale": Scale(f"{module}:input", norm)}
