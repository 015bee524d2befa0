"""Defaults of a run's options for this machine, and checks that the run is possible.

An impossible run raises `UsageError` before anything is written.
"""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmsys_suite.config import (
    BYTE_VOCABULARY,
    BYTES,
    LEAST_CONTEXT,
    STAGES,
    Layout,
    RunConfig,
    UsageError,
    add_dependencies,
    compute_default_rows,
    count_gpus,
    get_size,
    require_integer,
    require_known,
)

#: Minimum of each integer field of a configuration.
MINIMUMS = dict.fromkeys(("world", "steps", "learn", "tensor", "pipeline", "rows"), 1) | {
    "warmup": 0,
    "seed": 0,
    "vocabulary": BYTE_VOCABULARY,
    "context": LEAST_CONTEXT,
}
#: Arithmetic of products: tf32 rounds the inputs of float32 products, and bf16 runs forward passes
#: under autocast to bfloat16. Weights, gradients, moments and messages are always float32.
DTYPES = ("fp32", "tf32", "bf16")
#: Default size of a vocabulary that is trained on the text.
TRAINED_VOCABULARY = 4096
#: Stages that need byte tokens: the budgets of `scale` and the labels of `inspect` are for bytes.
BYTE_STAGES = ("scale", "inspect")
#: Values of `--log`: Python packages that can record the losses of `learn`.
LOGS = ("tensorboard", "wandb")
#: Largest seed. A batch is drawn with about 10**6 times the seed, which must fit in 64 bits.
MOST_SEED = 10**12
#: Options that only some stages read, each with these stages.
STAGES_OF_OPTION = {"steps": ("train", "scale"), "warmup": ("train",)} | dict.fromkeys(
    ("learn", "tensor", "pipeline", "recompute", "compile", "trace", "log", "clip", "resume"),
    ("learn",),
)


def resolve(
    stages: list[str],
    *,
    preset: str | None = None,
    world: int | None = None,
    backend: str = "auto",
    out: str | Path | None = None,
    **options: Any,
) -> RunConfig:
    """Return the configuration of a run, with defaults that depend on this machine.

    `stages` may be empty, which selects all stages. `options` are further fields of `RunConfig`;
    None selects the default of a field.

    Raises:
        UsageError: a name, number or path is not valid, or this machine has no suitable device.
    """
    gpus = count_gpus()
    preset = preset or ("gpu" if gpus else "cpu")
    options = {name: value for name, value in options.items() if value is not None}
    options |= {name: Path(options[name]) for name in ("data", "resume") if name in options}
    world = _resolve_num_ranks(world, default=gpus if preset == "gpu" else 2)
    if backend == "auto":
        backend = "nccl" if preset == "gpu" else "gloo"
    config = RunConfig(
        stages=add_dependencies(stages or list(STAGES)),
        preset=preset,
        world=world,
        backend=backend,
        rows=compute_default_rows(preset, world),
        out=None if out is None else Path(out),
    )
    if preset == "gpu":
        config = replace(config, size="small", dtype="bf16", context=1024, learning_rate=3e-4)
    if options.get("tokenizer") == "bpe":
        config = replace(config, vocabulary=TRAINED_VOCABULARY)
    config = replace(config, **options)
    check(config)
    return config


def _resolve_num_ranks(world: int | None, default: int) -> int:
    """Return the number of ranks of torchrun; without torchrun, the requested or default number.

    Raises UsageError if `world` contradicts torchrun, or if RANK is set without a valid WORLD_SIZE.
    """
    if "RANK" not in os.environ:
        return default if world is None else world
    rank, size = os.environ["RANK"], os.environ.get("WORLD_SIZE", "")
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise UsageError(
            f"expected RANK and WORLD_SIZE of torchrun in the environment, got RANK={rank!r} and "
            f"WORLD_SIZE={size!r}; start with torchrun, or unset RANK"
        )
    launched = int(size)
    if world not in (None, launched):
        raise UsageError(
            f"--world {world} contradicts torchrun's WORLD_SIZE={launched}; omit --world"
        )
    return launched


def check(config: RunConfig) -> None:
    """Raise UsageError if the names, the numbers or the paths do not allow the run."""
    _check_names(config)
    _check_device(config)
    _check_numbers(config)
    _check_learn(config)
    _check_tokens(config)
    _check_stages_of_options(config)
    if config.data is not None and not os.path.exists(config.data):
        raise UsageError(f"expected --data to be an existing file or folder, got {config.data}")
    if config.resume is not None and not os.path.exists(config.resume / ".metadata"):
        raise UsageError(
            f"expected --resume to be a checkpoint (runs/NAME/checkpoint), got {config.resume}"
        )
    _check_text_folder(config)


def _check_names(config: RunConfig) -> None:
    if config.stages != add_dependencies(list(config.stages)):
        required = ", ".join(add_dependencies(list(config.stages)))
        raise UsageError(
            f"expected the stages {required}, in this order, got {', '.join(config.stages)}"
        )
    get_size(config.size)
    require_known("dtype", config.dtype, DTYPES)
    if config.dtype == "tf32" and config.device != "cuda":
        raise UsageError(f"dtype tf32 needs a CUDA device, got preset {config.preset}; use fp32")


def _check_device(config: RunConfig) -> None:
    """Raise UsageError unless this machine has the device and the backend supports its tensors."""
    gpus = count_gpus()
    require_known("preset", config.preset, ("cpu", "gpu"))
    if config.preset == "gpu" and not gpus:
        raise UsageError("preset gpu needs a CUDA device, and torch finds none; use --preset cpu")
    require_known("backend", config.backend, ("gloo", "nccl"))
    if config.preset == "cpu" and config.backend == "nccl":
        raise UsageError(
            "expected backend gloo for preset cpu, got nccl, which supports only CUDA tensors; use "
            "--preset gpu or --backend gloo"
        )
    if config.preset == "gpu" and config.world > gpus and "RANK" not in os.environ:
        raise UsageError(
            f"preset gpu needs one GPU per rank, got {config.world} ranks and {gpus} GPUs; "
            f"use --world {gpus}"
        )


def _check_numbers(config: RunConfig) -> None:
    for name, minimum in MINIMUMS.items():
        value = getattr(config, name)
        if name == "learn" and value is None:
            continue
        require_integer(name, value, minimum)
    if config.seed > MOST_SEED:
        raise UsageError(f"expected seed <= {MOST_SEED}, got {config.seed}")
    if config.rows % config.world:
        raise UsageError(
            f"expected rows to be a multiple of the number of ranks, {config.world}, got "
            f"{config.rows}; otherwise the mean of the ranks' losses is not the loss over all rows"
        )
    if not 0 < config.learning_rate < math.inf:
        raise UsageError(f"expected a finite learning_rate > 0, got {config.learning_rate}")


def _check_tokens(config: RunConfig) -> None:
    """Raise UsageError unless the tokenizer, the vocabulary and the stages fit together."""
    if config.tokenizer == BYTES:
        if config.vocabulary != BYTE_VOCABULARY:
            raise UsageError(
                f"--vocabulary {config.vocabulary} needs --tokenizer bpe or a file: bytes have a "
                f"vocabulary of {BYTE_VOCABULARY}"
            )
        return
    if config.tokenizer != "bpe" and not os.path.isfile(config.tokenizer):
        raise UsageError(f"expected --tokenizer bytes, bpe or a file, got {config.tokenizer}")
    if config.tokenizer == "bpe" and config.vocabulary == BYTE_VOCABULARY:
        raise UsageError(
            f"--tokenizer bpe with --vocabulary {BYTE_VOCABULARY} merges no bytes; pass a larger "
            f"vocabulary, such as {TRAINED_VOCABULARY}"
        )
    byte_stages = [stage for stage in config.stages if stage in BYTE_STAGES]
    if byte_stages:
        other_stages = [stage for stage in config.stages if stage not in BYTE_STAGES]
        raise UsageError(
            f"--tokenizer {config.tokenizer} cannot be used with {' and '.join(byte_stages)}, "
            f"which need byte tokens; name the other stages: llmsys run {' '.join(other_stages)}"
        )


def _check_stages_of_options(config: RunConfig) -> None:
    """Raise UsageError for an option that would be ignored, because its stages are left out."""
    default = RunConfig()
    for name, stages in STAGES_OF_OPTION.items():
        is_set = getattr(config, name) != getattr(default, name)
        if is_set and not set(stages) & set(config.stages):
            needed = " or ".join(stages)
            raise UsageError(f"--{name} needs the stage {needed}; add it, or omit --{name}")


def _check_learn(config: RunConfig) -> None:
    """Raise UsageError unless the options of the stage learn fit the model and this machine."""
    split = f"--tensor {config.tensor} --pipeline {config.pipeline}"
    if config.world % (config.pipeline * config.tensor):
        raise UsageError(f"{split}: their product must divide the {config.world} ranks")
    layout = Layout(config.data_parallel, config.pipeline, config.tensor)
    if reason := layout.explain_refusal(get_size(config.size), config.rows):
        raise UsageError(f"{split}: {reason}")
    if config.clip is not None and not 0 < config.clip < math.inf:
        raise UsageError(f"expected a finite --clip > 0, got {config.clip}")
    if config.log is not None:
        require_known("log", config.log, LOGS)
        if importlib.util.find_spec(config.log) is None:
            raise UsageError(f"--log {config.log} needs a package; run `pip install {config.log}`")


def _check_text_folder(config: RunConfig) -> None:
    """Raise UsageError if the run folder is inside the text folder, which it would change."""
    if config.data is None or not os.path.isdir(config.data):
        return
    out, text = (Path(os.path.realpath(path)) for path in (config.out or "runs", config.data))
    if out.is_relative_to(text):
        raise UsageError(
            f"the run folder {out} is inside the folder {config.data} of --data, so the run would "
            "train on its own results; name a folder elsewhere with --out"
        )
