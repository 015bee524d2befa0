"""Packed queries over a cache: prefill and decode in one call, as servers issue them."""

import itertools

import pytest
import torch
from flashattn2 import attention_reference, flash_attention_with_kvcache
from flashattn2.backends import tiled
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decode import shuffle_into_pages


def compute_reference(q, k, v, bounds, lengths, **options):
    """Return attention of each sequence's queries over its first keys, in float64."""
    outs, sums = [], []
    options = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    for b, length in enumerate(lengths):
        rows = q[bounds[b] : bounds[b + 1]].transpose(0, 1)[None]
        keys = (x[b : b + 1, :, :length].double() for x in (k, v))
        out, lse = attention_reference(rows.double(), *keys, return_lse=True, **options)
        outs.append(out[0].transpose(0, 1))
        sums.append(lse[0])
    return torch.cat(outs), torch.cat(sums, 1)


def check(backend, heads, sequences, page_size, dims, dtype, tolerance, **options):
    """Compare with the reference; rows after a sequence's keys are NaN and must not be read."""
    counts, lengths = zip(*sequences, strict=True)
    cu = torch.tensor((0, *counts)).cumsum(0).int()
    q = torch.randn(int(cu[-1]), heads[0], dims[0]).to(dtype)
    k, v = (torch.randn(len(counts), heads[1], max(lengths) + 3, d).to(dtype) for d in dims)
    expected = compute_reference(q, k, v, cu.tolist(), lengths, **options)
    for b, length in enumerate(lengths):
        k[b, :, length:] = v[b, :, length:] = torch.nan
    table = None
    if page_size:
        torch.manual_seed(1)
        k, table = shuffle_into_pages(k, page_size)
        torch.manual_seed(1)
        v, _ = shuffle_into_pages(v, page_size)
    out, lse = flash_attention_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        cu_seqlens_q=cu,
        return_lse=True,
        backend=backend,
        **options,
    )
    torch.testing.assert_close(out.double(), expected[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected[1], atol=tolerance, rtol=tolerance)


@given(
    heads=st.sampled_from(((4, 2), (2, 2), (3, 1))),
    sequences=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), min_size=1, max_size=4),
    page_size=st.sampled_from((None, 1, 4, 16)),
    dims=st.sampled_from(((8, 8), (8, 5))),
    is_causal=st.booleans(),
    window=st.none() | st.tuples(st.none() | st.integers(0, 9), st.none() | st.integers(0, 9)),
    softcap=st.none() | st.just(2.0),
    sinks=st.booleans(),
    backend=st.sampled_from(("auto", "torch")),
)
@settings(max_examples=30, deadline=None)
def test_cpu_backends_equal_the_reference_in_float64(backend, heads, sinks, **case):
    options = {"sinks": torch.randn(heads[0])} if sinks else {}
    check(backend, heads, dtype=torch.float64, tolerance=1e-6, **case, **options)


@pytest.mark.parametrize(
    ("splits", "page_size"),
    [
        (1, 8),
        *(
            pytest.param(*pair, marks=pytest.mark.exhaustive)
            for pair in ((1, None), (3, None), (3, 8))
        ),
    ],
)
@pytest.mark.parametrize(
    ("heads", "dtype", "options"),
    [
        ((2, 2), torch.bfloat16, {}),
        ((6, 2), torch.float32, {"is_causal": True, "softcap": 2.0}),
        ((6, 2), torch.float32, {"window": (20, 3), "sinks": torch.arange(6.0) - 2}),
    ],
    ids=str,
)
def test_kernel_equals_the_reference(interpreter, splits, page_size, heads, dtype, options):
    interpreter(splits=splits)
    sequences = ((1, 70), (20, 20), (0, 9), (7, 33), (3, 0))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    check("triton", heads, sequences, page_size, (24, 16), dtype, tolerance, **options)


# The sequences, heads, pages and options of the paged tests of vLLM (test_flash_attn.py and
# test_triton_unified_attention.py) and sglang (test_flashattn_backend.py: pages of one row, and a
# prefix in the cache), with their tolerances.
SERVED = (
    ((1, 1328), (5, 18), (129, 463)),
    ((1, 523), (1, 37), (1, 2011)),
    ((1, 1328), (1, 18), (1, 463)),
    ((4, 260), (256, 256), (100, 356)),
)
VARIANTS = ({}, {"window": (255, 0)}, {"softcap": 50.0}, {"window": (127, 0), "softcap": 10.0})


#: The usual tests run these cases; the exhaustive tests run every combination.
USUAL = (
    (SERVED[0], ((4, 4), 128), 16, torch.bfloat16, VARIANTS[0]),
    (SERVED[1], ((8, 2), 128), 32, torch.bfloat16, VARIANTS[1]),
    (SERVED[2], ((16, 2), 64), 16, torch.bfloat16, VARIANTS[2]),
    (SERVED[3], ((8, 2), 64), 1, torch.bfloat16, VARIANTS[0]),
)


def list_served_cases():
    """Return the usual cases, and all combinations of the lists as exhaustive cases."""
    heads_and_dims = (((4, 4), 128), ((8, 2), 256), ((16, 2), 64))
    dtypes = (torch.bfloat16, torch.float32)
    every = itertools.product(SERVED, heads_and_dims, (1, 16, 32), dtypes, VARIANTS)
    return [*USUAL, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in every)]


@pytest.mark.parametrize(
    ("sequences", "heads_and_dim", "page_size", "dtype", "options"), list_served_cases(), ids=str
)
def test_cases_of_vllm_and_sglang(sequences, heads_and_dim, page_size, dtype, options):
    heads, dim = heads_and_dim
    tolerance = 1.5e-2 if dtype == torch.bfloat16 else 1e-3
    options = {"scale": dim**-0.5, "is_causal": True, **options}
    check("auto", heads, sequences, page_size, (dim, dim), dtype, tolerance, **options)


def test_the_kernel_skips_keys_after_a_causal_tile(interpreter):
    """A NaN that a tile loads reaches its output, also if it hides the key."""
    q, k, v = (torch.randn(128, 1, 16) for _ in "qkv")
    k, v = (x.transpose(0, 1)[None] for x in (k, v))
    # The first query tile ends at key 16 or earlier, and a tile of keys has 32 or 64 rows.
    v[:, :, 64:] = torch.nan
    lengths, cu = torch.tensor([128], dtype=torch.int32), torch.tensor([0, 128], dtype=torch.int32)
    for options in ({"cu_seqlens_q": cu}, {}):
        rows = q if options else q.transpose(0, 1)[None]
        out = flash_attention_with_kvcache(
            rows, k, v, cache_seqlens=lengths, is_causal=True, backend="triton", **options
        )
        out = out if options else out[0].transpose(0, 1)
        assert out[:16].isfinite().all()
        assert out[64:].isnan().all()


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_long_prefill_skips_half_of_its_tiles(monkeypatch, backend):
    seen = []
    scores = tiled.compute_scores
    monkeypatch.setattr(tiled, "compute_scores", lambda *a: seen.append(1) or scores(*a))
    monkeypatch.setattr(tiled, "TILE", 16)
    q, k = torch.randn(145, 1, 8), torch.randn(1, 1, 150, 8)
    flash_attention_with_kvcache(
        q,
        k,
        k,
        cache_seqlens=150,
        is_causal=True,
        window=(149, 0),
        backend=backend,
        cu_seqlens_q=torch.tensor([0, 145], dtype=torch.int32),
    )
    # Five keys are before the queries, so each of the ten rows of tiles has one more.
    assert len(seen) == sum(min(tile + 2, 10) for tile in range(10))


def test_packed_queries_compile_in_one_graph():
    torch._dynamo.reset()

    def run(q, k, lengths, table, cu):
        return flash_attention_with_kvcache(
            q, k, k, cache_seqlens=lengths, block_table=table, cu_seqlens_q=cu, is_causal=True
        )

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    k, lengths = torch.randn(6, 2, 4, 16), torch.tensor([7, 3], dtype=torch.int32)
    table, q = torch.tensor([[5, 0], [2, 4]], dtype=torch.int32), torch.randn(6, 4, 16)
    for bounds in ([0, 1, 6], [0, 4, 6]):
        arguments = (q, k, lengths, table, torch.tensor(bounds, dtype=torch.int32))
        torch.testing.assert_close(compiled(*arguments), run(*arguments))
    for wrong in ([0, 7, 6], [1, 4, 6], [0, 4, 5]):
        for function in (run, compiled):
            with pytest.raises(ValueError, match="cu_seqlens_q must start at 0, never decrease"):
                function(q, k, lengths, table, torch.tensor(wrong, dtype=torch.int32))


Q, CACHE = torch.zeros(5, 4, 16), torch.zeros(2, 2, 8, 16)
CU = torch.tensor([0, 1, 5], dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": Q[None]}, ValueError, r"to be \(total_q, heads, dim\), got shape \(1, 5, 4, 16\)"),
        ({"cu_seqlens_q": [0, 1, 5]}, TypeError, "cu_seqlens_q to be a torch.Tensor, got list"),
        ({"cu_seqlens_q": CU.long()}, ValueError, r"int32 of shape .* got torch\.int64"),
        ({"cu_seqlens_q": CU[:0]}, ValueError, r"int32 of shape \(sequences \+ 1,\)"),
        ({"cu_seqlens_q": CU[:2]}, ValueError, "batch 1 for q and 2 for k_cache"),
        ({"cu_seqlens_q": CU + 1}, ValueError, r"must start at 0, .* got \[1, 2, 6\]"),
        ({"k": CACHE, "v": CACHE}, ValueError, "no k and v with cu_seqlens_q, got new keys"),
        ({"block_table": CU[None]}, ValueError, r"block_table to be int32 of shape \(2, max_pages"),
        ({"cache_seqlens": CU}, ValueError, r"cache_seqlens to be int32 of shape \(2,\)"),
        ({"cache_seqlens": 9}, ValueError, "cache_seqlens must be from 0 to 8"),
    ],
)
def test_wrong_packed_queries_are_refused(change, error, message):
    arguments = {"q": Q, "k_cache": CACHE, "v_cache": CACHE, "cache_seqlens": 3, "cu_seqlens_q": CU}
    flash_attention_with_kvcache(**arguments)
    with pytest.raises(error, match=message):
        flash_attention_with_kvcache(**{**arguments, **change})
