"""Calibrated rounding of weights: GPTQ, AWQ and SmoothQuant.

GPTQ (Frantar et al., "GPTQ", 2023) rounds one column after another and updates the later columns to
compensate for the error. It minimizes the sum over the data of (W x - Q x)^2, which depends on the
data only through H = sum x x^T. It equals greedy optimal brain quantization in a fixed order: a row
of the Cholesky factor of H^-1 replaces inverting the remaining part of H at each step. H is
singular for few or dependent inputs; its diagonal is increased until the factorization succeeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tinyml.conversion import compress_weights, dense_copy, evaluation_mode
from tinyml.layers import (
    is_conv1d,
    layers_of,
    outputs_first,
    protected_modules,
    weight_identity,
    weight_of,
)
from tinyml.quantization.grid import (
    Granularity,
    Grid,
    Observer,
    as_rows,
    granularity_of,
    grid_of,
    kept_in,
    wide,
)
from tinyml.quantization.grid_weight import GridWeight
from tinyml.quantization.int8 import with_int8_linears
from tinyml.quantization.synchronized_batches import second_moment, visit_layers
from tinyml.validation import check_bits, check_finite, require_batches


@torch.no_grad()
def gptq(
    model: nn.Module,
    batches: Sequence[Any],
    bits: int = 4,
    *,
    granularity: Granularity | None = None,
    group_size: int | None = None,
    symmetric: bool = True,
    observer: Observer = "minmax",
    damping: float = 0.01,
    protect: Sequence[str] = (),
) -> nn.Module:
    """Return a copy of `model` with linear weights rounded by GPTQ on `batches`.

    `model(batch)`, or `model(**batch)` for a mapping, runs once per batch, with all batches in
    step: at each layer they wait until the layer is rounded, so later layers are calibrated on the
    outputs of rounded layers. Tokens that `batch["attention_mask"]` marks as padding do not count.
    A layer that never runs is rounded to the nearest code.
    """

    def rounded(layer: nn.Module, inputs: list[Tensor]) -> GridWeight:
        weight = weight_of(layer)
        first = outputs_first(layer, weight)
        hessian = second_moment(inputs) if inputs else _identity(first)
        rows = as_rows(first.float(), kind, group_size)
        grid = grid_of(rows, bits, symmetric=symmetric, observer=observer).stored_as(weight.dtype)
        codes = gptq_codes(first, hessian, grid, damping=damping).view(rows.shape)
        return GridWeight(codes, grid, weight, bits, transposed=is_conv1d(layer))

    kind = granularity_of(granularity, group_size)
    check_bits(bits, "a grid has")
    return round_layers(model, batches, rounded, protect)


@torch.no_grad()
def awq(
    model: nn.Module,
    batches: Sequence[Any],
    bits: int = 4,
    *,
    group_size: int | None = None,
    symmetric: bool = True,
    observer: Observer = "minmax",
    steps: int = 20,
    protect: Sequence[str] = (),
) -> nn.Module:
    """Return a copy of `model` with linear weights scaled by AWQ before rounding.

    Inputs that are large on `batches` matter more. Their weights are multiplied by s = mean(|x|)^a
    before rounding and divided by s when read, which reduces their error (Lin et al., "AWQ", 2023,
    section 3.2). The exponent a in [0, 1) is the one of `steps` values for which the layer's
    outputs change least; a = 0 is rounding to nearest. Batches run as in `gptq`.
    """

    def rounded(layer: nn.Module, inputs: list[Tensor]) -> GridWeight:
        weight, transposed = weight_of(layer), is_conv1d(layer)
        first = outputs_first(layer, weight).float()
        hessian = second_moment(inputs) if inputs else _identity(first)
        check_finite("the inputs of a layer", hessian)
        tokens = torch.cat(inputs) if inputs else torch.ones_like(first[:1])
        size = tokens.float().abs().sum(0) / max(1, len(tokens))
        size = without_dead_inputs(size)
        size = size.clamp(min=1e-4 * float(size.max()) + 1e-12)
        best, least = None, torch.inf
        for step in range(steps):
            divide = size ** (step / steps)
            # The weights are multiplied by the stored factors, by which they are divided later.
            divide = kept_in(weight.dtype, divide / (divide.max() * divide.min()).sqrt())
            rows = as_rows(first * wide(divide), kind, group_size)
            grid = grid_of(rows, bits, symmetric=symmetric, observer=observer)
            grid = grid.stored_as(weight.dtype)
            candidate = GridWeight(
                grid.quantize(rows),
                grid,
                weight,
                bits,
                transposed=transposed,
                divide=divide if step else None,
            )
            change = outputs_first(layer, candidate(weight)).double() - first.double()
            error = float(((change @ hessian) * change).sum())
            if best is None or error < least:
                best, least = candidate, error
        assert best is not None
        return best

    kind = granularity_of(None, group_size)
    check_bits(bits, "a grid has")
    if steps < 1:
        raise ValueError(f"expected steps >= 1, got {steps}")
    return round_layers(model, batches, rounded, protect)


@torch.no_grad()
def smoothquant(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    alpha: float = 0.5,
    activations: Literal["dynamic", "auto"] = "dynamic",
    protect: Sequence[str] = (),
) -> nn.Module:
    """Return `quantize(model, activations=...)` of a model whose inputs were smoothed first.

    Each input is divided by s = max|x|^alpha / max|w|^(1 - alpha), and its weights are multiplied
    by s, so that the weights take over part of the inputs' range (Xiao et al., "SmoothQuant", 2023,
    equation 4). Layers that share their weight with another layer are not smoothed.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"expected 0 <= alpha <= 1, got {alpha}")
    model, divide = dense_copy(model, (nn.Linear,)), {}
    layers = layers_of(model, (nn.Linear,), protect)
    shared = [weight_identity(module) for module in model.modules()]

    def note(name: str, inputs: list[Tensor]) -> None:
        weight = outputs_first(layers[name], weight_of(layers[name])).float()
        check_finite(f"{name}.weight", weight)
        largest = torch.cat(inputs).float().abs().amax(0)
        check_finite(f"the inputs of {name}", largest)
        largest = without_dead_inputs(largest)
        ratio = largest.clamp(min=1e-5) ** alpha / weight.abs().amax(0).clamp(min=1e-5) ** (
            1 - alpha
        )
        if shared.count(weight_identity(layers[name])) == 1:
            divide[name] = ratio

    with evaluation_mode(model):
        visit_layers(model, require_batches(batches), layers, note)
    return with_int8_linears(
        model, "minmax", activations, protected_modules(model, protect), divide
    )


def without_dead_inputs(size: Tensor) -> Tensor:
    """Return the sizes of a layer's inputs with zeros replaced by the median of the other sizes.

    Calibration says nothing about the size of an input that was always zero. A factor of almost
    zero would round its weights to zero, or divide its next value by almost zero.
    """
    alive = size > 0
    return torch.where(alive, size, size[alive].median() if alive.any() else torch.ones_like(size))


def round_layers(
    model: nn.Module,
    batches: Sequence[Any],
    rounded: Callable[[nn.Module, list[Tensor]], GridWeight],
    protect: Sequence[str],
) -> nn.Module:
    """Return a copy with each linear weight replaced by `rounded(layer, inputs)`, first to last.

    `inputs` is an empty list for a layer that never runs.
    """
    model = dense_copy(model, (nn.Linear,))
    layers = layers_of(model, (nn.Linear,), protect)
    for name, layer in layers.items():
        check_finite(f"{name}.weight".lstrip("."), weight_of(layer))
    done: dict[str, GridWeight] = {}

    def visit(name: str, inputs: list[Tensor]) -> None:
        weight = weight_of(layers[name])
        done[name] = rounded(layers[name], inputs)
        weight.copy_(done[name](weight))  # later layers are calibrated on its rounded outputs

    with evaluation_mode(model):
        visit_layers(model, require_batches(batches), layers, visit)
    for name in layers.keys() - done.keys():
        visit(name, [])
    return compress_weights(model, (nn.Linear,), lambda name, _: done.get(name), protect)


@torch.no_grad()
def gptq_codes(
    weight: Tensor, hessian: Tensor, grid: Grid, *, damping: float = 0.01, block: int = 128
) -> Tensor:
    """Return the codes (out, in) of a weight (out, in) on `grid`, given H = sum x x^T (in, in).

    `grid` has one row for the tensor, per output, or per group of inputs. `damping` is the fraction
    of H's mean diagonal that is added to the diagonal. Errors are propagated within blocks of
    columns first and then once to all later columns, which is the same sum with less memory
    traffic.
    """
    outputs, inputs = weight.shape
    if hessian.shape != (inputs, inputs):
        raise ValueError(
            f"expected a Hessian of shape (in, in) = {(inputs, inputs)} for this weight, "
            f"got {tuple(hessian.shape)}"
        )
    if not (torch.isfinite(weight).all() and torch.isfinite(hessian).all()):
        raise ValueError("expected finite weights and calibration inputs, got nan or inf")
    scale, zero = (_by_column(part, outputs, inputs) for part in (grid.scale, grid.zero))
    factor = inverse_factor(hessian, damping)
    remaining = weight.double().clone()
    codes = torch.empty(outputs, inputs, dtype=torch.int32, device=weight.device)
    for start in range(0, inputs, block):
        end = min(start + block, inputs)
        errors = torch.empty(outputs, end - start, dtype=torch.float64, device=weight.device)
        for i in range(start, end):
            column = Grid(scale[:, i], zero[:, i], grid.low, grid.high)
            codes[:, i] = column.quantize(remaining[:, i])
            error = (remaining[:, i] - column.dequantize(codes[:, i])) / factor[i, i]
            remaining[:, i:end] -= error[:, None] * factor[i, i:end]
            errors[:, i - start] = error
        remaining[:, end:] -= errors @ factor[start:end, end:]
    return codes


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """Return upper triangular U with U^T U = (H + d I)^-1, for the first d that succeeds.

    d starts at `damping` times the mean of the diagonal and is multiplied by ten until it succeeds.
    """
    hessian = hessian.double()
    identity = torch.eye(len(hessian), dtype=torch.float64, device=hessian.device)
    mean = float(hessian.diagonal().mean())
    if mean <= 0:  # all inputs are zero
        return identity
    fraction = max(damping, 1e-12)
    while True:
        lower, failed = torch.linalg.cholesky_ex(hessian + fraction * mean * identity)
        if not failed:
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and torch.isfinite(upper).all():
                return upper
        fraction *= 10


def _by_column(part: Tensor, outputs: int, inputs: int) -> Tensor:
    """Expand scales or zero points of rows to a matrix (out, in)."""
    count = part.double().numel()
    if count % outputs and count != 1:
        raise ValueError(f"{count} scales do not fit {outputs} outputs")
    if count == 1:
        return part.double().expand(outputs, inputs)
    per_row = part.double().view(outputs, -1)
    return per_row.repeat_interleave(inputs // per_row.shape[1], dim=1)


def _identity(weight: Tensor) -> Tensor:
    return torch.eye(weight.shape[1], dtype=torch.float64, device=weight.device)
