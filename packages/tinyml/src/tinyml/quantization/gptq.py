"""Calibrated rounding of weights: GPTQ, AWQ and SmoothQuant.

GPTQ (Frantar et al., "GPTQ", 2023) rounds one column after another and updates the later columns to
compensate for the error. It minimizes the sum over the data of (W x - Q x)^2, which depends on the
data only through H = sum x x^T. It equals greedy optimal brain quantization in a fixed order: a row
of the Cholesky factor of H^-1 replaces inverting the remaining part of H at each step. H is
singular for few or dependent inputs; its diagonal is increased until the factorization succeeds.

With groups of inputs, the grid of a group is fitted to the updated weights when its first column is
reached. Columns with large inputs may be rounded first, when the most other columns can still
compensate for them; groups then follow each other as wholes, so the storage does not change.
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
from tinyml.quantization.calibration import (
    InputStatistics,
    Progress,
    visit_layers,
    watch_inputs,
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
    activation_order: bool = True,
    protect: Sequence[str] = (),
    progress: Progress | None = None,
) -> nn.Module:
    """Return a copy of `model` with linear weights rounded by GPTQ on `batches`.

    `model(batch)`, or `model(**batch)` for a mapping, runs up to each layer, and later layers are
    calibrated on the outputs of rounded layers. Blocks of rounded layers do not run again (Note
    [Replayed blocks]). Tokens that `batch["attention_mask"]` marks as padding do not count. A layer
    that never runs is rounded to the nearest code. With `activation_order`, inputs with large
    values are rounded first. `progress(name, done, total)` is called after each layer.
    """

    def grid_for(rows: Tensor, dtype: torch.dtype) -> Grid:
        return grid_of(rows, bits, symmetric=symmetric, observer=observer).stored_as(dtype)

    def rounded(layer: nn.Module, statistics: InputStatistics | None) -> GridWeight:
        weight = weight_of(layer)
        first = outputs_first(layer, weight).float()
        rows = as_rows(first, kind, group_size)
        grid = grid_for(rows, weight.dtype)
        if statistics is None:
            codes = grid.quantize(rows)
        else:
            codes, grid = gptq_codes(
                outputs_first(layer, weight),
                statistics.moment,
                grid,
                damping=damping,
                activation_order=activation_order,
                refit=(lambda r: grid_for(r.float(), weight.dtype)) if kind == "group" else None,
            )
        return GridWeight(codes.view(rows.shape), grid, weight, bits, transposed=is_conv1d(layer))

    kind = granularity_of(granularity, group_size)
    check_bits(bits, "a grid has")
    return round_layers(model, batches, rounded, protect, progress)


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
    progress: Progress | None = None,
) -> nn.Module:
    """Return a copy of `model` with linear weights scaled by AWQ before rounding.

    Inputs that are large on `batches` matter more. Their weights are multiplied by s = mean(|x|)^a
    before rounding and divided by s when read, which reduces their error (Lin et al., "AWQ", 2023,
    section 3.2). The exponent a in [0, 1) is the one of `steps` values for which the layer's
    outputs change least; a = 0 is rounding to nearest. Batches run as in `gptq`.
    """

    def rounded(layer: nn.Module, statistics: InputStatistics | None) -> GridWeight:
        weight, transposed = weight_of(layer), is_conv1d(layer)
        first = outputs_first(layer, weight).float()
        if statistics is None:
            hessian = torch.eye(first.shape[1], dtype=torch.float64, device=first.device)
            size = torch.ones_like(first[0])
        else:
            hessian = statistics.moment
            check_finite("the inputs of a layer", hessian)
            size = (statistics.absolute / max(1, statistics.tokens)).float()
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
    return round_layers(model, batches, rounded, protect, progress)


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

    largest: dict[str, Tensor] = {}

    def note(name: str, inputs: Tensor) -> None:
        if len(inputs):
            most = inputs.float().abs().amax(0)
            largest[name] = torch.maximum(most, largest.get(name, most))

    with evaluation_mode(model):
        watch_inputs(model, require_batches(batches), layers, note)
    for name, most in largest.items():
        weight = outputs_first(layers[name], weight_of(layers[name])).float()
        check_finite(f"{name}.weight", weight)
        check_finite(f"the inputs of {name}", most)
        most = without_dead_inputs(most).clamp(min=1e-5)
        if shared.count(weight_identity(layers[name])) == 1:
            divide[name] = most**alpha / weight.abs().amax(0).clamp(min=1e-5) ** (1 - alpha)
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
    rounded: Callable[[nn.Module, InputStatistics | None], GridWeight],
    protect: Sequence[str],
    progress: Progress | None = None,
) -> nn.Module:
    """Return a copy with each linear weight replaced by `rounded(layer, statistics)`, in order.

    `statistics` is None for a layer that never runs.
    """
    model = dense_copy(model, (nn.Linear,))
    layers = layers_of(model, (nn.Linear,), protect)
    for name, layer in layers.items():
        check_finite(f"{name}.weight".lstrip("."), weight_of(layer))
    done: dict[str, GridWeight] = {}

    def visit(name: str, statistics: InputStatistics | None) -> None:
        weight = weight_of(layers[name])
        done[name] = rounded(layers[name], statistics)
        weight.copy_(done[name](weight))  # later layers are calibrated on its rounded outputs

    with evaluation_mode(model):
        visit_layers(model, require_batches(batches), layers, visit, progress)
    for name in layers.keys() - done.keys():
        visit(name, None)
    return compress_weights(model, (nn.Linear,), lambda name, _: done.get(name), protect)


@torch.no_grad()
def gptq_codes(
    weight: Tensor,
    hessian: Tensor,
    grid: Grid,
    *,
    damping: float = 0.01,
    block: int = 128,
    activation_order: bool = False,
    refit: Callable[[Tensor], Grid] | None = None,
) -> tuple[Tensor, Grid]:
    """Return the codes (out, in) of a weight (out, in), given H = sum x x^T (in, in), and the grid.

    `grid` has one row for the tensor, per output, or per group of inputs. `refit(rows)` returns the
    grid of the updated weights (out, group) of one group. `damping` is the fraction of H's mean
    diagonal that is added to the diagonal. Errors are propagated within blocks of columns first and
    then once to all later columns, which is the same sum with less memory traffic.
    """
    outputs, inputs = weight.shape
    if hessian.shape != (inputs, inputs):
        raise ValueError(
            f"expected a Hessian of shape (in, in) = {(inputs, inputs)} for this weight, "
            f"got {tuple(hessian.shape)}"
        )
    if not (_is_finite(weight) and _is_finite(hessian)):
        raise ValueError("expected finite weights and calibration inputs, got nan or inf")
    scale, zero = (_per_output(part, outputs) for part in (grid.scale, grid.zero))
    group = -(-inputs // scale.shape[1])
    order = torch.arange(inputs, device=weight.device)
    if activation_order:
        order = _by_activation(hessian.diagonal(), group)
    if refit is not None:
        block = -(-block // group) * group  # a group is up to date only within its block
        scale, zero = scale.clone(), zero.clone()
    factor = inverse_factor(hessian, damping, order)
    remaining = weight[:, order].double()
    codes = torch.empty(outputs, inputs, dtype=torch.int32, device=weight.device)
    for start in range(0, inputs, block):
        end = min(start + block, inputs)
        errors = torch.empty(outputs, end - start, dtype=torch.float64, device=weight.device)
        for i in range(start, end):
            number = int(order[i]) // group
            if refit is not None and i % group == 0:
                fitted = refit(remaining[:, i : i + group])
                scale[:, number], zero[:, number] = fitted.scale[:, 0], fitted.zero[:, 0]
            column = Grid(scale[:, number], zero[:, number], grid.low, grid.high)
            rounded = column.quantize(remaining[:, i])
            codes[:, order[i]] = rounded
            error = (remaining[:, i] - column.dequantize(rounded)) / factor[i, i]
            remaining[:, i:end] -= error[:, None] * factor[i, i:end]
            errors[:, i - start] = error
        remaining[:, end:] -= errors @ factor[start:end, end:]
    if refit is not None:
        scale, zero = (p.reshape(grid.scale.shape).to(grid.scale.dtype) for p in (scale, zero))
        grid = Grid(scale, zero, grid.low, grid.high)
    return codes, grid


def _by_activation(size: Tensor, group: int) -> Tensor:
    """Return the columns, the largest diagonal of H first, with groups that stay together."""
    by_group = size.view(-1, group)
    groups = by_group.sum(1).argsort(descending=True, stable=True)
    inside = by_group.argsort(dim=1, descending=True, stable=True)
    starts = torch.arange(0, len(size), group, device=size.device)[:, None]
    return (starts + inside)[groups].flatten()


def inverse_factor(hessian: Tensor, damping: float, order: Tensor | None = None) -> Tensor:
    """Return upper triangular U with U^T U = (H + d I)^-1, for the first d that succeeds.

    d starts at `damping` times the mean of the diagonal and is multiplied by ten until it succeeds.
    Rows and columns of H are taken in `order`.
    """
    hessian = hessian.double()
    size = len(hessian)
    order = torch.arange(size, device=hessian.device) if order is None else order
    mean = float(hessian.diagonal().mean())
    if mean <= 0:  # all inputs are zero
        return torch.eye(size, dtype=torch.float64, device=hessian.device)
    fraction = max(damping, 1e-12)
    # With P for the reversal of rows and P H P = L L^T, U is P L^-1 P. Most of the memory of a wide
    # layer is H and three matrices of its size in this loop.
    order = order.flip(0)
    while True:
        lower = hessian[order[:, None], order]
        lower.diagonal().add_(fraction * mean)
        lower, failed = torch.linalg.cholesky_ex(lower)
        if not failed:
            inverse = torch.eye(size, dtype=torch.float64, device=hessian.device)
            torch.linalg.solve_triangular(lower, inverse, upper=False, out=inverse)
            if _is_finite(inverse):
                del lower
                return inverse.flip(0, 1)
        fraction *= 10


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def _per_output(part: Tensor, outputs: int) -> Tensor:
    """Return scales or zero points of rows as (outputs, groups)."""
    count = part.numel()
    if count % outputs and count != 1:
        raise ValueError(f"{count} scales do not fit {outputs} outputs")
    return part.double().view(1 if count == 1 else outputs, -1).expand(outputs, -1)
