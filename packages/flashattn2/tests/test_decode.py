"""Attention over a cache is attention over each sequence's keys, contiguous or in pages."""

import contextlib
import itertools
import math

import numpy as np
import pytest
import torch
from faked_device import faked_device
from flashattn2 import attention_reference, flash_attention_with_kvcache
from flashattn2.backends import aten
from flashattn2.kernels import decode, launch
from flashattn2.kvcache import eager, validation
from flashattn2.kvcache.eager import attend_sequences
from flashattn2.kvcache.operators import append_op, decode_op
from flashattn2.kvcache.validation import check_values
from flashattn2.spec import AttentionSpec, make_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad


def shuffle_into_pages(cache, page_size, spare=3):
    """Return the same rows in shuffled pages, and their block table."""
    batch, heads, capacity, dim = cache.shape
    num_pages = -(-capacity // page_size)
    table = (
        torch.randperm(batch * num_pages + spare)[: batch * num_pages].view(batch, num_pages).int()
    )
    rows = torch.nn.functional.pad(cache, (0, 0, 0, num_pages * page_size - capacity))
    pages = torch.full(
        (batch * num_pages + spare, heads, page_size, dim), torch.nan, dtype=cache.dtype
    )
    pages[table.long()] = rows.unflatten(2, (num_pages, page_size)).transpose(1, 2)
    return pages, table


def compute_expected(q, k, v, lengths, **options):
    parts = [
        attention_reference(
            q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], return_lse=True, **options
        )
        for b, n in enumerate(lengths)
    ]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def check(backend, shape, lengths, page_size, new, dims, tolerance, dtype, device="cpu", **options):
    """Compare with the reference; rows after a sequence's keys are NaN and must not be read."""
    heads, kv_heads, seq_q = shape
    batch, capacity = len(lengths), max(lengths) + new + 5
    q = torch.randn(batch, heads, seq_q, dims[0]).to(dtype)
    k, v = (torch.randn(batch, kv_heads, capacity, d).to(dtype) for d in dims)
    truth = compute_expected(
        *(x.double() for x in (q, k, v)),
        [n + new for n in lengths],
        **{name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()},
    )
    appended = [torch.stack([x[b, :, n : n + new] for b, n in enumerate(lengths)]) for x in (k, v)]
    for b, n in enumerate(lengths):
        k[b, :, n:] = v[b, :, n:] = torch.nan
    table = None
    if page_size:
        torch.manual_seed(1)
        k, table = shuffle_into_pages(k, page_size)
        torch.manual_seed(1)
        v, _ = shuffle_into_pages(v, page_size)
    with faked_device(device) as faked:
        tensors = (q, k, v, *(appended if new else ()))
        out, lse = flash_attention_with_kvcache(
            *(faked.to_device(x) for x in tensors),
            block_table=None if table is None else faked.to_device(table),
            return_lse=True,
            backend=backend,
            cache_seqlens=faked.to_device(torch.tensor(lengths, dtype=torch.int32)),
            **options,
        )
        assert out.device.type == lse.device.type == device
        out, lse = out.cpu(), lse.cpu()
    torch.testing.assert_close(out.double(), truth[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), truth[1], atol=tolerance, rtol=tolerance)


@given(
    shape=st.sampled_from(((4, 2, 1), (2, 2, 3), (6, 1, 2), (4, 1, 5))),
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    page_size=st.sampled_from((None, 1, 4, 16)),
    new=st.integers(0, 3),
    dims=st.sampled_from(((8, 8), (8, 5))),
    is_causal=st.booleans(),
    window=st.none() | st.tuples(st.none() | st.integers(0, 9), st.none() | st.integers(0, 9)),
    softcap=st.none() | st.just(2.0),
    sinks=st.booleans(),
    backend=st.sampled_from(("auto", "torch")),
)
@settings(max_examples=25, deadline=None)
def test_cpu_attention_over_a_cache_equals_the_reference_in_float64(backend, shape, sinks, **case):
    options = {"sinks": torch.randn(shape[0])} if sinks else {}
    check(backend, shape, tolerance=1e-6, dtype=torch.float64, **case, **options)


KERNEL_OPTIONS = {
    "none": {},
    "softcap": {"is_causal": True, "softcap": 2.0},
    "sinks": {"window": (20, 3), "sinks": torch.arange(4.0) - 2},
}


def list_kernel_cases():
    """Return the cases of the kernel; the usual tests run each of `KERNEL_OPTIONS` once."""
    usual = [
        (1, None, torch.float32, "none"),
        (3, 8, torch.bfloat16, "softcap"),
        (1, 8, torch.float32, "sinks"),
        (37, 8, torch.float32, "none"),
    ]
    dtypes = torch.float32, torch.bfloat16
    # The outputs of 37 splits are combined in three steps.
    every = itertools.product((1, 3, 37), (None, 8, 48), dtypes, KERNEL_OPTIONS)
    return [pytest.param(*c, marks=[] if c in usual else [pytest.mark.exhaustive]) for c in every]


@pytest.mark.parametrize(("splits", "page_size", "dtype", "name"), list_kernel_cases(), ids=str)
def test_decode_kernel_equals_the_reference(interpreter, splits, page_size, dtype, name):
    interpreter(splits=splits)
    options = KERNEL_OPTIONS[name]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    check("triton", (4, 2, 3), (0, 70, 33), page_size, 2, (24, 16), tolerance, dtype, **options)


def test_new_keys_are_written_in_place_after_the_old(interpreter):
    cache = torch.zeros(2, 1, 8, 16)
    new = torch.randn(2, 1, 3, 16)
    for backend in ("auto", "triton"):
        k, v = cache.clone(), cache.clone()
        lengths = torch.tensor([0, 5], dtype=torch.int32)
        flash_attention_with_kvcache(
            new, k, v, new, new, cache_seqlens=lengths, is_causal=True, backend=backend
        )
        assert torch.equal(k[0, :, :3], new[0])
        assert torch.equal(v[1, :, 5:], new[1])
        assert k[0, :, 3:].abs().sum() == k[1, :, :5].abs().sum() == 0
        assert lengths.tolist() == [0, 5]


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"window": (3, 0)}], ids=str)
def test_autocast_casts_nothing_inside(options):
    q, k = torch.randn(2, 4, 2, 16), torch.randn(2, 2, 70, 16)
    exact = flash_attention_with_kvcache(q, k, k, cache_seqlens=60, **options)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = flash_attention_with_kvcache(q, k, k, cache_seqlens=60, **options)
    assert torch.equal(exact, under_autocast)


def test_the_length_may_be_a_numpy_integer():
    q, k = torch.randn(2, 4, 2, 16), torch.randn(2, 2, 70, 16)
    exact = flash_attention_with_kvcache(q, k, k, cache_seqlens=60)
    from_numpy = flash_attention_with_kvcache(q, k, k, cache_seqlens=np.int64(60))
    assert torch.equal(exact, from_numpy)


def test_attention_compiles_in_one_graph(interpreter):
    q, k = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 20, 16)

    def run(q, k, v, new, lengths):
        return flash_attention_with_kvcache(q, k, v, new, new, cache_seqlens=lengths)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    new, lengths = torch.randn(2, 2, 1, 16), torch.tensor([3, 9], dtype=torch.int32)
    caches = [k.clone() for _ in range(4)]
    torch.testing.assert_close(
        compiled(q, *caches[:2], new, lengths), run(q, *caches[2:], new, lengths)
    )
    torch.testing.assert_close(caches[0], caches[2])


def test_autocast_does_not_make_other_dtypes_match():
    q, k = torch.randn(2, 4, 1, 16).half(), torch.randn(2, 2, 20, 16)
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float16, torch.bfloat16):
            cache = k.to(dtype)
            out = flash_attention_with_kvcache(q, cache, cache, cache_seqlens=9)
            assert out.dtype == dtype
        for dtype in (torch.float32, torch.float64):
            with pytest.raises(ValueError, match="expected k_cache to have the dtype, device"):
                flash_attention_with_kvcache(q, k.to(dtype), k.to(dtype), cache_seqlens=9)


def make_pages_of_four():
    """Return six pages of four rows, and queries and new rows of two sequences."""
    k, v = torch.randn(2, 6, 2, 4, 16)
    return torch.randn(2, 4, 1, 16), k, v, torch.randn(2, 2, 1, 16)


WRONG_CACHES = {
    "negative page": ([[4, 1], [-1, 3]], [5, 4]),
    "negative page in the middle": ([[4, -1], [0, 3]], [5, 4]),
    "page too large": ([[4, 6], [0, 3]], [5, 4]),
    "huge page": ([[4, 2**31 - 1], [0, 3]], [5, 4]),
    "length above the capacity": ([[4, 1], [0, 3]], [9, 4]),
    "huge length": ([[4, 1], [0, 3]], [5, 2**31 - 1]),
    "negative length": ([[4, 1], [0, 3]], [-1, 4]),
}


def test_a_compiled_function_may_slice_interleaved_caches_of_several_buffers():

    def run(q, cache, new, lengths):
        keys, values = cache[..., :16], cache[..., 16:]
        return flash_attention_with_kvcache(q, keys, values, new, new, cache_seqlens=lengths)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    lengths = torch.tensor([20, 30], dtype=torch.int32)
    for offset in (0, 7, 64):
        memory = torch.randn(2 * 4 * 64 * 32 + offset)
        caches = [memory.clone()[offset:].view(2, 4, 64, 32) for _ in range(2)]
        q, new = torch.randn(2, 2, 4, 1, 16)
        ours, eager = (f(q, c, new, lengths) for f, c in zip((compiled, run), caches, strict=True))
        torch.testing.assert_close(ours, eager)
        assert torch.equal(*caches)


@pytest.mark.parametrize(
    "layout",
    ["heads", *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("new keys", "pages"))],
)
def test_compiled_caches_that_overlap_another_input_are_refused(layout):
    """The graph would assume the storage offsets of its first call.  Slices inside are right."""
    lengths, table = torch.tensor([20, 3], dtype=torch.int32), None
    memory = torch.randn(2, 2, 4, 64, 16)
    if layout == "pages":
        table = torch.tensor([[3, 2], [1, 0]], dtype=torch.int32)
        memory = torch.randn(4, 2, 2, 32, 16)

    def cut(memory):
        new = torch.ones(2, 2, 1, 16)
        if layout == "pages":
            return *memory.unbind(1), new, new
        if layout == "heads":
            return *memory[0].split(2, dim=1), new, new
        k_cache, v_cache = memory[:, :, :2]
        return k_cache, v_cache, *memory[:, :, :2, 7:8]

    def run(q, *tensors):
        tensors = cut(*tensors) if len(tensors) == 1 else tensors
        return flash_attention_with_kvcache(q, *tensors, cache_seqlens=lengths, block_table=table)

    q = torch.randn(2, 4, 1, 16)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="slice it inside of the compiled function"):
        compiled(q, *cut(memory))
    expected = memory.clone()
    torch.testing.assert_close(compiled(q, memory), run(q, expected))
    assert torch.equal(memory, expected)
    if layout == "heads":
        # Another input contains the whole cache.
        with pytest.raises(RuntimeError, match="slice it inside of the compiled function"):
            torch.compile(lambda q, x, y: run(q, x, *cut(y)[1:]), backend="aot_eager")(
                q, cut(memory)[0], memory
            )


def test_compiled_caches_in_separate_memory_are_right_for_all_storage_offsets():
    compiled = torch.compile(flash_attention_with_kvcache, fullgraph=True, backend="aot_eager")
    q, new = torch.randn(2, 4, 1, 16), torch.ones(2, 2, 1, 16)
    lengths = torch.tensor([20, 3], dtype=torch.int32)
    for offset in (0, 64):
        kv = torch.randn(4096 * 2 + offset)[offset:].view(2, 2, 2, 64, 16)
        expected = kv.clone()
        torch.testing.assert_close(
            compiled(q, *kv, new, new, cache_seqlens=lengths),
            flash_attention_with_kvcache(q, *expected, new, new, cache_seqlens=lengths),
        )
        assert torch.equal(kv, expected)


def list_backends_compilers_and_calls():
    """Return the cases of wrong caches; the usual tests compile one call per backend."""
    usual = [("auto", "aot_eager", True), ("triton", "aot_eager", False)]
    every = itertools.product(("auto", "triton"), (None, "aot_eager", "inductor"), (False, True))
    return [
        pytest.param(*c, marks=[] if c[1] is None or c in usual else [pytest.mark.exhaustive])
        for c in every
    ]


@pytest.mark.parametrize(("backend", "compiler", "appends"), list_backends_compilers_and_calls())
def test_wrong_pages_and_lengths_are_refused_and_write_nothing(
    interpreter, backend, compiler, appends
):
    """One compiled graph serves all wrong caches, because only values differ."""
    q, k, v, new = make_pages_of_four()
    before = k.clone(), v.clone()

    def run(q, k, v, new, lengths, table):
        rows = (new, new) if appends else ()
        return flash_attention_with_kvcache(
            q, k, v, *rows, cache_seqlens=lengths, block_table=table, backend=backend
        )

    if compiler is not None:
        torch._dynamo.reset()
        run = torch.compile(run, fullgraph=True, backend=compiler)
    for wrong in WRONG_CACHES.values():
        table, lengths = (torch.tensor(x, dtype=torch.int32) for x in wrong)
        with (
            torch.no_grad(),
            pytest.raises(ValueError, match=r"block_table must name|cache_seqlens must be"),
        ):
            run(q, k, v, new, lengths, table)
        assert torch.equal(k, before[0]), wrong
        assert torch.equal(v, before[1]), wrong


@pytest.mark.parametrize("length", [-2, -1, 0, 4])
def test_more_new_keys_than_the_capacity_are_refused_for_every_length(length):
    q, k, v, _ = make_pages_of_four()
    before, new = k.clone(), torch.randn(2, 2, 6, 16)
    lengths, table = torch.tensor([[length, length], [4, 0]], dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"cache_seqlens must be .* got length {length}"):
        flash_attention_with_kvcache(
            q, k, v, new, new, cache_seqlens=lengths, block_table=table[:, None]
        )
    assert torch.equal(k, before)


@pytest.mark.parametrize(("table", "lengths"), WRONG_CACHES.values(), ids=WRONG_CACHES)
def test_the_assertion_for_gpus_finds_wrong_pages_and_lengths(table, lengths):
    _, k, _, _ = make_pages_of_four()
    good = torch.tensor([[4, 1], [0, -1]], dtype=torch.int32)
    check_values(torch.tensor([7, 3], dtype=torch.int32), 1, k, good, False, True, True)
    table, lengths = (torch.tensor(x, dtype=torch.int32) for x in (table, lengths))
    with pytest.raises(RuntimeError, match=r"block_table must name|cache_seqlens must be"):
        check_values(lengths, 0, k, table, False, True, True)


@pytest.mark.parametrize(("table", "lengths"), WRONG_CACHES.values(), ids=WRONG_CACHES)
def test_without_assertions_the_kernels_write_nothing_and_return_nan(interpreter, table, lengths):
    """Device-side assertions may be compiled out on a GPU."""
    from flashattn2.kernels import decode

    q, k, v, new = make_pages_of_four()
    table, lengths = (torch.tensor(x, dtype=torch.int32) for x in (table, lengths))
    spec = make_spec(16, False, None, None, None)
    out, lse = decode.decode(q, k, v, lengths, table, None, spec, 0)
    wrong = [
        not 0 <= n <= 8 or not all(0 <= p < 6 for p in t[: -(-n // 4)])
        for t, n in zip(table.tolist(), lengths.tolist(), strict=True)
    ]
    assert any(wrong)
    assert out.isnan().flatten(1).all(1).tolist() == wrong
    assert lse.isnan().flatten(1).all(1).tolist() == wrong
    written, written_values = k.clone(), v.clone()
    decode.append(written, written_values, new, new, lengths, table)
    expected = k.clone()
    for b, (t, n) in enumerate(zip(table.tolist(), lengths.tolist(), strict=True)):
        if 0 <= n < 8 and 0 <= t[n // 4] < 6:
            expected[t[n // 4], :, n % 4] = new[b, :, 0]
    assert torch.equal(written, expected)
    assert torch.equal(written_values != v, written != k)


@pytest.mark.parametrize(
    ("backend", "compiled"),
    [
        ("auto", False),
        ("auto", True),
        ("triton", False),
        pytest.param("triton", True, marks=pytest.mark.exhaustive),
    ],
)
def test_unused_pages_may_have_any_number(interpreter, backend, compiled):
    """Entries of the block table after a sequence may be -1."""
    q, k, v, new = make_pages_of_four()
    before = k.clone()
    table = torch.tensor([[3, 2, -1], [5, -1, 99]], dtype=torch.int32)
    lengths = torch.tensor([5, 3], dtype=torch.int32)

    def run(q, k, v, new, lengths, table):
        return flash_attention_with_kvcache(
            q, k, v, new, new, cache_seqlens=lengths, block_table=table, backend=backend
        )

    with torch.no_grad():
        (torch.compile(run, backend="aot_eager") if compiled else run)(q, k, v, new, lengths, table)
    changed = (k != before).any(-1).any(1).nonzero().tolist()
    assert changed == [[2, 1], [5, 3]]


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_strides_of_tables_and_lengths_do_not_change_the_result(interpreter, backend):
    q, k, v, new = make_pages_of_four()
    table = torch.tensor([[3, 2], [5, 0]], dtype=torch.int32)
    lengths = torch.tensor([5, 5], dtype=torch.int32)
    expected = None
    for t, n in (
        (table, lengths),
        (table.mT.contiguous().mT, lengths[:1].expand(2)),
        (table.repeat_interleave(2, dim=1)[:, ::2], lengths.repeat_interleave(2)[::2]),
    ):
        caches = k.clone(), v.clone()
        out = flash_attention_with_kvcache(
            q, *caches, new, new, cache_seqlens=n, block_table=t, backend=backend
        )
        expected = expected or (out, *caches)
        for got, right in zip((out, *caches), expected, strict=True):
            assert torch.equal(got, right)


Q, CACHE = torch.zeros(2, 4, 1, 16), torch.zeros(2, 2, 8, 16)
TABLE = torch.zeros(2, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": None}, TypeError, "q to be a torch.Tensor, got NoneType"),
        ({"q": Q[0]}, ValueError, r"4-dimensional, got shape \(4, 1, 16\)"),
        ({"q": Q[:1]}, ValueError, "batch 1 for q and 2 for k_cache; .* block_table"),
        ({"q": Q[:, :3]}, ValueError, "got 3 query heads and 2 key heads"),
        ({"q": Q.half()}, ValueError, "of q, torch.float16 .* got torch.float32"),
        ({"v_cache": CACHE[:, :, :7]}, ValueError, "k_cache and v_cache to have the same shape"),
        ({"k": CACHE}, ValueError, "both k and v to append"),
        ({"k": CACHE[:1], "v": CACHE[:1]}, ValueError, r"k to be .* \(batch 2, kv_heads 2"),
        (dict.fromkeys("kv", CACHE[0, 0, 0]), ValueError, r"k to be .* got .* of shape \(16,\)"),
        ({"cache_seqlens": 9}, ValueError, r"cache_seqlens must be from 0 to 8: .* got 9"),
        ({"cache_seqlens": -1}, ValueError, "from 0 to 8"),
        ({"cache_seqlens": 2**40}, ValueError, f"from 0 to 8: .* got {2**40}"),
        ({"cache_seqlens": np.int64(9)}, ValueError, "from 0 to 8: .* got 9"),
        ({"cache_seqlens": 7, "k": CACHE[:, :, :2], "v": CACHE[:, :, :2]}, ValueError, "0 to 6"),
        ({"cache_seqlens": [1, 2]}, TypeError, "an int or an int32 tensor, got list"),
        ({"cache_seqlens": True}, TypeError, "an int or an int32 tensor, got bool"),
        ({"cache_seqlens": torch.tensor([1, 2])}, ValueError, "cache_seqlens to be int32 of shape"),
        ({"block_table": TABLE.long()}, ValueError, "block_table to be int32 .* got torch.int64"),
        (
            {"block_table": TABLE + 2},
            ValueError,
            "must name pages 0 to 1, got page 2",
        ),
        ({"scale": True}, TypeError, "scale to be a float, .* got True"),
        ({"sinks": torch.full((4,), torch.inf)}, ValueError, r"finite sinks, got \[inf"),
        (
            {"q": Q[..., :0], "k_cache": CACHE[..., :0]},
            ValueError,
            "a head dim of at least 1",
        ),
        (
            {"k_cache": CACHE[:, :, :0], "v_cache": CACHE[:, :, :0], "block_table": TABLE},
            ValueError,
            r"pages of at least one row, got k_cache of shape \(2, 2, 0, 16\)",
        ),
        (
            dict.fromkeys(("q", "k_cache", "v_cache"), Q.int()),
            ValueError,
            "q to be float64, .*int32",
        ),
    ],
)
def test_wrong_cache_arguments_are_refused(change, error, message):
    arguments = {"q": Q, "k_cache": CACHE, "v_cache": CACHE, "cache_seqlens": 3, **change}
    with pytest.raises(error, match=message):
        flash_attention_with_kvcache(**arguments)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_attention_over_a_cache_has_no_gradient():
    def run(q):
        return flash_attention_with_kvcache(q, CACHE, CACHE, cache_seqlens=3)

    with pytest.raises(RuntimeError, match=r"no gradient; call it under torch.no_grad"):
        run(Q.clone().requires_grad_())
    sinks = torch.zeros(Q.shape[1], requires_grad=True)
    with pytest.raises(RuntimeError, match=r"no gradient; call it under torch.no_grad"):
        flash_attention_with_kvcache(Q, CACHE, CACHE, cache_seqlens=3, sinks=sinks)
    # The kernel would drop the tangent without an error.
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="outside of forward-mode AD"):
        run(forward_ad.make_dual(Q, Q + 1))
    with pytest.raises(RuntimeError, match=r"outside of forward-mode AD and torch\.func"):
        torch.func.jvp(run, (Q,), (Q + 1,))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8])
def test_quantized_caches_are_refused_with_the_reason(dtype):
    cache = CACHE.to(dtype)
    with pytest.raises(ValueError, match=r"quantized caches need scales, .* keep the cache in bfl"):
        flash_attention_with_kvcache(Q, cache, cache, cache_seqlens=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_devices_without_triton_run_the_fallback(dtype):
    """The faked device has no assertions and no float64, and reads values only by a copy."""
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for seq_q, page_size, new, options in (
        (1, None, 0, {}),
        (1, 4, 2, {"window": (2, 1), "softcap": 2.0}),
        (3, None, 2, {"is_causal": True}),
        (3, 4, 0, {"window": (2, 1), "scale": 0.3}),
    ):
        check(
            *("auto", (4, 2, seq_q), (7, 0, 5), page_size, new, (20, 12), tolerance, dtype),
            device="cuda",
            **options,
        )


def test_values_are_checked_on_devices_without_triton():
    q, k, v, new = make_pages_of_four()
    with faked_device("cuda") as faked:
        for table, lengths in WRONG_CACHES.values():
            wrong = (torch.tensor(x, dtype=torch.int32) for x in (lengths, table))
            moved = [faked.to_device(x) for x in (q, k, v, new, *wrong)]
            for rows in ((), (moved[3], moved[3])):
                with pytest.raises(
                    ValueError, match=r"block_table must name|cache_seqlens must be"
                ):
                    flash_attention_with_kvcache(
                        *moved[:3], *rows, cache_seqlens=moved[4], block_table=moved[5]
                    )


def test_shapes_of_a_cache_on_the_meta_device():
    q, k = torch.empty(2, 4, 3, 20, device="meta"), torch.empty(6, 2, 4, 20, device="meta")
    table = torch.empty(2, 3, dtype=torch.int32, device="meta")
    for dtype in (torch.float32, torch.float64):
        out, lse = flash_attention_with_kvcache(
            *(x.to(dtype) for x in (q, k, k[..., :12], k[:2, :, :1], k[:2, :, :1, :12])),
            cache_seqlens=2,
            block_table=table,
            window=2,
            return_lse=True,
        )
        assert (out.shape, lse.shape) == ((2, 4, 3, 12), (2, 4, 3))
        assert (out.dtype, lse.dtype, out.device.type) == (dtype, dtype, "meta")


# The operators run the tiled backend as they run torch's kernel.
@pytest.mark.parametrize(
    "backend", [pytest.param("torch", marks=pytest.mark.exhaustive), "aten", "triton"]
)
def test_opcheck_of_both_operators(interpreter, backend):
    q = torch.randn(2, 4, 3, 16)
    new = torch.randn(2, 2, 2, 16)
    cache, table = shuffle_into_pages(torch.randn(2, 2, 12, 16), 4)
    cache = cache.nan_to_num()
    lengths = torch.tensor([9, 5], dtype=torch.int32)
    scalars = (0.25, -1, 0, 0.0, backend, 2, True, True)
    torch.library.opcheck(decode_op, (q, cache, cache, lengths, table, None, *scalars))
    rows, cu = q.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None], torch.tensor([0, 1, 6]).int()
    torch.library.opcheck(decode_op, (rows, cache, cache, lengths, table, cu, *scalars))
    torch.library.opcheck(
        append_op, (cache, cache.clone(), new, new, lengths, table, backend, True)
    )


@pytest.mark.parametrize("seq_q", [1, 2])
def test_other_devices_without_triton_do_not_run_the_cpu_kernel(monkeypatch, seq_q):
    """Float64, other head dims and GPUs without Triton run tiled PyTorch on their device."""
    monkeypatch.setattr(aten, "run_kernel", None)
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 2, n, 20, device="cuda") for n in (seq_q, 4, 4))
        for spec in (AttentionSpec(1.0), AttentionSpec(1.0, 2, 0), AttentionSpec(1.0, softcap=2.0)):
            for counts in ([4, 4], [3, 4]):
                out, lse = attend_sequences(q, k, v, counts, None, None, spec, "torch")
                assert out.shape == q.shape
                assert out.device == lse.device == q.device


def test_sequences_may_share_a_full_page():
    q = torch.randn(2, 2, 1, 16)
    cache = torch.zeros(4, 2, 4, 16)
    table = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32)
    flash_attention_with_kvcache(q, cache, cache.clone(), q, q, cache_seqlens=4, block_table=table)
    assert torch.equal(cache[1:3, :, 0], q[:, :, 0])


@pytest.mark.parametrize("backend", ["auto", "torch", "triton"])
@pytest.mark.parametrize(
    ("table", "lengths"),
    [
        # Both sequences append to the last row of page 0.
        ([[0, 1], [0, 2]], [3, 3]),
        # The new key of the first sequence is in the third row of page 0, as a key of the second.
        ([[0, 1], [2, 0]], [2, 7]),
        # The first sequence has page 0 twice.
        ([[0, 0], [1, 2]], [5, 2]),
    ],
)
def test_new_keys_in_rows_of_other_keys_are_refused(interpreter, table, lengths, backend):
    cache = torch.randn(3, 2, 4, 16)
    new = torch.randn(2, 2, 1, 16)
    lengths, table = torch.tensor(lengths).int(), torch.tensor(table).int()
    before = cache.clone()

    options = {"cache_seqlens": lengths, "block_table": table, "backend": backend}
    with pytest.raises(ValueError, match="copy a shared page before a sequence appends"):
        flash_attention_with_kvcache(new, cache, cache.clone(), new, new, **options)
    with pytest.raises(RuntimeError, match="a page that receives new keys"):
        check_values(lengths, 1, cache, table, False, True, True)
    assert torch.equal(cache, before)


@pytest.mark.parametrize(
    ("backend", "length"), [("auto", 2), ("auto", 40), ("torch", 2), ("triton", 2)]
)
def test_different_keys_and_values_in_one_cache_are_refused(interpreter, length, backend):
    q = torch.randn(2, 2, 1, 16)
    buffer = torch.zeros(2, 2, 64, 40)

    def run(k_cache, v_cache, k, v):
        return flash_attention_with_kvcache(
            k, k_cache, v_cache, k, v, cache_seqlens=length, backend=backend
        )

    for _ in range(2):  # the second call takes the fast path
        for first in (0, 9):
            caches = buffer[..., :16], buffer[..., first : first + 16]
            with pytest.raises(ValueError, match="new values would overwrite keys"):
                run(*caches, q, q.clone())
        assert not buffer.any()
        # These keys and values have the same address, but are equal in one head only.
        for k, v in ((q, q[:, :1].expand_as(q)), (q[:, :1].expand_as(q), q)):
            with pytest.raises(ValueError, match="new values would overwrite keys"):
                run(buffer[..., :16], buffer[..., :16], k, v)
        assert not buffer.any()
    # Latent attention has values that are a part of the keys.
    latent = torch.randn(2, 2, 1, 32)
    run(buffer[..., :32], buffer[..., 16:32], latent, latent[..., 16:])
    assert torch.equal(buffer[:, :, length, :32], latent[:, :, 0])
    # The rows of keys and values alternate in one buffer.
    run(buffer[..., :16], buffer[..., 16:32], q, q.clone())
    assert torch.equal(buffer[:, :, length, :32], torch.cat((q, q), -1)[:, :, 0])


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("is_overlapping", [False, True])
@pytest.mark.parametrize("layout", ["pairs", "pool", "rows", "head dims"])
def test_caches_are_refused_if_and_only_if_they_overlap(layout, is_overlapping, order):
    if layout == "pairs":
        memory = torch.zeros(3, 2, 6, 9, 2)
        caches = (
            memory[..., :8, 0],
            memory[..., :8, 1] if not is_overlapping else memory[..., 1:, 0],
        )
    elif layout == "pool":
        memory = torch.zeros(6, 2, 6, 8)
        caches = memory[:3], memory[2:5] if is_overlapping else memory[3:]
    elif layout == "rows":
        memory = torch.zeros(3, 2, 12, 8)
        caches = memory[:, :, :6], memory[:, :, 5:11] if is_overlapping else memory[:, :, 6:]
    else:
        memory = torch.zeros(3, 2, 6, 13)
        caches = memory[..., :8], memory[..., 7:12] if is_overlapping else memory[..., 8:]
    k_cache, v_cache = caches[::order]
    new = [torch.ones(*x.shape[:2], 1, x.shape[3]) for x in (k_cache, v_cache)]
    q = torch.randn(3, 2, 1, k_cache.shape[3])
    refusal = pytest.raises(ValueError, match="got caches that overlap")
    with refusal if is_overlapping else contextlib.nullcontext():
        flash_attention_with_kvcache(q, k_cache, v_cache, *new, cache_seqlens=5)
    assert int(memory.sum()) == (0 if is_overlapping else sum(x.numel() for x in new))


def test_adjacent_caches_are_not_searched_for_an_overlap(monkeypatch):
    """The search would take a third of the time that Python may take for a decoded token."""
    monkeypatch.setattr(validation, "_map_addresses", None)
    caches = torch.zeros(2, 3, 2, 40, 16)
    q, new = torch.randn(3, 2, 1, 16), torch.ones(3, 2, 1, 16)
    for k_cache, v_cache in (caches, caches.flip(0), caches[:, :, :, :20]):
        for _ in range(2):
            flash_attention_with_kvcache(q, k_cache, v_cache, new, new.clone(), cache_seqlens=17)


@pytest.mark.parametrize("backend", ["auto", "torch", "triton"])
@pytest.mark.parametrize("source", [39, 41])
def test_new_keys_may_be_rows_of_the_cache(interpreter, source, backend):
    """The rows that accepted tokens of a draft move to may overlap the rows they move from."""
    q = torch.randn(1, 2, 3, 16) if backend == "torch" else torch.randn(1, 2, 1, 16)
    for _ in range(2):  # the second call takes the fast path
        caches = torch.randn(2, 1, 2, 64, 16)
        expected_caches = caches.clone()
        expected_caches[..., 40:43, :] = caches[..., source : source + 3, :]
        k, v = caches[..., source : source + 3, :]
        out = flash_attention_with_kvcache(q, *caches, k, v, cache_seqlens=40, backend=backend)
        assert torch.equal(caches, expected_caches)
        reference = attention_reference(q, *expected_caches[..., :43, :])
        torch.testing.assert_close(out, reference)


@pytest.mark.parametrize("backend", ["auto", "torch", "triton"])
def test_queries_in_rows_that_are_overwritten_keep_their_values(interpreter, backend):
    for _ in range(2):  # the second call takes the fast path
        k_cache, v_cache = torch.randn(2, 1, 2, 64, 16)
        q, new = k_cache[:, :, 40:41], torch.randn(1, 2, 1, 16)
        expected = attention_reference(
            q.clone(),
            torch.cat((k_cache[:, :, :40], new), 2),
            torch.cat((v_cache[:, :, :40], new), 2),
        )
        out = flash_attention_with_kvcache(
            q, k_cache, v_cache, new, new.clone(), cache_seqlens=40, backend=backend
        )
        torch.testing.assert_close(out, expected)


def test_compiled_queries_in_rows_of_the_cache_are_refused():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(k_cache, v_cache, new):
        q = k_cache[:, :, 40:41]
        return flash_attention_with_kvcache(q, k_cache, v_cache, new, new * 2, cache_seqlens=40)

    with torch.no_grad(), pytest.raises(Exception, match="expected no overlapping views"):
        run(*torch.randn(2, 1, 2, 64, 16), torch.randn(1, 2, 1, 16))


def test_one_packed_query_gives_the_same_result_twice():
    """The second call finds the plan of the first."""
    q, cache = torch.randn(1, 2, 16), torch.randn(2, 2, 40, 16)
    for boundaries in ([0, 1], [0, 0, 1]):
        cu = torch.tensor(boundaries, dtype=torch.int32)
        caches = cache[: len(cu) - 1], cache[: len(cu) - 1]
        first, second = (
            flash_attention_with_kvcache(q, *caches, cache_seqlens=40, cu_seqlens_q=cu)
            for _ in range(2)
        )
        assert torch.equal(first, second)


@pytest.mark.parametrize("backend", ["auto", "torch", "triton"])
@pytest.mark.parametrize("lengths", [2, 40, torch.tensor([2, 3], dtype=torch.int32)], ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=["batch", "heads"])
def test_new_keys_in_an_expanded_cache_are_refused(interpreter, shape, lengths, backend):
    """The rows of several sequences or heads would be written to the same memory."""
    q = torch.randn(2, 2, 1, 16)
    for index in range(2):
        buffers = [torch.zeros(2, 2, 64, 16) for _ in "kv"]
        buffers[index] = torch.zeros(*shape, 64, 16)
        caches = [x.expand(2, 2, -1, -1) for x in buffers]
        for _ in range(2):  # the second call takes the fast path
            with pytest.raises(ValueError, match=r"got rows that share memory .* made by contig"):
                flash_attention_with_kvcache(
                    q, *caches, q, q.clone(), cache_seqlens=lengths, backend=backend
                )
            assert not any(x.any() for x in buffers)
        # Reading such a cache is allowed.
        flash_attention_with_kvcache(q, *caches, cache_seqlens=lengths, backend=backend)


@pytest.mark.parametrize("index", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("strides", [(256, 128, 1, 1), (64, 64, 16, 1), (256, 128, 8, 2)], ids=str)
def test_new_keys_in_a_cache_with_overlapping_rows_are_refused(strides, index):
    q = torch.randn(2, 2, 1, 16)
    caches = list(torch.zeros(2, 2, 2, 8, 16))
    caches[index] = memory = torch.zeros(600).as_strided((2, 2, 8, 16), strides)
    for _ in range(2):
        with pytest.raises(ValueError, match="got rows that share memory"):
            flash_attention_with_kvcache(q, *caches, q, q.clone(), cache_seqlens=3)
    assert not memory.any()


def list_pages_dtypes_and_backends():
    """Return the cases of chunks; the usual tests run each page size, and each dtype twice."""
    usual = [
        (1, 1, torch.float32, "auto"),
        (7, 1, torch.float64, "torch"),
        (7, 1, torch.bfloat16, "auto"),
        (16, 1, torch.bfloat16, "torch"),
        (16, 3, torch.float32, "torch"),
        (50, 1, torch.float64, "auto"),
    ]
    pages = [(1, 1), (7, 1), (16, 1), (16, 3), (50, 1)]
    dtypes = [torch.float64, torch.float32, torch.bfloat16]
    every = [(*p, *x) for p, *x in itertools.product(pages, dtypes, ("auto", "torch"))]
    return [pytest.param(*c, marks=[] if c in usual else [pytest.mark.exhaustive]) for c in every]


@pytest.mark.parametrize(
    ("page_size", "seq_q", "dtype", "backend"), list_pages_dtypes_and_backends(), ids=str
)
def test_pages_are_copied_in_chunks(monkeypatch, page_size, seq_q, dtype, backend):
    """The lengths are around the ends of chunks, which have 32 rows or fewer."""
    monkeypatch.setattr(eager, "CHUNK_BYTES", 1)
    monkeypatch.setattr(eager, "CHUNK_ROWS", 32)
    lengths = (0, 1, 95, 96, 97, 127, 128, 129)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    for window in (None, (110, None)) if seq_q == 1 else (None,):
        shape = (4, 2, seq_q)
        check(backend, shape, lengths, page_size, 1, (16, 24), tolerance, dtype, window=window)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
def test_decoding_one_sequence_fills_the_gpu(monkeypatch, kv_heads):
    """The launches are recorded instead of run, for a GPU with 132 SMs."""
    grids = []

    class Recorded:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *arguments, **options: None

    gpu = launch.Device(227 * 1024, 132, launch.HOPPER)
    monkeypatch.setattr(launch, "get_device", lambda _: gpu)
    monkeypatch.setattr(decode, "decode_kernel", Recorded())
    monkeypatch.setattr(decode, "combine", lambda *_: None)
    q, cache = torch.randn(1, 8 * kv_heads, 1, 16), torch.randn(1, kv_heads, 65536, 16)
    flash_attention_with_kvcache(q, cache, cache, cache_seqlens=65536, backend="triton")
    (grid,) = grids
    assert 0.96 * 132 <= math.prod(grid) <= 132


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_chunks_of_pages_keep_values_that_are_not_finite(monkeypatch, value):
    monkeypatch.setattr(eager, "CHUNK_BYTES", 1)
    monkeypatch.setattr(eager, "CHUNK_ROWS", 32)
    q, (k, v) = torch.ones(1, 2, 1, 16), torch.randn(2, 1, 2, 128, 16)
    for keys in (slice(0, 32), slice(5, 6), slice(96, 128), slice(0, 128)):
        for index in range(2):
            caches = [k.clone(), v.clone()]
            caches[index][:, 0, keys] = value
            table = torch.arange(8, dtype=torch.int32)[None]
            pages = [x[0].unflatten(1, (8, 16)).transpose(0, 1).contiguous() for x in caches]
            out = flash_attention_with_kvcache(q, *pages, cache_seqlens=128, block_table=table)
            contiguous = flash_attention_with_kvcache(q, *caches, cache_seqlens=128)
            torch.testing.assert_close(out, contiguous, equal_nan=True)


@pytest.mark.parametrize("backend", ["auto", "torch", "triton"])
@pytest.mark.parametrize("is_paged", [False, True])
def test_no_sequences_give_an_empty_result(interpreter, is_paged, backend):
    for seq_q in (1, 3):
        q, cache = torch.randn(0, 4, seq_q, 16), torch.randn(3 if is_paged else 0, 2, 8, 16)
        table = torch.zeros(0, 2, dtype=torch.int32) if is_paged else None
        out, lse = flash_attention_with_kvcache(
            q, cache, cache, cache_seqlens=3, block_table=table, return_lse=True, backend=backend
        )
        assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
