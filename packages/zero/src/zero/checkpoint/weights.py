"""Weights read from safetensors files, by runs of elements.

Each rank reads only its ranges, so it never needs more memory than its shard and a buffer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zero.checkpoint.ownership import Part
from zero.checkpoint.safetensors_format import INDEX, InFile, read_header

TORCH_FILES = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class Weights:
    """The tensors of a file or a folder of weights."""

    path: Path
    tensors: dict[str, InFile]

    def read(self, parts: Sequence[Part]) -> None:
        """Fill the values of `parts`."""
        for part in parts:
            self.tensors[part.name].read(part.start, part.values)


def find_weights(path: Path) -> Weights | None:
    """Find safetensors files at `path`; None if there are none."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not path.is_file():
        files = _files_of_index(path / INDEX, files)
    is_torch = any(file.match(pattern) for file in files for pattern in TORCH_FILES)
    if is_torch or (not files and any(any(path.glob(pattern)) for pattern in TORCH_FILES)):
        raise ValueError(
            f"expected safetensors files, got files of torch.save at {path}: load them with "
            "model.load_state_dict(torch.load(file, mmap=True)), which FSDP shards"
        )
    if not files:
        return None
    tensors: dict[str, InFile] = {}
    for file in files:
        for name, stored in read_header(file):
            if name in tensors:
                raise ValueError(f"{name} is in two files of {path}: keep one")
            tensors[name] = stored
    return Weights(path, tensors)


def _files_of_index(index: Path, files: list[Path]) -> list[Path]:
    """Return the files that an index names, or `files` without an index."""
    if not index.exists():
        return files
    try:
        named = json.loads(index.read_text())["weight_map"].values()
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{index} is damaged ({error}): use another copy") from None
    listed = sorted({index.parent / name for name in named})
    for file in listed:
        if not file.exists():
            raise ValueError(f"{file} is missing: {index.name} names it")
    return listed
