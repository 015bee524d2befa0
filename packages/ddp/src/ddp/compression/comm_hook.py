"""Communication hooks with the interface of torch's DDP: fp16, bf16, PowerSGD, or user-defined."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.bucket import Bucket
from ddp.communication import Collective
from ddp.extensions import Extension, Step
from ddp.process_group import ReduceGroup

#: Called as `hook(state, bucket)`; the tensor of its future replaces the bucket's gradients.
Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]


class GradBucket:
    """A bucket with the methods of `torch.distributed.GradBucket`, which only C++ can construct.

    `views` contains one tensor per gradient, with the shape and strides of the gradient.
    """

    def __init__(
        self,
        index: int,
        parameters: Sequence[nn.Parameter],
        buffer: Tensor,
        views: Sequence[Tensor],
        *,
        is_last: bool,
    ) -> None:
        self._index = index
        self._parameters = parameters
        self._buffer = buffer
        self._views = views
        self._is_last = is_last

    def index(self) -> int:
        """Return the index of the bucket in the step. Sparse gradients have separate indices."""
        return self._index

    def buffer(self) -> Tensor:
        """Return the flat gradients, or one sparse gradient, not divided by the number of ranks."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the gradients."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Return the gradients in the shapes of their parameters."""
        if self._buffer.is_sparse:
            return [self._buffer]
        pieces = self._buffer.split([view.numel() for view in self._views])
        return [
            piece.as_strided(view.shape, view.stride(), piece.storage_offset())
            for piece, view in zip(pieces, self._views, strict=True)
        ]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients are in the bucket."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Return True for the last bucket of the step, and for the last sparse gradient."""
        return self._is_last


@dataclass(frozen=True)
class CommHook(Extension):
    """Reduction of a bucket by `hook(state, bucket)`, which divides by the number of ranks."""

    state: Any
    hook: Hook

    def on_step_start(self, step: Step) -> None:
        """Request unscaled gradients, because the hook divides them; sum the flags separately."""
        step.scale = 1.0
        step.reduces_flags = False

    def launch(self, bucket: Bucket, group: ReduceGroup) -> Collective:
        """Call the hook; the value of its future becomes the gradients."""
        gradients = bucket.gradients
        if bucket.parameters[0].is_complex():
            gradients = torch.view_as_complex(gradients.view(-1, 2))
        future = self._call(
            GradBucket(
                bucket.index, bucket.parameters, gradients, bucket.views, is_last=bucket.is_last
            )
        )

        def store() -> None:
            gradients.copy_(_get_reduced_tensor(future.value(), gradients).reshape(-1))

        return Collective(future, bucket.gradients.nbytes, 0, store, launches_in_callbacks=True)

    def reduce_sparse(self, bucket: GradBucket) -> Tensor:
        """Return the value of the hook's future for a sparse gradient."""
        reduced = _get_reduced_tensor(self._call(bucket).wait(), bucket.buffer())
        return reduced.coalesce() if reduced.is_sparse else reduced

    def _call(self, bucket: GradBucket) -> Any:
        future = self.hook(self.state, bucket)
        if not isinstance(future, torch.futures.Future | torch._C.Future):
            raise RuntimeError(
                "callback must return a torch.futures.Future object, but got "
                f"{type(future).__name__}; the future must contain one tensor, the summed gradients"
            )
        return future


def check_hook(hook: Any) -> None:
    """Raise `TypeError` or `ValueError` unless `hook` can be called as `hook(state, bucket)`."""
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable. It is {type(hook).__name__}")
    signature = inspect.signature(hook)
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"the communication hook must take (state, bucket), but it takes {signature}"
        ) from error
    second = list(signature.parameters.values())[1:2]
    bucket = signature.parameters.get("bucket", second[0] if second else None)
    annotation = bucket.annotation if bucket else inspect.Signature.empty
    if not _is_allowed(annotation, dist.GradBucket, GradBucket):
        raise ValueError(
            f"Communication hook: bucket annotation should be dist.GradBucket, not {annotation}"
        )
    returned = signature.return_annotation
    if not _is_allowed(returned, torch.futures.Future[Tensor], torch.futures.Future):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor], "
            f"not {returned}"
        )


def _is_allowed(annotation: Any, *allowed: Any) -> bool:
    # `from __future__ import annotations` turns annotations into strings, which are not checked.
    return (
        annotation is inspect.Signature.empty
        or isinstance(annotation, str)
        or annotation in allowed
    )


def _get_reduced_tensor(value: Any, gradients: Tensor) -> Tensor:
    """Return the tensor in the value of a hook's future; raise `TypeError` if it does not fit."""
    reduced = value[0] if isinstance(value, list | tuple) else value
    is_fitting = isinstance(reduced, Tensor) and reduced.numel() == gradients.numel()
    if gradients.is_sparse:
        is_fitting = is_fitting and reduced.shape == gradients.shape
    if not is_fitting:
        kind = tuple(reduced.shape) if isinstance(reduced, Tensor) else type(reduced).__name__
        raise TypeError(
            "expected the future of the communication hook to contain one tensor of shape "
            f"{tuple(gradients.shape)}, like the buffer() of its bucket; got {kind}"
        )
    return reduced
