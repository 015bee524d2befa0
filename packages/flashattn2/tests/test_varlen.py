"""Packed attention is attention over each sequence separately."""

import pytest
import torch
from against_float64 import assert_as_good_as_plain
from flashattn2 import flash_attention_varlen
from torch.autograd import gradcheck, gradgradcheck

CU_Q = torch.tensor([0, 37, 37, 38, 90], dtype=torch.int32)
CU_K = torch.tensor([0, 20, 41, 80, 110], dtype=torch.int32)


def apply_one_by_one(function, cu_q=CU_Q, cu_k=CU_K):
    """Return the function applied to each packed sequence."""

    def run(q, k, v, **options):
        outs, sums = [], []
        for n in range(len(cu_q) - 1):
            rows, keys = slice(*cu_q[n : n + 2]), slice(*cu_k[n : n + 2])
            parts = (x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys]))
            out, lse = function(*parts, **options)
            outs.append(out[0].transpose(0, 1))
            sums.append(lse[0])
        return torch.cat(outs), torch.cat(sums, 1)

    return run


def build_packed(backend, cu_q=CU_Q, cu_k=CU_K):
    return lambda q, k, v, **o: flash_attention_varlen(q, k, v, cu_q, cu_k, backend=backend, **o)


def draw_tensors(dim=16, dtype=torch.float32):
    q = torch.randn(90, 2, dim)
    k, v = (torch.randn(110, 1, dim) for _ in "kv")
    return [x.to(dtype) for x in (q, k, v)]


@pytest.mark.parametrize("backend", ["auto", "torch", "triton"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.exhaustive),
        pytest.param({"is_causal": True}, marks=pytest.mark.exhaustive),
        {"window": (9, 4), "softcap": 2.0},
    ],
    ids=str,
)
def test_packed_attention_is_attention_over_each_sequence(interpreter, backend, options):
    assert_as_good_as_plain(
        build_packed(backend),
        draw_tensors(),
        one_by_one=apply_one_by_one,
        lse_shape=(2, 90),
        **options,
    )


def test_many_sequences_of_any_lengths_are_located(interpreter):
    """Sequences are empty, shorter than a tile, or end at the edge of a tile."""
    lengths = torch.tensor(
        [[0, 16, 1, 0, 0, 32, 33, 15, 17, 0, 48, 5], [3, 16, 0, 7, 0, 32, 31, 9, 9, 9, 9, 9]]
    )
    cu_q, cu_k = (torch.nn.functional.pad(n.cumsum(0), (1, 0)).int() for n in lengths)
    q = torch.randn(int(cu_q[-1]), 1, 16)
    k, v = (torch.randn(int(cu_k[-1]), 1, 16) for _ in "kv")
    assert_as_good_as_plain(
        build_packed("triton", cu_q, cu_k),
        [q, k, v],
        is_causal=True,
        one_by_one=lambda run: apply_one_by_one(run, cu_q, cu_k),
        lse_shape=(1, len(q)),
    )


@pytest.mark.parametrize("fast_mode", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_reference_passes_gradcheck_and_gradgradcheck(fast_mode):
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    tensors = [torch.randn(5, 1, 2, dtype=torch.float64, requires_grad=True) for _ in "qkv"]

    def run(q, k, v):
        return build_packed("torch", cu, cu)(q, k, v, is_causal=True, return_lse=True)

    assert gradcheck(run, tensors, fast_mode=fast_mode)
    assert gradgradcheck(run, tensors, fast_mode=fast_mode)


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize("odd", [pytest.param(False, marks=pytest.mark.exhaustive), True])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.float16, marks=pytest.mark.exhaustive)],
    ids=str,
)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"is_causal": True}, marks=pytest.mark.exhaustive),
        {"window": (9, 4), "softcap": 2.0},
    ],
    ids=str,
)
def test_values_of_other_sequences_change_no_bit(interpreter, dtype, options, odd):
    """NaN and infinities are in the other sequences, whose rows are in the same tiles."""
    q, k, v = draw_tensors(dtype=dtype)
    inputs = [q[:, :1], k, v, torch.randn(90, 1, 16, dtype=dtype)]
    rows = [torch.repeat_interleave(torch.arange(4), cu.diff()) for cu in (CU_Q, CU_K, CU_K, CU_Q)]

    def results(q, k, v, grad_out):
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        run = build_packed("triton")
        out = run(q, k, v, **options)
        return out, *torch.autograd.grad(out, (q, k, v), grad_out)

    clean = results(*(x.clone() for x in inputs))
    planted = [x.clone() for x in inputs]
    for x, sequence in zip(planted, rows, strict=True):
        bad = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype).repeat(len(x))
        others = sequence % 2 != odd
        x[others] = bad[: others.sum()][:, None, None]
    computed = results(*planted)
    for a, b, sequence in zip(computed, clean, (rows[0], *rows[:3]), strict=True):
        mine = sequence % 2 == odd
        assert torch.equal(a[mine], b[mine])
        assert not a[~mine].isfinite().all()
