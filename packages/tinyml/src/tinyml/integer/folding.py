"""Folding of normalizations and clamping activations into the steps before them.

A batch normalization after a product becomes a part of its weight and bias. Activations that only
clamp, such as ReLU and ReLU6, become cuts of the previous step, because integers are clamped there
anyway.
"""

from __future__ import annotations

import torch

from tinyml.integer.steps import Step

_CUT_HERE = {"product", "sum", "cat", "gate"}
_CUTS = {"relu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max"}


def folded(steps: list[Step]) -> list[Step]:
    """Fold normalizations and clamping activations into the previous step if it has one reader.

    The last step is the output, because `torch.export` removes steps that do not lead to it.
    """
    readers = {step: [s for s in steps if step in s.sources] for step in steps}
    replaced: dict[Step, Step] = {}
    remaining = []
    for step in steps:
        step.sources = [replaced.get(source, source) for source in step.sources]
        before = step.sources[0] if step.sources else None
        alone = before is not None and len(readers.get(before, [])) <= 1
        if step.kind == "product" and step.signs and before is not None:
            is_plain_product = before.kind == "product" and not before.cuts and not before.signs
            # A linear layer's channels are its last dimension; those of an image are dimension 1.
            same_channels = (before.geometry is None) == (step.geometry is None)
            if alone and is_plain_product and same_channels:
                _normalize(before, step)
                replaced[step], readers[before] = before, readers[step]
                continue
        elif before is not None and alone and before.kind in _CUT_HERE and _cuts(step):
            assert step.function is not None
            before.cuts.append(step.function)
            replaced[step], readers[before] = before, readers[step]
            continue
        remaining.append(step)
    for step in remaining:
        if step.kind == "product":
            step.signs = ()
    return remaining


def _cuts(step: Step) -> bool:
    """Return True if a step only clamps, to a range that contains zero."""
    if step.operator not in _CUTS or step.function is None:
        return False
    ends = step.function(torch.tensor([-1e30, 1e30]))
    return float(ends[0]) <= 0 <= float(ends[1])


def _normalize(product: Step, norm: Step) -> None:
    """Fold a normalization into a product: w' = w f, b' = b f + shift."""
    assert product.weight is not None
    assert norm.function is not None
    assert norm.bias is not None
    weight = norm.function(product.weight)
    factor = norm.function(torch.ones(len(weight), 1, dtype=torch.float64)).view(-1)
    bias = 0 if product.bias is None else product.bias.double() * factor
    product.bias = (bias + norm.bias.double()).to(product.weight.dtype)
    product.weight = weight.to(product.weight.dtype)
