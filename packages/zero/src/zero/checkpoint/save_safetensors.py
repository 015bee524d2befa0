"""Weights written in Hugging Face's layout: safetensors files, with an index if there are several.

Each rank writes only its ranges of bytes, so it never needs more memory than its shard and a
buffer. As in a checkpoint, each file has one checksum for the header and one per run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from zero.checkpoint import checksums
from zero.checkpoint.draft import Draft, check_target, draft_folder
from zero.checkpoint.ownership import Part, model_parts
from zero.checkpoint.safetensors_format import (
    BUFFER_BYTES,
    INDEX,
    NAMES,
    InFile,
    encode_header,
)
from zero.checkpoint.storage import memory_of, together


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
    If a rank fails, every rank raises a RuntimeError that names the failed ranks, and the folder is
    unchanged.
    """
    # If `path` is a symbolic link, its target is written and the link is kept.
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
        offset = len(encode_header(tensors))
        layout[file] = []
        for name, shape, stored_dtype in tensors:
            layout[file].append((name, InFile(Path(file), offset, shape, stored_dtype)))
            offset += shape.numel() * stored_dtype.itemsize
    return layout


def _write_header(path: Path, tensors: Sequence[tuple[str, InFile]]) -> None:
    last = tensors[-1][1]
    with path.open("wb") as file:
        file.write(encode_header([(name, stored.shape, stored.dtype) for name, stored in tensors]))
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


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
