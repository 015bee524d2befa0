"""The torch functions that are correct on part of a tensor, and the reductions of a whole one."""

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
#: Maps each reduction to the function that combines elements, and to the neutral element.
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
    "zero_", "zeros_like", "ones_like", "copy_", "fill_", "clone", "_to_copy",
}  # fmt: skip
#: Element-wise Python functions and methods whose name is not an operator tagged `pointwise`.
ELEMENTWISE_FUNCTIONS = {
    "to", "double", "float", "half", "bfloat16", "type", "cpu", "cuda", "contiguous", "detach",
    "data", "real", "empty_like", "full_like", "fill_", "nan_to_num", "clip", "where", "isfinite",
    "isreal", "multiply", "divide", "subtract", "negative", "absolute", "true_divide", "square",
    "clamp", "masked_fill", "positive",
}  # fmt: skip
#: Tensor attributes that return a view of all elements.
VIEWS = {"data", "real", "imag", "T", "mT", "H", "mH"}
#: Methods whose names end with an underscore, but which do not change elements.
NOT_IN_PLACE = {"requires_grad_", "detach_", "share_memory_"}
#: Functions that assign to elements, or that return elements or the result of comparing them as
#: objects other than tensors.
READS_ELEMENTS = {
    "item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__",
    "is_nonzero", "__contains__", "__iter__", "__setitem__", "equal", "allclose", "__dlpack__",
}  # fmt: skip
#: The module of torch's collectives.
COLLECTIVES = "torch.distributed.distributed_c10d"
#: Maps Python operators to aten operators if their names differ.
OPERATOR_NAMES = {
    "truediv": "div", "invert": "bitwise_not", "floordiv": "floor_divide", "mod": "remainder",
    "and": "bitwise_and", "or": "bitwise_or", "pos": "positive",
}  # fmt: skip

REMEDY = (
    "element-wise operations, norms, sums, means, maxima and minima work; p.grad.full_tensor(), "
    "or p.full_tensor() at stage 3, called by every rank, gathers the elements"
)


def reduces_all_elements(name: str, args: Any, kwargs: Any) -> bool:
    """Return True if an operation reduces the whole tensor to a 0-dimensional tensor."""
    names: tuple[str, ...]
    if name in NORMS:
        names = ("self", "ord", "dim", "keepdim")
    elif name in REDUCTIONS:
        names = ("self", "dim", "keepdim")
    else:
        return False
    arguments = dict(zip(names, args, strict=False)) | kwargs
    if name == "linalg_norm" and arguments.get("ord") is not None and args[0].dim() > 1:
        # This is a norm of the matrix, such as its largest singular value.
        return False
    if arguments.get("keepdim"):
        return False
    dim = arguments.get("dim")
    return dim is None or (isinstance(dim, list | tuple) and not dim)


def python_name(func: Any) -> str:
    """Return the name of a torch function or method, or of the attribute that `func` reads."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        name = func.__self__.__name__
    return "linalg_vector_norm" if name == "vector_norm" else name


def is_pointwise(operator: Any) -> bool:
    """Return True if an aten operator is element-wise, not random, and returns tensors."""
    # torch tags `equal`, which returns a bool, as `pointwise` too.
    others = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output}
    return torch.Tag.pointwise in operator.tags and not others.intersection(operator.tags)


@cache
def is_elementwise(name: str) -> bool:
    """Return True if a function or method of torch is element-wise, in place or not."""
    if name in READS_ELEMENTS:
        return False
    known = ELEMENTWISE_FUNCTIONS | ELEMENTWISE_OPERATORS
    stripped = name.strip("_")
    candidates = [stripped]
    if name.startswith("__"):
        # The method `__iadd__` is `add` in place.
        candidates.append(stripped[1:])
    for candidate in candidates:
        operator = OPERATOR_NAMES.get(candidate, candidate)
        if {operator, name, operator + "_"} & known:
            return True
        packet = getattr(aten, operator, None) if operator else None
        if packet is None:
            continue
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        if any(is_pointwise(overload) for overload in overloads):
            return True
    return False
