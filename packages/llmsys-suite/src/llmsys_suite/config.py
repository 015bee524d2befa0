"""The configuration of a run: its fields, the sizes of models, their splits and the stages."""

from __future__ import annotations

import ctypes
import math
import os
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accounting import Transformer


class UsageError(ValueError):
    """An error in the user's input; `llmsys` prints its message and exits with status 2."""


def require_integer(name: str, value: Any, minimum: int) -> None:
    """Raise UsageError unless `value` is an integer of at least `minimum`; bools are refused."""
    if type(value) is not int or value < minimum:
        raise UsageError(f"expected {name} to be an integer >= {minimum}, got {value!r}")


@dataclass(frozen=True)
class Size:
    """Widths, number of layers and number of heads of a decoder."""

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int

    def __post_init__(self) -> None:
        """Raise `ValueError` unless sizes are positive integers and the head width is even."""
        for name in ("d_model", "d_ff", "num_layers", "num_heads"):
            require_integer(name, getattr(self, name), 1)
        if self.d_model % (2 * self.num_heads):
            raise ValueError(
                f"expected d_model to be a multiple of {2 * self.num_heads}, twice the number of "
                f"heads, got {self.d_model}"
            )

    def to_transformer(self, *, layers: int | None = None, vocabulary: int = 256) -> Transformer:
        """Return this size as an `accounting.Transformer`; `layers` replaces `num_layers`."""
        import accounting

        return accounting.Transformer(
            layers=layers or self.num_layers,
            d_model=self.d_model,
            heads=self.num_heads,
            vocab_size=vocabulary,
            d_ff=self.d_ff,
        )


# Publications use the name "xl" for two models: `xl` and `2.7B` in this table.
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


def require_known(name: str, value: str, known: Collection[str]) -> None:
    """Raise UsageError unless `value` is one of the values in `known`."""
    if value not in known:
        raise UsageError(f"{name} {value!r} is unknown; choose from {', '.join(known)}")


def get_size(name: str) -> Size:
    """Return the size that `name` selects in `SIZES` or describes as WIDTHxFFxLAYERSxHEADS.

    Raises:
        UsageError: the name is unknown, or no model can have the shape.
    """
    if name in SIZES:
        return SIZES[name]
    numbers = name.split("x")
    if len(numbers) != 4 or any(not re.fullmatch("[1-9][0-9]*", number) for number in numbers):
        raise UsageError(
            f"size {name!r} is unknown; choose from {', '.join(SIZES)}, or write a shape as "
            "WIDTHxFFxLAYERSxHEADS, such as 256x768x6x8"
        )
    try:
        size = Size(*map(int, numbers))
        size.to_transformer()
    except ValueError as error:
        raise UsageError(f"size {name}: {error}") from None
    return size


@dataclass(frozen=True)
class Layout:
    """A grid of ranks (Narayanan et al. 2021, section 3).

    Ranks along the dimension `tensor` split each block by heads and columns. Ranks along `pipeline`
    have consecutive blocks, and ranks along `data` read different rows.
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    #: The order of forward and backward passes in the pipeline: "GPipe" or "1F1B".
    schedule: str = "1F1B"

    def explain_refusal(self, size: Size, rows: int) -> str:
        """Return the reason why this layout does not fit a model and `rows`, or an empty string."""
        if size.num_layers < self.pipeline:
            return f"{size.num_layers} layers do not split into {self.pipeline} pipeline stages"
        for name in ("num_heads", "d_ff"):
            value = getattr(size, name)
            if value % self.tensor:
                return f"{name} {value} is not a multiple of {self.tensor} tensor-parallel ranks"
        if rows % self.data:
            return f"{rows} rows are not a multiple of {self.data} replicas of the model"
        if rows // self.data < self.pipeline:
            per_replica = rows // self.data
            return f"{per_replica} rows per replica are fewer than {self.pipeline} pipeline stages"
        return ""

    def count_microbatches(self, rows: int) -> int:
        """Return the number of microbatches into which a pipeline splits `rows` rows.

        A microbatch has two rows. It has one row if `rows` is odd, or if there would be fewer
        microbatches than ranks.
        """
        return rows // 2 if rows % 2 == 0 and rows // 2 >= self.pipeline else rows

    def compute_bubble(self, rows: int) -> float:
        """Return the fraction (p - 1) / (m + p - 1) of a step in which a pipeline rank is idle.

        A pipeline of p ranks computes m microbatches, and communication is assumed to take no time
        (Narayanan et al. 2021, section 2.2).
        """
        idle = self.pipeline - 1
        return idle / (self.count_microbatches(rows) + idle)


def build_possible_layouts(size: Size, world: int, rows: int) -> dict[str, Layout]:
    """Return the layouts that the stage `parallel` compares and that fit the model, by name."""
    layouts = {
        "pipeline (GPipe)": Layout(pipeline=world, schedule="GPipe"),
        "pipeline (1F1B)": Layout(pipeline=world),
        "tensor (Megatron)": Layout(tensor=world),
    }
    if (group := find_group_size(size, world)) > 1:
        layouts["data x tensor"] = Layout(data=world // group, tensor=group)
    return {name: split for name, split in layouts.items() if not split.explain_refusal(size, rows)}


def find_group_size(size: Size, world: int) -> int:
    """Return the largest common divisor of `world`, num_heads and d_ff below `world`, or 1.

    For example, a model with twelve heads trains on eight ranks in two groups of four.
    """
    fits = math.gcd(size.num_heads, size.d_ff)
    divisors = [n for n in range(1, world) if world % n == 0 and fits % n == 0]
    return max(divisors, default=1)


#: Minimum context. The stage `memory` also uses half of the run's context.
LEAST_CONTEXT = 8
#: Name of the tokenizer whose tokens are bytes, and the size of its vocabulary.
BYTES = "bytes"
BYTE_VOCABULARY = 256
#: Stages in the order of a run, each with the stages that it requires.
STAGES: dict[str, tuple[str, ...]] = {
    "plan": (),
    "links": (),
    "attention": (),
    "train": ("plan",),
    "learn": ("train",),
    "parallel": (),
    "memory": (),
    "scale": (),
    "inspect": ("learn",),
    "compress": ("learn",),
    "audit": ("plan", "train"),
    "report": (),
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run; `config_file.MEANING` explains every field.

    `rows` is the global batch in sequences, and `context` is the length of a sequence in tokens.
    One step reads rows x context tokens at any world size.
    """

    stages: tuple[str, ...] = tuple(STAGES)
    preset: str = "cpu"
    size: str = "tiny"
    world: int = 2
    backend: str = "gloo"
    dtype: str = "fp32"
    rows: int = 8
    context: int = 128
    steps: int = 20
    warmup: int = 5
    learn: int | None = None
    tensor: int = 1
    pipeline: int = 1
    recompute: bool = False
    compile: bool = False
    trace: bool = False
    log: str | None = None
    resume: Path | None = None
    clip: float | None = None
    seed: int = 0
    learning_rate: float = 2e-3
    data: Path | None = None
    tokenizer: str = BYTES
    vocabulary: int = BYTE_VOCABULARY
    out: Path | None = None

    @property
    def device(self) -> str:
        """The type of the run's device: cuda with the preset gpu, otherwise cpu."""
        return "cuda" if self.preset == "gpu" else "cpu"

    @property
    def loss_unit(self) -> str:
        """The unit of the run's losses."""
        return "nats per byte" if self.tokenizer == BYTES else "nats per token"

    @property
    def parts(self) -> int:
        """The number of sequential parts into which a single process splits the global batch.

        On a GPU it is the world size, so that the process needs no more memory than one rank.
        """
        return self.world if self.device == "cuda" else 1

    @property
    def data_parallel(self) -> int:
        """The number of replicas of the model in `learn`; each has pipeline x tensor ranks."""
        return self.world // (self.pipeline * self.tensor)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as values that JSON can represent."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunConfig:
        """Return the configuration that `to_json` wrote."""
        paths = {key: Path(values[key]) for key in ("data", "out", "resume") if values[key]}
        return cls(**values | paths | {"stages": tuple(values["stages"])})


def compute_default_rows(preset: str, world: int) -> int:
    """Return the default number of rows of the global batch."""
    return (16 if preset == "gpu" else 4) * world


def add_dependencies(stages: list[str]) -> tuple[str, ...]:
    """Return `stages`, their dependencies and `report`, in the order of a run.

    Raises UsageError for an unknown stage.
    """
    selected = {"report"}

    def add_with_dependencies(stage: str) -> None:
        require_known("stage", stage, STAGES)
        selected.add(stage)
        for required in STAGES[stage]:
            add_with_dependencies(required)

    for stage in stages:
        add_with_dependencies(stage)
    return tuple(stage for stage in STAGES if stage in selected)


def count_restarts() -> int:
    """Return how often torchrun has restarted this run."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def count_ranks_on_this_host(world: int) -> int:
    """Return how many of `world` ranks run on this host; without torchrun, all of them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


def count_gpus() -> int:
    """Return the number of CUDA devices that torch can use."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        # Without a driver, torch would find no device either, and importing it takes seconds.
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
