"""Tensors that share memory: tied weights are stored once, and views as separate tensors."""

from __future__ import annotations

from torch import Tensor, nn

from tinyml.conversion import check_supported


def get_state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of `model`; raise `ValueError` if a value is not a tensor with data."""
    check_supported(model)
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.is_meta:
            kind = "a tensor on the meta device" if isinstance(value, Tensor) else repr(type(value))
            raise ValueError(
                f"expected tensors with data in the state dict, got {name!r}, which is {kind}"
            )
    return state


def get_memory_key(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors with the same elements in the same memory.

    Views of another dtype, and conjugated and negated views, have different elements.
    """
    view = tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), *view


def copy_if_shared(tensor: Tensor, storages: set[int]) -> Tensor:
    """Return a contiguous tensor on the CPU that shares no memory with earlier results.

    `storages` are the addresses of the storages of earlier tensors, to which that of `tensor` is
    added. safetensors refuses tensors that share memory.
    """
    address = tensor.untyped_storage().data_ptr()
    is_shared = address in storages
    storages.add(address)
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return tensor.clone() if is_shared else tensor
