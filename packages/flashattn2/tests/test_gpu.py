"""Tests that need a GPU: the compiled kernels against float64, in every shipped configuration.

`pytest -m gpu packages/flashattn2` needs torch, triton, numpy and pytest, and no more.
"""

import itertools

import pytest
import torch
from against_float64 import assert_as_good_as_plain
from flashattn2 import (
    attention_reference,
    explain,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kvcache,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HALF = (torch.bfloat16, torch.float16)
TIGHT = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill new buffers with NaN, so that unwritten values are visible."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def draw_tensors(dim, seq_q=333, seq_k=333, dtype=torch.bfloat16, heads=4, kv_heads=2, batch=2):
    q = torch.randn(batch, heads, seq_q, dim, device="cuda", dtype=dtype)
    k, v = (torch.randn(batch, kv_heads, seq_k, dim, device="cuda", dtype=dtype) for _ in "kv")
    return q, k, v


def run(**fixed):
    return lambda *a, **o: flash_attention(*a, **o, **fixed)


HEAD_DIMS = (16, 24, 32, 64, 80, 128, 192, 256)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_every_head_dim_and_dtype_is_as_good_as_plain(dim, dtype):
    """Each pair of lengths is combined with each kind of options for some head dim."""
    fixed = run(backend="triton")
    kinds = ({}, {"is_causal": True}, {"window": (150, 20), "softcap": 5.0})
    for i, lengths in enumerate(((333, 333), (100, 700), (700, 100))):
        options = kinds[(i + HEAD_DIMS.index(dim)) % 3]
        assert_as_good_as_plain(fixed, draw_tensors(dim, *lengths, dtype), **options)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, (70, None), 33])
def test_pairs_of_options_are_as_good_as_plain(dim, is_causal, window):
    for softcap, scale in itertools.product((None, 3.0), (None, 0.3)):
        options = {"is_causal": is_causal, "window": window, "softcap": softcap, "scale": scale}
        assert_as_good_as_plain(run(backend="triton"), draw_tensors(dim, 257, 511), **options)


def test_grid_smaller_than_the_gpu_is_split_and_as_good_as_plain():
    for dim, is_causal in itertools.product((64, 128), (False, True)):
        few = draw_tensors(dim, 2000, 2000, heads=1, kv_heads=1, batch=1)
        assert_as_good_as_plain(run(backend="triton"), few, is_causal=is_causal)


def test_two_deterministic_runs_are_bit_equal():
    q, k, v = (x.requires_grad_() for x in draw_tensors(64, 1000, 1000))
    runs = []
    for _ in range(2):
        out = flash_attention(q, k, v, is_causal=True)
        runs.append((out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))))
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("dim", [64, 128])
def test_packed_sequences_do_not_wait_and_equal_separate_calls(dim):
    cu = torch.tensor([0, 70, 71, 400, 400, 777], dtype=torch.int32, device="cuda")
    leaves = [
        torch.randn(777, 4, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in "qkv"
    ]
    grad = torch.randn_like(leaves[0])

    def run():
        out = flash_attention_varlen(*leaves, cu, cu, is_causal=True)
        return out, *torch.autograd.grad(out, leaves, grad)

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    bounds = cu.tolist()
    for n in range(5):
        rows = slice(*bounds[n : n + 2])
        alone = [x[rows].transpose(0, 1)[None].detach().requires_grad_() for x in leaves]
        out = flash_attention(*alone, is_causal=True)
        results = out, *torch.autograd.grad(out, alone, grad[rows].transpose(0, 1)[None])
        for ours, expected in zip(packed, results, strict=True):
            expected = expected[0].transpose(0, 1)
            torch.testing.assert_close(ours[rows], expected, atol=2e-2, rtol=2e-2)


def test_cuda_graph_replays_attention():
    q, k, v = draw_tensors(64)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        flash_attention(q, k, v)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attention(q, k, v)
    q.copy_(torch.randn_like(q))
    graph.replay()
    torch.testing.assert_close(out, flash_attention(q, k, v))


def test_inductor_compiles_attention_in_one_graph():
    q, k, v = (x.requires_grad_() for x in draw_tensors(64))

    def loss(q, k, v):
        return flash_attention(q, k, v, is_causal=True).float().square().sum()

    compiled = torch.compile(loss, fullgraph=True)
    expected = torch.autograd.grad(loss(q, k, v), (q, k, v))
    ours = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_tf32_is_as_good_as_its_bits():
    q, k, v = draw_tensors(64, dtype=torch.float32)
    exact = flash_attention(*(x.double() for x in (q, k, v)), backend="torch")
    torch.set_float32_matmul_precision("high")
    try:
        out = flash_attention(q, k, v)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert (out - exact).abs().max() <= 2.0**-8 * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("page_size", [None, 16, 48])
def test_attention_over_a_cache_equals_the_reference(dtype, page_size):
    """One new token, several, and more queries than a tile has, over short and long caches."""
    lengths, new = (0, 70, 3000, 1025), 2
    for seq_q, dim in ((1, 128), (3, 64), (40, 64)):
        q = torch.randn(len(lengths), 8, seq_q, dim, device="cuda", dtype=dtype)
        k, v = torch.randn(2, len(lengths), 2, 3024, dim, device="cuda", dtype=dtype)
        for options in ({}, {"is_causal": True, "softcap": 2.0}, {"window": (500, 0)}):
            caches, table = [k.clone(), v.clone()], None
            added = [
                torch.stack([x[b, :, n : n + new] for b, n in enumerate(lengths)]) for x in (k, v)
            ]
            for cache, b in itertools.product(caches, range(len(lengths))):
                cache[b, :, lengths[b] :] = torch.nan
            if page_size:
                # Pages in reverse order.
                pages = 3024 // page_size
                caches = [
                    x.unflatten(2, (pages, page_size)).transpose(1, 2).flatten(0, 1).flip(0)
                    for x in caches
                ]
                table = torch.arange(4 * pages, device="cuda", dtype=torch.int32).flip(0)
                table = table.view(4, pages)
            counts = torch.tensor(lengths, device="cuda", dtype=torch.int32)
            fixed = {"cache_seqlens": counts, "block_table": table, "backend": "triton"}
            out, lse = flash_attention_with_kvcache(
                q, *caches, *added, return_lse=True, **fixed, **options
            )
            for b, n in enumerate(lengths):
                single = slice(b, b + 1)
                keys, values = (x[single, :, : n + new].double() for x in (k, v))
                expected = attention_reference(
                    q[single].double(), keys, values, return_lse=True, **options
                )
                close = {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else TIGHT
                torch.testing.assert_close(out[single].double(), expected[0], **close)
                torch.testing.assert_close(lse[single].double(), expected[1], **close)


def is_hopper():
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


on_hopper = pytest.mark.skipif(not is_hopper(), reason="needs a GPU of compute capability 9.0")


@on_hopper
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("deterministic", [True, False])
def test_the_gluon_kernels_are_as_good_as_plain(dim, dtype, deterministic):
    """Each pair of lengths is combined with each band for some head dim and dtype."""
    fixed = run(backend="gluon", deterministic=deterministic)
    bands = ({}, {"is_causal": True}, {"window": (150, 20)}, {"window": (None, 40)})
    shift = 2 * (dim == 64) + (dtype == torch.float16)
    for i, lengths in enumerate(((333, 333), (100, 700), (700, 100), (1, 2000), (128, 4096))):
        assert_as_good_as_plain(fixed, draw_tensors(dim, *lengths, dtype), **bands[(i + shift) % 4])


@on_hopper
@pytest.mark.parametrize("dim", [64, 128])
def test_the_gluon_forward_is_the_same_a_hundred_times_on_a_full_gpu(dim):
    """A race on a tile would change the result between runs."""
    inputs = draw_tensors(dim, 2048, 2048, heads=16, kv_heads=4, batch=4)
    for options in ({}, {"is_causal": True}, {"window": (300, 0)}):
        expected = flash_attention(*inputs, return_lse=True, backend="triton", **options)
        first = flash_attention(*inputs, return_lse=True, backend="gluon", **options)
        for ours, theirs in zip(first, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1.6e-2, atol=1e-2)
        for _ in range(100):
            repeated = flash_attention(*inputs, return_lse=True, backend="gluon", **options)
            assert all(torch.equal(a, b) for a, b in zip(repeated, first, strict=True))


@on_hopper
def test_the_gluon_forward_takes_any_strides_and_is_compiled_in_one_graph():
    q, k, v = draw_tensors(128, 500, 500)
    expected = flash_attention(q, k, v, backend="gluon")
    wide = torch.zeros(*k.shape[:-1], 131, device="cuda", dtype=k.dtype)[..., 3:]
    wide.copy_(k)
    assert torch.equal(flash_attention(q, wide, v, backend="gluon"), expected)
    compiled = torch.compile(run(backend="gluon"), fullgraph=True)
    assert torch.equal(compiled(q, k, v), expected)


@pytest.mark.parametrize("backend", ["triton", "gluon"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_nan_is_kept(backend, name, is_causal):
    """Every number that depends on a NaN is NaN, and no row of another head is."""
    if backend == "gluon" and not is_hopper():
        pytest.skip("needs a GPU of compute capability 9.0")
    for row in (0, 150, 299):
        inputs = draw_tensors(64, 300, 300, kv_heads=4)
        inputs["qkv".index(name)][0, 0, row, 3] = torch.nan
        out, lse = flash_attention(*inputs, is_causal=is_causal, return_lse=True, backend=backend)
        if name == "q":
            assert out[0, 0, row].isnan().all()
            assert lse[0, 0, row].isnan()
        else:
            seeing = slice(row if is_causal else 0, None)
            columns = slice(3, 4) if name == "v" else slice(None)
            assert out[0, 0, seeing, columns].isnan().all()
        assert not out[0, 1:].isnan().any()
        assert not out[1].isnan().any()


@on_hopper
@pytest.mark.parametrize("dim", [64, 128])
def test_auto_uses_gluon_for_long_sequences_as_exactly_as_plain(dim):
    inputs = draw_tensors(dim, 2100, 2100, heads=8, kv_heads=4, batch=4)
    for options in ({}, {"is_causal": True}, {"window": (300, 0)}):
        assert explain(*inputs, **options).backend == "gluon"
        assert_as_good_as_plain(flash_attention, inputs, **options)


def test_memory_grows_with_the_sequence():
    from flashattn2.bench.measure import measure_peak_extra_bytes

    def extra(seq):
        q, k, v = (x.requires_grad_() for x in draw_tensors(64, seq, seq))
        grad = torch.ones_like(q)
        return measure_peak_extra_bytes(
            lambda: torch.autograd.grad(flash_attention(q, k, v), (q, k, v), grad), "cuda"
        )

    assert extra(8192) <= 2.2 * extra(4096)
