"""Times and errors of attention at the model's shapes: flashattn2, unfused attention and SDPA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flashattn2
import torch
import torch.nn.functional as F
from torch import Tensor

from llmsys_suite.measure.interleaved import time_interleaved
from llmsys_suite.model import plain_attention
from llmsys_suite.ranks.rank import Run
from llmsys_suite.results import Attention

ROUNDS = 7
PEER = "SDPA"
KERNELS: dict[str, Callable[..., Any]] = {
    "plain": plain_attention,
    PEER: F.scaled_dot_product_attention,
    "flashattn2": flashattn2.flash_attention,
    "flashattn2 tiled": partial(flashattn2.flash_attention, backend="torch"),
}


def run(run: Run) -> Attention | None:
    """Time each kernel in interleaved rounds, and compare its output with float64, on rank 0."""
    if run.rank != 0:
        return None
    q, k, v = draw_inputs(run)
    exact = plain_attention(q.double(), k.double(), v.double(), is_causal=True)
    interleaved = time_interleaved(
        {name: partial(forward_backward, kernel, q, k, v) for name, kernel in KERNELS.items()},
        ROUNDS,
        run.device,
    )
    rows = [
        {
            "kernel": name,
            "forward_backward_ms": interleaved.compute_median_ms(name),
            "ratio_to_sdpa_p50": interleaved.compute_ratio(PEER, name),
            "max_error": float((kernel(q, k, v, is_causal=True) - exact).abs().max().detach()),
        }
        for name, kernel in KERNELS.items()
    ]
    explanation = str(flashattn2.explain(q, k, v, is_causal=True))
    return Attention(list(q.shape), rows, explanation, interleaved)


def draw_inputs(run: Run) -> tuple[Tensor, Tensor, Tensor]:
    """Return random q, k and v, each of shape (rows of one rank, heads, context, head_dim)."""
    config = run.model
    rows = max(1, run.config.rows // run.world)
    shape = (rows, config.num_heads, config.context, config.d_model // config.num_heads)
    torch.manual_seed(run.config.seed)
    q, k, v = (
        torch.randn(shape, device=run.device).to(run.compute_dtype).requires_grad_()
        for _ in range(3)
    )
    return q, k, v


def forward_backward(kernel: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of its sum with respect to q, k and v."""
    out = kernel(q, k, v, is_causal=True)
    return [out.detach(), *torch.autograd.grad(out.sum(), (q, k, v))]
