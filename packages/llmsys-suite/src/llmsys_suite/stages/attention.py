"""Which attention kernel suits this machine: ours, plain and SDPA at the model's own shapes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import flashattn2
import torch
import torch.nn.functional as F
from torch import Tensor

from llmsys_suite.model import ModelConfig, plain_attention

if TYPE_CHECKING:
    from llmsys_suite.worker import Run

ROUNDS = 7


def run(run: Run) -> dict[str, Any]:
    """Forward and backward of each kernel, taking turns, on rank 0; errors against float64."""
    if run.rank != 0:
        return {}
    config = ModelConfig.named(run.config.size, context=run.config.context)
    rows = max(1, run.config.rows // run.world)
    shape = (rows, config.num_heads, config.context, config.d_model // config.num_heads)
    torch.manual_seed(run.config.seed)
    q, k, v = (torch.randn(shape, device=run.device, requires_grad=True) for _ in range(3))
    kernels: dict[str, Callable[..., Any]] = {
        "plain": plain_attention,
        "SDPA": F.scaled_dot_product_attention,
        "flashattn2": flashattn2.flash_attention,
        "flashattn2 tiled": lambda q, k, v, is_causal: flashattn2.flash_attention(
            q, k, v, is_causal=is_causal, backend="torch"
        ),
    }
    exact = plain_attention(q.double(), k.double(), v.double(), is_causal=True)
    seconds = _rounds(kernels, q, k, v)
    rows_out = []
    for name, kernel in kernels.items():
        ratios = [a / b for a, b in zip(seconds[name], seconds["SDPA"], strict=True)]
        error = (kernel(q, k, v, is_causal=True).double() - exact).abs().max()
        rows_out.append(
            {
                "kernel": name,
                "forward_backward_ms": statistics.median(seconds[name]) * 1e3,
                "ratio_to_sdpa_p50": statistics.median(ratios),
                "max_error": float(error.detach()),
            }
        )
    why = str(flashattn2.explain(q, k, v, is_causal=True))
    return {"shape": list(shape), "rows": rows_out, "explain": why}


def _rounds(
    kernels: dict[str, Callable[..., Any]], q: Tensor, k: Tensor, v: Tensor
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in kernels}
    for turn in range(ROUNDS + 1):
        for name, kernel in kernels.items():
            _synchronize(q.device)
            begin = time.perf_counter()
            out = kernel(q, k, v, is_causal=True)
            torch.autograd.grad(out.sum(), (q, k, v))
            _synchronize(q.device)
            if turn > 0:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
