"""Configuration of a run, checked against this machine before anything starts."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accounting import Transformer


@dataclass(frozen=True)
class Size:
    """d_model, d_ff, layers and heads of a decoder."""

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int

    def described(self, *, layers: int | None = None, vocabulary: int = 256) -> Transformer:
        """Return the decoder in accounting's description."""
        import accounting

        return accounting.Transformer(
            layers=layers or self.num_layers,
            d_model=self.d_model,
            heads=self.num_heads,
            vocab_size=vocabulary,
            d_ff=self.d_ff,
        )


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


def size_of(name: str) -> Size:
    """Return a size of `SIZES`, or the size that WIDTHxFFxLAYERSxHEADS describes.

    Raises:
        UsageError: the name is neither, or no model can have this shape.
    """
    if name in SIZES:
        return SIZES[name]
    numbers = name.split("x")
    if len(numbers) != 4 or any(not re.fullmatch("[1-9][0-9]*", number) for number in numbers):
        raise UsageError(
            f"size {name!r} is unknown; choose from {', '.join(SIZES)}, or describe one by width, "
            "feed-forward width, layers and heads, for example 256x768x6x8"
        )
    size = Size(*map(int, numbers))
    if size.d_model % (2 * size.num_heads):
        raise UsageError(
            f"size {name}: width {size.d_model} does not split into {size.num_heads} heads of an "
            f"even width; make it a multiple of {2 * size.num_heads}"
        )
    return size


#: `memory` also draws half of the context, and a head needs two positions to look back.
LEAST_CONTEXT = 8
#: The tokenizer of which every byte is a token, and the size of its vocabulary.
BYTES = "bytes"
BYTE_VOCABULARY = 256
#: Smallest value of each number of a configuration.
LEAST = {
    "world": 1,
    "steps": 1,
    "warmup": 0,
    "epochs": 0,
    "learn": 1,
    "tensor": 1,
    "pipeline": 1,
    "seed": 0,
    "rows": 1,
    "vocabulary": BYTE_VOCABULARY,
    "context": LEAST_CONTEXT,
}
#: Arithmetic of the forward pass. Weights, gradients, moments and messages are float32 in each of
#: them: tf32 rounds the inputs of float32 products, bf16 is autocast to bfloat16.
DTYPES = ("fp32", "tf32", "bf16")
#: Size of a vocabulary that is trained on the text, unless another one is named.
TRAINED_VOCABULARY = 4096
#: Stages that read bytes: the budgets of `scale` and the labels of `inspect` are for bytes.
BYTE_STAGES = ("scale", "inspect")
#: Programs that show the losses of `learn`, and the module that each needs.
LOGS = {"tensorboard": "tensorboard", "wandb": "wandb"}
#: Largest seed: a batch is drawn with a million times the seed, which must fit 64 bits.
MOST_SEED = 10**12
# In the order of a run.  Each stage names the stages whose results it reads.
STAGES: dict[str, tuple[str, ...]] = {
    "plan": (),
    "links": (),
    "attention": (),
    "train": ("plan",),
    "learn": ("train",),
    "parallel": (),
    "profile": (),
    "precision": (),
    "memory": (),
    "scale": (),
    "inspect": ("learn",),
    "compress": ("learn",),
    "audit": ("plan", "train"),
    "report": (),
}


class UsageError(ValueError):
    """A run that is not possible: reported in one line, with exit status 2."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run.

    `rows` is the global batch in sequences and `context` their length in tokens, so that one
    step reads rows x context tokens for any world size.
    """

    stages: tuple[str, ...] = tuple(STAGES)
    preset: str = "cpu"
    size: str = "tiny"
    world: int = 2
    backend: str = "gloo"
    device: str = "cpu"
    dtype: str = "fp32"
    rows: int = 8
    context: int = 128
    steps: int = 20
    warmup: int = 5
    #: Epochs over the whole text for each variant; 0 draws random windows for `steps` steps.
    epochs: int = 0
    #: Steps of the stage `learn`; None takes those of the checkpoint, or 500.
    learn: int | None = None
    #: Numbers of ranks that split each block of `learn`, and that have consecutive blocks.
    tensor: int = 1
    pipeline: int = 1
    #: True to recompute blocks of `learn` in the backward pass instead of saving activations.
    recompute: bool = False
    #: True to compile the blocks of `learn`.
    compile: bool = False
    #: True to record three steps of `learn` with torch.profiler.
    trace: bool = False
    #: The program of LOGS that receives the losses of `learn`, or None.
    log: str | None = None
    #: The checkpoint that the stage `learn` continues from.
    resume: Path | None = None
    #: Largest norm of the gradient in `learn`, or None for gradients that are not clipped.
    clip: float | None = None
    seed: int = 0
    learning_rate: float = 2e-3
    data: Path | None = None
    #: BYTES; "bpe", which trains a vocabulary on the text; or a file of the package tokenizers.
    tokenizer: str = BYTES
    vocabulary: int = BYTE_VOCABULARY
    #: The run folder; None chooses `runs/DATE-TIME` when the run starts.
    out: Path | None = None

    @property
    def loss_unit(self) -> str:
        """The unit of the losses of the model that the run trains."""
        return "nats per byte" if self.tokenizer == BYTES else "nats per token"

    @property
    def parts(self) -> int:
        """Number of parts in which one process handles the global batch.

        On a GPU it equals the world size, so that one process needs the memory of one rank.
        """
        return self.world if self.device == "cuda" else 1

    @property
    def data_parallel(self) -> int:
        """Number of parts of the rows in `learn`; each is trained by pipeline x tensor ranks."""
        return self.world // (self.pipeline * self.tensor)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for config.json."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunConfig:
        """Return the configuration that `to_json` wrote."""
        paths = {key: Path(values[key]) for key in ("data", "out", "resume") if values[key]}
        return cls(**values | paths | {"stages": tuple(values["stages"])})


def resolve(
    stages: list[str],
    *,
    preset: str | None = None,
    world: int | None = None,
    backend: str = "auto",
    out: Path | None = None,
    **options: Any,
) -> RunConfig:
    """Return a configuration whose missing options are chosen for this machine.

    Raises:
        UsageError: the machine, the names or the numbers do not allow the run.
    """
    gpus = count_gpus()
    preset = preset or ("gpu" if gpus else "cpu")
    if preset not in ("cpu", "gpu"):
        raise UsageError(f"preset {preset!r} is unknown; choose cpu or gpu")
    if preset == "gpu" and not gpus:
        raise UsageError("preset gpu needs a CUDA device and this machine shows none; use cpu")
    options = {name: value for name, value in options.items() if value is not None}
    if options.get("epochs") == 0:
        raise UsageError("--epochs 0 is below 1, the least that makes sense")
    if options.keys() >= {"steps", "epochs"}:
        both = f"--steps {options['steps']} and --epochs {options['epochs']}"
        raise UsageError(f"{both} contradict each other; give one")
    launched = "RANK" in os.environ
    if launched and world not in (None, int(os.environ["WORLD_SIZE"])):
        raise UsageError(
            f"--world {world} contradicts the launcher's WORLD_SIZE={os.environ['WORLD_SIZE']}"
        )
    if launched:
        world = int(os.environ["WORLD_SIZE"])
    elif world is None:
        world = gpus if preset == "gpu" else 2
    config = RunConfig(
        stages=with_dependencies(stages or list(STAGES)),
        preset=preset,
        world=world,
        backend=_backend(backend, preset, gpus, world, launched),
        device="cuda" if preset == "gpu" else "cpu",
        out=out,
    )
    config = replace(config, rows=default_rows(preset, world))
    if preset == "gpu":
        config = replace(config, size="small", dtype="bf16", context=1024, learning_rate=3e-4)
    if options.get("tokenizer") == "bpe":
        config = replace(config, vocabulary=TRAINED_VOCABULARY)
    config = replace(config, **options)
    check(config)
    return config


def default_rows(preset: str, world: int) -> int:
    """Return the rows of the global batch if no option decides them."""
    return (16 if preset == "gpu" else 4) * world


def with_dependencies(stages: list[str]) -> tuple[str, ...]:
    """Return `stages` and their dependencies in the order of a run."""
    wanted: set[str] = set()

    def want(stage: str) -> None:
        if stage not in STAGES:
            raise UsageError(f"stage {stage!r} is unknown; choose from {', '.join(STAGES)}")
        wanted.add(stage)
        for needed in STAGES[stage]:
            want(needed)

    for stage in stages:
        want(stage)
    wanted.add("report")
    return tuple(stage for stage in STAGES if stage in wanted)


def restarts() -> int:
    """Return how often torchrun has restarted this run."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def count_gpus() -> int:
    """Return the number of CUDA devices that torch can use."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        # No driver.  Asking torch, whose import takes seconds, would find the same.
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def percentage(text: str, option: str) -> float:
    """Return `5%` or `5` as 0.05; raise UsageError unless it is between 0 and 100 %."""
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        raise UsageError(f"{option} {text!r} is not a percentage; give one such as 5%") from None
    if not 0 < value < 1:
        raise UsageError(f"{option} {text} is not between 0% and 100%")
    return value


def _backend(backend: str, preset: str, gpus: int, world: int, launched: bool) -> str:
    if backend not in ("auto", "gloo", "nccl"):
        raise UsageError(f"backend {backend!r} is unknown; choose auto, gloo or nccl")
    if backend == "auto":
        backend = "nccl" if preset == "gpu" else "gloo"
    if backend == "nccl" and not gpus:
        raise UsageError("backend nccl needs a CUDA device and this machine shows none; use gloo")
    if backend == "nccl" and preset == "cpu":
        raise UsageError("backend nccl moves CUDA tensors; use it with --preset gpu")
    if backend == "nccl" and world > gpus and not launched:
        raise UsageError(
            f"backend nccl needs one GPU per rank, got {world} ranks and {gpus} GPUs; "
            "use --backend gloo"
        )
    return backend


def check(config: RunConfig) -> None:
    """Raise UsageError if the names, the numbers or the paths do not allow the run."""
    _check_names(config)
    _check_numbers(config)
    _check_learn(config)
    _check_tokens(config)
    if config.data is not None and not os.path.exists(config.data):
        raise UsageError(f"no data at {config.data}; give a file or a folder, or leave --data out")
    if config.resume is not None and not os.path.exists(config.resume / ".metadata"):
        raise UsageError(f"no checkpoint at {config.resume}; a run writes RUN/checkpoint")
    if config.resume is not None and "learn" not in config.stages:
        raise UsageError(f"--resume {config.resume} needs the stage learn; add it to the stages")
    _check_out(config.out)
    _check_text_folder(config)


def _check_names(config: RunConfig) -> None:
    if config.stages != with_dependencies(list(config.stages)):
        needed = ", ".join(with_dependencies(list(config.stages)))
        raise UsageError(f"stages {', '.join(config.stages)} need, in this order, {needed}")
    size_of(config.size)
    if config.dtype not in DTYPES:
        raise UsageError(f"dtype {config.dtype!r} is unknown; choose from {', '.join(DTYPES)}")
    if config.dtype == "tf32" and config.device != "cuda":
        raise UsageError(f"dtype tf32 needs a CUDA device, got device {config.device}; use fp32")
    if config.device not in ("cpu", "cuda"):
        raise UsageError(f"device {config.device!r} is unknown; choose cpu or cuda")
    if config.device == "cuda" and not count_gpus():
        raise UsageError("device cuda needs a CUDA device and this machine shows none; use cpu")
    if (config.backend, config.device) not in (("gloo", "cpu"), ("gloo", "cuda"), ("nccl", "cuda")):
        raise UsageError(f"backend {config.backend!r} does not move tensors of {config.device}")


def _check_numbers(config: RunConfig) -> None:
    for name, least in LEAST.items():
        value = getattr(config, name)
        if name == "learn" and value is None:
            continue
        if type(value) is not int:
            raise UsageError(f"{name} {value!r} is not a whole number")
        if value < least:
            raise UsageError(f"--{name} {value} is below {least}, the least that makes sense")
    if config.seed > MOST_SEED:
        raise UsageError(f"--seed {config.seed} is above {MOST_SEED}, the largest seed")
    if config.rows % config.world:
        raise UsageError(
            f"{config.rows} rows do not split over {config.world} ranks: the mean of the ranks' "
            f"means would not be that of the rows; take a multiple of {config.world}"
        )
    if not 0 < config.learning_rate < math.inf:
        raise UsageError(f"learning_rate {config.learning_rate} is not a positive number")


def _check_tokens(config: RunConfig) -> None:
    """Raise UsageError unless the stages can read the tokens."""
    if config.tokenizer == BYTES:
        if config.vocabulary != BYTE_VOCABULARY:
            raise UsageError(
                f"--vocabulary {config.vocabulary} needs --tokenizer bpe or a file: bytes have a "
                f"vocabulary of {BYTE_VOCABULARY}"
            )
        return
    if config.tokenizer != "bpe" and not os.path.isfile(config.tokenizer):
        raise UsageError(f"no tokenizer at {config.tokenizer}; give bytes, bpe or a file")
    if config.tokenizer == "bpe" and config.vocabulary == BYTE_VOCABULARY:
        raise UsageError(
            f"--tokenizer bpe with --vocabulary {BYTE_VOCABULARY} merges no bytes; pass a larger "
            f"vocabulary, such as {TRAINED_VOCABULARY}"
        )
    if config.epochs:
        raise UsageError(f"--epochs {config.epochs} counts bytes; use --steps with a tokenizer")
    if reading := [stage for stage in BYTE_STAGES if stage in config.stages]:
        others = [stage for stage in config.stages if stage not in BYTE_STAGES]
        raise UsageError(
            f"the stages {', '.join(reading)} read bytes, not --tokenizer {config.tokenizer}; name "
            f"the others: llmsys run {' '.join(others)}"
        )


def _check_learn(config: RunConfig) -> None:
    """Raise UsageError unless the options of the stage learn fit the model and this machine."""
    size, grid = size_of(config.size), config.pipeline * config.tensor
    for name, count in (("num_heads", size.num_heads), ("d_ff", size.d_ff)):
        if count % config.tensor:
            raise UsageError(
                f"--tensor {config.tensor} does not divide {name} {count} of size {config.size}"
            )
    if size.num_layers < config.pipeline:
        raise UsageError(
            f"--pipeline {config.pipeline} is above the {size.num_layers} layers of {config.size}"
        )
    if config.world % grid:
        raise UsageError(
            f"--tensor {config.tensor} times --pipeline {config.pipeline} does not divide "
            f"{config.world} ranks"
        )
    if config.clip is not None and not 0 < config.clip < math.inf:
        raise UsageError(f"--clip {config.clip} is not a positive number")
    if config.log is not None and config.log not in LOGS:
        raise UsageError(f"log {config.log!r} is unknown; choose from {', '.join(LOGS)}")
    if config.log is not None and importlib.util.find_spec(LOGS[config.log]) is None:
        raise UsageError(f"--log {config.log} needs `pip install {LOGS[config.log]}`")
    requested = {"tensor": config.tensor > 1, "pipeline": config.pipeline > 1} | {
        name: getattr(config, name) for name in ("recompute", "compile", "trace", "log", "clip")
    }
    if "learn" not in config.stages and (
        options := [name for name in requested if requested[name]]
    ):
        raise UsageError(f"--{options[0]} needs the stage learn; add it to the stages")


def _check_out(out: Path | None) -> None:
    """Raise `UsageError` if the run folder exists and is not empty.

    Only the rank that claims the folder checks it, because the other ranks may find it claimed
    already; after a restart by torchrun the folder of the first attempt is used.
    """
    if out is None or os.environ.get("RANK", "0") != "0" or restarts():
        return
    # Methods of Path raise for a name that is too long; os.path returns False.
    if os.path.exists(out) and not (os.path.isdir(out) and not os.listdir(out)):
        raise UsageError(f"{out} exists and is not empty; name another folder with --out")


def _check_text_folder(config: RunConfig) -> None:
    """Raise UsageError if the run folder lies in the text, which would change during the run."""
    if config.data is None or not os.path.isdir(config.data):
        return
    out, text = (Path(os.path.realpath(path)) for path in (config.out or "runs", config.data))
    if out.is_relative_to(text):
        raise UsageError(
            f"the run folder {out} lies in the text {config.data}, so the run would train on its "
            "own results; name a folder elsewhere with --out"
        )
