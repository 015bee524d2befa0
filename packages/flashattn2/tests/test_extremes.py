"""Extreme inputs: huge windows, many heads, no heads, no data, no NVIDIA GPU."""

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
from against_float64 import compute_results
from flashattn2 import attention_reference, explain, flash_attention, flash_attention_varlen
from flashattn2.kernels import configs, launch
from option_pairs import draw_tensors

BACKENDS = ("torch", "auto", "triton")
HUGE = (2**30, 2**31 - 20, 2**31 - 1, 2**31, 2**32 + 3, sys.maxsize, 2**70)


@pytest.mark.parametrize(
    ("backend", "bound"),
    [
        *itertools.product(("torch", "auto"), HUGE),
        ("triton", 2**31 - 1),
        pytest.param("triton", sys.maxsize, marks=pytest.mark.exhaustive),
    ],
)
def test_a_bound_beyond_every_key_hides_nothing(interpreter, backend, bound):
    q, k, v = (x[:, :1] for x in draw_tensors("more keys", 16))
    grads = torch.randn_like(q), torch.randn(q.shape[:-1])

    def run(q, k, v, **options):
        return flash_attention(q, k, v, backend=backend, **options)

    cases = [(True, bound)] if backend == "triton" else [(False, (None, bound)), (True, bound)]
    for is_causal, window in cases:
        free = compute_results(run, (q, k, v), torch.float32, grads, is_causal=is_causal)
        bounded = compute_results(
            run, (q, k, v), torch.float32, grads, is_causal=is_causal, window=window
        )
        for a, b in zip(bounded, free, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("bound", [2**30 - 1, 2**29])
def test_the_largest_bounds_of_a_kernel_hide_nothing(interpreter, bound):
    q, k, v = (x[:, :1, :20] for x in draw_tensors("fewer keys", 16))
    for window in ((bound, None), (None, bound), bound):
        out = flash_attention(q, k, v, window=window, backend="triton")
        torch.testing.assert_close(out, attention_reference(q, k, v), atol=1e-5, rtol=1e-5)


def test_window_accepts_numpy_integers_and_lists():
    numpy = pytest.importorskip("numpy")
    q, k, v = draw_tensors("square", 16)
    expected = attention_reference(q, k, v, window=(3, 5))
    for window in ((numpy.int64(3), numpy.int32(5)), [3, 5]):
        torch.testing.assert_close(flash_attention(q, k, v, window=window), expected)
    packed = torch.randn(9, 2, 16)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    free = flash_attention_varlen(packed, packed, packed, cu, cu)
    bound = flash_attention_varlen(packed, packed, packed, cu, cu, window=sys.maxsize)
    assert torch.equal(free, bound)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("splits", [1, 16])
def test_every_grid_is_within_the_limits_of_cuda(interpreter, monkeypatch, packed, splits):
    """At most 65,535 programs on all axes but the first, for any batch and heads."""
    from triton.runtime import interpreter as of_triton

    interpreter(splits=1 if packed else splits)
    grids = []

    def only_note(self, *args, grid=None, **kwargs):
        grids.append(self.grid if grid is None else grid)

    monkeypatch.setattr(of_triton.GridExecutor, "__call__", only_note)
    heads = 70_000
    if packed:
        q = torch.zeros(2, heads, 16, dtype=torch.half, requires_grad=True)
        cu = torch.tensor([0, 1, 2], dtype=torch.int32)
        out = flash_attention_varlen(q, q, q, cu, cu, backend="triton")
    else:
        q = torch.zeros(heads, 1, 1, 16, dtype=torch.half, requires_grad=True)
        out = flash_attention(q, q, q, backend="triton")
    out.sum().backward()
    assert len(grids) >= 3
    for first, *others in grids:
        assert heads <= first < 2**31
        assert all(other <= 65_535 for other in others)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_sequences_give_empty_results_and_gradients(interpreter, backend):
    q, k = (torch.zeros(0, heads, 16, requires_grad=True) for heads in (4, 2))
    none = torch.zeros(1, dtype=torch.int32)
    out, lse = flash_attention_varlen(q, k, k, none, none, return_lse=True, backend=backend)
    assert out.shape == (0, 4, 16)
    assert lse.shape == (4, 0)
    for grad, x in zip(torch.autograd.grad(out.sum() + lse.sum(), (q, k)), (q, k), strict=True):
        assert grad.shape == x.shape


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(0, 0), (0, 2)])
def test_no_heads_give_empty_results_and_zero_gradients(interpreter, backend, heads, kv_heads):
    q = torch.randn(2, heads, 5, 16, requires_grad=True)
    k = torch.randn(2, kv_heads, 5, 16, requires_grad=True)
    out, lse = flash_attention(q, k, k, is_causal=True, return_lse=True, backend=backend)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])
    (out.sum() + lse.sum()).backward()
    assert (q.grad.shape, k.grad.shape) == (q.shape, k.shape)
    assert (k.grad == 0).all()
    assert attention_reference(q, k, k).shape == q.shape


def test_meta_tensors_give_shapes_forward_and_backward():
    q, k, v = (x.to("meta").requires_grad_() for x in draw_tensors("more keys", 24))
    out, lse = flash_attention(q, k, v, is_causal=True, window=3, return_lse=True)
    (out.sum() + lse.sum()).backward()
    assert out.device.type == lse.device.type == q.grad.device.type == "meta"
    assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])
    assert (q.grad.shape, k.grad.shape, v.grad.shape) == (q.shape, k.shape, v.shape)
    assert explain(q, k, v).backend == "torch"
    assert attention_reference(q, k, v).shape == q.shape
    packed = torch.empty(9, 2, 16, device="meta", requires_grad=True)
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    flash_attention_varlen(packed, packed, packed, cu, cu, is_causal=True).sum().backward()
    assert packed.grad.shape == packed.shape


@pytest.mark.parametrize(
    ("capability", "first"),
    [
        ((8, 0), "pointers"),
        ((8, 6), "pointers_86"),
        ((8, 7), "pointers"),
        ((8, 9), "pointers_86"),
        ((9, 0), "tma"),
        ((10, 3), "tma_100"),
        ((12, 0), "pointers_120"),
    ],
)
def test_each_compute_capability_has_its_tables_of_tiles(monkeypatch, capability, first):
    major, minor = capability
    properties = SimpleNamespace(
        major=major, minor=minor, shared_memory_per_block_optin=2**17, multi_processor_count=84
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    device = launch.get_device.__wrapped__(torch.device("cuda"))
    assert device.paths[0] == first
    assert device.paths[-1] == "pointers"


def test_tiles_are_pruned_to_the_shared_memory_of_a_gpu(monkeypatch):
    gpu = launch.Device(64 * 1024, 68, launch.AMPERE)
    monkeypatch.setattr(launch, "get_device", lambda _: gpu)
    from flashattn2.spec import AttentionSpec

    for (_, kind, kernel), dims in configs.TILES.items():
        dtype = torch.bfloat16 if kind == "half" else torch.float32
        for dim in dims:
            x = torch.empty(1, 1, 512, dim, dtype=dtype)
            plan = launch.plan_launch(
                kernel, kind, AttentionSpec(1.0, left=9, softcap=2.0), x, x, x, packed=False
            )
            assert not plan.meta.TMA
            used = configs.count_shared_bytes(kernel, plan.tile, x.element_size(), dim)
            assert used <= 64 * 1024 or max(plan.tile.block_m, plan.tile.block_n) == 16
