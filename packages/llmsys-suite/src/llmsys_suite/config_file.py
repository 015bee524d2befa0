"""Configuration files: every field of a run in TOML, with its meaning and its default."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from llmsys_suite.config import RunConfig, UsageError

#: Meaning of each field.
MEANING = {
    "stages": "Stages to run, with their dependencies, in the order of `llmsys list`.",
    "preset": "cpu or gpu; sets the device and the defaults of size, world, backend, dtype, "
    "rows, context and learning_rate.",
    "size": "A size of `llmsys list`, or width, feed-forward width, layers, heads: 256x768x6x8.",
    "world": "Number of ranks; by default one per GPU with the preset gpu, otherwise 2.",
    "backend": "auto, gloo or nccl; auto is nccl with the preset gpu, otherwise gloo.",
    "dtype": "fp32, tf32 or bf16: arithmetic of products; the weights are float32 in all three.",
    "rows": "Sequences per step over all ranks; a multiple of the number of ranks.",
    "context": "Tokens per sequence.",
    "steps": "Measured steps per variant; the stage scale multiplies its budgets by this number.",
    "warmup": "Steps of each variant before the measured steps.",
    "learn": "Steps of the stage learn; by default 400, or the number in the checkpoint.",
    "tensor": "Number of ranks over which the stage learn splits each block.",
    "pipeline": "Number of ranks over which the stage learn splits the sequence of blocks.",
    "recompute": "Recompute blocks in the backward pass of the stage learn to save memory.",
    "compile": "Compile the blocks of the stage learn with torch.compile.",
    "trace": "Write Chrome traces of three steps of the stage learn: RUN/trace-RANK.json.",
    "log": "tensorboard or wandb, which also records losses and learning rates of the stage learn.",
    "resume": "Checkpoint that the stage learn continues, such as runs/NAME/checkpoint.",
    "clip": "Norm to which the stage learn clips gradients; by default they are not clipped.",
    "seed": "Seed of weights and batches.",
    "learning_rate": "Learning rate of AdamW in the stage train; learn peaks at twice this rate.",
    "data": "Text to train on: a file or a folder; by default the standard library of Python.",
    "tokenizer": "bytes, bpe (trained on the text), or a tokenizer.json of the package tokenizers.",
    "vocabulary": "Size of the vocabulary: 256 for bytes, by default 4096 for bpe; a file needs at "
    "least its largest token id plus one.",
    "out": "A new or empty folder for the results; by default runs/DATE-TIME.",
}
#: Example values of the fields that are None by default.
EXAMPLES = {
    "learn": 400,
    "log": "tensorboard",
    "clip": 1.0,
    "resume": "runs/NAME/checkpoint",
    "data": "text",
    "out": "run",
}
PATHS = ("resume", "data", "out")
#: Type of a TOML value, in words and in Python, by the first word of a field's annotation.
TOML_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "tuple": ("an array of strings", (list,)),
    "bool": ("true or false", (bool,)),
    "int": ("an integer", (int,)),
    "float": ("a number", (int, float)),
    "str": ("a string", (str,)),
    "Path": ("a string", (str,)),
}


def to_toml(config: RunConfig) -> str:
    """Return a file that describes `config`; a field that is None is a comment with an example."""
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
        raise UsageError(
            f"--config {path} cannot be read: {error}; `llmsys config` prints a valid file"
        ) from None
    annotations = {field.name: str(field.type) for field in fields(RunConfig)}
    for name, value in values.items():
        if name not in MEANING:
            raise UsageError(f"{path}: unknown field {name!r}; `llmsys config` prints all fields")
        if name in PATHS and value == "":
            raise UsageError(f"{path}: expected {name} to be a path, got an empty string")
        description, types = TOML_TYPES[re.split(r"\W", annotations[name])[0]]
        has_strings = not isinstance(value, list) or all(isinstance(item, str) for item in value)
        if type(value) not in types or not has_strings:
            raise UsageError(f"{path}: expected {name} to be {description}, got {value!r}")
    return {name: Path(value) if name in PATHS else value for name, value in values.items()}
