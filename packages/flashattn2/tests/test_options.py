"""Sinks and other head dims of values, on every backend."""

import pytest
import torch
from flashattn2 import (
    attention_reference,
    flash_attention,
    flash_attention_varlen,
)
from option_pairs import draw_tensors
from torch.autograd import gradcheck, gradgradcheck

CU = torch.tensor([0, 3, 9], dtype=torch.int32)


@pytest.mark.parametrize("backend", ["torch", "aten", "triton"])
@pytest.mark.parametrize("packed", [False, True])
def test_sinks_have_the_gradients_of_the_reference(interpreter, backend, packed):
    q, k, v = (x[:1, :, :9] for x in draw_tensors("square", (16, 24)))
    sinks = torch.randn(2)
    results = []
    for run in ("ours", "reference"):
        leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
        *x, s = leaves
        if run == "ours" and packed:
            rows = (t[0].transpose(0, 1) for t in x)
            out, lse = flash_attention_varlen(
                *rows, CU, CU, sinks=s, return_lse=True, backend=backend, is_causal=True
            )
            out, lse = out.transpose(0, 1)[None], lse[None]
        elif run == "ours":
            out, lse = flash_attention(
                *x, sinks=s, return_lse=True, backend=backend, is_causal=True
            )
        else:
            cuts = (slice(0, 3), slice(3, 9)) if packed else (slice(None),)
            parts = [
                attention_reference(
                    *(t[:, :, c] for t in x), sinks=s, return_lse=True, is_causal=True
                )
                for c in cuts
            ]
            out, lse = (torch.cat(part, 2) for part in zip(*parts, strict=True))
        loss = out.square().sum() + lse.sin().sum()
        results.append((out, lse, *torch.autograd.grad(loss, leaves)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("fast_mode", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_sinks_and_values_of_another_head_dim_pass_gradcheck_and_gradgradcheck(fast_mode):
    shapes = ((1, 2, 5, 3), (1, 1, 4, 3), (1, 1, 4, 2), (2,))
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]

    def run(q, k, v, sinks):
        return flash_attention(
            q, k, v, sinks=sinks, softcap=2.0, window=(2, 1), backend="torch", return_lse=True
        )

    assert gradcheck(run, leaves, fast_mode=fast_mode)
    assert gradgradcheck(run, leaves, fast_mode=fast_mode)


@pytest.mark.parametrize("backend", ["torch", "aten"])
def test_small_sink_keeps_its_gradient(backend):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 33, 16).double()
    sinks = torch.tensor([-14.0, -40.0], dtype=torch.float64)  # shares of about 1e-8 and 1e-19
    grads = []
    for dtype, function in ((torch.float64, attention_reference), (torch.float32, flash_attention)):
        leaf = sinks.to(dtype).requires_grad_()
        options = {"backend": backend} if function is flash_attention else {}
        out = function(*(x.to(dtype) for x in (q, k, v)), sinks=leaf, **options)
        grads += torch.autograd.grad(out.square().sum(), leaf)
    torch.testing.assert_close(grads[1].double(), grads[0], rtol=1e-4, atol=0)


def test_row_that_sees_no_key_sees_its_sink():
    q, k = torch.randn(1, 2, 5, 8, requires_grad=True), torch.randn(1, 2, 3, 8)
    sinks = torch.tensor([0.5, -1.0], requires_grad=True)
    for function in (flash_attention, attention_reference):
        out, lse = function(q, k, k, sinks=sinks, is_causal=True, return_lse=True)
        assert (out[:, :, :2] == 0).all()
        torch.testing.assert_close(lse[0, :, :2], sinks[:, None].expand(2, 2))
        grads = torch.autograd.grad(out.sum() + lse.sum(), (q, sinks))
        assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("sink", [-1e4, 0.0, 1e4])
def test_second_derivatives_are_right_for_any_distance_between_scores_and_sink(sink):
    """The rows include one that sees no key, whose log-sum-exp is -inf without its sink."""
    q = torch.randn(1, 1, 5, 8, requires_grad=True)
    k = torch.randn(1, 1, 4, 8, requires_grad=True)
    sinks = torch.full((1,), sink, requires_grad=True)
    seconds = []
    for function in (flash_attention, attention_reference):
        out, lse = function(q, k, k, sinks=sinks, is_causal=True, return_lse=True)
        loss = out.sin().sum() + lse.sin().sum()
        grads = torch.autograd.grad(loss, (q, k, sinks), create_graph=True)
        norm = sum(g.square().sum() for g in grads)
        seconds.append(torch.autograd.grad(norm, (q, k, sinks)))
    torch.testing.assert_close(*seconds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dims", [(24, 16), (16, 24)])
@pytest.mark.parametrize("layout", ["heads first", "sequence first"])
def test_aten_backend_accepts_values_of_another_head_dim(dtype, dims, layout):
    q, k, v = (x.to(dtype) for x in draw_tensors("square", dims))
    if layout == "sequence first":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    results = []
    for function in (lambda *a, **o: flash_attention(*a, backend="aten", **o), attention_reference):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = function(*leaves, is_causal=True)
        assert out.shape == (*q.shape[:-1], dims[1])
        results.append((out, *torch.autograd.grad(out.float().sin().sum(), leaves)))
    tolerance = {torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-10}[dtype]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("sinks", "error", "message"),
    [
        (torch.zeros(3), ValueError, r"one number per query head, got .* of shape \(3,\)"),
        (torch.zeros(4, dtype=torch.int64), ValueError, r"got torch.int64"),
        (torch.zeros(4, device="meta"), ValueError, r"device of q, cpu, got meta"),
        ([0.0] * 4, TypeError, r"sinks to be a torch.Tensor, got list"),
    ],
)
@pytest.mark.parametrize("function", [flash_attention, attention_reference])
def test_wrong_sinks_are_refused(function, sinks, error, message):
    q, k = torch.zeros(1, 4, 8, 16), torch.zeros(1, 2, 8, 16)
    with pytest.raises(error, match=message):
        function(q, k, k, sinks=sinks)
