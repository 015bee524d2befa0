"""Weights read from safetensors files, by runs of elements.

A file has a JSON header, followed by the tensors end to end. A run of elements of a row-major
tensor is one range of bytes, and each rank reads only its ranges. A rank therefore never needs more
memory than its shard and a buffer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from zero.checkpoint.ownership import Part

#: All dtypes of the format whose elements are a whole number of bytes.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu, "C64": torch.complex64, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
BUFFER_BYTES = 1 << 24
INDEX = "model.safetensors.index.json"
TORCH_FILES = ("*.bin", "*.pt", "*.pth")
#: The largest header, in bytes, that the format's reference implementation reads.
LONGEST_HEADER = 100_000_000


class InFile(NamedTuple):
    """Row-major elements that start at byte `offset` of a file."""

    shape: torch.Size
    dtype: torch.dtype
    file: Path
    offset: int

    def read(self, start: int, values: Tensor) -> None:
        """Fill flat `values` with the elements from `start` on, cast to the dtype of `values`."""
        with self.file.open("rb") as file:
            file.seek(self.offset + start * self.dtype.itemsize)
            for part in values.split(BUFFER_BYTES // self.dtype.itemsize):
                buffer = torch.empty(part.shape, dtype=self.dtype)
                memory = memoryview(buffer.view(torch.uint8).numpy())  # type: ignore[arg-type]
                if file.readinto(memory) < buffer.nbytes:
                    raise ValueError(f"{self.file} ends early: use another copy")
                part.copy_(buffer)


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
    """Return the tensors of the safetensors files at `path`, or None if there are no files.

    Raise ValueError for files of torch.save, and for damaged files.
    """
    files = [path] if path.is_file() else _files_of_index(path)
    is_torch = any(file.match(pattern) for file in files for pattern in TORCH_FILES)
    if is_torch or (not files and any(any(path.glob(pattern)) for pattern in TORCH_FILES)):
        raise ValueError(
            f"expected safetensors files, got files of torch.save at {path}: load them with "
            "module.load_state_dict(torch.load(file, mmap=True)), where module is the model before "
            "or after FSDP(module)"
        )
    if not files:
        return None
    tensors: dict[str, InFile] = {}
    for file in files:
        for name, stored in _read_header(file):
            if name in tensors:
                raise ValueError(f"{name} is in two files of {path}: keep one")
            tensors[name] = stored
    return Weights(path, tensors)


def _files_of_index(folder: Path) -> list[Path]:
    """Return the files that a folder's index names; without an index, all its safetensors files."""
    index = folder / INDEX
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        named = json.loads(index.read_text())["weight_map"].values()
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{index} is damaged ({error}): use another copy") from None
    listed = sorted({folder / name for name in named})
    for file in listed:
        if not file.exists():
            raise ValueError(f"{file} is missing: {index.name} names it")
    return listed


def _read_header(path: Path) -> Iterator[tuple[str, InFile]]:
    """Yield the name and location of each tensor in a safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(min(length, LONGEST_HEADER))
    try:
        table = json.loads(text)
        table.pop("__metadata__", None)
        entries = [
            (name, entry["dtype"], torch.Size(entry["shape"]), *entry["data_offsets"])
            for name, entry in table.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: its header cannot be read ({error!r})") from None
    end = 0
    for name, dtype_name, shape, start, stop in sorted(entries, key=lambda entry: entry[3:]):
        if dtype_name not in DTYPES:
            raise ValueError(
                f"expected a dtype of whole bytes per element, got {dtype_name} for {name} in "
                f"{path}: convert the file, or load it with the program that wrote it"
            )
        dtype = DTYPES[dtype_name]
        is_in_file = 8 + length + stop <= size
        if start != end or stop - start != shape.numel() * dtype.itemsize or not is_in_file:
            raise ValueError(
                f"{path} is damaged or truncated: {name} has bytes {start} to {stop}, the tensor "
                f"before it ends at byte {end}, and the file has {size} bytes: use another copy"
            )
        end = stop
        yield name, InFile(shape, dtype, path, 8 + length + start)
    if 8 + length + end != size:
        raise ValueError(f"{path} is damaged: it is longer than its tensors: use another copy")


def check_format(path: Path) -> None:
    """Raise ValueError that names the conversion tool for folders of DeepSpeed and Megatron."""
    # DeepSpeed has one folder per step, beside a file that names the latest.
    if any(path.glob("*_optim_states.pt")) or any(path.glob("*/*_optim_states.pt")):
        raise ValueError(
            f"expected whole tensors, got DeepSpeed's files of partitions at {path}: run the "
            "script zero_to_fp32.py that DeepSpeed has saved beside them, and load its output"
        )
    if (path / "common.pt").is_file() and (path / "metadata.json").is_file():
        raise ValueError(
            f"expected tensors under the model's names, got a distributed checkpoint of Megatron "
            f"at {path}: convert it with Megatron-LM's tools/checkpoint/convert.py"
        )
