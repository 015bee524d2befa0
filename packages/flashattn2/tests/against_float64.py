"""Errors against float64, compared with those of plain PyTorch in the same dtype."""

from math import sqrt
from statistics import mean, median

import torch
from flashattn2 import attention_reference
from flashattn2.spec import make_spec

NAMES = ("output", "lse", "dq", "dk", "dv")


def compute_textbook_attention(
    q,
    k,
    v,
    *,
    is_causal=False,
    scale=None,
    window=None,
    softcap=None,
    sinks=None,
    return_lse=False,
):
    """Compute attention in plain PyTorch: matrix product, softmax, matrix product.

    It is more exact than the reference, which computes P from a rounded log-sum-exp.
    """
    spec = make_spec(q.shape[-1], is_causal, scale, window, softcap)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = (q @ k.mT) * spec.scale
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    queries, keys = (torch.arange(n, device=q.device) for n in s.shape[-2:])
    hidden = spec.make_hidden_mask(queries, keys, len(keys) - len(queries))
    if sinks is not None:
        s = torch.cat((s, sinks.to(s.dtype)[:, None, None].expand(*s.shape[:-1], 1)), -1)
        hidden = torch.nn.functional.pad(hidden, (0, 1))
        v = torch.nn.functional.pad(v, (0, 0, 0, 1))
    blind = hidden.all(-1)[:, None]
    s = s.masked_fill(hidden & ~blind, -torch.inf)
    out = (s.softmax(-1) @ v).masked_fill(blind, 0.0)
    return out, s.logsumexp(-1).masked_fill(blind[:, 0], -torch.inf)


def compute_results(run, tensors, dtype, grads, **options):
    """Return the output, log-sum-exp and gradients for some cotangents, in float64."""
    q, k, v = (x.to(dtype).requires_grad_() for x in tensors)
    out, lse = run(q, k, v, return_lse=True, **options)
    seen = lse.isfinite()
    loss = (out * grads[0].to(out.dtype)).sum() + (lse * grads[1].to(lse.dtype))[seen].sum()
    return [
        x.detach().double().masked_fill(x == -torch.inf, 0.0)
        for x in (out, lse, *torch.autograd.grad(loss, (q, k, v)))
    ]


def assert_as_good_as_plain(
    run, tensors, *, one_by_one=lambda run: run, lse_shape=None, draws=1, **options
):
    """Assert that errors are at most twice those of plain PyTorch.

    The results are the output, log-sum-exp, dQ, dK and dV.  The bound applies to the root mean
    square of the errors of all draws in every dtype, and to the largest error in half precision.

    In float32 the largest of several thousand errors varies by more than a factor of two even
    between two versions of plain PyTorch with different orders of summation.  Therefore the largest
    float32 error is bounded by five times plain's in each draw, which detects a wrong element, and
    by twice plain's in the median of `draws`.  One query has few errors, so its bound per draw is
    ten: over 14,400 draws the largest ratio was 5.9, and the largest median 1.8.
    """
    dtype, device = tensors[0].dtype, tensors[0].device
    exactly, plainly = one_by_one(attention_reference), one_by_one(compute_textbook_attention)
    ratios = {name: [] for name in NAMES}
    squares = {name: [] for name in NAMES}
    for draw in range(draws):
        if draw:
            tensors = [torch.randn(x.shape, device=device).to(dtype) for x in tensors]
        # The dtype represents the cotangents exactly, so all three runs compute the same function.
        grads = (
            torch.randn(*tensors[0].shape[:-1], tensors[2].shape[-1], device=device).to(dtype),
            torch.randn(lse_shape or tensors[0].shape[:-1], device=device),
        )
        exact = compute_results(exactly, tensors, torch.float64, grads, **options)
        plain = compute_results(plainly, tensors, dtype, grads, **options)
        ours = compute_results(run, tensors, dtype, grads, **options)
        for name, e, p, o in zip(NAMES, exact, plain, ours, strict=True):
            errors = o - e, p - e
            squares[name].append([x.square().mean().item() for x in errors])
            float32_limit = 10 if tensors[0].shape[-2] == 1 else 5
            limit = float32_limit if dtype == torch.float32 else 2
            _assert_at_most(limit, name, *map(_get_largest, errors), options)
            ratios[name].append(_get_largest(errors[0]) / (_get_largest(errors[1]) or 1.0))
    for name, of_draws in squares.items():
        ours, plain = (sqrt(mean(column)) for column in zip(*of_draws, strict=True))
        _assert_at_most(2, f"the root mean square of {name}", ours, plain, options)
    if draws > 1:
        for name, of_draws in ratios.items():
            _assert_at_most(2, f"the largest error of {name}", median(of_draws), 1.0, options)


def _assert_at_most(factor, name, ours, plain, options):
    message = f"{name} is off by {ours:.2e}, plain PyTorch by {plain:.2e}: {options}"
    assert ours <= factor * plain, message


def _get_largest(x):
    return x.abs().max().item()
