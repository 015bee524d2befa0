"""The model sizes that have names; free of torch, so that a plan needs none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """d_model, d_ff, layers and heads of a decoder."""

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int


# "xl" has meant two models in print: this one, and the one that is called 2.7B here.
SIZES = {
    "mini": Size(32, 96, 2, 2),
    "tiny": Size(128, 384, 4, 4),
    "small": Size(768, 3072, 12, 12),
    "medium": Size(1024, 4096, 24, 16),
    "large": Size(1280, 5120, 36, 20),
    "xl": Size(1600, 6400, 48, 25),
    "2.7B": Size(2560, 10240, 32, 32),
    "10B": Size(4608, 12288, 50, 36),
}
