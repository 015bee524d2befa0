"""The splits that the stage `parallel` compares."""

from __future__ import annotations

import math

from llmsys_suite.config import Layout, Size


def possible_layouts(size: Size, world: int, rows: int) -> dict[str, Layout]:
    """Return the layouts that the stage `parallel` compares, by name, if they fit the model."""
    layouts = {
        "pipeline (GPipe)": Layout(pipeline=world, schedule="GPipe"),
        "pipeline (1F1B)": Layout(pipeline=world),
        "tensor (Megatron)": Layout(tensor=world),
    }
    if (group := group_size(size, world)) > 1:
        layouts["data x tensor"] = Layout(data=world // group, tensor=group)
    return {name: split for name, split in layouts.items() if not split.why_not(size, rows)}


def group_size(size: Size, world: int) -> int:
    """Return the largest proper divisor of `world` that also divides num_heads and d_ff.

    For example, a model with twelve heads trains on eight ranks in two groups of four.
    """
    fits = math.gcd(size.num_heads, size.d_ff)
    divisors = [n for n in range(1, world) if world % n == 0 and fits % n == 0]
    return max(divisors, default=1)
