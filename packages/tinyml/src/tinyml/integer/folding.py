"""Folding of normalizations and clamping activations into the steps before them.

A batch normalization after a product becomes a part of its weight and bias. Activations that only
clamp, such as ReLU and ReLU6, clamp the previous step instead, because integers are clamped there
anyway.
"""

from __future__ import annotations

import torch

from tinyml.integer.steps import Affine, Concatenation, Gate, Product, Step, Sum, Table

_CLAMPS = {"relu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max"}


def folded(steps: list[Step]) -> list[Step]:
    """Fold normalizations and clamping activations into the previous step if it has one reader.

    Other normalizations become products. The last step is the output, because `torch.export`
    removes steps that do not lead to it.
    """
    readers = {step: [other for other in steps if step in other.sources] for step in steps}
    replaced: dict[Step, Step] = {}
    remaining: list[Step] = []
    for step in steps:
        step.sources = [replaced.get(source, source) for source in step.sources]
        before = step.sources[0] if step.sources else None
        if before is not None and len(readers[before]) == 1 and _fold(before, step):
            replaced[step] = before
            readers[before] = readers[step]
            continue
        if isinstance(step, Affine):
            replaced[step] = step.as_product()
            readers[replaced[step]] = readers[step]
        remaining.append(replaced.get(step, step))
    return remaining


def _fold(before: Step, step: Step) -> bool:
    """Make `before` compute the value of `step` as well, in place, if it can; return True if so."""
    if isinstance(step, Affine):
        if not isinstance(before, Product) or before.clamps:
            return False
        # A linear layer's channels are its last dimension; those of an image are dimension 1.
        if (before.geometry is None) != (len(step.shape) == 2):
            return False
        _normalize(before, step)
        return True
    if isinstance(before, Product | Sum | Concatenation | Gate) and _only_clamps(step):
        before.clamps.append(step.run)
        return True
    return False


def _only_clamps(step: Step) -> bool:
    """Return True if a step only clamps, to a range that contains zero."""
    if not isinstance(step, Table) or step.operator not in _CLAMPS:
        return False
    low, high = step.function(torch.tensor([-1e30, 1e30], device="cpu")).tolist()
    return bool(low <= 0 <= high)


def _normalize(product: Product, norm: Affine) -> None:
    """Fold a normalization into a product: w' = w f, b' = b f + shift."""
    weight = product.weight
    factor = norm.factor.view(-1, *(1,) * (weight.dim() - 1))
    bias = 0 if product.bias is None else product.bias.double() * norm.factor
    product.weight = (weight.double() * factor).to(weight.dtype)
    product.bias = (bias + norm.shift).to(weight.dtype)
