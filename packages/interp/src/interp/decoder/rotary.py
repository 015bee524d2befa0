"""Rotary angles and their scaling methods: linear, dynamic, Llama 3, YaRN and LongRoPE."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """The rotary positions of one layer. Without angles, nothing is rotated."""

    #: The angle by which each pair of dimensions is rotated per position, in radians.
    angles: tuple[float, ...] = ()
    #: The scale of rotated queries and keys (YaRN, LongRoPE).
    scale: float = 1.0
    #: The length of the longest texts with these `angles`, or None if all texts have them.
    original_length: int | None = None
    #: The angles of longer texts with LongRoPE; () with dynamic scaling.
    long_angles: tuple[float, ...] = ()
    #: The base of the angles, for dynamic scaling.
    theta: float = 0.0
    #: The factor of dynamic scaling.
    factor: float = 1.0

    def compute_angles(self, length: int) -> tuple[float, ...]:
        """Return the angles of a text of `length` tokens."""
        if self.original_length is None or length <= self.original_length:
            return self.angles
        if self.long_angles:
            return self.long_angles
        # Dynamic scaling increases the base with the length, in float32 as in transformers.
        tokens = torch.tensor(length, dtype=torch.float32, device="cpu")
        growth = self.factor * tokens / self.original_length - (self.factor - 1)
        dims = 2 * len(self.angles)
        return compute_rotary_angles(dims, self.theta * growth ** (dims / (dims - 2)))


def compute_rotary_angles(
    dims: int, theta: float | Tensor, divisors: float | Sequence[float] = 1.0
) -> tuple[float, ...]:
    """Return theta^(-2i / dims), divided by `divisors`, for the pairs i of `dims` dimensions."""
    # Use float32, as in transformers: the rounding errors matter at position 1,000.
    exponents = torch.arange(0, dims, 2, dtype=torch.int64, device="cpu").float() / dims
    inverse = torch.tensor(divisors, dtype=torch.float32, device="cpu") * theta**exponents
    return tuple((1.0 / inverse).tolist())


#: The supported values of `rope_type`.
_METHODS = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")


def build_scaled_rotary(
    rope: Mapping[str, Any], dims: int, original_length: int, max_length: int
) -> Rotary:
    """Return the rotary positions of `dims` dimensions by the method that `rope` names.

    `original_length` is the context length of pretraining, `max_length` that of the scaled model.
    Raises ValueError for an unknown method, a missing factor, and an odd number of dimensions with
    dynamic scaling and YaRN.
    """
    name = rope.get("rope_type") or rope.get("type") or "default"
    method = "longrope" if name == "su" else name  # "su" is an old name.
    if method not in _METHODS:
        raise ValueError(f"rope_type {method!r} is not one of {', '.join(_METHODS)}")
    angles = compute_rotary_angles(dims, rope["rope_theta"])
    if method == "default":
        return Rotary(angles)
    factor = rope.get("factor")
    if not factor and method in ("yarn", "longrope") and original_length:
        factor = max_length / original_length
    if not factor:
        raise ValueError(f"rope_type {method!r} has no factor; add it to the configuration")
    if method in ("dynamic", "yarn") and dims % 2:
        raise ValueError(
            f"expected an even number of rotated dimensions per head with {method!r}, got {dims}; "
            "for odd numbers, implementations rotate different dimensions"
        )
    if method == "dynamic":
        theta = rope["rope_theta"]
        return Rotary(angles, original_length=max_length, theta=theta, factor=factor)
    if method == "linear":
        return Rotary(tuple(angle / factor for angle in angles))
    if method == "llama3":
        scaled = [_scale_as_llama3(angle, factor, original_length, rope) for angle in angles]
        return Rotary(tuple(scaled))
    if method == "yarn":
        angles = _scale_as_yarn(angles, factor, original_length, rope)
        return Rotary(angles, _compute_yarn_scale(factor, rope))
    angles = compute_rotary_angles(dims, rope["rope_theta"], rope["short_factor"])
    long_angles = compute_rotary_angles(dims, rope["rope_theta"], rope["long_factor"])
    scale = _compute_longrope_scale(factor, rope, original_length)
    return Rotary(angles, scale, original_length, long_angles)


def _scale_as_llama3(angle: float, factor: float, length: int, rope: Mapping[str, Any]) -> float:
    """Divide a small angle by the factor, keep a large angle, and interpolate in between."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    rotations = length * angle / (2 * math.pi)
    unscaled = min(1.0, max(0.0, (rotations - low) / (high - low)))
    scaled: float = (1 - unscaled) * angle / factor + unscaled * angle
    return scaled


def _scale_as_yarn(
    angles: tuple[float, ...], factor: float, length: int, rope: Mapping[str, Any]
) -> tuple[float, ...]:
    """Interpolate angles as in Peng et al. 2023, "YaRN"; `length` is the pretraining context."""
    dims = 2 * len(angles)

    def find_pair(rotations: float) -> float:
        """Return the index of the pair that rotates this number of times within the context."""
        log_theta = math.log(rope["rope_theta"])
        return dims * math.log(length / (rotations * 2 * math.pi)) / (2 * log_theta)

    low, high = find_pair(rope.get("beta_fast") or 32), find_pair(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001  # Avoid a division by 0.
    scaled = []
    for i, angle in enumerate(angles):
        divided = min(1.0, max(0.0, (i - low) / (high - low)))
        scaled.append(angle / factor * divided + angle * (1 - divided))
    return tuple(scaled)


def _compute_yarn_scale(factor: float, rope: Mapping[str, Any]) -> float:
    """Return YaRN's scale of rotated queries and keys."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        scale_of_all_dims = compute_yarn_temperature(factor, rope["mscale_all_dim"])
        return compute_yarn_temperature(factor, rope["mscale"]) / scale_of_all_dims
    return compute_yarn_temperature(factor, 1.0)


def compute_yarn_temperature(factor: float, weight: float) -> float:
    """Return YaRN's scale of queries and keys: 0.1 weight log(factor) + 1, or 1 if factor <= 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _compute_longrope_scale(factor: float, rope: Mapping[str, Any], length: int) -> float:
    """Return LongRoPE's scale of rotated queries and keys."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
