"""Configuration files: every field of a run in TOML, with its meaning and its default."""

from __future__ import annotations

import json
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from llmsys_suite.config import RunConfig, UsageError

#: Meaning of each field.
MEANING = {
    "stages": "Stages to run, with their dependencies, in the order of `llmsys list`.",
    "preset": "cpu or gpu; decides the device and the defaults of size, world, backend, dtype, "
    "rows, context and learning_rate.",
    "size": "A size of `llmsys list`, or width, feed-forward width, layers, heads: 256x768x6x8.",
    "world": "Number of ranks.",
    "backend": "auto, gloo or nccl; auto is nccl with the preset gpu.",
    "dtype": "fp32, tf32 or bf16: arithmetic of products; the weights are float32 in all three.",
    "rows": "Global batch in sequences; a multiple of the number of ranks.",
    "context": "Tokens per sequence.",
    "steps": "Measured steps per variant; the budgets of the stage scale are proportional.",
    "warmup": "Steps before the measured ones.",
    "learn": "Steps of the stage learn; by default 400, or those of the checkpoint.",
    "tensor": "Ranks that split each block in the stage learn.",
    "pipeline": "Ranks that have consecutive blocks in the stage learn.",
    "recompute": "Run blocks of learn again in the backward pass to save memory.",
    "compile": "Compile the blocks of learn with torch.compile.",
    "trace": "Write Chrome traces of three steps of learn: RUN/trace-RANK.json.",
    "log": "tensorboard or wandb: a program that also records the losses of the stage learn.",
    "resume": "Checkpoint from which the stage learn continues: RUN/checkpoint.",
    "clip": "Largest norm of the gradient in the stage learn; by default it is not clipped.",
    "seed": "Seed of weights and batches.",
    "learning_rate": "Learning rate of AdamW in the stage train; learn peaks at twice this rate.",
    "data": "Text to train on: a file or a folder; by default the standard library of Python.",
    "tokenizer": "bytes; bpe, trained on the text; or a tokenizer.json of the package tokenizers.",
    "vocabulary": "Number of tokens: 256 bytes; 4096 by default for bpe.",
    "out": "A new folder for the results; by default runs/DATE-TIME.",
}
#: Examples of the fields that have no value by default.
EXAMPLES = {
    "learn": 400,
    "log": "tensorboard",
    "clip": 1.0,
    "resume": "runs/NAME/checkpoint",
    "data": "text",
    "out": "run",
}
PATHS = ("resume", "data", "out")


def to_toml(config: RunConfig) -> str:
    """Return the text of a file that describes `config`; fields without a value are comments."""
    lines = []
    for name, meaning in MEANING.items():
        value = getattr(config, name)
        lines.append(f"# {meaning}")
        if value is None:
            lines.append(f"# {name} = {json.dumps(EXAMPLES[name])}")
        else:
            plain = str(value) if isinstance(value, Path) else value
            lines.append(f"{name} = {json.dumps(plain, ensure_ascii=False)}")
        lines.append("")
    return "\n".join(lines)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the fields of a file; raise UsageError for unknown fields and wrong types."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--config {path} cannot be read: {error}") from None
    kinds = {field.name: str(field.type) for field in fields(RunConfig)}
    for name, value in values.items():
        if name not in MEANING:
            raise UsageError(f"{path}: unknown field {name!r}; `llmsys config` prints all fields")
        if name in PATHS and value == "":
            raise UsageError(f"{path}: expected {name} to be a path, got an empty text")
        if not _has_kind(value, kinds[name]):
            raise UsageError(f"{path}: expected {name} of type {kinds[name]}, got {value!r}")
    return {name: Path(value) if name in PATHS else value for name, value in values.items()}


def _has_kind(value: Any, kind: str) -> bool:
    """Return True if a TOML value fits the annotation of a field."""
    if kind.startswith("tuple"):
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if kind == "bool":
        return type(value) is bool
    if kind.startswith("int"):
        return type(value) is int
    if kind.startswith("float"):
        return type(value) in (int, float)
    return isinstance(value, str)
