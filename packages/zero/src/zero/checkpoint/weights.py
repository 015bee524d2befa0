"""Weights in files of whole tensors, safetensors and torch's, read and written by runs of elements.

Notable:
- a run of elements of a row-major tensor is one range of bytes of a safetensors file: each rank
  reads and writes its own, so that nobody ever holds more than its shard and a buffer;
- torch's own files are mapped, not read;
- what is written has a checksum for the header and for each run, as checkpoints have.
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
from zero.checkpoint.draft import Draft, check_place, draft_folder
from zero.checkpoint.holding import Part, model_parts
from zero.checkpoint.storage import bytes_of, read_into, together

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
BUFFER_BYTES = 1 << 24
# The largest header that the format's own library reads.
LONGEST_HEADER = 100_000_000
OURS = {"format": "pt", "checksums": checksums.NAME}


class Stored(Protocol):
    """A tensor in a file."""

    @property
    def shape(self) -> torch.Size:
        """Its shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""

    def read(self, start: int, stop: int, values: Tensor) -> None:
        """Fill flat `values` with elements `start` to `stop`, in its own dtype."""


@dataclass(frozen=True)
class InFile:
    """Row-major elements from byte `offset` of a file on."""

    file: Path
    offset: int
    shape: torch.Size
    dtype: torch.dtype

    def range(self, start: int, stop: int) -> tuple[int, int]:
        """The bytes of elements `start` to `stop`: (offset, length)."""
        size = self.dtype.itemsize
        return self.offset + start * size, (stop - start) * size

    def read(self, start: int, stop: int, values: Tensor) -> None:
        """Fill flat `values` with elements `start` to `stop`, in its own dtype."""
        at, _ = self.range(start, stop)
        with self.file.open("rb") as file:
            file.seek(at)
            for part in values.split(BUFFER_BYTES // self.dtype.itemsize):
                here = part if part.dtype == self.dtype and part.device.type == "cpu" else None
                buffer = torch.empty(part.shape, dtype=self.dtype) if here is None else here
                read_into(file, buffer)
                if here is None:
                    part.copy_(buffer)


@dataclass(frozen=True)
class Mapped:
    """A tensor of a torch file, whose bytes are read when they are used."""

    tensor: Tensor

    @property
    def shape(self) -> torch.Size:
        """Its shape."""
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.tensor.dtype

    def read(self, start: int, stop: int, values: Tensor) -> None:
        """Fill flat `values` with elements `start` to `stop`, in its own dtype."""
        values.copy_(self.tensor.reshape(-1)[start:stop])


@dataclass(frozen=True)
class Weights:
    """A folder or file of weights that was found: its tensors, and checksums if it has any."""

    path: Path
    tensors: Mapping[str, Stored]
    verifier: checksums.Verifier | None

    def verify(self, parts: Sequence[Part]) -> None:
        """Raise ValueError if stored bytes that `parts` are made of are damaged."""
        if self.verifier is not None:
            found = ((part, self.tensors[part.name]) for part in parts)
            self.verifier.check(
                (part.name, stored.file.name, *stored.range(part.start, part.stop))
                for part, stored in found
                if isinstance(stored, InFile)
            )

    def read(self, parts: Sequence[Part]) -> None:
        """Fill the values of `parts`."""
        for part in parts:
            self.tensors[part.name].read(part.start, part.stop, part.values)


def find_weights(path: Path) -> Weights | None:
    """Find safetensors or torch files of weights at `path`; None if there are none."""
    if path.is_file():
        files = [path]
    else:
        kinds = ("*.safetensors", "pytorch_model*.bin", "*.bin", "*.pt", "*.pth")
        files = next(filter(None, (sorted(path.glob(kind)) for kind in kinds)), [])
    if not files:
        return None
    if files[0].suffix != ".safetensors":
        return Weights(path, _of_torch(files), None)
    folder = files[0].parent
    present = (folder / checksums.NAME).exists()
    verifier = checksums.Verifier(folder) if present else None
    tensors: dict[str, Stored] = {}
    index = folder / "model.safetensors.index.json"
    for file in _listed(index, files, verifier) if not path.is_file() else files:
        for name, stored in _header(file, verifier):
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
    """Write the model's weights as Hugging Face does: safetensors files in the folder `path`.

    Every rank calls it and writes what it holds, without gathering anything. `dtype`: what
    floating-point tensors are written in. Other files in the folder, such as config.json, stay.
    Raises RuntimeError on every rank, naming those that failed; what was at `path` is then kept.
    """
    # What a link points to is written, and the link stays.
    final = Path(os.path.realpath(path))
    drafts: list[Draft] = []
    parts, _ = model_parts(model)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    layout = _lay_out(parts, dtype, int(file_gb * 1e9))

    def prepare() -> str:
        if rank > 0:
            return ""
        check_place(final, other=".metadata")
        drafts.append(Draft(final))
        for file, tensors in layout.items():
            _write_header(drafts[0].folder / file, tensors)
        return drafts[0].token

    def write() -> checksums.Ranges:
        places = {
            name: (file, stored) for file, tensors in layout.items() for name, stored in tensors
        }
        sums: checksums.Ranges = {}
        for part in (part for part in parts if part.written_by(rank, world)):
            file, stored = places[part.name]
            done = _write_run(folder / file, stored, part)
            sums.setdefault(file, []).append(done)
        for file in sums:
            _sync(folder / file)
        return sums

    failure = f"weights {path} were not saved"

    def publish() -> None:
        if rank == 0:
            _finish(folder, layout, everyones, token)
            drafts[0].publish(_is_weights)

    try:
        token = together(prepare, group, failure)[0]
        folder = draft_folder(final, token)
        everyones = together(write, group, failure)
        together(publish, group, failure)
    finally:
        for draft in drafts:
            draft.close()


Layout = dict[str, list[tuple[str, InFile]]]


def _lay_out(parts: Sequence[Part], dtype: torch.dtype | None, file_bytes: int) -> Layout:
    """Where each tensor goes: the same on every rank."""
    groups: list[list[tuple[str, torch.Size, torch.dtype]]] = [[]]
    filled = 0
    for name, shape, kept in sorted((p.name, p.shape, p.values.dtype) for p in parts):
        kind = dtype if dtype is not None and kept.is_floating_point else kept
        if kind not in NAMES:
            raise ValueError(f"{name} is {kind}, which safetensors does not know: pass dtype=...")
        size = shape.numel() * kind.itemsize
        if groups[-1] and filled + size > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append((name, shape, kind))
        filled += size
    layout: Layout = {}
    for number, tensors in enumerate(groups, 1):
        some = f"model-{number:05}-of-{len(groups):05}.safetensors"
        file = some if len(groups) > 1 else "model.safetensors"
        at = len(_encoded(tensors))
        layout[file] = []
        for name, shape, kind in tensors:
            layout[file].append((name, InFile(Path(file), at, shape, kind)))
            at += shape.numel() * kind.itemsize
    return layout


def _encoded(tensors: Sequence[tuple[str, torch.Size, torch.dtype]]) -> bytes:
    """The header of a file: its length in eight bytes, then JSON, padded to eight bytes."""
    table: dict[str, Any] = {"__metadata__": OURS}
    at = 0
    for name, shape, kind in tensors:
        end = at + shape.numel() * kind.itemsize
        table[name] = {"dtype": NAMES[kind], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_header(path: Path, tensors: Sequence[tuple[str, InFile]]) -> None:
    last = tensors[-1][1]
    with path.open("wb") as file:
        file.write(_encoded([(name, stored.shape, stored.dtype) for name, stored in tensors]))
        file.truncate(sum(last.range(0, last.shape.numel())))


def _write_run(path: Path, stored: InFile, part: Part) -> tuple[int, int, int]:
    """Write one part; return (offset, length, checksum)."""
    offset, length = stored.range(part.start, part.stop)
    crc = 0
    with path.open("r+b") as file:
        file.seek(offset)
        for some in part.values.split(BUFFER_BYTES // stored.dtype.itemsize):
            written = bytes_of(some.to("cpu", stored.dtype).contiguous())
            file.write(written)
            crc = checksums.crc32(written, crc)
    return offset, length, crc


def _finish(draft: Path, layout: Layout, everyones: Sequence[checksums.Ranges], token: str) -> None:
    """Write the index and the checksums."""
    extra: checksums.Ranges = {}
    for file, tensors in layout.items():
        length = tensors[0][1].offset
        extra[file] = [(0, length, checksums.checksum(draft / file, 0, length))]
    if len(layout) > 1:
        index = draft / "model.safetensors.index.json"
        total = sum(s.range(0, s.shape.numel())[1] for t in layout.values() for _, s in t)
        names = {name: file for file, tensors in layout.items() for name, _ in tensors}
        index.write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2) + "\n"
        )
        size = index.stat().st_size
        extra[index.name] = [(0, size, checksums.checksum(index))]
        _sync(index)
    checksums.write(draft, [extra, *everyones], token)


def _is_weights(path: Path) -> bool:
    return path.suffix == ".safetensors" or path.name in (
        checksums.NAME,
        "model.safetensors.index.json",
    )


def _listed(index: Path, files: list[Path], verifier: checksums.Verifier | None) -> list[Path]:
    """The files that an index names; all that were found if there is none."""
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


def _header(path: Path, verifier: checksums.Verifier | None) -> Iterator[tuple[str, InFile]]:
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
        about = table.pop("__metadata__", {})
        entries = [
            (name, DTYPES[e["dtype"]], torch.Size(e["shape"]), *e["data_offsets"])
            for name, e in table.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: its header is no safetensors' ({error!r})") from None
    if about.get("checksums") and verifier is None:
        raise ValueError(f"{path.parent} has lost its checksums: use another copy")
    for name, dtype, shape, start, stop in entries:
        if stop - start != shape.numel() * dtype.itemsize or 8 + length + stop > size:
            raise ValueError(f"{name} in {path} is cut short: use another copy")
        yield name, InFile(path, 8 + length + start, shape, dtype)


def _of_torch(files: Sequence[Path]) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for file in files:
        options: Any = {"map_location": "cpu", "weights_only": True}
        try:
            try:
                content = torch.load(file, mmap=True, **options)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                # The format of before 2020, which cannot be mapped.
                content = torch.load(file, **options)
        except Exception as error:
            raise ValueError(
                f"{file} is damaged, or holds more than tensors and plain values "
                f"({str(error).splitlines()[0]})"
            ) from error
        found.update((name, Mapped(tensor)) for name, tensor in _flatten(content, ""))
    return found


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
