"""The tiled backend and torch's CPU kernel have small errors."""

import pytest
import torch
from against_float64 import assert_as_good_as_plain, compute_results
from flashattn2 import FlashAttentionTorch, attention_reference, flash_attention
from flashattn2.backends import tiled
from hypothesis import given, settings
from hypothesis import strategies as st
from option_pairs import OPTIONS, draw_tensors, list_cases_of_pairs, make_sinks


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiled, "TILE", 8)


def run(backend):
    return lambda *a, **o: flash_attention(*a, **o, backend=backend)


lengths = st.integers(1, 30)
bounds = st.none() | st.integers(0, 20)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_every_option_equals_the_reference_in_float64(backend):
    @given(
        shape=st.tuples(lengths, lengths, st.sampled_from(((2, 2), (4, 2), (3, 1)))),
        dim=st.sampled_from((1, 3, 8)),
        is_causal=st.booleans(),
        window=st.none() | st.tuples(bounds, bounds),
        softcap=st.none() | st.floats(0.5, 5.0),
        scale=st.none() | st.floats(0.1, 2.0),
    )
    @settings(max_examples=30, deadline=None)
    def check(shape, dim, **options):
        seq_q, seq_k, (heads, kv_heads) = shape
        q = torch.randn(2, heads, seq_q, dim, dtype=torch.float64)
        k, v = (torch.randn(2, kv_heads, seq_k, dim, dtype=torch.float64) for _ in "kv")
        grads = torch.randn_like(q), torch.randn(q.shape[:-1])
        ours, theirs = (
            compute_results(function, (q, k, v), torch.float64, grads, **options)
            for function in (run(backend), attention_reference)
        )
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)

    check()


# Only the kernels have splits and TMA.
TILED_OPTIONS = {n: x for n, x in OPTIONS.items() if n not in ("splits", "tma")}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", list_cases_of_pairs(TILED_OPTIONS), ids=str)
def test_every_pair_of_options_is_as_good_as_plain(case):
    case = dict(case)
    case |= make_sinks(case.pop("sinks"), case["shape"])
    # One query has few errors, so the median of their largest needs more draws.
    draws = 25 if case["shape"] == "one query" else 9
    shape = draw_tensors(case.pop("shape"), case.pop("dim"))
    assert_as_good_as_plain(run("torch"), shape, draws=draws, **case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"is_causal": True, "window": (50, None), "softcap": 3.0}],
    ids=str,
)
def test_every_dtype_is_as_good_as_plain(monkeypatch, dtype, backend, options):
    monkeypatch.setattr(tiled, "TILE", 64)
    q = torch.randn(1, 4, 200, 40).to(dtype)
    k, v = (torch.randn(1, 2, 200, 40).to(dtype) for _ in "kv")
    # The next test checks torch's kernel with other inputs.
    draws = 9 if backend == "torch" and dtype == torch.float32 else 1
    assert_as_good_as_plain(run(backend), (q, k, v), draws=draws, **options)


def test_aten_backend_has_the_bits_of_sdpa():
    """With a sharp softmax in float32 the kernel has 2 to 5 times plain's error, as SDPA has."""
    q, k, v = (torch.randn(1, 4, 200, 40, requires_grad=True) for _ in "qkv")
    grad = torch.randn(1, 4, 200, 40)
    results = []
    for function in (run("aten"), torch.nn.functional.scaled_dot_product_attention):
        out = function(q, k, v, is_causal=True, scale=0.7)
        results.append((out, *torch.autograd.grad(out, (q, k, v), grad)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_paper_function_saves_one_number_per_row():
    Q = torch.randn(2, 9, 16, requires_grad=True)
    out = FlashAttentionTorch.apply(Q, Q, Q, is_causal=True)
    assert [t.shape for t in out.grad_fn.saved_tensors].count((2, 9)) == 1
    (grad,) = torch.autograd.grad(out.sum(), Q)
    (expected,) = torch.autograd.grad(attention_reference(Q, Q, Q, is_causal=True).sum(), Q)
    torch.testing.assert_close(grad, expected)


def test_paper_function_compiles_in_one_graph():
    torch._dynamo.reset()
    tensors = [torch.randn(2, 9, 16, requires_grad=True) for _ in "QKV"]

    def run(Q, K, V):
        return FlashAttentionTorch.apply(Q, K, V, True)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, run):
        out = function(*tensors)
        results.append((out, *torch.autograd.grad(out.sin().sum(), tensors)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize(("seq_q", "seq_k", "batch"), [(0, 5, 1), (5, 0, 1), (5, 5, 0)])
def test_empty_tensors_give_empty_or_zero_results(backend, seq_q, seq_k, batch):
    q = torch.randn(batch, 2, seq_q, 8, requires_grad=True)
    k = torch.randn(batch, 1, seq_k, 8, requires_grad=True)
    out, lse = flash_attention(q, k, k, backend=backend, is_causal=True, return_lse=True)
    out.sum().backward()
    assert out.shape == q.shape
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert (q.grad == 0).all()
    assert (k.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("keys", [1, 3])
def test_gradients_of_few_keys_that_many_rows_see_are_rounded_once(dtype, backend, keys):
    """The gradient dV is a sum over all rows, which must not be rounded between tiles."""
    q = torch.randn(1, 4, 500, 64).to(dtype)
    k, v = (torch.randn(1, 4, keys, 64).to(dtype) for _ in "kv")
    assert_as_good_as_plain(
        lambda *x, **o: flash_attention(*x, backend=backend, **o), [q, k, v], draws=1
    )
