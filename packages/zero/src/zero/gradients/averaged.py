"""`.grad` at stages 1 and 2: a tensor of the parameter's shape whose elements are in buckets."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from zero.gradients.reductions import PartialGradient, compute_norms, gather_runs, reduce, unscale
from zero.gradients.rules import REMEDY, UNSCALE, aten, is_elementwise, is_full_reduction

#: Elements `start` to `stop` of a flattened tensor, and their values.
LocalRun = tuple[int, int, Tensor]

#: After `p.data = p.data - p.grad`, a parameter has the memory of an averaged gradient, which does
#: not exist. torch raises this error instead of reading it. Some builds of torch lack the function.
_MEMORY_ERROR = (
    "expected a whole tensor, got the memory of an averaged gradient, of which this rank stores "
    f"only its shard: {REMEDY}"
)
_set_memory_error = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)


class AveragedGradient(PartialGradient):
    """The `.grad` of a parameter after the backward pass at stages 1 and 2, in its shape.

    The elements are stored in the reducer's buckets. See Note [Operations on a sharded gradient]
    and Note [Two classes of sharded gradients].
    """

    #: A weak reference to the object that stores the elements. Its `fetch_runs(gradient)` returns
    #: this rank's runs of averaged elements, and `communicator` has the collectives of the ranks. A
    #: strong reference from `.grad` to its parameter, in C++, could never be collected.
    source_ref: Callable[[], Any]
    #: The key by which the source finds this gradient's elements.
    key: Any
    #: The elements themselves, if the gradient is the result of an operation.
    runs: list[LocalRun] | None
    #: This rank's gradient of a later backward pass, which has not been averaged yet.
    unreduced: Tensor | None
    #: True if this rank's backward pass reached the parameter.
    is_used: bool

    @staticmethod
    def __new__(
        cls,
        like: Tensor,
        source: Any,
        key: Any,
        *,
        dtype: torch.dtype | None = None,
        runs: list[LocalRun] | None = None,
        is_used: bool = True,
    ) -> AveragedGradient:
        """Create the averaged gradient of `like`."""
        gradient: AveragedGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=dtype or like.dtype, device=like.device
        )
        gradient.source_ref = weakref.ref(source)
        if _set_memory_error is not None:
            _set_memory_error(Tensor.untyped_storage(gradient)._cdata, _MEMORY_ERROR)
        gradient.communicator = source.communicator
        gradient.key = key
        gradient.runs = runs
        gradient.unreduced = None
        gradient.is_used = is_used
        return gradient

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def source(self) -> Any:
        """The object that stores the elements; raise RuntimeError if it was deleted."""
        source = self.source_ref()
        if source is None:
            raise RuntimeError(
                "the optimizer that stores the elements of this gradient was deleted: call "
                "zero_grad(), or keep the optimizer until its gradients have been used"
            )
        return source

    @property
    def data(self) -> Tensor:
        """A tensor with the same elements. An assignment overwrites the elements."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        # torch's setter replaces a tensor's memory, but this tensor has no memory.
        if (value.shape, value.dtype) != (self.shape, self.dtype):
            raise RuntimeError(
                f"expected {tuple(self.shape)} {self.dtype} as the data of a gradient, got "
                f"{tuple(value.shape)} {value.dtype}: assign to .grad instead"
            )
        self.copy_(value)

    def fetch_local_runs(self) -> list[LocalRun]:
        """Return this rank's runs of the flattened average: (start, stop, values), at least one.

        Raise RuntimeError if the gradient includes a local gradient that is not averaged yet.
        """
        if self.unreduced is not None:
            raise RuntimeError(
                "this gradient includes a local gradient, which a backward pass under no_sync() or "
                "a second reentrant checkpoint has added on this rank: run the last backward pass "
                "of a step outside no_sync(), pass use_reentrant=False to checkpoints that share a "
                "layer, or use optimizer.clip_grad_norm_, which averages"
            )
        if self.runs is not None:
            return self.runs
        runs = self.source.fetch_runs(self)
        return runs or [(0, 0, torch.empty(0, dtype=self.dtype, device=self.device))]

    def list_local_pieces(self) -> list[Tensor]:
        """Return this rank's elements as plain tensors."""
        return [values for start, stop, values in self.fetch_local_runs() if start < stop]

    def full_tensor(self) -> Tensor:
        """Return the whole average on every rank; every rank must call this method."""
        return gather_runs(self.fetch_local_runs(), self.shape, self.communicator)

    def data_ptr(self) -> int:
        """Return 0, as torch does for tensors without memory, instead of raising `_MEMORY_ERROR`.

        Programs that compare the addresses of all tensors call this method.
        """
        return 0

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return an empty storage; some methods of the actual one would end the process."""
        return torch.UntypedStorage(0, device=self.device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AveragedGradient({tuple(self.shape)}, {self.dtype}; full_tensor() gathers it)"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run `func` on this rank's elements or over all ranks, or raise."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "detach":
            return _alias(args[0])
        if name in ("add_", "add") and torch._C._current_graph_task_id() != -1:
            return _accumulate(name, *args, **kwargs)
        if name == UNSCALE:
            gradients, found_inf, inv_scale = args
            return unscale(gradients, found_inf, inv_scale)
        if name.startswith("_foreach_"):
            return _apply_foreach(name.removeprefix("_foreach_"), args, kwargs)
        if is_full_reduction(name, args, kwargs):
            return reduce(name, args, kwargs)
        if is_elementwise(func):
            return _apply_elementwise(func, args, kwargs)
        raise RuntimeError(
            f"{name} needs all elements of an averaged gradient, but this rank stores only its "
            f"shard: {REMEDY}"
        )


def _alias(gradient: AveragedGradient) -> AveragedGradient:
    alias = AveragedGradient(
        gradient, gradient.source, gradient.key, runs=gradient.runs, is_used=gradient.is_used
    )
    alias.unreduced = gradient.unreduced
    return alias


def _accumulate(name: str, gradient: Any, added: Any, *, alpha: float = 1) -> Any:
    """Add a local gradient to `unreduced`, which will be averaged later; return the gradient.

    Autograd adds the gradient of a later backward pass. A parameter's hook may also add a tensor or
    number. Raise RuntimeError if `added` is an average, if `gradient` is a plain tensor, or if it
    was computed from averages in this backward pass.
    """
    # Autograd adds to `.grad` in place, unless it creates a graph. It adds the gradients of two
    # uses of a parameter out of place.
    is_computed_from_averages = (
        isinstance(gradient, AveragedGradient)
        and gradient.runs is not None
        and name == "add"
        and not torch.is_grad_enabled()
    )
    is_sum_of_gradients = not isinstance(gradient, AveragedGradient) or is_computed_from_averages
    if is_sum_of_gradients or isinstance(added, AveragedGradient):
        raise make_loss_error()
    gradient = gradient if name == "add_" else _alias(gradient)
    is_gradient = isinstance(added, Tensor) and added.shape == gradient.shape and alpha == 1
    if gradient.unreduced is not None:
        gradient.unreduced.add_(added, alpha=alpha)
    elif is_gradient:
        gradient.unreduced = added.clone()
    else:
        zeros = torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device)
        gradient.unreduced = zeros.add_(added, alpha=alpha)
    return gradient


def make_loss_error() -> RuntimeError:
    """Return the error for a loss that was computed from averaged gradients."""
    return RuntimeError(
        "expected no averaged gradient in a backward pass: compute losses from "
        "p.grad.full_tensor(), called by every rank"
    )


def _match_runs(func: Any, gradients: Sequence[AveragedGradient]) -> list[list[LocalRun]]:
    """Return each gradient's runs; raise RuntimeError if ranges or shapes differ."""
    all_runs = [gradient.fetch_local_runs() for gradient in gradients]
    ranges = [[(start, stop) for start, stop, _ in runs] for runs in all_runs]
    has_one_shape = all(gradient.shape == gradients[0].shape for gradient in gradients)
    if not has_one_shape or any(other != ranges[0] for other in ranges):
        raise _make_combination_error(func)
    return all_runs


def _make_combination_error(func: Any) -> RuntimeError:
    return RuntimeError(
        f"{func} combines an averaged gradient, of which this rank stores only its shard, with a "
        f"tensor of other elements: {REMEDY}"
    )


def _apply_elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an element-wise operator on each run of this rank's elements."""
    leaves, spec = tree_flatten((args, kwargs))
    gradients = [leaf for leaf in leaves if isinstance(leaf, AveragedGradient)]
    all_runs = _match_runs(func, gradients)
    ranges = [(start, stop) for start, stop, _ in all_runs[0]]
    is_in_place = func._schema.is_mutable
    target = kwargs.get("out", args[0])
    if is_in_place and not isinstance(target, AveragedGradient):
        raise _make_combination_error(func)
    if is_in_place:
        gradients[0].communicator.check_not_joining()
    shape = gradients[0].shape
    results = []
    for index, (start, stop) in enumerate(ranges):
        values = iter([runs[index][2] for runs in all_runs])
        local_leaves = [
            next(values)
            if isinstance(leaf, AveragedGradient)
            else _slice_argument(leaf, shape, start, stop)
            for leaf in leaves
        ]
        local_args, local_kwargs = tree_unflatten(local_leaves, spec)
        results.append((start, stop, func(*local_args, **local_kwargs)))
    if is_in_place:
        return target
    dtype = results[0][2].dtype
    return AveragedGradient(gradients[0], gradients[0].source, None, dtype=dtype, runs=results)


def _slice_argument(value: Any, shape: torch.Size, start: int, stop: int) -> Any:
    """Return elements `start` to `stop` of an argument that is broadcast to `shape`.

    Return numbers and tensors with a single element whole.
    """
    if not isinstance(value, Tensor):
        return value
    if value.numel() == 1:
        # Keep a dimension, because dtype promotion treats 0-dimensional tensors like numbers.
        return value.reshape(1) if value.dim() else value
    return value.expand(shape).reshape(-1)[start:stop]


def _apply_foreach(name: str, args: Any, kwargs: Any) -> Any:
    """Apply a `_foreach_` operation tensor by tensor; return the results, or None if in place."""
    if name == "norm":
        return compute_norms(args[0], *args[1:], **kwargs)
    is_in_place = name.endswith("_")
    # `_foreach_maximum_` has no base operator in place, and `_foreach_powsum` has none at all.
    operator = getattr(aten, name, None)
    base_operator: Any = getattr(aten, name.rstrip("_"), None)
    if operator is None and base_operator is None:
        raise RuntimeError(
            f"_foreach_{name} is not supported for averaged gradients, of which this rank stores "
            f"only its shard: {REMEDY}"
        )
    if name.rstrip("_") in ("addcdiv", "addcmul") and len(args) > 3:
        kwargs = {"value": args[3]}
        args = args[:3]
    results = []
    for index in range(len(args[0])):
        row = [arg[index] if isinstance(arg, list | tuple) else arg for arg in args]
        if operator is None:
            row[0].copy_(base_operator(*row, **kwargs))
        else:
            results.append(operator(*row, **kwargs))
    return None if is_in_place else results
