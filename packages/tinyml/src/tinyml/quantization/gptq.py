"""Round weights one column after another, and let the later ones make up for the error.

Notable (Frantar et al., "GPTQ", 2023):
- the sum over the data of (W x - Q x)^2 is what is kept small; its curvature H = sum x x^T is all
  that is needed of the data;
- it is the exact greedy method (optimal brain quantization) in a fixed order: the row of the
  Cholesky factor of H^-1 is what inverting the rest of H at each step would give;
- H of few or dependent inputs has no inverse. Its diagonal is raised until it has, never an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tinyml.layers import (
    check_bits,
    check_finite,
    compress_weights,
    dense_copy,
    evaluating,
    guarded,
    identity,
    is_conv1d,
    layers_of,
    outputs_first,
    some,
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
from tinyml.quantization.in_step import second_moment, visit_in_step
from tinyml.quantization.int8 import with_int8_linears


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
    """A copy of `model` with its linear weights rounded so that outputs on `batches` stay close.

    Runs `model(batch)` once for each batch, all batches in step: at each layer they wait until it
    is rounded, so it is done on the inputs that the rounded ones before it make, and the cost grows
    with the depth and no faster. A layer that never runs is rounded to the nearest.
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
    return round_in_step(model, batches, rounded, protect)


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
    """A copy of `model` whose linear weights are rounded after each input was scaled by its size.

    Inputs that are large on `batches` matter more, so their weights are multiplied by
    s = mean(|x|)^a before rounding and divided by it when read, which makes their error smaller
    (Lin et al., "AWQ", 2023, section 3.2). The share a of [0, 1) is the one of `steps` for which
    the layer's outputs change least; a = 0 is rounding to the nearest. Batches run as in `gptq`.
    """

    def rounded(layer: nn.Module, inputs: list[Tensor]) -> GridWeight:
        weight, transposed = weight_of(layer), is_conv1d(layer)
        first = outputs_first(layer, weight).float()
        hessian = second_moment(inputs) if inputs else _identity(first)
        check_finite("what a layer is given", hessian)
        tokens = torch.cat(inputs) if inputs else torch.ones_like(first[:1])
        size = tokens.float().abs().sum(0) / max(1, len(tokens))
        size = size.clamp(min=1e-4 * float(size.max()) + 1e-12)
        best, least = None, torch.inf
        for step in range(steps):
            divide = size ** (step / steps)
            # As it is kept: the weights are divided by the very numbers that they were times.
            divide = kept_in(weight.dtype, divide / (divide.max() * divide.min()).sqrt())
            rows = as_rows(first * wide(divide), kind, group_size)
            grid = grid_of(rows, bits, symmetric=symmetric, observer=observer)
            grid = grid.stored_as(weight.dtype)
            made = GridWeight(
                grid.quantize(rows), grid, weight, bits, transposed=transposed,
                divide=divide if step else None,
            )  # fmt: skip
            change = outputs_first(layer, made(weight)).double() - first.double()
            error = float(((change @ hessian) * change).sum())
            if best is None or error < least:
                best, least = made, error
        assert best is not None
        return best

    kind = granularity_of(None, group_size)
    check_bits(bits, "a grid has")
    if steps < 1:
        raise ValueError(f"{steps} steps; one or more shares are tried")
    return round_in_step(model, batches, rounded, protect)


@torch.no_grad()
def smoothquant(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    alpha: float = 0.5,
    activations: Literal["dynamic", "auto"] = "dynamic",
    protect: Sequence[str] = (),
) -> nn.Module:
    """`quantize(model, activations=...)` with inputs made even first, where a few are very large.

    Each input is divided by s = max|x|^alpha / max|w|^(1 - alpha) and its weights multiplied by it,
    so that the inputs' range is shared with the weights (Xiao et al., "SmoothQuant", 2023, equation
    4). Layers that share their weight with another stay as they are.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}; a share from 0 to 1")
    model, divide = dense_copy(model, (nn.Linear,)), {}
    layers = layers_of(model, (nn.Linear,), protect)
    shared = [identity(module) for module in model.modules()]

    def note(name: str, inputs: list[Tensor]) -> None:
        weight = outputs_first(layers[name], weight_of(layers[name])).float()
        check_finite(f"{name}.weight", weight)
        largest = torch.cat(inputs).float().abs().amax(0)
        check_finite(f"what {name} is given", largest)
        ratio = largest.clamp(min=1e-5) ** alpha / weight.abs().amax(0).clamp(min=1e-5) ** (
            1 - alpha
        )
        if shared.count(identity(layers[name])) == 1:
            divide[name] = ratio

    with evaluating(model):
        visit_in_step(model, some(batches), layers, note)
    return with_int8_linears(model, "minmax", activations, guarded(model, protect), divide)


def round_in_step(
    model: nn.Module,
    batches: Sequence[Any],
    rounded: Callable[[nn.Module, list[Tensor]], GridWeight],
    protect: Sequence[str],
) -> nn.Module:
    """A copy with each linear weight as `rounded(layer, inputs)` makes it, first to last.

    A layer that never runs gets no inputs: an empty list.
    """
    model = dense_copy(model, (nn.Linear,))
    layers = layers_of(model, (nn.Linear,), protect)
    for name, layer in layers.items():
        check_finite(f"{name}.weight".lstrip("."), weight_of(layer))
    done: dict[str, GridWeight] = {}

    def visit(name: str, inputs: list[Tensor]) -> None:
        weight = weight_of(layers[name])
        done[name] = rounded(layers[name], inputs)
        weight.copy_(done[name](weight))  # the layers behind it see what it will give

    with evaluating(model):
        visit_in_step(model, some(batches), layers, visit)
    for name in layers.keys() - done.keys():
        visit(name, [])
    return compress_weights(model, (nn.Linear,), lambda name, _: done.get(name), protect)


@torch.no_grad()
def gptq_codes(
    weight: Tensor, hessian: Tensor, grid: Grid, *, damping: float = 0.01, block: int = 128
) -> Tensor:
    """The codes (out, in) of a weight (out, in) on `grid`, given H = sum x x^T (in, in).

    `grid` has one row for the tensor, for each output, or for each group of inputs. `damping` is
    the share of H's mean diagonal that is added to it. Errors are spread inside blocks of columns
    first, then once to all columns after the block, which is the same sum in less memory traffic.
    """
    outputs, inputs = weight.shape
    if hessian.shape != (inputs, inputs):
        raise ValueError(
            f"the hessian is {tuple(hessian.shape)}; {(inputs, inputs)} for this weight"
        )
    if not (torch.isfinite(weight).all() and torch.isfinite(hessian).all()):
        raise ValueError("the weight or the calibration inputs hold nan or inf")
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
    """U, upper triangular, with U^T U = (H + d I)^-1, for the least d from `damping` on that works.

    d is tried at `damping` times the mean of the diagonal, then at ten times that, and so on.
    """
    hessian = hessian.double()
    identity = torch.eye(len(hessian), dtype=torch.float64, device=hessian.device)
    mean = float(hessian.diagonal().mean())
    if mean <= 0:  # no input was ever different from zero
        return identity
    share = max(damping, 1e-12)
    while True:
        lower, failed = torch.linalg.cholesky_ex(hessian + share * mean * identity)
        if not failed:
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and torch.isfinite(upper).all():
                return upper
        share *= 10


def _by_column(part: Tensor, outputs: int, inputs: int) -> Tensor:
    """Scales or zero points of rows, as the (out, in) matrix that each column reads."""
    each = part.double().numel()
    if each % outputs and each != 1:
        raise ValueError(f"{each} scales do not fit {outputs} outputs")
    if each == 1:
        return part.double().expand(outputs, inputs)
    per_row = part.double().view(outputs, -1)
    return per_row.repeat_interleave(inputs // per_row.shape[1], dim=1)


def _identity(weight: Tensor) -> Tensor:
    return torch.eye(weight.shape[1], dtype=torch.float64, device=weight.device)
