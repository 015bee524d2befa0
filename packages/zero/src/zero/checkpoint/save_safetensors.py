"""Weights written in Hugging Face's layout: safetensors files, with an index if there are several.

Each rank writes only its ranges of bytes, so it never needs more memory than its shard and a
buffer.
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
from zero.checkpoint.safetensors_format import INDEX, NAMES, InFile, encode_header
from zero.checkpoint.storage import together


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
    failure = f"weights {path} were not saved"
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(
            f"expected a floating-point dtype for floating-point tensors, got {dtype}: quantize "
            "the model before it is saved"
        )
    if not parts:
        raise ValueError("expected a model with parameters or buffers, got one without tensors")

    def open_draft() -> str:
        if rank > 0:
            return ""
        check_target(final, other=".metadata")
        drafts.append(Draft(final))
        return drafts[0].token

    try:
        token = together(open_draft, group, failure)[0]
        folder = draft_folder(final, token)
        layout = _lay_out(folder, parts, dtype, int(file_gb * 1e9))
        local_parts = [part for part in parts if part.is_written_by(rank, world)]
        local_files = sorted(layout)[rank::world]
        together(lambda: _write_headers(layout) if rank == 0 else None, group, failure)
        together(lambda: _write_parts(layout, local_parts), group, failure)
        files = together(lambda: checksums.of_files(folder, local_files), group, failure)
        together(lambda: _publish(drafts[0], layout, files) if rank == 0 else None, group, failure)
    finally:
        for draft in drafts:
            draft.close()


#: The name and location of each tensor of each file.
Layout = dict[str, list[tuple[str, InFile]]]


def _lay_out(
    folder: Path, parts: Sequence[Part], dtype: torch.dtype | None, file_bytes: int
) -> Layout:
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
            stored = InFile(folder / file, offset, shape, stored_dtype)
            layout[file].append((name, stored))
            offset = stored.stop
    return layout


def _write_headers(layout: Layout) -> None:
    for tensors in layout.values():
        last = tensors[-1][1]
        described = [(name, stored.shape, stored.dtype) for name, stored in tensors]
        with last.file.open("wb") as file:
            file.write(encode_header(described))
            file.truncate(last.stop)


def _write_parts(layout: Layout, parts: Sequence[Part]) -> None:
    location_of = dict(entry for tensors in layout.values() for entry in tensors)
    for part in parts:
        location_of[part.name].write(part.start, part.values)
    for file in {location_of[part.name].file for part in parts}:
        _sync(file)


def _publish(draft: Draft, layout: Layout, files_of_ranks: Sequence[dict[str, int]]) -> None:
    """Write the index and the checksums, and rename the folder to its final path."""
    files = {name: crc for files_of_rank in files_of_ranks for name, crc in files_of_rank.items()}
    if len(layout) > 1:
        _write_index(draft.folder / INDEX, layout)
        files |= checksums.of_files(draft.folder, [INDEX])
    checksums.write(draft.folder, files, draft.token)
    draft.publish(_is_weights_file)


def _write_index(path: Path, layout: Layout) -> None:
    total = 0
    names = {}
    for file, tensors in layout.items():
        for name, stored in tensors:
            total += stored.shape.numel() * stored.dtype.itemsize
            names[name] = file
    contents = {"metadata": {"total_size": total}, "weight_map": names}
    path.write_text(json.dumps(contents, indent=2) + "\n")
    _sync(path)


def _is_weights_file(path: Path) -> bool:
    return path.suffix == ".safetensors" or path.name in (checksums.NAME, INDEX)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
