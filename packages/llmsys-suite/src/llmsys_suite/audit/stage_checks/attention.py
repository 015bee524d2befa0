"""Checks of `attention`: kernels against the formula in float64, times against the audit's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import flashattn2
import torch
import torch.nn.functional as F
from torch import Tensor

from llmsys_suite import results
from llmsys_suite.audit import reference
from llmsys_suite.audit.check import Check, Sources, compare_rows
from llmsys_suite.audit.stage_checks import timing
from llmsys_suite.config import RunConfig, get_size
from llmsys_suite.folder import RunFolder
from llmsys_suite.model import plain_attention
from llmsys_suite.ranks.rank import Run
from llmsys_suite.stages import attention

#: The kernel for each name in the table, defined independently of the stage.
KERNELS: dict[str, Callable[..., Tensor]] = {
    "plain": plain_attention,
    "SDPA": F.scaled_dot_product_attention,
    "flashattn2": flashattn2.flash_attention,
    "flashattn2 tiled": partial(flashattn2.flash_attention, backend="torch"),
}
#: Allowed relative distance of attention from float64 by dtype of products: about five times the
#: largest distance of correct kernels, which is 1e-6 in float32 (for gradients) and 5e-3 in bf16.
#: tf32 has three more mantissa bits than bf16, so its rounding errors are one eighth as large.
ATTENTION_TOLERANCE = {"fp32": 5e-6, "tf32": 2.5e-2 / 8, "bf16": 2.5e-2}


def check_records(folder: RunFolder, result: results.Attention) -> Iterator[Check]:
    """Check the rows of the table, the shape, and the figures that follow from the timings."""
    yield compare_rows("kernels", KERNELS, [row["kernel"] for row in result.rows])
    shape = _compute_query_shape(folder.config)
    wrong = [] if result.shape == shape else [f"{result.shape} instead of {shape}"]
    yield Sources("reported", "the configuration").check_none("shape", wrong)
    medians = {row["kernel"]: row["forward_backward_ms"] for row in result.rows}
    yield from timing.check_totals(result.interleaved, medians)
    ratios = {row["kernel"]: 1 / row["ratio_to_sdpa_p50"] for row in result.rows}
    yield timing.check_speedups(result.interleaved, attention.PEER, ratios)


def check_stage(run: Run, result: results.Attention) -> Iterator[Check]:
    """Compare outputs, gradients and times of all kernels."""
    inputs = _draw_inputs(run)
    exact = reference.compute_attention(*(t.detach().double() for t in inputs))
    # Other inputs detect a kernel that returns a stored result for the inputs of the stage.
    other_inputs = [(t + 0.1).detach() for t in inputs]
    leaves = [t.double().requires_grad_() for t in other_inputs]
    out = reference.compute_attention(*leaves)
    expected = [out.detach(), *torch.autograd.grad(out.sum(), leaves)]
    distances = []
    errors = []
    misnamed = []
    for row in result.rows:
        name = row["kernel"]
        kernel = attention.KERNELS[name]
        error = float((kernel(*inputs, is_causal=True).detach() - exact).abs().max())
        errors.append((error, row["max_error"], name))
        computed = attention.forward_backward(kernel, *(t.requires_grad_() for t in other_inputs))
        with torch.no_grad():
            named_out = KERNELS[name](*other_inputs, is_causal=True)
        # Two implementations round differently, so equal bits identify the kernel.
        if not torch.equal(computed[0], named_out):
            misnamed.append(name)
        tensors = zip(("out", "dq", "dk", "dv"), computed, expected, strict=True)
        for tensor_name, actual, exact_tensor in tensors:
            where = f"{name} {tensor_name}"
            distances.append((reference.compute_distance(actual, exact_tensor), where))
    kernels = Sources("every kernel", "float64")
    tolerance = ATTENTION_TOLERANCE[run.config.dtype]
    yield kernels.check_distances("outputs and gradients", distances, tolerance)
    bits = Sources("bits of the outputs", "the kernel of this name")
    yield bits.check_none("kernels", misnamed)
    yield Sources("reported", "the audit's own").check_all_equal("largest error", errors, 0.01)
    yield from _check_times(run, result, inputs)


def _compute_query_shape(config: RunConfig) -> list[int]:
    """Return the shape of the queries: rows of one rank, heads, context, head_dim."""
    size = get_size(config.size)
    rows = max(1, config.rows // config.world)
    return [rows, size.num_heads, config.context, size.d_model // size.num_heads]


def _draw_inputs(run: Run) -> tuple[Tensor, Tensor, Tensor]:
    """Return the q, k and v that the stage draws."""
    shape = _compute_query_shape(run.config)
    dtype = torch.bfloat16 if run.config.dtype == "bf16" else torch.float32
    torch.manual_seed(run.config.seed)
    drawn = [torch.randn(shape, device=run.device).to(dtype) for _ in range(3)]
    q, k, v = (tensor.requires_grad_() for tensor in drawn)
    return q, k, v


def _check_times(
    run: Run, result: results.Attention, inputs: tuple[Tensor, Tensor, Tensor]
) -> Iterator[Check]:
    """Time each of the `KERNELS` on `inputs`, and compare the stage's times with these times."""
    calls = {
        name: partial(attention.forward_backward, kernel, *inputs)
        for name, kernel in KERNELS.items()
    }

    def compare(timed: timing.Rounds) -> Iterator[Check]:
        yield from timing.check_shortest(result.interleaved, timed)
        yield from timing.check_ratios(result.interleaved, attention.PEER, timed)

    yield from timing.check_against_rounds(run, calls, compare)
