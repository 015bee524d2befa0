"""Arithmetic of gradients and of changes: checks, means, and flat vectors."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor


def require_finite(worker: int, gradients: Mapping[str, Tensor]) -> None:
    """Raise `ValueError` if a gradient is not finite."""
    values = {name: g._values() if g.is_sparse else g for name, g in gradients.items()}
    # The sums are fast to compute, and are read from a GPU in one transfer. They may overflow,
    # so the elements are checked if a sum is not finite.
    are_finite = [elements.sum().isfinite() for elements in values.values()]
    if not are_finite or torch.stack([flag.to(are_finite[0].device) for flag in are_finite]).all():
        return
    for name, elements in values.items():
        count = int((~elements.isfinite()).sum())
        if count:
            raise ValueError(
                f"worker {worker}'s gradient of {name} is not finite in {count} of "
                f"{elements.numel()} elements; nothing was applied: skip the batch or lower the "
                "learning rate"
            )


def mean(gradients: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the mean of the gradients in `dtype`; 16-bit gradients are summed in float32.

    The sum is computed in the memory of the first gradient if its dtype is wide enough.
    """
    # The sort is stable, so it keeps the order of the workers. A dense tensor has to come first,
    # because a dense tensor cannot be added to a sparse one in place.
    total, *others = sorted(gradients, key=lambda gradient: gradient.is_sparse)
    if others:
        wide = torch.promote_types(dtype, torch.float32)
        total = total.to(wide)
        for other in others:
            total.add_(other.to(wide) if other.is_sparse else other)
        total.div_(len(gradients))
    # Coalescing sums the elements of repeated rows before they are rounded.
    return total.coalesce().to(dtype) if total.is_sparse else total.to(dtype)


def flatten(views: Iterable[Tensor]) -> Tensor:
    """Return the elements of all views as one float32 vector."""
    return torch.cat([torch.empty(0), *(view.reshape(-1).float() for view in views)])


def add_flat(views: Iterable[Tensor], flat: Tensor) -> None:
    """Add a float32 vector to the elements of all views."""
    start = 0
    for view in views:
        view.view(-1).add_(flat[start : start + view.numel()].to(view.dtype))
        start += view.numel()
