"""The splits that the stage `parallel` compares."""

from __future__ import annotations

import math

from llmsys_suite.config import Layout
from llmsys_suite.model import ModelConfig


def possible_layouts(config: ModelConfig, world: int, rows: int) -> dict[str, Layout]:
    """Return the layouts that the stage `parallel` compares, by name, if they fit the model."""
    layouts = {
        "pipeline (GPipe)": Layout(pipeline=world, schedule="GPipe"),
        "pipeline (1F1B)": Layout(pipeline=world),
        "tensor (Megatron)": Layout(tensor=world),
    }
    if (group := group_size(config, world)) > 1:
        layouts["data x tensor"] = Layout(data=world // group, tensor=group)
    return {name: split for name, split in layouts.items() if not split.why_not(config, rows)}


def group_size(config: ModelConfig, world: int) -> int:
    """Return the largest proper divisor of `world` that also divides num_heads and d_ff.

    For example, a model with twelve heads trains on eight ranks in two groups of four.
    """
    fits = math.gcd(config.num_heads, config.d_ff)
    divisors = [size for size in range(1, world) if world % size == 0 and fits % size == 0]
    return max(divisors, default=1)
