"""Reduce ops on tensors: their functions, accumulation dtypes and unsupported dtypes.

16-bit and 8-bit floats accumulate in float32, and complex32 accumulates in complex64. Both are
rounded once, at the end. A process that has the tensors of all ranks combines them in rank order,
so the result does not depend on the size of a chunk.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache

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


def get_op_name(op: object) -> str:
    """Return the name of a reduce op, such as "SUM" for `ReduceOp.SUM`."""
    return _get_op_name(getattr(op, "op", op))


@lru_cache
def _get_op_name(kind: object) -> str:
    name = str(getattr(kind, "name", kind)).rsplit(".", 1)[-1]
    if name not in COMBINE:
        raise ValueError(f"reduce op {name} is not supported; use one of {', '.join(COMBINE)}")
    return name


@cache
def check_dtype(op: str, dtype: torch.dtype) -> None:
    """Raise TypeError if torch or this package does not define the op for `dtype`."""
    is_integer = not (dtype.is_floating_point or dtype.is_complex)
    if op == "AVG" and is_integer:
        raise TypeError(f"AVG of {dtype} has no exact result; use SUM and divide")
    if op in ("MIN", "MAX") and dtype.is_complex:
        raise TypeError(
            f"{op} of {dtype} is not defined because complex numbers have no order; reduce the "
            "absolute values"
        )
    if op in ("BAND", "BOR", "BXOR") and not is_integer:
        raise TypeError(f"{op} of {dtype} is not defined; pass integers or bool")
    try:
        value = torch.zeros(1, dtype=dtype, device="cpu")
        total = torch.zeros(1, dtype=get_accumulation_dtype(dtype), device="cpu")
        reduce_into(op, [value, value], value, total)
    except RuntimeError as error:
        # torch copies some dtypes, such as uint16, but has no arithmetic for them.
        raise TypeError(
            f"torch has no {op} of {dtype}; convert the tensor to a wider signed dtype"
        ) from error


def split_into_pieces(flat: Tensor, length: int) -> list[Tensor]:
    """Return views of `length` elements each; the last view may be shorter.

    If `flat` is empty, the list contains one empty view.
    """
    if flat.numel() <= length:
        return [flat]
    return [flat[start : start + length] for start in range(0, flat.numel(), length)]


def get_accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for 16-bit and 8-bit floats, complex64 for complex32, otherwise the dtype."""
    if dtype == torch.complex32:
        return torch.complex64
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def average(op: str, tensor: Tensor, world_size: int) -> None:
    """Divide a finished sum by `world_size` if the op is AVG."""
    if op != "AVG":
        return
    if tensor.is_complex():
        # Complex division is not correctly rounded, but dividing the two parts separately is.
        tensor = torch.view_as_real(tensor)
    if world_size & (world_size - 1) == 0:
        # Multiplying by the inverse of a power of two gives the same result three times as fast.
        tensor.mul_(1 / world_size)
    else:
        tensor.div_(world_size)


def reduce_into(op: str, parts: Sequence[Tensor], out: Tensor, scratch: Tensor | None) -> None:
    """Compute out = parts[0] op parts[1] op ... in this order; AVG divides the sum at the end.

    If the accumulation dtype differs from the dtype, `scratch` is a tensor of the accumulation
    dtype, and `scratch.numel()` elements are reduced at a time. Without `scratch`, `out` must not
    be one of parts[2:].
    """
    if scratch is None:
        _reduce_into(op, parts, out)
        return
    for start in range(0, out.numel(), max(1, scratch.numel())):
        block = out[start : start + scratch.numel()]
        total = scratch[: block.numel()]
        blocks = [part[start : start + scratch.numel()] for part in parts]
        blocks[0] = blocks[0].to(total.dtype)
        _reduce_into(op, blocks, total)
        block.copy_(total)


def _reduce_into(op: str, parts: Sequence[Tensor], total: Tensor) -> None:
    combine = COMBINE[op]
    if len(parts) == 1:
        total.copy_(parts[0])
    else:
        combine(parts[0], parts[1].to(total.dtype), out=total)
    for part in parts[2:]:
        combine(total, part.to(total.dtype), out=total)
    average(op, total, len(parts))
