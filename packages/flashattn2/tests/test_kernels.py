"""The Triton kernels in Triton's interpreter have small errors against float64."""

import math

import pytest
import torch
from against_float64 import assert_as_good_as_plain
from flashattn2 import (
    FlashAttentionTriton,
    attention_reference,
    flash_attention,
    flash_attention_with_kvcache,
)
from flashattn2.kernels import launch
from option_pairs import OPTIONS, draw_tensors, list_cases_of_pairs, make_sinks
from triton.runtime import interpreter as triton_interpreter


def triton(*arguments, **options):
    return flash_attention(*arguments, **options, backend="triton")


@pytest.mark.parametrize("case", list_cases_of_pairs(OPTIONS), ids=str)
def test_every_pair_of_options_is_as_good_as_plain(interpreter, case):
    case = dict(case)
    interpreter(splits=case.pop("splits"), tma=case.pop("tma"))
    shape = case.pop("shape")
    of_heads = make_sinks(case.pop("sinks"), shape)
    # In the interpreter, every program takes long, and these sequences have enough rows.
    inputs = [x[: 4 if shape == "one query" else 1] for x in draw_tensors(shape, case.pop("dim"))]
    if shape in ("square", "more keys"):
        # The test of half precision has two key heads, each for two query heads.
        inputs = [x[:, : x.shape[1] // 2] for x in inputs]
        of_heads = {name: x[: inputs[0].shape[1]] for name, x in of_heads.items()}
    assert_as_good_as_plain(triton, inputs, **case, **of_heads)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {"is_causal": True}),
        (torch.float16, {"window": (19, 3), "softcap": 2.0}),
    ],
    ids=str,
)
def test_half_precision_is_as_good_as_plain(interpreter, dtype, options):
    assert_as_good_as_plain(triton, draw_tensors("more keys", 24, dtype), **options)


@pytest.mark.parametrize("draws", [3, pytest.param(9, marks=pytest.mark.exhaustive)])
def test_largest_float32_error_of_the_median_draw_is_at_most_twice_that_of_plain(
    interpreter, draws
):
    inputs = [x[:, : x.shape[1] // 2] for x in draw_tensors("more keys", 24)]
    assert_as_good_as_plain(triton, inputs, draws=draws, is_causal=True, softcap=2.0)


@pytest.mark.parametrize(
    ("splits", "dtype"),
    [
        (3, torch.float32),
        (1, torch.float16),
        pytest.param(1, torch.float32, marks=pytest.mark.exhaustive),
        pytest.param(3, torch.float16, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_nothing_is_read_before_it_is_written(interpreter, monkeypatch, splits, dtype):
    interpreter(splits=splits)
    # torch fills every empty tensor with NaN in this mode.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        # Query heads share a key head: dK and dV are sums. The first tile of queries sees no key.
        inputs = [x[:, :, :54] for x in draw_tensors("fewer keys", 24, dtype)]
        assert_as_good_as_plain(triton, inputs, is_causal=True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_launch_does_not_call_slow_triton_functions(interpreter, monkeypatch):
    """Triton's host functions took half of the time before a launch."""
    interpreter(splits=2)
    monkeypatch.setattr(triton_interpreter.GridExecutor, "__call__", lambda *_, **__: None)
    for name in ("cdiv", "next_power_of_2"):
        monkeypatch.setattr(f"triton.{name}", None)
    q, k, v = (x.requires_grad_() for x in draw_tensors("more keys", 24, torch.float16))
    triton(q, k, v, is_causal=True).sum().backward()
    with torch.no_grad():
        flash_attention_with_kvcache(q[:, :, :1], k, v, cache_seqlens=5, backend="triton")


def test_two_deterministic_runs_are_bit_equal(interpreter, monkeypatch):
    """The second run executes the programs of each kernel in the reverse order."""
    interpreter(splits=3)
    set_grid_idx = triton_interpreter.InterpreterBuilder.set_grid_idx
    reversed_grids = []

    def set_reversed_idx(builder, *indices):
        reversed_grids.append(builder.grid_dim)
        last = [size - 1 for size in builder.grid_dim]
        set_grid_idx(builder, *(n - i for n, i in zip(last, indices, strict=True)))

    q = torch.randn(1, 2, 20, 16, requires_grad=True)
    k, v = torch.randn(2, 1, 1, 70, 16).requires_grad_()
    runs = []
    for order in (set_grid_idx, set_reversed_idx):
        monkeypatch.setattr(triton_interpreter.InterpreterBuilder, "set_grid_idx", order)
        out = triton(q, k, v, is_causal=True)
        runs.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    assert max(math.prod(grid) for grid in reversed_grids) > 1
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_that_see_no_key_give_zero_and_no_gradient(interpreter, backend):
    q, k, v = (x.requires_grad_() for x in draw_tensors("fewer keys", 16))
    out, lse = flash_attention(q, k, v, is_causal=True, return_lse=True, backend=backend)
    blind = q.shape[2] - k.shape[2]
    (grad,) = torch.autograd.grad(out.sum() + lse[:, :, blind:].sum(), q)
    assert (out[:, :, :blind] == 0).all()
    assert (lse[:, :, :blind] == -torch.inf).all()
    assert (grad[:, :, :blind] == 0).all()
    assert (grad[:, :, blind:] != 0).any()


def test_paper_function_equals_the_reference_and_saves_one_number_per_row(interpreter):
    Q = torch.randn(2, 21, 16, requires_grad=True)
    out = FlashAttentionTriton.apply(Q, Q, Q, True)
    assert [t.shape for t in out.grad_fn.saved_tensors].count((2, 21)) == 1
    expected = attention_reference(Q, Q, Q, is_causal=True)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(out.square().sum(), Q),
        torch.autograd.grad(expected.square().sum(), Q),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("programs", "loop", "processors", "splits"),
    [(132, 64, 132, 1), (64, 64, 132, 2), (32, 64, 132, 4), (1, 512, 132, 16), (1, 3, 132, 1)],
)
def test_splits_fill_the_gpu_with_at_least_four_tiles_each(programs, loop, processors, splits):
    assert launch.count_splits(programs, loop, processors) == splits
