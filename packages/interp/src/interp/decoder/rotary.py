"""Rotary angles, their scaling methods and their configurations, and the slopes of ALiBi.

Newer configurations of Hugging Face have `rope_parameters`, possibly one set per kind of layer.
Older ones have `rope_theta` and `rope_scaling`. Families differ in the names and defaults of the
base, of the fraction of rotated dimensions, and of the original length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interp.decoder.families import Family


@dataclass(frozen=True)
class Rotary:
    """The rotary positions of one layer; nothing is rotated without angles."""

    #: The angle per position of each rotated pair.
    angles: tuple[float, ...] = ()
    #: The scale of rotated queries and keys (YaRN, LongRoPE).
    scale: float = 1.0
    #: The number of tokens beyond which a text has other angles than `angles`, or None.
    original_length: int | None = None
    #: The angles of longer texts with LongRoPE; () with dynamic scaling.
    long_angles: tuple[float, ...] = ()
    #: The base and the factor of dynamic scaling.
    theta: float = 0.0
    factor: float = 1.0

    def angles_at(self, length: int) -> tuple[float, ...]:
        """Return the angles of a text of `length` tokens."""
        if self.original_length is None or length <= self.original_length:
            return self.angles
        if self.long_angles:
            return self.long_angles
        # Dynamic scaling grows the base with the length, in float32 as in transformers.
        tokens = torch.tensor(length, dtype=torch.float32, device="cpu")
        growth = self.factor * tokens / self.original_length - (self.factor - 1)
        dims = 2 * len(self.angles)
        return rotary_angles(dims, self.theta * growth ** (dims / (dims - 2)))


def rotary_angles(
    dims: int, theta: float | Tensor, divisors: float | Sequence[float] = 1.0
) -> tuple[float, ...]:
    """Return theta^(-2i / dims), divided by `divisors`, for the pairs i of `dims` dimensions."""
    # Use float32, as in transformers: the rounding errors matter at position 1,000.
    exponents = torch.arange(0, dims, 2, dtype=torch.int64, device="cpu").float() / dims
    inverse = torch.tensor(divisors, dtype=torch.float32, device="cpu") * theta**exponents
    return tuple((1.0 / inverse).tolist())


def scaled_rotary(
    rope: Mapping[str, Any], dims: int, original_length: int, max_length: int
) -> Rotary:
    """Return the rotary positions of `dims` dimensions by the method that `rope` names.

    `original_length` is the context length of pretraining, `max_length` that of the scaled model.
    """
    method = rope.get("rope_type") or rope.get("type") or "default"
    angles = rotary_angles(dims, rope["rope_theta"])
    if method == "default":
        return Rotary(angles)
    factor = rope.get("factor")
    if not factor and method in ("yarn", "longrope", "su") and original_length:
        factor = max_length / original_length
    if not factor:
        raise ValueError(f"rope_type {method!r} has no factor; is the configuration complete?")
    if method in ("dynamic", "yarn") and dims % 2:
        raise ValueError(
            f"expected an even number of rotated dimensions per head with {method!r}, got {dims}; "
            "implementations rotate different dimensions of an odd number"
        )
    if method == "dynamic":
        theta = rope["rope_theta"]
        return Rotary(angles, original_length=max_length, theta=theta, factor=factor)
    if method == "linear":
        return Rotary(tuple(angle / factor for angle in angles))
    if method == "llama3":
        return Rotary(tuple(_llama3(angle, factor, original_length, rope) for angle in angles))
    if method == "yarn":
        return Rotary(_yarn(angles, factor, original_length, rope), _yarn_scale(factor, rope))
    if method in ("longrope", "su"):
        angles, long_angles = (
            rotary_angles(dims, rope["rope_theta"], rope[f"{length}_factor"])
            for length in ("short", "long")
        )
        scale = _longrope_scale(factor, rope, original_length)
        return Rotary(angles, scale, original_length, long_angles)
    raise ValueError(
        f"rope_type {method!r} is not one of default, dynamic, linear, llama3, longrope, yarn"
    )


def _llama3(angle: float, factor: float, length: int, rope: Mapping[str, Any]) -> float:
    """Divide a small angle by the factor, keep a large angle, and interpolate in between."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    rotations = length * angle / (2 * math.pi)
    smooth = min(1.0, max(0.0, (rotations - low) / (high - low)))
    scaled: float = (1 - smooth) * angle / factor + smooth * angle
    return scaled


def _yarn(
    angles: tuple[float, ...], factor: float, length: int, rope: Mapping[str, Any]
) -> tuple[float, ...]:
    """Interpolate angles as in Peng et al. 2023, "YaRN"; `length` is the pretraining context."""
    dims = 2 * len(angles)

    def dim_of(rotations: float) -> float:
        log_theta = math.log(rope["rope_theta"])
        return dims * math.log(length / (rotations * 2 * math.pi)) / (2 * log_theta)

    low, high = dim_of(rope.get("beta_fast") or 32), dim_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    scaled = []
    for i, angle in enumerate(angles):
        interpolated = min(1.0, max(0.0, (i - low) / (high - low)))
        scaled.append(angle / factor * interpolated + angle * (1 - interpolated))
    return tuple(scaled)


def _yarn_scale(factor: float, rope: Mapping[str, Any]) -> float:
    """Return YaRN's scale of rotated queries and keys."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        whole = yarn_temperature(factor, rope["mscale_all_dim"])
        return yarn_temperature(factor, rope["mscale"]) / whole
    return yarn_temperature(factor, 1.0)


def yarn_temperature(factor: float, weight: float) -> float:
    """Return YaRN's scale of queries and keys, 0.1 weight log(factor) + 1; 1 if factor <= 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope_scale(factor: float, rope: Mapping[str, Any], length: int) -> float:
    """Return LongRoPE's scale of rotated queries and keys."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the slope of each head's position bias; Press et al. 2022, "ALiBi"."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    # The remaining heads use every second slope of a model with twice as many heads.
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return tuple(slopes)


def rotary_of(config: Mapping[str, Any], family: Family, d_head: int, kind: str) -> Rotary:
    """Return the rotary positions of one kind of layer."""
    if not family.rotary or (config["model_type"] == "cohere2" and kind == "full_attention"):
        return Rotary()
    rope = rope_parameters(config, family, kind)
    dims = _rotated_dims(config, family, d_head, rope)
    max_length = config.get("max_position_embeddings", 0)
    return scaled_rotary(rope, dims, _original_length(config, rope), max_length)


def _rotated_dims(
    config: Mapping[str, Any], family: Family, d_head: int, rope: Mapping[str, Any]
) -> int:
    """Return the number of dimensions per head that are rotated."""
    fraction = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    if family.rotary_fraction is not None:
        return int(d_head * (fraction or config.get("rotary_pct") or family.rotary_fraction))
    if family.latent and fraction not in (None, 1):
        raise ValueError(
            f"partial_rotary_factor = {fraction!r} is not supported with latent attention, whose "
            "rotated dimensions are qk_rope_head_dim"
        )
    name = "qk_rope_head_dim" if family.latent else "rotary_dim"
    is_named = family.latent or config["model_type"] == "gptj"
    return (config.get(name) if is_named else None) or d_head


def _original_length(config: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    """Return the context length of pretraining, by default `max_position_embeddings`, or 0.

    A value outside the rotary options has priority over a value among them.
    """
    name = "original_max_position_embeddings"
    length: int = config.get(name) or rope.get(name) or config.get("max_position_embeddings", 0)
    return length


def rope_parameters(config: Mapping[str, Any], family: Family, kind: str) -> dict[str, Any]:
    """Return the rotary parameters of one kind of layer, from a newer or older configuration."""
    rope = dict(config.get("rope_parameters") or {})
    rope = dict(rope.get(kind, rope))
    theta = config.get("rope_theta") or config.get("rotary_emb_base") or family.default_theta
    is_local = kind == "sliding_attention" and family.local_theta is not None
    if is_local:
        theta = config.get("rope_local_base_freq") or family.local_theta
    # Layers with a window are not scaled in families that have a separate base, and in OLMo 3.
    is_unscaled = is_local or (config["model_type"], kind) == ("olmo3", "sliding_attention")
    if not rope and not is_unscaled:
        rope = dict(config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", theta)
    return rope
