"""The number of ranks along each dimension of a split, and the splits that fit a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmsys_suite.config import Size

if TYPE_CHECKING:
    from llmsys_suite.model import ModelConfig

#: Number of stages per rank in each schedule of a pipeline.
STAGES_PER_RANK = {"GPipe": 1, "1F1B": 1, "interleaved": 2}


@dataclass(frozen=True)
class Layout:
    """A grid of ranks (Narayanan et al. 2021, section 3).

    Ranks along the dimension `tensor` split each block by heads and columns. Ranks along `pipeline`
    have consecutive blocks, and ranks along `data` read different rows.
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    #: The order of forward and backward passes in the pipeline, a key of STAGES_PER_RANK.
    schedule: str = "1F1B"
    #: True to split the norms and residual sums by tokens (Korthikanti et al. 2022, section 4.2).
    sequence: bool = False

    @property
    def num_stages(self) -> int:
        """The number of stages of the pipeline."""
        return self.pipeline * STAGES_PER_RANK[self.schedule]

    def why_not(self, config: ModelConfig | Size, rows: int) -> str:
        """Return the reason why this layout does not fit a model and `rows`, or an empty string."""
        if config.num_layers < self.num_stages:
            return f"{config.num_layers} layers do not make {self.num_stages} stages"
        names = ("num_heads", "d_ff", *(("context", "vocabulary") if self.sequence else ()))
        for name in names:
            if (value := getattr(config, name)) % self.tensor:
                return f"{name} {value} does not split over {self.tensor} ranks"
        if rows % self.data:
            return f"{rows} rows do not split over {self.data} groups"
        count = self.num_microbatches(rows // self.data)
        if self.schedule == "interleaved" and count % max(1, count // self.pipeline):
            return f"{count} microbatches do not split into rounds of {self.pipeline} ranks"
        return ""

    def num_microbatches(self, rows: int) -> int:
        """Return the number of microbatches into which a pipeline splits `rows` rows.

        A microbatch has two rows, or one row if there would be fewer microbatches than ranks.
        """
        return rows // 2 if rows % 2 == 0 and rows // 2 >= self.pipeline else rows

    def bubble(self, rows: int) -> float:
        """Return the idle fraction (p - 1) / (m s + p - 1) of a step without communication.

        There are p ranks with s stages each and m microbatches (Narayanan et al. 2021, section
        2.2).
        """
        work = self.num_microbatches(rows) * STAGES_PER_RANK[self.schedule]
        return (self.pipeline - 1) / (work + self.pipeline - 1)


def all_layouts(config: ModelConfig, world: int) -> dict[str, Layout]:
    """Return the layouts that the stage `parallel` compares, by name."""
    group = group_size(config, world)
    return {
        "pipeline (GPipe)": Layout(pipeline=world, schedule="GPipe"),
        "pipeline (1F1B)": Layout(pipeline=world),
        "pipeline (interleaved)": Layout(pipeline=world, schedule="interleaved"),
        "tensor (Megatron)": Layout(tensor=world),
        "tensor and sequence": Layout(tensor=world, sequence=True),
    } | ({"data x tensor": Layout(data=world // group, tensor=group)} if group > 1 else {})


def possible_layouts(config: ModelConfig, world: int, rows: int) -> dict[str, Layout]:
    """Return the layouts of `all_layouts` that fit the model and the rows."""
    layouts = all_layouts(config, world)
    return {name: split for name, split in layouts.items() if not split.why_not(config, rows)}


def group_size(config: ModelConfig, world: int) -> int:
    """Return the largest proper divisor of `world` that also divides num_heads and d_ff.

    For example, a model with twelve heads trains on eight ranks in two groups of four.
    """
    fits = math.gcd(config.num_heads, config.d_ff)
    divisors = [size for size in range(1, world) if world % size == 0 and fits % size == 0]
    return max(divisors, default=1)
