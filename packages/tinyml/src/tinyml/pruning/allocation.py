"""Allocation of bits or sparsities to layers under a budget of bytes.

The losses of single layers (`sensitivity`) are assumed to add up. Dynamic programming over bytes
finds the choice with the least total loss that fits. Bytes are rounded up to 1/4096 of the budget,
so the choice always fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tinyml.conversion import plain_copy
from tinyml.layers import QUANTIZABLE, is_conv1d, layers_of, outputs_first, weight_of
from tinyml.pruning.magnitude import importance, prune, smallest_mask
from tinyml.pruning.sensitivity import Sensitivity
from tinyml.quantization.grid import as_rows, grid_of
from tinyml.quantization.linear import quantize
from tinyml.quantization.pack import packed_bytes
from tinyml.size import Size, has_value, size_of
from tinyml.validation import check_bits

_PARTS = 4096


@dataclass(frozen=True)
class Allocation:
    """The storage of each layer; a layer without bits or sparsity is unchanged."""

    bits: dict[str, int]
    sparsity: dict[str, float]
    #: The size of the whole model, as `size_of(...).sparse_bytes` counts it.
    bytes: int
    #: The predicted loss of the metric if the losses of layers add up.
    loss: float

    def apply(self, model: nn.Module) -> nn.Module:
        """Return a copy of the model, pruned and quantized as allocated."""
        small = plain_copy(model)
        if self.sparsity:
            small = prune(small, self.sparsity, layers=QUANTIZABLE).model
        return quantize(small, self.bits) if self.bits else small


def round_weight(weight: Tensor, bits: float) -> Tensor:
    """Return the weight rounded to `quantize`'s grid with `bits` bits, for a scan over bits."""
    if bits != int(bits):
        raise ValueError(f"{bits} bits; a code has a whole number of them")
    rows = as_rows(weight.float())
    grid = grid_of(rows, int(bits)).stored_as(weight.dtype)
    return grid.dequantize(grid.quantize(rows)).view(weight.shape).to(weight.dtype)


def allocate(
    model: nn.Module,
    budget_bytes: int,
    *,
    bits: Sensitivity | None = None,
    sparsity: Sensitivity | None = None,
    larger_is_better: bool = True,
) -> Allocation:
    """Return the bits and sparsities with the least loss that fit in `budget_bytes`.

    `bits` is `sensitivity(..., amounts=(2, 3, 4, ...), compress=round_weight)`, and `sparsity` is a
    scan over sparsities. `larger_is_better` is True if the metric is an accuracy, False if it is a
    loss.
    """
    scans_by_kind = {"bits": bits, "sparsity": sparsity}
    scans = {kind: scan for kind, scan in scans_by_kind.items() if scan is not None}
    if not scans:
        raise ValueError("expected a scan over bits, over sparsities, or both; got neither")
    budget_bytes = int(budget_bytes)
    model = plain_copy(model)  # as `apply` starts from it
    layers = layers_of(model, QUANTIZABLE)
    size = size_of(model)
    stored = {name: _stored_bytes(size, name) for name in layers}
    forms: dict[str, list[tuple[float, int, str, float]]] = {}
    for kind, scan in scans.items():
        for name, values in scan.values.items():
            if name not in layers:
                raise ValueError(f"the scan has a layer {name!r} that the model lacks")
            mine = forms.setdefault(name, [(0.0, stored[name], "", 0.0)])
            for amount, value in values.items():
                if math.isnan(value) or math.isnan(scan.baseline):
                    raise ValueError(
                        f"expected a scan without nan, got a metric of {value} for {name!r} at "
                        f"{amount} and a baseline of {scan.baseline}; use a metric that is a number"
                    )
                lost = scan.baseline - value if larger_is_better else value - scan.baseline
                nbytes = _bytes(layers[name], kind, amount)
                mine.append((max(lost, 0.0), nbytes, kind, amount))
    fixed = size.sparse_bytes - sum(stored[name] for name in forms)
    least = fixed + sum(min(form[1] for form in choices) for choices in forms.values())
    unit = max(1, budget_bytes // _PARTS)
    if least > budget_bytes:
        raise ValueError(f"{budget_bytes} bytes are below {least}, the least of these forms")
    chosen, total = _cheapest(list(forms.values()), (budget_bytes - fixed) // unit, unit)
    picked = dict(zip(forms, chosen, strict=True))
    return Allocation(
        {name: int(form[3]) for name, form in picked.items() if form[2] == "bits"},
        {name: form[3] for name, form in picked.items() if form[2] == "sparsity"},
        fixed + sum(form[1] for form in chosen),
        total,
    )


def _bytes(layer: nn.Module, kind: str, amount: float) -> int:
    weight = weight_of(layer)
    if kind == "bits":
        check_bits(int(amount) if amount == int(amount) else amount, "a grid has")
        rows = len(outputs_first(layer, weight) if is_conv1d(layer) else weight)
        return packed_bytes(weight.numel(), int(amount)) + rows * weight.itemsize
    score = importance(outputs_first(layer, weight))
    pruned = weight.masked_fill(~outputs_first(layer, smallest_mask(score, amount)), 0)
    nonzero = int(has_value(pruned).sum())
    return min(weight.nbytes, -(-weight.numel() // 8) + nonzero * weight.itemsize)


def _stored_bytes(size: Size, name: str) -> int:
    """Return the bytes of a layer's weight in its stored form, possibly pruned or compressed."""
    weight = f"{name}.weight".lstrip(".")
    parts = f"{name}.parametrizations.weight.".lstrip(".")
    tensors = size.sparse_by_name.items()
    return sum(nbytes for key, nbytes in tensors if key == weight or key.startswith(parts))


def _cheapest(forms: list[list[Any]], room: int, unit: int) -> tuple[list[Any], float]:
    """Choose one form from each list; least[b] is the least loss of the lists so far in b units."""
    least = torch.zeros(room + 1, dtype=torch.float64)
    tables = []
    for choices in forms:
        trials = torch.full((len(choices), room + 1), torch.inf, dtype=torch.float64)
        for number, (lost, nbytes, *_) in enumerate(choices):
            size = -(-nbytes // unit)
            if size <= room:
                trials[number, size:] = least[: room + 1 - size] + lost
        least, best = trials.min(0)
        tables.append(best)
    if not torch.isfinite(least[room]):
        raise ValueError("the budget is too close to the smallest size of these forms; increase it")
    chosen, total = [], float(least[room])
    for choices, best in zip(reversed(forms), reversed(tables), strict=True):
        form = choices[int(best[room])]
        room -= -(-form[1] // unit)
        chosen.append(form)
    return chosen[::-1], total
