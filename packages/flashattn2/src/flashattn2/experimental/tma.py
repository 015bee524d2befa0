"""Tiles that TMA, Hopper's tensor memory accelerator, moves between global and shared memory.

Status: experimental, as for the forward kernel: see `forward.py`.

A descriptor defines a tensor in global memory and the size of its tiles.  Inside a kernel,
`load_tile`, `store_tile` and `add_tile` move one tile.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashattn2.kernels.launch import can_use_tma

# In Triton 3.6 these functions are named `async_copy_...`; in 3.9 the old names raise an error.
if hasattr(tma, "async_load"):
    load_tile, store_tile = tma.async_load, tma.async_store
else:
    load_tile, store_tile = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

# Triton 3.6 supports the instruction, but has no public function for it.
if hasattr(tma, "async_atomic_add"):
    add_tile = tma.async_atomic_add
else:

    @gl._core.builtin
    def add_tile(target, at, source, _semantic=None):
        """Add a tile to global memory by TMA."""
        at = _semantic._convert_to_ir_values(at, require_i64=False)
        add = gl._core.ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(add, target.handle, at, source.handle)


def make_loadable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, with a contiguous copy of each tensor that TMA cannot load."""
    return tuple(
        x if can_use_tma(x) else x.clone(memory_format=torch.contiguous_format) for x in tensors
    )


def make_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Return a TMA descriptor for tiles of `rows` rows of one head."""
    # A dimension of size 1 may have any stride: choose one that is a multiple of 16 bytes.
    strides = [x.shape[-1] if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
    block = [1, 1, rows, x.shape[-1]]
    return TensorDescriptor(x, list(x.shape), [*strides[:-1], 1], block, make_layout(x.dtype))


@functools.cache
def make_layout(dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Return the layout of tiles in shared memory, with 128-byte swizzling."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=dtype.itemsize * 8, rank=4)


def make_row_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Return a TMA descriptor for `rows` numbers of one head."""
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [1, rows], make_row_layout())


@functools.cache
def make_row_layout() -> gl.NVMMASharedLayout:
    """Return the layout of the numbers of one head in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
