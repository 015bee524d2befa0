"""Comparison of modules across ranks, and broadcasts of their tensors."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.communication import run_collective
from ddp.consistency.failure_attribution import FailureAttribution

#: Tensors are broadcast together up to this many bytes.
BROADCAST_BYTES = 25 * 2**20


def check_same_model(
    module: nn.Module,
    settings: Mapping[str, object],
    group: dist.ProcessGroup,
    ignored: Collection[str],
) -> None:
    """Raise `ValueError` on every rank if models or settings differ across ranks.

    The error names the rank and the parameter, buffer or setting. This is a collective.
    """
    local_settings = {name: str(value) for name, value in settings.items()}
    gathered = gather_objects((describe_model(module, ignored), local_settings), group)
    _, settings_of_rank0 = gathered[0]
    for rank, (_, settings_of_rank) in enumerate(gathered):
        for name, value in settings_of_rank0.items():
            if settings_of_rank[name] != value:
                raise ValueError(
                    f"{name} is {settings_of_rank[name]} on rank {rank} and {value} on rank 0; "
                    "pass the same value on every rank"
                )
    check_same_descriptions([description for description, _ in gathered])


def check_same_descriptions(descriptions: Sequence[Sequence[str]]) -> None:
    """Raise `ValueError` if the description of a rank differs from the description of rank 0.

    The error names the rank and contains the first line that differs.
    """
    for rank, description in enumerate(descriptions):
        for expected, line in zip_longest(descriptions[0], description, fillvalue="nothing"):
            if line != expected:
                raise ValueError(
                    f"the models differ across ranks: rank {rank} has {line}, but rank 0 has "
                    f"{expected}; build the same module on every rank"
                )


def compute_checksum(tensors: Iterable[Tensor]) -> int:
    """Return the CRC-32 of the tensors' bytes."""
    total = 0
    for tensor in tensors:
        total = zlib.crc32(_as_bytes(tensor).cpu().numpy().tobytes(), total)
    return total


@torch.no_grad()
def broadcast_tensors(
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup,
    failures: FailureAttribution,
    description: str,
    *,
    source: int = 0,
) -> None:
    """Broadcast tensors in place from rank `source` of the group; send small tensors together."""
    broadcast = partial(dist.broadcast, group=group, group_src=source)
    # A retained graph may have saved buffers. The guard hides their change from autograd, so that a
    # second backward pass does not fail.
    with torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
        for batch in _split_into_batches(tensors):
            # Bytes can represent every dtype, including bool and float8.
            pieces = [_as_bytes(tensor) for tensor in batch]
            flat = pieces[0] if len(batch) == 1 else torch.cat(pieces)
            run_collective(broadcast, flat, description, failures.attribute_errors)
            if dist.get_rank(group) == source:
                continue
            sizes = [tensor.nbytes for tensor in batch]
            for tensor, piece in zip(batch, flat.split(sizes), strict=True):
                if piece.data_ptr() != tensor.data_ptr():
                    # The offset of a clone is 0; `view` needs a multiple of the element size.
                    tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))


def collect_state(
    module: nn.Module, ignored: Collection[str], *, buffers: bool = True
) -> dict[str, Tensor]:
    """Return parameters by name, and buffers if `buffers` is True; omit names in `ignored`."""
    named = [*module.named_parameters(), *(module.named_buffers() if buffers else ())]
    return {name: tensor for name, tensor in named if name not in ignored}


def describe_model(module: nn.Module, ignored: Collection[str]) -> list[str]:
    """Return one line per parameter and buffer, with the properties that all ranks must share."""
    lines = []
    sparse = collect_sparse_parameters(module)
    for name, parameter in module.named_parameters():
        if name in ignored:
            continue
        line = f"parameter {name!r} {tuple(parameter.shape)} {parameter.dtype}"
        if not parameter.requires_grad:
            line += " frozen"
        elif parameter in sparse:
            line += " with sparse gradients"
        else:
            # The bucket stores gradients in the memory order of the parameter.
            like = torch.empty_like(parameter, device="meta")
            if not like.is_contiguous():
                line += f" with strides {like.stride()}"
        lines.append(line)
    for name, buffer in module.named_buffers():
        if name not in ignored:
            lines.append(f"buffer {name!r} {tuple(buffer.shape)} {buffer.dtype}")
    return lines


def collect_sparse_parameters(module: nn.Module) -> set[Tensor]:
    """Return the weights of all embeddings with `sparse=True`."""
    return {
        layer.weight
        for layer in module.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
    }


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the `value` of every rank in `group`. This is a collective."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _split_into_batches(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Split tensors into batches of one device with at most `BROADCAST_BYTES` each."""
    batches: list[list[Tensor]] = []
    open_batches: dict[torch.device, tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        batch, size = open_batches.get(tensor.device, ([], 0))
        if not batch or size + tensor.nbytes > BROADCAST_BYTES:
            batch = []
            size = 0
            batches.append(batch)
        batch.append(tensor)
        open_batches[tensor.device] = (batch, size + tensor.nbytes)
    return batches


def _as_bytes(tensor: Tensor) -> Tensor:
    # The memory of a lazy conjugate does not contain its values.
    values = tensor.detach().resolve_conj().resolve_neg()
    return values.contiguous().reshape(-1).view(torch.uint8)
