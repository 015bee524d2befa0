"""Weights of other programs in safetensors files, which are mapped into memory.

A rank reads only the bytes of its elements. It therefore needs no more memory than its shard.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from zero.checkpoint.ownership import Part

INDEX = "model.safetensors.index.json"
TORCH_FILES = ("*.bin", "*.pt", "*.pth")
#: The key of the offsets of shards in the metadata of files of torch's HuggingFaceStorageWriter.
SHARDING_INFO = "DCP_SHARDING_INFO"


@dataclass(frozen=True)
class Weights:
    """The tensors of a file or a folder of weights."""

    mapped: dict[str, Tensor]

    @cached_property
    def tensors(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """The whole shape and dtype of every tensor."""
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self.mapped.items()}

    def read(self, parts: Sequence[Part]) -> None:
        """Fill the values of `parts`, cast to their dtypes."""
        for part in parts:
            part.values.copy_(self.mapped[part.name].view(-1)[part.start : part.stop])


def find_weights(path: Path) -> Weights | None:
    """Return the tensors of the safetensors files at `path`, or None if there are no files.

    `path` is a file, a folder or the index in a folder. Raise ValueError for files of torch.save,
    and for damaged files.
    """
    if path.name == INDEX:
        path = path.parent
    files = [path] if path.is_file() else _list_files(path)
    is_torch = any(file.match(pattern) for file in files for pattern in TORCH_FILES)
    if is_torch or (not files and any(any(path.glob(pattern)) for pattern in TORCH_FILES)):
        raise ValueError(
            f"expected safetensors files, got files of torch.save at {path}: load them with "
            "module.load_state_dict(torch.load(file, mmap=True)), where module is the model before "
            "or after FSDP(module)"
        )
    mapped: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in _map_file(file).items():
            if name in mapped:
                raise ValueError(f"{name} is in two files of {path}: keep one")
            mapped[name] = tensor
    return Weights(mapped) if files else None


def _list_files(folder: Path) -> list[Path]:
    """Return the files that a folder's index names; without an index, all its safetensors files."""
    index = folder / INDEX
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        named = json.loads(index.read_text())["weight_map"].values()
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{index} is damaged ({error}): use another copy") from None
    return sorted({folder / name for name in named})


def _map_file(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
        offsets = _read_offsets(path)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: {INDEX} names it") from None
    except Exception as error:
        raise ValueError(f"{path} is damaged ({error}): use another copy") from None
    shards = [name for name, starts in offsets.items() if any(starts)]
    if shards:
        raise ValueError(
            f"expected whole tensors, got a shard of {shards[0]} at offsets {offsets[shards[0]]} "
            f"in {path}, which HuggingFaceStorageWriter wrote: save with save_distributed=True and "
            "enable_consolidation=True, or convert the folder with torch's "
            "consolidate_safetensors_files"
        )
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float4_e2m1fn_x2:
            raise ValueError(
                f"expected a dtype of whole bytes per element, got {tensor.dtype} for {name} in "
                f"{path}: convert the file, or load it with the program that wrote it"
            )
    return tensors


def _read_offsets(path: Path) -> dict[str, list[int]]:
    """Return where the tensors of a file start in the whole tensors; empty if it does not say."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    shards = json.loads(metadata.get(SHARDING_INFO, "{}"))
    return {name: shard["saved_offsets"] for name, shard in shards.items()}


def check_format(path: Path) -> None:
    """Raise ValueError for folders of DeepSpeed and Megatron; the error names the converter."""
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
