"""Reference counts that show whether the caller still uses the memory of a gradient.

A step overwrites the memory of earlier gradients. A count above the expected one means that the
caller has another reference to this memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor, nn


def count_references(tensors: Sequence[Tensor]) -> list[int]:
    """Return the number of references to each tensor, from Python and from C++.

    The counts include the references of `tensors` and of this function.
    """
    return [getrefcount(tensor) + tensor._use_count() for tensor in tensors]


_tensors = [torch.empty(0)]
#: Result of `count_references` for a tensor that only the passed list and one other list reference.
UNSHARED_REFERENCES = count_references(list(_tensors))[0]


def count_memory_references(tensor: Tensor) -> int:
    """Return the number of references to the storage of a tensor.

    Each tensor that uses the storage counts as one. The count includes one of this function.
    """
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def is_aliased(parameter: nn.Parameter) -> bool:
    """Return True if there is another reference to `.grad`, or another tensor with its storage."""
    references, memory_references = _count_grad_references(parameter)
    return references > _UNALIASED_REFERENCES[0] or memory_references > _UNALIASED_REFERENCES[1]


def _count_grad_references(parameter: nn.Parameter) -> tuple[int, int]:
    """Return the number of references to `.grad`, and to the storage of `.grad`."""
    gradient: Any = parameter.grad
    (references,) = count_references([gradient])
    return references, count_memory_references(gradient)


_parameter = nn.Parameter(torch.empty(1))
_parameter.grad = torch.empty(1)
#: Result of `_count_grad_references` for a `.grad` that is referenced only by its parameter.
_UNALIASED_REFERENCES = _count_grad_references(_parameter)
