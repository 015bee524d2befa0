"""Operations on gradients and changes: checks, means, and flat vectors."""

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


def compute_mean(gradients: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the mean of the gradients in `dtype`, summed in `dtype` or float32 if that is wider.

    With several gradients, the sum overwrites the first gradient if it has the dtype of the sum.
    """
    total, *others = gradients
    if others:
        total = total.to(torch.promote_types(dtype, torch.float32))
        for other in others:
            total.add_(other)
        total.div_(len(gradients))
    return total.to(dtype)


def flatten(views: Iterable[Tensor]) -> Tensor:
    """Return the elements of all views as one float32 vector."""
    return torch.cat([view.reshape(-1).float() for view in views])


def add_flat(views: Iterable[Tensor], flat: Tensor) -> None:
    """Add the elements of a float32 vector, in order, to the elements of all views in place."""
    start = 0
    for view in views:
        view.view(-1).add_(flat[start : start + view.numel()].to(view.dtype))
        start += view.numel()
