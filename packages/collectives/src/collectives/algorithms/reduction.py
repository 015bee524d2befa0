"""Reduce ops on tensors: what each does, in which dtype it accumulates, what it refuses.

Notable:
- 16-bit and 8-bit floats accumulate in float32 and are rounded once, at the end;
- the ranks' values are combined in rank order wherever one process sees them all, so that a
  result does not depend on the size of a chunk.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

Combine = Callable[..., Tensor]

COMBINE: dict[str, Combine] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}

# torch moves these, and no more.
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def op_name(op: object) -> str:
    """ "SUM" for ReduceOp.SUM, and so on."""
    return _name(getattr(op, "op", op))


@lru_cache
def _name(kind: object) -> str:
    name = str(getattr(kind, "name", kind)).rsplit(".", 1)[-1]
    if name not in COMBINE:
        raise ValueError(f"reduce op {name} is not supported; use one of {', '.join(COMBINE)}")
    return name


def check(name: str, dtype: torch.dtype) -> None:
    """Raise TypeError if `dtype` has no such reduction."""
    real = dtype.is_floating_point
    if dtype in UNSIGNED:
        raise TypeError(f"torch does not compute with {dtype}; reduce it as a wider signed dtype")
    if name == "AVG" and not (real or dtype.is_complex):
        raise TypeError(f"AVG of {dtype} has no exact result; use SUM and divide")
    if name in ("MIN", "MAX") and dtype.is_complex:
        raise TypeError(f"{name} of {dtype} is not defined: complex numbers have no order")
    if name in ("BAND", "BOR", "BXOR") and (real or dtype.is_complex):
        raise TypeError(f"{name} of {dtype} is not defined; it takes integers and bool")


def in_pieces(flat: Tensor, length: int) -> list[Tensor]:
    """Views of `length` elements each, the last one shorter; an empty tensor is one piece."""
    if flat.numel() <= length:
        return [flat]
    return [flat[start : start + length] for start in range(0, flat.numel(), length)]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for floats of 16 and 8 bits, else the dtype itself."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def average(name: str, tensor: Tensor, world: int) -> None:
    """Divide a finished sum by `world` if the op is AVG."""
    if name == "AVG":
        # A complex quotient is not the correctly rounded one; that of each part is.
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        # For a power of two the product with its inverse is the same, and three times as fast.
        tensor.mul_(1 / world) if world & (world - 1) == 0 else tensor.div_(world)


def reduce_into(name: str, parts: Sequence[Tensor], out: Tensor, scratch: Tensor | None) -> None:
    """out = parts[0] op parts[1] op ...

    `scratch` holds some elements in the accumulation dtype where that is not the dtype itself (see
    `accumulation_dtype`): so many are reduced at a time. Without it `out` is none of parts[2:].
    """
    if scratch is None:
        _reduce_into(name, parts, out)
        return
    # Of an empty tensor there is nothing to take `scratch`'s elements at a time.
    for start in range(0, out.numel(), max(1, scratch.numel())):
        block = out[start : start + scratch.numel()]
        total = scratch[: block.numel()]
        wide = [part[start : start + scratch.numel()].to(total.dtype) for part in parts[:1]]
        wide += [part[start : start + scratch.numel()] for part in parts[1:]]
        _reduce_into(name, wide, total)
        block.copy_(total)


def _reduce_into(name: str, parts: Sequence[Tensor], total: Tensor) -> None:
    combine, world = COMBINE[name], len(parts)
    if world == 1:
        total.copy_(parts[0])
    else:
        combine(parts[0], parts[1].to(total.dtype), out=total)
    for part in parts[2:]:
        combine(total, part.to(total.dtype), out=total)
    average(name, total, world)
