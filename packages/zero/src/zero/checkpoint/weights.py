"""Weights read from safetensors and torch files, by runs of elements.

Each rank reads only its ranges, so it never needs more memory than its shard and a buffer. torch's
files are memory-mapped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from zero.checkpoint import checksums
from zero.checkpoint.ownership import Part
from zero.checkpoint.safetensors_format import INDEX, InFile, read_header


class Stored(Protocol):
    """A tensor in a file."""

    @property
    def shape(self) -> torch.Size:
        """The whole shape."""

    @property
    def dtype(self) -> torch.dtype:
        """The stored dtype."""

    def read(self, start: int, stop: int, values: Tensor) -> None:
        """Fill flat `values` with elements `start` to `stop`, cast to its dtype."""


@dataclass(frozen=True)
class Mapped:
    """A memory-mapped tensor of a torch file."""

    tensor: Tensor

    @property
    def shape(self) -> torch.Size:
        """The whole shape."""
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """The stored dtype."""
        return self.tensor.dtype

    def read(self, start: int, stop: int, values: Tensor) -> None:
        """Fill flat `values` with elements `start` to `stop`, cast to its dtype."""
        values.copy_(self.tensor.reshape(-1)[start:stop])


@dataclass(frozen=True)
class Weights:
    """A folder or file of weights: its tensors, and its checksums if it has any."""

    path: Path
    tensors: Mapping[str, Stored]
    verifier: checksums.Verifier | None

    def verify(self, parts: Sequence[Part]) -> None:
        """Raise ValueError if stored bytes of these parts are damaged."""
        if self.verifier is None:
            return
        wanted = []
        for part in parts:
            stored = self.tensors[part.name]
            if isinstance(stored, InFile):
                byte_range = stored.range(part.start, part.stop)
                wanted.append((part.name, stored.file.name, *byte_range))
        self.verifier.check(wanted)

    def read(self, parts: Sequence[Part]) -> None:
        """Fill the values of `parts`."""
        for part in parts:
            self.tensors[part.name].read(part.start, part.stop, part.values)


def find_weights(path: Path) -> Weights | None:
    """Find safetensors or torch files of weights at `path`; None if there are none."""
    if path.is_file():
        files = [path]
    else:
        files = []
        for pattern in ("*.safetensors", "pytorch_model*.bin", "*.bin", "*.pt", "*.pth"):
            files = files or sorted(path.glob(pattern))
    if not files:
        return None
    if files[0].suffix != ".safetensors":
        return Weights(path, _map_torch_files(files), None)
    folder = files[0].parent
    has_checksums = (folder / checksums.NAME).exists()
    verifier = checksums.Verifier(folder) if has_checksums else None
    tensors: dict[str, Stored] = {}
    if not path.is_file():
        files = _files_of_index(folder / INDEX, files, verifier)
    for file in files:
        for name, stored in read_header(file, verifier):
            if name in tensors:
                raise ValueError(f"{name} is in two files of {folder}: keep one")
            tensors[name] = stored
    return Weights(path, tensors, verifier)


def _files_of_index(
    index: Path, files: list[Path], verifier: checksums.Verifier | None
) -> list[Path]:
    """Return the files that an index names, or `files` without an index."""
    if not index.exists():
        return files
    if verifier is not None:
        verifier.check([("the index", index.name, 0, index.stat().st_size)])
    try:
        named = json.loads(index.read_text())["weight_map"].values()
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{index} is damaged ({error}): use another copy") from None
    listed = sorted({index.parent / name for name in named})
    for file in listed:
        if not file.exists():
            raise ValueError(f"{file} is missing: {index.name} names it")
    return listed


def _map_torch_files(files: Sequence[Path]) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for file in files:
        options: Any = {"map_location": "cpu", "weights_only": True}
        try:
            try:
                content = torch.load(file, mmap=True, **options)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                # The format that torch wrote before 2020 cannot be memory-mapped.
                content = torch.load(file, **options)
        except Exception as error:
            raise ValueError(
                f"{file} is damaged, or has more than tensors and plain values "
                f"({str(error).splitlines()[0]})"
            ) from error
        for name, tensor in _flatten(content, ""):
            if name in tensors:
                raise ValueError(f"{name} is in two files of {file.parent}: keep one")
            tensors[name] = Mapped(tensor)
    return tensors


def _flatten(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value.detach()
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else str(key))
