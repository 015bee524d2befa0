"""Tensors that share memory: tied weights are stored once, and views as separate tensors."""

from __future__ import annotations

from torch import Tensor


def memory_of(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors with the same elements in the same memory.

    A view of another dtype, and one that conjugates or negates, has other elements.
    """
    view = tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), *view


def separate(tensor: Tensor, storages: set[int]) -> Tensor:
    """Return a contiguous tensor on the CPU, a copy if its storage is one of `storages`.

    Its storage is added to `storages`: safetensors refuses tensors that share a part of their
    memory.
    """
    address = tensor.untyped_storage().data_ptr()
    is_shared = address in storages
    storages.add(address)
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return tensor.clone() if is_shared else tensor
