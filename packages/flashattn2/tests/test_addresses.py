"""Kernels compute addresses in 64 bits: strides and sizes may exceed 2**31 elements.

The tensors are views of sparse files, so only the accessed pages use memory.
"""

import pytest
import torch
from flashattn2 import attention_reference, flash_attention, flash_attention_with_kvcache
from flashattn2.kernels.forward import combine_kernel

FAR = 2**31


@pytest.fixture
def sparse(tmp_path):
    """Return a function that makes a zeroed tensor of any size in a sparse file."""
    count = iter(range(100))

    def make(size, dtype=torch.float16):
        path = tmp_path / str(next(count))
        return torch.from_file(str(path), shared=True, size=size, dtype=dtype)

    return make


def spread(sparse, x, strides):
    """Return the values of `x` in a tensor with these strides."""
    last = sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True))
    target = sparse(last + 1, x.dtype).as_strided(x.shape, strides)
    return target.copy_(x)


@pytest.mark.parametrize("strides", [(FAR + 64, 320, 16, 1), (320, FAR + 64, 16, 1)], ids=str)
def test_batches_and_heads_may_be_far_apart(interpreter, sparse, strides):
    check(interpreter, sparse, strides, 20)


def test_rows_may_be_far_apart(interpreter, sparse):
    """Twenty rows of this stride span more than 2**31 elements; a tile has 16 or 32 rows."""
    check(interpreter, sparse, (32, 16, FAR // 19 + 61, 1), 20)


def check(interpreter, sparse, strides, seq):
    interpreter(tma=False)
    near = [torch.randn(2, 2, seq, 16, dtype=torch.float16) for _ in range(4)]
    far = [spread(sparse, x, strides).requires_grad_() for x in near[:3]]
    out = flash_attention(*far, is_causal=True, backend="triton")
    grads = torch.autograd.grad(out, far, spread(sparse, near[3], strides))
    exact = [x.double().requires_grad_() for x in near[:3]]
    expected = attention_reference(*exact, is_causal=True)
    wanted = torch.autograd.grad(expected, exact, near[3].double())
    for got, right in zip((out, *grads), (expected, *wanted), strict=True):
        torch.testing.assert_close(got.double(), right, atol=1e-2, rtol=1e-2)
    with torch.no_grad():
        out = flash_attention_with_kvcache(
            *far, cache_seqlens=seq, is_causal=True, backend="triton"
        )
    torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)


def test_many_splits_are_combined(sparse):
    """Only splits 13 and 15 of 16 see keys, so the result is the mean of their outputs."""
    splits = 16
    heads = 32
    rows = 40960
    dim = 128
    part_rows = heads * rows
    assert splits * part_rows * dim >= FAR
    parts = sparse(splits * part_rows * dim, torch.float32)
    lse = torch.full((splits * part_rows,), -torch.inf)
    for split in (13, 15):
        first = split * part_rows
        parts[first * dim : (first + 32) * dim] = float(split)
        lse[first : first + 32] = 0.0
    out, sums = sparse(part_rows * dim, torch.float32).view(1, heads, rows, dim), lse[:part_rows]
    combine_kernel[(1, 1)](
        parts,
        lse,
        out,
        sums.clone(),
        out.stride()[:3],
        (rows // 32, heads, rows, splits, part_rows),
        D=dim,
        BLOCK_D=dim,
        BLOCK_M=32,
        SPLITS=16,
    )
    assert (out[0, 0, :32] == 14.0).all()
