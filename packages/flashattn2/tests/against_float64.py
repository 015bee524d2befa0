"""How far a result is from float64, beside how far plain PyTorch is in the same dtype."""

import torch
from flashattn2 import attention_reference

NAMES = ("output", "lse", "dq", "dk", "dv")


def results(run, tensors, dtype, grads, **options):
    """Output, log-sum-exp and the gradients for given cotangents, in float64."""
    q, k, v = (x.to(dtype).requires_grad_() for x in tensors)
    out, lse = run(q, k, v, return_lse=True, **options)
    seen = lse.isfinite()
    loss = (out * grads[0].to(out.dtype)).sum() + (lse * grads[1].to(lse.dtype))[seen].sum()
    return [
        x.detach().double().masked_fill(x == -torch.inf, 0.0)
        for x in (out, lse, *torch.autograd.grad(loss, (q, k, v)))
    ]


def assert_as_good_as_plain(
    run, tensors, *, ulps=1, reference=attention_reference, lse_shape=None, **options
):
    """At most twice plain PyTorch's error, and one unit in the last place of the largest value.

    The error is the root mean square over all elements, which hardly changes from draw to draw. The
    largest single one does (0.5 to 6 times plain's, torch's own kernel among them); ten times
    plain's still tells an element that is wrong from one that is unlucky.
    ``ulps`` is 2 where the interpreter truncates to bfloat16 instead of rounding.
    """
    dtype = tensors[0].dtype
    # Cotangents that the dtype holds exactly, so that all three compute the same thing.
    device = tensors[0].device
    out_grad = torch.randn(tensors[0].shape, device=device).to(dtype)
    lse_grad = torch.randn(lse_shape or tensors[0].shape[:-1], device=device)
    grads = (out_grad, lse_grad)
    exact = results(reference, tensors, torch.float64, grads, **options)
    plain = results(reference, tensors, dtype, grads, **options)
    ours = results(run, tensors, dtype, grads, **options)
    for name, e, p, o in zip(NAMES, exact, plain, ours, strict=True):
        precision = torch.float32 if name == "lse" else dtype
        rounding = ulps * torch.finfo(precision).eps * _largest(e)
        for measure, factor in ((_root_mean_square, 2), (_largest, 10)):
            error, allowed = measure(o - e), factor * measure(p - e) + rounding
            message = f"{name} is off by {error:.2e}, allowed {allowed:.2e}: {options}"
            assert error <= allowed, message


def _root_mean_square(x):
    return x.square().mean().sqrt()


def _largest(x):
    return x.abs().max()
