"""How an optimizer may be split over ranks, found by trying it rather than by its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

Split = Literal["elements", "parameters"]
STEPS = 3
# Sides of the larger matrices that an optimizer is tried on, where it will see as many elements.
SIDES = (64, 256)


def how_to_split(
    optimizer_cls: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    device: torch.device | None = None,
    *,
    group: Mapping[str, Any] | None = None,
    shapes: Iterable[Sequence[int]] = (),
) -> Split:
    """Say how `optimizer_cls(params, **options)` may be sharded, after three small steps of it.

    "elements" if cutting its tensors anywhere leaves its steps as they are (SGD, Adam, ...);
    "parameters" if it must see whole tensors but treats each by itself (Adafactor, Muon).
    `group`: what a parameter group has beside its parameters. `shapes`: its parameters'; some
    optimizers treat those of many elements, or of four dimensions, differently. Raises ValueError
    with the reason if it can be neither (LBFGS, SparseAdam).
    """
    # A step of no length, as warm-up begins with, would show nothing.
    options, group = (
        {**o, "lr": 0.01} if not o.get("lr", 1) else o for o in (options, group or {})
    )
    seen = [tuple(shape) for shape in shapes]
    # Eight-bit states, for one, are kept in blocks of tensors that are large enough.
    largest = max(map(prod, seen), default=0)
    sides = {side for side in SIDES if largest >= side**2}
    # Some factor what both sides of a matrix are long enough for.
    squarest = max((min(shape) for shape in seen if len(shape) == 2), default=0)
    sides |= {min(squarest, max(SIDES))} if squarest > min(SIDES) else set()
    kinds: list[tuple[int, ...]] = [(side, side) for side in sorted(sides)]
    # A rule such as `p.dim() == 4` is of convolutions.
    kinds += [(3, *[2] * (dim - 2), 3) for dim in sorted({*map(len, seen)}) if dim > 2]
    key = optimizer_cls, f"{options} {group} {device} {kinds}"
    if key not in _found:
        # A caller may have set another default device, such as meta.
        with torch.device(device or "cpu"):
            split = _try(optimizer_cls, options, group, [(6, 4), (4, 5)])
            for kind in kinds:
                if split == "elements":
                    split = _try(optimizer_cls, options, group, [kind, (6, 4)])
        if " at 0x" in key[1]:
            # An address does not name an option for good.
            return split
        _found[key] = split
    return _found[key]


# What was found for a class, its options and sizes: trying takes some twenty milliseconds.
_found: dict[tuple[type, str], Split] = {}


def _try(
    optimizer_cls: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    group: Mapping[str, Any],
    shapes: Sequence[tuple[int, ...]],
) -> Split:
    name = optimizer_cls.__name__
    random = np.random.default_rng(0)

    def draw() -> list[Tensor]:
        return [torch.tensor(random.standard_normal(shape)) for shape in shapes]

    values, gradients = draw(), [draw() for _ in range(STEPS)]
    steps = [[g[i] for g in gradients] for i in range(len(shapes))]
    try:
        whole = _run(optimizer_cls, options, group, values, steps)
        apart = [
            _run(optimizer_cls, options, group, [v], [g])[0]
            for v, g in zip(values, steps, strict=True)
        ]
    except Exception as error:
        raise ValueError(
            f"{name} cannot be sharded: it fails on dense matrices with a plain step() ({error}); "
            'if it works on your parameters, pass split="parameters" or split="elements"'
        ) from error
    if not _same(whole, apart):
        raise ValueError(
            f"{name} cannot be sharded: its step on one parameter depends on the others, which "
            "other ranks hold; use it unsharded"
        )
    cut = 7
    try:
        parts = _run(
            optimizer_cls,
            options,
            group,
            [piece for v in values for piece in _cut(v, cut)],
            [[_cut(g, cut)[i] for g in steps_of] for steps_of in steps for i in range(2)],
        )
    except Exception:
        # An optimizer that refuses vectors wants matrices.
        return "parameters"
    joined = [torch.cat(parts[i : i + 2]) for i in range(0, len(parts), 2)]
    return "elements" if _same([w.flatten() for w in whole], joined) else "parameters"


def _cut(tensor: Tensor, at: int) -> tuple[Tensor, Tensor]:
    flat = tensor.flatten()
    return flat[:at], flat[at:]


def _run(
    optimizer_cls: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    group: Mapping[str, Any],
    values: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> list[Tensor]:
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = optimizer_cls([{**group, "params": parameters}], **options)
    for step in range(STEPS):
        for parameter, steps in zip(parameters, gradients, strict=True):
            parameter.grad = steps[step].clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(
        torch.allclose(a.double(), b.double(), rtol=1e-9, atol=1e-12)
        for a, b in zip(some, others, strict=True)
    )
