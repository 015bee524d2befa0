"""Norms, sums and other reductions of gradients over the elements of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zero.gradients.rules import REDUCTIONS, UNSCALE
from zero.process_groups import Communicator, as_bytes


class PartialGradient(Tensor):
    """A gradient of which this rank stores only some elements."""

    #: The collectives of the ranks over which the elements are sharded.
    communicator: Communicator

    def list_local_pieces(self) -> list[Tensor]:
        """Return this rank's elements as plain tensors."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        result = self.clone()
        memo[id(self)] = result
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "expected a whole tensor to copy or pickle, got a tensor of which this rank stores "
            "only some elements: use full_tensor(), called by every rank, or a state_dict()"
        )


def gather_runs(
    runs: Sequence[tuple[int, int, Tensor]], shape: torch.Size, communicator: Communicator
) -> Tensor:
    """Return the whole tensor, assembled from every rank's runs: (start, stop, values).

    Elements in no run are zero. Every rank must call this function, with at least one run.
    """
    communicator.check_not_joining()
    first = runs[0][2]
    whole = torch.zeros(shape.numel(), dtype=first.dtype, device=communicator.device)
    for start, stop, values in runs:
        whole[start:stop] = values.reshape(-1)
    # Every byte is nonzero on at most one rank, so the sum of bytes is exact. A sum of elements
    # would lose the sign of zero.
    communicator.all_reduce(as_bytes(whole)).wait()
    return whole.to(first.device).view(shape)


def unscale(gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply gradients in place by `inv_scale`; set `found_inf` to 1 if any rank has inf or NaN.

    Raise RuntimeError if the gradients are sharded over several groups. Every rank must call this
    function.
    """
    communicator = _get_communicator(gradients)
    communicator.check_not_joining()
    pieces = _list_local_pieces(gradients)
    if pieces:
        getattr(torch, UNSCALE)(pieces, found_inf, inv_scale)
    found_anywhere = found_inf.to(communicator.device)
    communicator.all_reduce(found_anywhere).wait()
    found_inf.copy_(found_anywhere.clamp(max=1.0))


def _list_local_pieces(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's elements of sharded gradients, and all elements of plain ones."""
    pieces = []
    for gradient in gradients:
        if isinstance(gradient, PartialGradient):
            pieces += gradient.list_local_pieces()
        else:
            pieces.append(gradient)
    return pieces


def _get_communicator(gradients: Sequence[Tensor]) -> Communicator:
    """Return the communicator of sharded gradients; raise RuntimeError if they have several groups.

    At least one of the gradients is sharded.
    """
    first, *others = [g.communicator for g in gradients if isinstance(g, PartialGradient)]
    if not all(first.uses_same_group(other) for other in others):
        raise RuntimeError(
            "expected gradients sharded over one process group, got several groups: clip with "
            "foreach=False, and use one optimizer and one scaler per group, because the groups "
            "could disagree on skipping the step"
        )
    return first


def compute_norms(gradients: Sequence[Tensor], ord: float = 2, dtype: Any = None) -> list[Tensor]:
    """Return each gradient's vector norm over all ranks, as 0-dimensional tensors.

    They have the real dtype that corresponds to `dtype` or, by default, to the gradient's dtype.
    Raise ValueError if `ord` is not positive, and RuntimeError if the gradients are sharded over
    several groups. Every rank must call this function.
    """
    if ord <= 0:
        raise ValueError(
            f"expected a norm of order > 0 of a sharded gradient, got order {ord}: compute it from "
            "full_tensor(), called by every rank"
        )
    # The norm of a vector is the norm of the norms of its parts.
    local = torch.zeros(len(gradients), dtype=torch.float64, device=gradients[0].device)
    for index, gradient in enumerate(gradients):
        parts = [
            torch.linalg.vector_norm(piece.to(torch.promote_types(piece.dtype, torch.float64)), ord)
            for piece in _list_local_pieces([gradient])
            if piece.numel()
        ]
        if parts:
            local[index] = torch.linalg.vector_norm(torch.stack(parts), ord)
    rows = _all_gather_rows(local, _get_communicator(gradients))
    totals = torch.linalg.vector_norm(rows, ord, dim=0)
    norms = []
    for gradient, local_norm, total in zip(gradients, local, totals, strict=True):
        # Replicated gradients are equal on all ranks, so their local norms are the totals.
        norm = total if isinstance(gradient, PartialGradient) else local_norm
        norms.append(norm.to((dtype or gradient.dtype).to_real()))
    return norms


def _all_gather_rows(values: Tensor, communicator: Communicator) -> Tensor:
    """Return a matrix with every rank's `values` in a row, so that all ranks get equal results."""
    communicator.check_not_joining()
    rows = values.new_zeros(communicator.world, values.numel(), device=communicator.device)
    rows[communicator.rank] = values
    communicator.all_reduce(rows).wait()
    return rows.to(values.device)


def reduce(name: str, args: Any, kwargs: Any) -> Tensor:
    """Return the norm, sum or other reduction called `name` of a gradient over all ranks."""
    gradient = args[0]
    dtype = kwargs.get("dtype")
    if name in REDUCTIONS:
        return _reduce_elements(name, gradient, dtype)
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    if order is None or order == "fro":
        order = 2
    return compute_norms([gradient], order, dtype)[0]


def _reduce_elements(name: str, gradient: Any, dtype: torch.dtype | None) -> Tensor:
    """Return the reduction `name` over all ranks; raise RuntimeError for a complex gradient."""
    if gradient.dtype.is_complex:
        raise RuntimeError(
            f"{name} of a sharded complex gradient is not supported: gather it by "
            "p.grad.full_tensor() on every rank, or use a norm or the sum of its abs()"
        )
    if dtype is None:
        # torch chooses the dtype, or raises for a mean of integers.
        dtype = getattr(torch, name)(torch.ones(1, dtype=gradient.dtype)).dtype
    function, neutral = REDUCTIONS[name]
    local = torch.tensor([neutral, 0.0], dtype=torch.float64, device=gradient.device)
    pieces = [piece.reshape(-1).to(dtype).double() for piece in gradient.list_local_pieces()]
    flat = torch.cat([local[:0], *pieces])
    if flat.numel():
        local[0] = function(flat)
        local[1] = flat.numel()
    values, counts = _all_gather_rows(local, gradient.communicator).unbind(1)
    result: Tensor = function(values)
    if name == "mean":
        result = result / counts.sum()
    return result.to(dtype)
