"""GPTQ: rounding of weights, column by column, with each error compensated in later columns.

The method is that of Frantar et al., "GPTQ", 2023. Each update of the later columns minimizes the
sum of |W x - Q x|^2 over the inputs x, which depends on them only through H = sum x x^T. GPTQ
equals optimal brain quantization in a fixed order. A row of the Cholesky factor of H^-1 replaces
inverting the remaining part of H at each step. H is singular for few or dependent inputs; its
diagonal is increased until the factorization succeeds.

Columns with large inputs may be rounded first, while most other columns can still compensate for
their errors. The columns of a group then stay together, so the storage does not change. Zeros of
the weight stay zeros, so a pruned model remains sparse.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tinyml.calibration.replay import visit_layers
from tinyml.conversion import (
    check_supported,
    evaluation_mode,
    install_weight,
    make_plain_copy,
    warn_of_dense_weights,
)
from tinyml.layers import (
    check_weights,
    find_layers,
    find_protected,
    get_weight,
    is_conv1d,
    is_instance_of,
    put_outputs_first,
)
from tinyml.quantization.grid import Grid, as_rows, check_grid_bits, compute_grid, widen
from tinyml.quantization.grid_weight import GridWeight
from tinyml.validation import (
    Progress,
    check_finite,
    check_number,
    format_names,
    require_batches,
)


@torch.inference_mode(mode=False)  # inference tensors do not count their modifications
@torch.no_grad()
def gptq(
    model: nn.Module,
    batches: Sequence[Any],
    bits: int = 4,
    *,
    group_size: int | None = None,
    symmetric: bool = True,
    damping: float = 0.01,
    activation_order: bool = True,
    protect: Sequence[str] = (),
    progress: Progress | None = None,
) -> nn.Module:
    """Return a copy of `model` with linear weights rounded by GPTQ on `batches`.

    `model(batch)`, or `model(**batch)` for a mapping, runs up to each layer in evaluation mode. A
    batch that is a list or tuple of one tensor counts as this tensor. Later layers are calibrated
    on the outputs of rounded layers. Blocks of rounded layers do not run again
    (Note [Replayed blocks]). Tokens at which `batch["attention_mask"]` (batch, seq) is zero are
    padding and do not count. A weight that several layers share is rounded for the inputs of the
    first of these layers. A layer that receives no inputs other than zeros is rounded to the
    nearest codes. A warning names the first four of these layers.

    There is one scale per output, or per group of `group_size` inputs; with symmetric=False there
    is also a zero point. `damping` times the mean of H's diagonal is added to the diagonal; it is
    increased until H can be factored. With `activation_order`, inputs with large values are rounded
    first, group by group. `progress(name, done, total)` is called after each layer.
    """
    check_grid_bits(bits, symmetric)
    check_number("damping", damping)
    if not 0 <= damping < math.inf:
        raise ValueError(f"expected a finite damping of at least 0, got {damping}")
    check_supported(model)
    aliases = _make_weight_aliases(model)
    model = make_plain_copy(model, dict(aliases))
    layers = find_layers(model, (nn.Linear,), protect)
    check_weights(layers)
    rounded: set[str] = set()
    uncalibrated: list[str] = []

    def make_grid(rows: Tensor, dtype: torch.dtype) -> Grid:
        return compute_grid(rows, bits, symmetric=symmetric).round_scales(dtype)

    def round_layer(name: str, hessian: Tensor | None) -> None:
        layer = layers[name]
        weight = get_weight(layer)
        rows = as_rows(widen(put_outputs_first(layer, weight)), group_size)
        grid = make_grid(rows, weight.dtype)
        if hessian is None or not hessian.any():
            uncalibrated.append(name)
            codes = grid.quantize(rows)
        else:
            codes, grid = compute_gptq_codes(
                put_outputs_first(layer, weight),
                hessian,
                grid,
                damping=damping,
                activation_order=activation_order,
                refit=None if group_size is None else lambda r: make_grid(r.to(rows), weight.dtype),
            )
        codes = codes.view(rows.shape)
        stored = GridWeight.from_codes(codes, grid, weight, bits, transposed=is_conv1d(layer))
        install_weight(model, layer, stored)  # later layers are calibrated on its rounded outputs
        rounded.add(name)

    with evaluation_mode(model):
        visit_layers(model, require_batches(batches), layers, round_layer, progress)
    for name in [name for name in layers if name not in rounded]:
        round_layer(name, None)
        if progress is not None:
            progress(name, len(rounded), len(layers))
    if uncalibrated:
        warnings.warn(
            "layers that received no inputs other than zeros are rounded to the nearest codes, "
            f"{len(uncalibrated)} in total: {format_names(uncalibrated)}; calibrate on more "
            "batches, or protect these layers to leave them dense",
            stacklevel=2,
        )
    for alias in set(aliases.values()).intersection(model.parameters()):
        alias.data = alias.data.clone()  # a protected weight must not share the original's memory
    warn_of_dense_weights(model, find_protected(model, protect))
    return model


def _make_weight_aliases(model: nn.Module) -> dict[int, nn.Parameter]:
    """Return parameters that share the memory of linear layers' weights, by the ids of the weights.

    With this result as its memo, `copy.deepcopy` does not copy the weights, which will be replaced.
    """
    layers = (layer for layer in model.modules() if is_instance_of(layer, (nn.Linear,)))
    weights = (layer._parameters.get("weight") for layer in layers)
    return {id(w): nn.Parameter(w.data, w.requires_grad) for w in weights if w is not None}


@torch.no_grad()
def compute_gptq_codes(
    weight: Tensor,
    hessian: Tensor,
    grid: Grid,
    *,
    damping: float = 0.01,
    block: int = 128,
    activation_order: bool = False,
    refit: Callable[[Tensor], Grid] | None = None,
) -> tuple[Tensor, Grid]:
    """Return the codes (out, in) of a weight (out, in), and the grid that they refer to.

    `hessian` is H = sum x x^T (in, in) over the calibration inputs x. `grid` has one row per output
    or per group of inputs. With `refit`, the grid of a group is fitted again before its columns are
    rounded: `refit(rows)` returns the grid of its updated weights `rows` (out, group). `damping` is
    that of `compute_reversed_cholesky`. Errors are compensated within `block` columns first, and
    then once in all later columns; the sums are the same, with less memory traffic.
    """
    outputs, inputs = weight.shape
    check_finite("the weight", weight)
    # If the diagonal is finite, so are all sums. The check of a whole H would copy it.
    check_finite("the calibration inputs", hessian.diagonal())
    scale, zero = (part.double().view(outputs, -1) for part in (grid.scale, grid.zero))
    group = inputs // scale.shape[1]
    order = torch.arange(inputs, device=weight.device)
    if activation_order:
        order = _compute_activation_order(hessian.diagonal(), group)
    if refit is not None:
        block = -(-block // group) * group  # only columns of one block contain all earlier errors
        scale, zero = scale.clone(), zero.clone()
    lower = compute_reversed_cholesky(hessian, damping, order)
    remaining = weight[:, order].double()
    codes = torch.empty(outputs, inputs, dtype=torch.int32, device=weight.device)
    for start in range(0, inputs, block):
        end = min(start + block, inputs)
        factor = compute_inverse_factor_rows(lower, start, end)
        errors = torch.empty(outputs, end - start, dtype=torch.float64, device=weight.device)
        for i in range(end - start):
            column = int(order[start + i])
            index = column // group
            if refit is not None and (start + i) % group == 0:
                fitted = refit(remaining[:, start + i : start + i + group])
                scale[:, index] = fitted.scale[:, 0]
                zero[:, index] = fitted.zero[:, 0]
            column_grid = Grid(scale[:, index], zero[:, index], grid.low, grid.high)
            rounded = column_grid.quantize(remaining[:, start + i])
            # Updates move pruned weights away from zero; they are set to zero again.
            rounded = rounded.where(weight[:, column] != 0, column_grid.zero.int())
            codes[:, column] = rounded
            error = (remaining[:, start + i] - column_grid.dequantize(rounded)) / factor[i, i]
            remaining[:, start + i : end] -= error[:, None] * factor[i, i : end - start]
            errors[:, i] = error
        remaining[:, end:] -= errors @ factor[:, end - start :]
    if refit is not None:
        scale, zero = (p.reshape(grid.scale.shape).to(grid.scale.dtype) for p in (scale, zero))
        grid = Grid(scale, zero, grid.low, grid.high)
    return codes, grid


def _compute_activation_order(diagonal: Tensor, group: int) -> Tensor:
    """Return the columns in descending order of H's diagonal.

    Groups of columns are ordered by their sums, and the columns of a group by their values.
    """
    by_group = diagonal.view(-1, group)
    groups = by_group.sum(1).argsort(descending=True, stable=True)
    inside = by_group.argsort(dim=1, descending=True, stable=True)
    starts = torch.arange(0, len(diagonal), group, device=diagonal.device)[:, None]
    return (starts + inside)[groups].flatten()


def compute_reversed_cholesky(hessian: Tensor, damping: float, order: Tensor) -> Tensor:
    """Return lower triangular L with L L^T = R (G / h + d I) R, for the first d that succeeds.

    G is H with rows and columns in `order`, and R reverses the order of rows or columns. h is the
    mean of H's diagonal, which cancels out in GPTQ's updates. d starts at max(`damping`, 1e-12) and
    is multiplied by ten until the factorization succeeds. Return the identity if H is zero.
    """
    mean = float(hessian.diagonal().mean())
    if mean <= 0:  # all inputs are zero
        return torch.eye(len(hessian), dtype=torch.float64, device=hessian.device)
    fraction = max(damping, 1e-12)
    reverse = order.flip(0)
    failed = torch.empty((), dtype=torch.int32, device=hessian.device)
    while True:
        # For a wide layer, this matrix and H need most of the memory, so it is factored in place.
        # LAPACK does this for a symmetric matrix whose columns are contiguous.
        lower = hessian[reverse[:, None], reverse].double().div_(mean).mT
        lower.diagonal().add_(fraction)
        torch.linalg.cholesky_ex(lower, out=(lower, failed))
        if not failed:
            return lower
        fraction *= 10


def compute_inverse_factor_rows(lower: Tensor, start: int, end: int) -> Tensor:
    """Return rows `start` to `end` of U, without the columns before `start`, which are zero.

    U is upper triangular, with U^T U = (G / h + d I)^-1. With G, L and R of
    `compute_reversed_cholesky`, it is R L^-1 R. Only the rows of one block of columns are computed
    at a time, because all rows need as much memory as H.
    """
    size = len(lower)
    identity_rows = lower.new_zeros(end - start, size)
    identity_rows.diagonal(size - end).fill_(1)
    rows = torch.linalg.solve_triangular(lower, identity_rows, upper=False, left=False)
    return rows[:, : size - start].flip(0, 1)
