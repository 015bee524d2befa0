"""Checkpoints of other programs that must be converted before they can be loaded."""

from __future__ import annotations

import json
from pathlib import Path


def check_format(path: Path) -> None:
    """Raise ValueError that names the conversion tool if the format cannot be loaded."""
    if _is_deepspeed(path):
        raise ValueError(
            f"expected whole tensors, got DeepSpeed's files of partitions at {path}: run the "
            "script zero_to_fp32.py that DeepSpeed has saved beside them, and load its output"
        )
    if _is_megatron(path):
        raise ValueError(
            f"expected tensors under the model's names, got a distributed checkpoint of Megatron "
            f"at {path}: convert it with Megatron-LM's tools/checkpoint/convert.py"
        )


def _is_deepspeed(path: Path) -> bool:
    """Return True for DeepSpeed's folder of one step or of all steps."""
    if any(path.glob("*_optim_states.pt")):
        return True
    return (path / "latest").is_file() and any(path.glob("*/*_optim_states.pt"))


def _is_megatron(path: Path) -> bool:
    try:
        contents = json.loads((path / "metadata.json").read_text())
    except (OSError, ValueError):
        return False
    is_distributed = isinstance(contents, dict) and "sharded_backend" in contents
    return is_distributed and (path / "common.pt").is_file()
