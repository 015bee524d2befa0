"""The format of safetensors files: a JSON header, followed by the tensors end to end.

A run of elements of a row-major tensor is one range of bytes of the file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: All dtypes of the format whose elements are a whole number of bytes.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu, "C64": torch.complex64, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
BUFFER_BYTES = 1 << 24
INDEX = "model.safetensors.index.json"
#: The largest header, in bytes, that the format's reference implementation reads.
LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class InFile:
    """Row-major elements that start at byte `offset` of a file."""

    file: Path
    offset: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        """The byte after the last element."""
        return self.offset + self.shape.numel() * self.dtype.itemsize

    def read(self, start: int, values: Tensor) -> None:
        """Fill flat `values` with the elements from `start` on, cast to its dtype."""
        with self.file.open("rb") as file:
            file.seek(self.offset + start * self.dtype.itemsize)
            for part in values.split(BUFFER_BYTES // self.dtype.itemsize):
                buffer = torch.empty(part.shape, dtype=self.dtype)
                if file.readinto(memory_of(buffer)) < buffer.nbytes:
                    raise ValueError(f"{self.file} ends early: use another copy")
                part.copy_(buffer)

    def write(self, start: int, values: Tensor) -> None:
        """Write flat `values`, cast to the stored dtype, to the elements from `start` on."""
        with self.file.open("r+b") as file:
            file.seek(self.offset + start * self.dtype.itemsize)
            for part in values.split(BUFFER_BYTES // self.dtype.itemsize):
                file.write(memory_of(part.to("cpu", self.dtype).contiguous()))


def memory_of(tensor: Tensor) -> memoryview:
    """Return a memoryview of the bytes of a contiguous CPU tensor."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def encode_header(tensors: Sequence[tuple[str, torch.Size, torch.dtype]]) -> bytes:
    """Return a file's header: its length in eight bytes, then JSON, padded to eight bytes."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape, dtype in tensors:
        stop = start + shape.numel() * dtype.itemsize
        table[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> Iterator[tuple[str, InFile]]:
    """Yield the name and location of each tensor in a safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
        if 8 + length > min(size, LONGEST_HEADER):
            raise ValueError(f"{path} is damaged: its header is longer than the file")
        text = file.read(length)
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
        if 8 + length + stop > size:
            raise ValueError(f"{name} in {path} is truncated: use another copy")
        if start != end or stop - start != shape.numel() * dtype.itemsize:
            raise ValueError(
                f"{path} is damaged: {name} has bytes {start} to {stop}, and the tensor before it "
                f"ends at byte {end}: use another copy"
            )
        end = stop
        yield name, InFile(path, 8 + length + start, shape, dtype)
    if 8 + length + end != size:
        raise ValueError(f"{path} is damaged: it is longer than its tensors: use another copy")
