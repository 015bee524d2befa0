"""Types and checks of arguments that several functions share."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

T = TypeVar("T")
#: The types of the weights that this package compresses, prunes and adapts.
FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: A function of a finished layer's name, the number of finished layers and the number of layers.
Progress = Callable[[str, int, int], None]


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message with the closest known name; empty if none is similar."""
    matches = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def format_names(names: Iterable[str]) -> str:
    """Return the first four names, separated by commas, and an ellipsis if there are more."""
    names = list(names)
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def check_bits(bits: float, noun: str, least: int = 1) -> None:
    """Raise `ValueError` unless `bits` is an int from `least` to 8."""
    if isinstance(bits, bool) or not isinstance(bits, int) or not least <= bits <= 8:
        raise ValueError(f"expected an int from {least} to 8 as bits of {noun}, got {bits!r}")


def check_number(name: str, number: object) -> None:
    """Raise `TypeError` unless `number` is a real number, or a tensor or an array of one number."""
    is_single = getattr(number, "shape", None) in ((), (1,))
    if isinstance(number, bool) or not (isinstance(number, numbers.Real) or is_single):
        raise TypeError(f"expected a number as {name}, got {number!r} ({type(number).__name__})")


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise `ValueError` if a tensor is not of `FLOAT_TYPES`, or contains NaN or infinity."""
    if tensor.dtype not in FLOAT_TYPES:
        raise ValueError(
            f"expected {name} of type float16, bfloat16, float32 or float64, got {tensor.dtype}; "
            "convert it with .to(torch.float32)"
        )
    if not torch.isfinite(tensor).all():
        raise ValueError(f"expected finite values in {name}, got nan or inf")


def check_strided(noun: str, *tensors: Tensor) -> None:
    """Raise `ValueError` if a tensor has a layout other than strided, such as a sparse one."""
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise ValueError(
                f"expected {noun} without sparse tensors, got a tensor of layout {tensor.layout}; "
                "call to_dense() on it"
            )


def require_batches(batches: Iterable[T]) -> list[T]:
    """Return the calibration batches as a list, because they are read several times.

    Return the tensor of a batch that is a list or tuple of one tensor, as from a `DataLoader` of a
    `TensorDataset`. Raise `ValueError` if there are no batches, for a single tensor or mapping, and
    for sparse tensors.
    """
    listed = [] if isinstance(batches, Tensor | Mapping) else list(batches)
    if not listed:
        raise ValueError(
            "expected a list with at least one batch of inputs, got an empty one or a single batch "
            f"({type(batches).__name__}); pass [batch]"
        )
    check_strided("batches", *(t for t in tree_leaves(listed) if isinstance(t, Tensor)))
    return [_unwrap_single_tensor(batch) for batch in listed]


def _unwrap_single_tensor(batch: T) -> T:
    if isinstance(batch, list | tuple) and len(batch) == 1 and isinstance(batch[0], Tensor):
        return cast(T, batch[0])
    return batch
