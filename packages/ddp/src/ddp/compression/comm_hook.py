"""Communication hooks that were written for torch's DDP: fp16, bf16, PowerSGD, your own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.bucket import Bucket
from ddp.collective import Link
from ddp.compression.ways import Call, Exchange

# Called as hook(state, bucket); the tensor of its future replaces the bucket's gradients.
Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]


class SparseGradBucket:
    """What a hook is handed for a sparse gradient: it alone."""

    def __init__(self, place: int, parameter: nn.Parameter, gradient: Tensor, last: bool) -> None:
        self._place, self._parameter, self._gradient, self._last = place, parameter, gradient, last

    def index(self) -> int:
        """Its place among the sparse ones."""
        return self._place

    def buffer(self) -> Tensor:
        """The gradient, coalesced, not divided by the number of ranks."""
        return self._gradient

    def set_buffer(self, buffer: Tensor) -> None:
        """Put another tensor in the place of the gradient."""
        self._gradient = buffer

    def gradients(self) -> list[Tensor]:
        """The one gradient."""
        return [self._gradient]

    def parameters(self) -> list[nn.Parameter]:
        """The one parameter."""
        return [self._parameter]

    def is_last(self) -> bool:
        """Whether nothing follows in this step."""
        return self._last


class GradBucket:
    """What a hook is handed: `torch.distributed.GradBucket`'s methods (only C++ can make that)."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._buffer = bucket.gradients
        if bucket.parameters[0].is_complex():
            self._buffer = torch.view_as_complex(bucket.gradients.view(-1, 2))

    def index(self) -> int:
        """Its place among the buckets."""
        return self._bucket.place

    def buffer(self) -> Tensor:
        """All its gradients, flat, not divided by the number of ranks."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Put another tensor in the place of the buffer."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Its gradients, each in its parameter's shape."""
        sizes = [view.numel() for view in self._bucket.views]
        pieces = self._buffer.split(sizes)
        return [
            piece.as_strided(view.shape, view.stride(), piece.storage_offset())
            for piece, view in zip(pieces, self._bucket.views, strict=True)
        ]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients it holds."""
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """Whether no bucket follows in this step."""
        return self._bucket.is_last


@dataclass(frozen=True)
class CommHook:
    """A way to sum a bucket that calls `hook(state, bucket)`; the hook divides by itself."""

    state: Any
    hook: Hook
    carries_flags = False
    scaled = False

    def exchange(self, bucket: Bucket, link: Link) -> Exchange:
        """Call the hook; what its future holds becomes the gradients."""
        future = self._called(GradBucket(bucket))
        yield Call(future, bucket.gradients.numel() * bucket.gradients.element_size(), 0)
        summed = _only(future.value())
        gradients = GradBucket(bucket).buffer()
        if not isinstance(summed, Tensor) or summed.numel() != gradients.numel():
            found = tuple(summed.shape) if isinstance(summed, Tensor) else type(summed).__name__
            raise TypeError(
                f"the future of the communication hook holds {found}; it must hold one tensor of "
                f"{gradients.numel()} elements, like the bucket's buffer()"
            )
        gradients.copy_(summed.view(-1))

    def sum_sparse(self, bucket: SparseGradBucket) -> Tensor:
        """What the hook makes of a sparse gradient."""
        summed = _only(self._called(bucket).wait())
        if not isinstance(summed, Tensor) or summed.shape != bucket.buffer().shape:
            raise TypeError(
                "the future of the communication hook must hold one tensor of the shape of the "
                f"sparse gradient, {tuple(bucket.buffer().shape)}"
            )
        return summed.coalesce() if summed.is_sparse else summed

    def _called(self, bucket: GradBucket | SparseGradBucket) -> Any:
        future = self.hook(self.state, bucket)
        if not isinstance(future, torch.futures.Future | torch._C.Future):
            raise RuntimeError(
                "callback must return a torch.futures.Future object, but got "
                f"{type(future).__name__}; its future holds the summed gradients, one tensor"
            )
        return future


def _only(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) else value


def check_hook(hook: Any) -> None:
    """Raise TypeError or ValueError unless `hook` can be called as hook(state, bucket)."""
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable. It is {type(hook).__name__}")
    signature = inspect.signature(hook)
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"the communication hook takes {signature}; it must take (state, bucket)"
        ) from error
    second = list(signature.parameters.values())[1:2]
    bucket = signature.parameters.get("bucket", second[0] if second else None)
    annotation = bucket.annotation if bucket else inspect.Signature.empty
    if not _is_any_of(annotation, dist.GradBucket, GradBucket):
        raise ValueError(
            f"Communication hook: bucket annotation should be dist.GradBucket, not {annotation}"
        )
    returned = signature.return_annotation
    if not _is_any_of(returned, torch.futures.Future[Tensor], torch.futures.Future):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor], "
            f"not {returned}"
        )


def _is_any_of(annotation: Any, *allowed: Any) -> bool:
    # Under `from __future__ import annotations` it is text: leave that to the call.
    return (
        annotation is inspect.Signature.empty
        or isinstance(annotation, str)
        or annotation in allowed
    )
