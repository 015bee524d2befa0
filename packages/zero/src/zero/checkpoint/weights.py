"""Weights in safetensors and torch files, read and written by runs of elements.

A run of elements of a row-major tensor is one range of bytes of a safetensors file. Each rank
reads and writes its ranges only, so it never needs more memory than its shard and a buffer.
torch's files are memory-mapped. Written files have one checksum for the header and one per run,
as checkpoints have.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero.checkpoint import checksums
from zero.checkpoint.draft import Draft, check_target, draft_folder
from zero.checkpoint.ownership import Part, model_parts
from zero.checkpoint.storage import memory_of, read_into, together

#: All dtypes of the format that have whole bytes per element.
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
#: The largest header that the format's reference implementation reads.
LONGEST_HEADER = 100_000_000
METADATA = {"format": "pt", "checksums": checksums.NAME}


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
class InFile:
    """Row-major elements that start at byte `offset` of a file."""

    file: Path
    offset: int
    shape: torch.Size
    dtype: torch.dtype

    def range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the offset and length in bytes of elements `start` to `stop`."""
        size = self.dtype.itemsize
        return self.offset + start * size, (stop - start) * size

    def read(self, start: int, stop: int, values: Tensor) -> None:
        """Fill flat `values` with elements `start` to `stop`, cast to its dtype."""
        offset, _ = self.range(start, stop)
        is_direct = values.dtype == self.dtype and values.device.type == "cpu"
        with self.file.open("rb") as file:
            file.seek(offset)
            for part in values.split(BUFFER_BYTES // self.dtype.itemsize):
                if is_direct:
                    read_into(file, part)
                else:
                    buffer = torch.empty(part.shape, dtype=self.dtype)
                    read_into(file, buffer)
                    part.copy_(buffer)


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
        for name, stored in _read_header(file, verifier):
            if name in tensors:
                raise ValueError(f"{name} is in two files of {folder}: keep one")
            tensors[name] = stored
    return Weights(path, tensors, verifier)


def save_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    file_gb: float = 5.0,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write the model's weights in Hugging Face's layout: safetensors files in the folder `path`.

    Every rank must call it, and writes its shard. Nothing is gathered. `dtype` is the dtype of
    floating-point tensors in the files. Other files in the folder, such as config.json, are kept.
    If a rank fails, RuntimeError is raised on every rank with the failed ranks, and the folder is
    unchanged.
    """
    # The target of a symbolic link is written, and the link stays.
    final = Path(os.path.realpath(path))
    drafts: list[Draft] = []
    parts, _ = model_parts(model)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(
            f"expected a floating-point dtype for floating-point tensors, got {dtype}: quantize "
            "the model before it is saved"
        )
    if not parts:
        raise ValueError("expected a model with parameters or buffers, got one without tensors")
    layout = _lay_out(parts, dtype, int(file_gb * 1e9))

    def prepare() -> str:
        if rank > 0:
            return ""
        check_target(final, other=".metadata")
        drafts.append(Draft(final))
        for file, tensors in layout.items():
            _write_header(drafts[0].folder / file, tensors)
        return drafts[0].token

    def write() -> checksums.Ranges:
        return _write_parts(
            folder, layout, [part for part in parts if part.is_written_by(rank, world)]
        )

    failure = f"weights {path} were not saved"

    def publish() -> None:
        if rank == 0:
            _finish(folder, layout, ranges_of_ranks, token)
            drafts[0].publish(_is_weights_file)

    try:
        token = together(prepare, group, failure)[0]
        folder = draft_folder(final, token)
        ranges_of_ranks = together(write, group, failure)
        together(publish, group, failure)
    finally:
        for draft in drafts:
            draft.close()


Layout = dict[str, list[tuple[str, InFile]]]


def _lay_out(parts: Sequence[Part], dtype: torch.dtype | None, file_bytes: int) -> Layout:
    """Return the file and offset of each tensor, which are equal on all ranks."""
    groups: list[list[tuple[str, torch.Size, torch.dtype]]] = [[]]
    filled = 0
    for name, shape, part_dtype in sorted((p.name, p.shape, p.values.dtype) for p in parts):
        is_cast = dtype is not None and part_dtype.is_floating_point
        stored_dtype: torch.dtype = dtype if is_cast else part_dtype  # type: ignore[assignment]
        if stored_dtype not in NAMES:
            raise ValueError(
                f"expected a dtype that safetensors supports, got {stored_dtype} for {name}: pass "
                "dtype=..."
            )
        size = shape.numel() * stored_dtype.itemsize
        if groups[-1] and filled + size > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append((name, shape, stored_dtype))
        filled += size
    layout: Layout = {}
    for number, tensors in enumerate(groups, 1):
        file = "model.safetensors"
        if len(groups) > 1:
            file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        offset = len(_encode_header(tensors))
        layout[file] = []
        for name, shape, stored_dtype in tensors:
            layout[file].append((name, InFile(Path(file), offset, shape, stored_dtype)))
            offset += shape.numel() * stored_dtype.itemsize
    return layout


def _encode_header(tensors: Sequence[tuple[str, torch.Size, torch.dtype]]) -> bytes:
    """Return a file's header: its length in eight bytes, then JSON, padded to eight bytes."""
    table: dict[str, Any] = {"__metadata__": METADATA}
    start = 0
    for name, shape, dtype in tensors:
        stop = start + shape.numel() * dtype.itemsize
        table[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_header(path: Path, tensors: Sequence[tuple[str, InFile]]) -> None:
    last = tensors[-1][1]
    with path.open("wb") as file:
        file.write(_encode_header([(name, stored.shape, stored.dtype) for name, stored in tensors]))
        file.truncate(sum(last.range(0, last.shape.numel())))


def _write_parts(folder: Path, layout: Layout, parts: Sequence[Part]) -> checksums.Ranges:
    """Write this rank's parts; return the checksums of their ranges."""
    location_of = {
        name: (file, stored) for file, tensors in layout.items() for name, stored in tensors
    }
    ranges: checksums.Ranges = {}
    for part in parts:
        file, stored = location_of[part.name]
        ranges.setdefault(file, []).append(_write_run(folder / file, stored, part))
    for file in ranges:
        _sync(folder / file)
    return ranges


def _write_run(path: Path, stored: InFile, part: Part) -> tuple[int, int, int]:
    """Write a part; return (offset, length, checksum)."""
    offset, length = stored.range(part.start, part.stop)
    crc = 0
    with path.open("r+b") as file:
        file.seek(offset)
        for chunk in part.values.split(BUFFER_BYTES // stored.dtype.itemsize):
            written = memory_of(chunk.to("cpu", stored.dtype).contiguous())
            file.write(written)
            crc = checksums.crc32(written, crc)
    return offset, length, crc


def _finish(
    draft: Path, layout: Layout, ranges_of_ranks: Sequence[checksums.Ranges], token: str
) -> None:
    """Write the index and the checksums."""
    headers: checksums.Ranges = {}
    for file, tensors in layout.items():
        length = tensors[0][1].offset
        headers[file] = [(0, length, checksums.checksum(draft / file, 0, length))]
    if len(layout) > 1:
        index = draft / INDEX
        total = 0
        names = {}
        for file, tensors in layout.items():
            for name, stored in tensors:
                total += stored.shape.numel() * stored.dtype.itemsize
                names[name] = file
        index.write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2) + "\n"
        )
        size = index.stat().st_size
        headers[index.name] = [(0, size, checksums.checksum(index))]
        _sync(index)
    checksums.write(draft, [headers, *ranges_of_ranks], token)


def _is_weights_file(path: Path) -> bool:
    return path.suffix == ".safetensors" or path.name in (checksums.NAME, INDEX)


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


def _read_header(path: Path, verifier: checksums.Verifier | None) -> Iterator[tuple[str, InFile]]:
    """Yield the name and location of each tensor in a safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
        if verifier is not None:
            verifier.check([("the header", path.name, 0, 8)])
        if 8 + length > min(size, LONGEST_HEADER):
            raise ValueError(f"{path} is damaged: its header is longer than the file")
        text = file.read(length)
    try:
        table = json.loads(text)
        metadata = table.pop("__metadata__", {})
        entries = [
            (name, entry["dtype"], torch.Size(entry["shape"]), *entry["data_offsets"])
            for name, entry in table.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: its header cannot be read ({error!r})") from None
    if metadata.get("checksums") and verifier is None:
        raise ValueError(f"{path.parent} has lost its checksums: use another copy")
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
                # The format that torch wrote before 2020 cannot be mapped.
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


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
