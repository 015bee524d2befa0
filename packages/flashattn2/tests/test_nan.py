"""NaN in a query, key or value is NaN in every result that depends on it, on every CPU path."""

import itertools

import pytest
import torch
from flashattn2 import (
    FlashAttentionTorch,
    attention_reference,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kvcache,
    sdpa,
)
from flashattn2.spec import make_spec

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Fewer keys than a vector register holds, exactly as many, and a remainder.
LENGTHS = (1, 2, 7, 15, 16, 17, 33)


def draw(seq_q, seq_k, dtype=torch.float32, dims=(16, 16), heads=(4, 2)):
    q = torch.randn(1, heads[0], seq_q, dims[0], dtype=dtype)
    k, v = (torch.randn(1, heads[1], seq_k, d, dtype=dtype) for d in dims)
    return q, k, v


def poison(tensors, name, row):
    """Set one number of one row of one head of the named tensor to NaN."""
    tensors["qkv".index(name)][0, 0, row, 3] = torch.nan


def assert_keeps_nan(out, lse, q, k, v, **options):
    """Every number that depends on a NaN is NaN, and no row of another head is."""
    # The reference multiplies hidden values by 0, which leaves NaN; only visible values count here.
    spec = make_spec(16, options.get("is_causal", False), None, options.get("window"), None)
    seq_q, seq_k = q.shape[2], k.shape[2]
    seen = ~spec.make_hidden_mask(torch.arange(seq_q), torch.arange(seq_k), seq_k - seq_q)
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    row_is_nan = ((q.double() @ k.double().mT).isnan() & seen).any(-1)
    is_nan = row_is_nan[..., None] | (seen.double() @ v.isnan().double() > 0)
    assert is_nan.any()
    assert out.isnan()[is_nan].all()
    assert lse.isnan()[row_is_nan].all()
    assert not out[:, -1].isnan().any()


def list_options_lengths_and_dtypes():
    """Return the cases of dense attention.

    The usual tests run each option with one length, and two options with other lengths and dtypes.
    """
    options = ({}, {"is_causal": True}, {"window": (3, 0)}, {"window": (0, 0)}, {"softcap": 2.0})
    sizes = [(seq, torch.float32) for seq in (1, 15, 16, 33, 2, 7, 17, 515)]
    sizes += [(15, dtype) for dtype in DTYPES[1:]]
    cases = []
    for option, (seq, dtype) in itertools.product(options, sizes):
        is_first = (seq, dtype) == (15, torch.float32)
        is_usual = is_first or (option in options[:2] and seq in (1, 15, 16, 33))
        marks = [] if is_usual else [pytest.mark.exhaustive]
        cases.append(pytest.param(option, seq, dtype, marks=marks))
    return cases


@pytest.mark.parametrize(("options", "seq", "dtype"), list_options_lengths_and_dtypes(), ids=str)
def test_dense_attention_keeps_nan(options, seq, dtype):
    for name, row in itertools.product("qkv", {0, seq // 2, seq - 1}):
        tensors = draw(seq, seq, dtype)
        poison(tensors, name, row)
        for backend in ("auto", "torch"):
            # The second call takes the path of a signature that was checked before.
            for _ in range(2):
                results = flash_attention(*tensors, backend=backend, return_lse=True, **options)
                assert_keeps_nan(*results, *tensors, **options)


@pytest.mark.parametrize("seq", LENGTHS)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_gradients_and_other_functions_keep_nan(name, seq):
    tensors = draw(seq, seq, heads=(2, 2))
    poison(tensors, name, seq - 1)
    expected = attention_reference(*tensors).isnan()
    cu = torch.tensor([0, seq], dtype=torch.int32)
    packed = (x[0].transpose(0, 1) for x in tensors)
    outs = [
        sdpa(*tensors),
        FlashAttentionTorch.apply(*(x[0] for x in tensors), False)[None],
        flash_attention_varlen(*packed, cu, cu).transpose(0, 1)[None],
    ]
    for out in outs:
        assert out.isnan()[expected].all()
    leaves = [x.requires_grad_() for x in tensors]
    grads = [
        torch.autograd.grad(function(*leaves).sum(), leaves)
        for function in (attention_reference, flash_attention, flash_attention)
    ]
    assert any(exact.isnan().any() for exact in grads[0])
    for ours in grads[1:]:
        for exact, grad in zip(grads[0], ours, strict=True):
            assert grad.isnan()[exact.isnan()].all()


def list_windows_and_lengths():
    """Return the cases of a cache; the usual tests run every window with two lengths."""
    cases = []
    for window, seq_k in itertools.product([None, (2, 0), (0, 0), (15, None)], LENGTHS):
        is_usual = window in (None, (2, 0)) or seq_k in (7, 17)
        marks = [] if is_usual else [pytest.mark.exhaustive]
        cases.append(pytest.param(window, seq_k, marks=marks))
    return cases


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(("window", "seq_k"), list_windows_and_lengths(), ids=str)
def test_attention_over_a_cache_keeps_nan(window, seq_k, paged):
    for name, seq_q in itertools.product("qkv", {1, min(2, seq_k)}):
        for row in {0, seq_q - 1} if name == "q" else {seq_k - 1}:
            tensors = draw(seq_q, seq_k)
            poison(tensors, name, row)
            q, k, v = tensors
            table = torch.zeros(1, 1, dtype=torch.int32) if paged else None
            for lengths in (seq_k, seq_k, torch.tensor([seq_k], dtype=torch.int32)):
                results = flash_attention_with_kvcache(
                    q,
                    k,
                    v,
                    cache_seqlens=lengths,
                    block_table=table,
                    window=window,
                    return_lse=True,
                )
                assert_keeps_nan(*results, *tensors, window=window)


def test_compiled_attention_keeps_nan():
    tensors = draw(4, 4)
    poison(tensors, "q", 1)
    compiled = torch.compile(flash_attention, fullgraph=True, backend="aot_eager")
    out, lse = compiled(*tensors, return_lse=True)
    assert_keeps_nan(out, lse, *tensors)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("seq", "name"),
    [
        *((40, name) for name in "qkv"),
        (1, "k"),
        (7, "v"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in ((1, "q"), (1, "v"), (7, "q"), (7, "k"))
        ),
    ],
)
def test_kernels_keep_nan(interpreter, seq, name):
    interpreter(splits=2)
    # A query in the second tile has the NaN, or all queries see it.
    tensors = draw(min(seq, 17 if name == "q" else 3), seq)
    poison(tensors, name, -1)
    assert_keeps_nan(*flash_attention(*tensors, backend="triton", return_lse=True), *tensors)
    results = flash_attention_with_kvcache(
        *tensors, cache_seqlens=seq, backend="triton", return_lse=True
    )
    assert_keeps_nan(*results, *tensors)


def test_score_of_zero_is_not_treated_as_lost_nan():
    """A log-sum-exp of exactly 0 is correct for a row with one key of score 0."""
    q, k, v = draw(3, 1, heads=(1, 1))
    q[0, 0, 0] = 0.0
    q[0, 0, 1] = torch.nan
    out, lse = flash_attention(q, k, v, return_lse=True)
    assert lse[0, 0, 0] == 0.0
    torch.testing.assert_close(out[0, 0, [0, 2]], v[0, 0, [0, 0]])
    assert out[0, 0, 1].isnan().all()


@pytest.mark.parametrize("length", [20, 64, 130, 600])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["q", "k"])
def test_infinite_bfloat16_scores_give_nan(name, is_causal, length):
    """Torch's kernel approximates exponentials in bfloat16, and gives numbers for some lengths."""
    torch.manual_seed(0)
    tensors = {x: torch.randn(1, 2, length, 16).bfloat16() for x in "qkv"}
    tensors[name][0, 0, 5, 2] = torch.inf
    # All scores with this element are positive infinity.
    tensors["k" if name == "q" else "q"][..., 2].abs_().add_(0.1)
    # With AMX, a matmul in bfloat16 also spreads a NaN to the row before, so the expected result is
    # computed in float64.
    wide = (x.double() for x in tensors.values())
    expected = attention_reference(*wide, is_causal=is_causal).isnan()
    assert expected.any()
    assert torch.equal(flash_attention(*tensors.values(), is_causal=is_causal).isnan(), expected)
    out, _ = flash_attention(*tensors.values(), is_causal=is_causal, return_lse=True)
    assert torch.equal(out.isnan(), expected)
    leaves = [x.requires_grad_() for x in tensors.values()]
    out = flash_attention(*leaves, is_causal=is_causal)
    assert torch.equal(out.isnan(), expected)
    dq, dk, dv = torch.autograd.grad(out.sum(), leaves)
    assert dq[expected].isnan().all()
    # Every row with a NaN output sees the first keys.
    for gradient in (dk, dv):
        assert gradient[:, expected.flatten(2).any(-1)[0], :6].isnan().all()


@pytest.mark.parametrize("backend", ["aten", "torch"])
@pytest.mark.parametrize("length", [8, 40, 600])
def test_row_of_scores_of_minus_infinity_is_nan_or_zero(backend, length):
    q, k, v = (torch.rand(1, 1, length, 16).add(0.1) for _ in "qkv")
    q[0, 0, 7, 3] = -torch.inf
    out = flash_attention(q, k, v, backend=backend)
    row = out[0, 0, 7]
    assert (row.isnan() | (row == 0)).all()
    assert (out[0, 0, :7] > 0).all()


@pytest.mark.parametrize("backend", ["aten", "torch"])
@pytest.mark.parametrize("hidden", [1, 256, 599])
def test_keys_with_scores_of_minus_infinity_have_no_weight(backend, hidden):
    q, k, v = (torch.rand(1, 1, 600, 16).add(0.1) for _ in "qkv")
    k[:, :, :hidden, 3] = -torch.inf
    results = flash_attention(q, k, v, backend=backend, return_lse=True)
    expected = attention_reference(q, k[:, :, hidden:], v[:, :, hidden:], return_lse=True)
    for result, number in zip(results, expected, strict=True):
        torch.testing.assert_close(result, number)
