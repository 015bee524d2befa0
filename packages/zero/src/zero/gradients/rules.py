"""Rules for torch functions of a sharded tensor: element-wise functions and full reductions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import inf
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
NORMS = {"norm", "linalg_norm", "linalg_vector_norm"}
#: Maps each reduction to the function that combines elements, and to its neutral element.
REDUCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "sum": (torch.sum, 0.0),
    "mean": (torch.sum, 0.0),
    "max": (torch.max, -inf),
    "amax": (torch.max, -inf),
    "min": (torch.min, inf),
    "amin": (torch.min, inf),
    "any": (torch.any, 0.0),
    "all": (torch.all, 1.0),
}
#: Element-wise aten operators without torch's tag `pointwise`.
ELEMENTWISE_OPERATORS = {
    "zero_", "zeros_like", "ones_like", "full_like", "empty_like", "copy_", "fill_", "clone",
    "_to_copy", "detach", "nan_to_num", "where", "masked_fill", "masked_fill_", "floor_divide",
    "floor_divide_",
}  # fmt: skip
#: Tensor attributes that return a view of all elements.
VIEWS = {"data", "real", "imag", "T", "mT", "H", "mH"}
#: Methods that neither read nor change elements, or that print them.
ON_OBJECT = {"requires_grad_", "detach_", "share_memory_", "__repr__", "__format__"}
#: Methods that read the elements without an operator that torch dispatches.
READS_MEMORY = {"tolist", "numpy", "__array__", "__dlpack__"}

REMEDY = (
    "element-wise operations, norms, sums, means, maxima and minima work; p.grad.full_tensor(), "
    "or p.full_tensor() at stage 3, called by every rank, gathers the elements"
)


def is_full_reduction(name: str, args: Any, kwargs: Any) -> bool:
    """Return True if an operation reduces the whole tensor to a 0-dimensional tensor."""
    names: tuple[str, ...]
    if name in NORMS:
        names = ("self", "ord", "dim", "keepdim")
    elif name in REDUCTIONS:
        names = ("self", "dim", "keepdim")
    else:
        return False
    arguments = dict(zip(names, args, strict=False)) | kwargs
    order = arguments.get("ord", arguments.get("p"))
    is_of_matrix = name == "linalg_norm" and order is not None and args[0].dim() > 1
    if is_of_matrix or order == "nuc":
        # This is a norm of the matrix, such as its largest singular value.
        return False
    if arguments.get("keepdim") or arguments.get("out") is not None:
        return False
    dim = arguments.get("dim")
    # An empty `dim` of the other reductions means all dimensions.
    is_empty = isinstance(dim, list | tuple) and not dim
    return dim is None or (is_empty and name not in ("any", "all"))


def get_python_name(func: Any) -> str:
    """Return the name of a torch function or method, or of the attribute that `func` reads.

    For a function that sets an attribute, return "__set__". `torch.linalg.vector_norm` is returned
    under the name of its aten operator, "linalg_vector_norm".
    """
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        name = func.__self__.__name__
    return "linalg_vector_norm" if name == "vector_norm" else name


@cache
def is_elementwise(operator: Any) -> bool:
    """Return True if an aten operator is element-wise, deterministic and has one result.

    A `_foreach_` operator is element-wise if any overload of its base operator is.
    """
    name = operator.overloadpacket.__name__
    if name.startswith("_foreach_"):
        base = name.removeprefix("_foreach_")
        # Some in-place operators, such as `_foreach_maximum_`, have no base operator in place.
        packet = getattr(aten, base, None) or getattr(aten, base.rstrip("_"), None)
        if packet is None or base in REDUCTIONS:
            return False
        return any(is_elementwise(getattr(packet, overload)) for overload in packet.overloads())
    # torch tags `equal`, which returns a bool, as `pointwise` too.
    others = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output}
    is_pointwise = torch.Tag.pointwise in operator.tags and not others.intersection(operator.tags)
    has_one_result = len(operator._schema.returns) == 1
    return (is_pointwise and has_one_result) or name in ELEMENTWISE_OPERATORS
