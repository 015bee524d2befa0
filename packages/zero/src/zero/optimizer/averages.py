"""The parameters whose `.grad` is an average, and edits of `.grad` by the caller.

See Note [Lifetime of a gradient] in `gradient_reducer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from zero.gradients.averaged import AveragedGradient
from zero.optimizer.gradient_buckets import Bucket
from zero.partition import Piece


class Averages:
    """The averaged gradients of a reducer's parameters. The buckets store their elements."""

    def __init__(self) -> None:
        #: Maps each parameter whose gradient is averaged, or is being reduced, to the key of its
        #: average. The key is a weak reference to the parameter, because the parameter's `.grad`
        #: refers to the key: see `AveragedGradient.source_ref`.
        self._keys: dict[nn.Parameter, TensorWeakRef] = {}

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._keys

    def is_current(self, key: TensorWeakRef) -> bool:
        """Return True if the average that `key` identifies has not been cleared."""
        return self._keys.get(key()) is key

    def is_assigned(self, parameter: nn.Parameter) -> bool:
        """Return True if `.grad` is an average that the caller has computed or copied.

        Examples are `p.grad = p.grad * 2` and `p.grad = q.grad`.
        """
        gradient = parameter.grad
        if not isinstance(gradient, AveragedGradient):
            return False
        return gradient.runs is not None or self._keys.get(parameter) is not gradient.key

    def mark(self, parameter: nn.Parameter, source: Any) -> None:
        """Replace a collected local gradient in `.grad` by an AveragedGradient.

        The AveragedGradient represents the average even while its reduction is in flight. If
        `.grad` is an AveragedGradient already, clear its `unreduced`, which was collected. `source`
        stores the elements. It is an argument, because an attribute would create a reference cycle.
        """
        gradient = parameter.grad
        if isinstance(gradient, AveragedGradient):
            gradient.is_used = is_used(gradient)
            gradient.unreduced = None
            return
        self._assign(parameter, source, is_used=gradient is not None)

    def list_cleared_parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose average the caller has replaced or removed."""
        return [p for p, key in self._keys.items() if getattr(p.grad, "key", None) is not key]

    def discard(
        self,
        cleared: Sequence[nn.Parameter],
        buckets: Sequence[Bucket],
        shard_pieces: Mapping[nn.Parameter, Sequence[tuple[Bucket, Piece]]],
    ) -> None:
        """Discard the averages of `cleared` parameters, and free buckets without other averages."""
        for parameter in cleared:
            del self._keys[parameter]
            for bucket, piece in shard_pieces.get(parameter, []):
                if bucket.average is not None:
                    bucket.get_average(piece).zero_()
        for bucket in buckets:
            if not any(parameter in self._keys for parameter, _ in bucket.shard_pieces):
                bucket.average = None

    def adopt(
        self, parameter: nn.Parameter, pieces: Sequence[tuple[Bucket, Piece]], source: Any
    ) -> None:
        """Copy an average that the caller has assigned to `.grad` into the buckets.

        Raise RuntimeError if the average has other ranges of elements than the parameter.
        """
        assigned = parameter.grad
        assert isinstance(assigned, AveragedGradient)
        assigned.communicator.check_not_joining()
        # The edit does not include a local gradient that was added to it later.
        assigned_runs = assigned.fetch_local_runs() if assigned.runs is None else assigned.runs
        runs = [run for run in assigned_runs if run[0] < run[1]]
        if [run[:2] for run in runs] != [(piece.start, piece.stop) for _, piece in pieces]:
            raise RuntimeError(
                f"the gradient assigned to a parameter of shape {tuple(parameter.shape)} was "
                "computed from another parameter's gradient: assign "
                "p.grad.full_tensor(), called by every rank, instead"
            )
        for (bucket, piece), (_, _, values) in zip(pieces, runs, strict=True):
            if bucket.average is None:
                bucket.average = torch.zeros_like(bucket.shard)
                bucket.average_is_in_buffer = False
            bucket.get_average(piece).copy_(values)
        gradient = self._assign(parameter, source, is_used=assigned.is_used)
        gradient.unreduced = assigned.unreduced

    def _assign(self, parameter: nn.Parameter, source: Any, *, is_used: bool) -> AveragedGradient:
        key = TensorWeakRef(parameter)
        self._keys[parameter] = key
        gradient = AveragedGradient(parameter, source, key, is_used=is_used)
        parameter.grad = gradient
        return gradient


def is_used(gradient: Tensor) -> bool:
    """Return True if a backward pass of this rank contributed to the gradient."""
    if isinstance(gradient, AveragedGradient):
        return gradient.is_used or gradient.unreduced is not None
    return True


def has_unreduced_gradient(parameter: nn.Parameter) -> bool:
    """Return True if this rank has a gradient that has not been averaged yet."""
    gradient = parameter.grad
    if isinstance(gradient, AveragedGradient):
        return gradient.unreduced is not None
    return gradient is not None
