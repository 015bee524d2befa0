"""`.grad` at stage 3, in the shape of this rank's shard, and torch functions of the shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from zero.gradients import rules
from zero.gradients.reductions import PartialGradient, compute_norms, gather_runs, reduce, unscale
from zero.process_groups import Communicator


@dataclass(frozen=True)
class ElementRange:
    """Elements `start` to `stop` of a flattened tensor of shape `shape`."""

    start: int
    stop: int
    shape: torch.Size


class ShardGradient(PartialGradient):
    """The `.grad` of an FSDP shard: this rank's elements of the averaged gradient.

    See Note [Operations on a sharded gradient]. While an optimizer steps, operations that would
    otherwise raise are applied to this rank's elements, because the optimizer is known or verified
    to be element-wise.
    """

    #: A weak reference to the arguments of the running step of an optimizer of shards.
    step_options: ClassVar[Callable[[], object]] = lambda: None
    elements: ElementRange

    def list_local_pieces(self) -> list[Tensor]:
        """Return this rank's elements as plain tensors."""
        return [as_plain(self)]

    def full_tensor(self) -> Tensor:
        """Return the whole average on every rank; every rank must call this method."""
        full: Tensor = _FullTensor.apply(as_plain(self), self.elements, self.communicator)
        return full

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` on this rank's elements or over all ranks, or raise."""
        if any(not issubclass(kind, ShardGradient) for kind in types):
            # `Shard.__torch_function__` converts the shards among the arguments.
            return NotImplemented
        kwargs = kwargs or {}
        name = rules.get_python_name(func)
        with torch._C.DisableTorchFunctionSubclass():
            if name == rules.UNSCALE:
                return unscale(*args)
            if name == "_foreach_norm" and _needs_graph(args[0]):
                full = [g.full_tensor() if isinstance(g, ShardGradient) else g for g in args[0]]
                return func(full, *args[1:], **kwargs)
            if name == "_foreach_norm":
                return compute_norms(*args, **kwargs)
            if name == "_foreach_max":
                return [
                    reduce("max", [g], {}) if isinstance(g, ShardGradient) else g.max()
                    for g in args[0]
                ]
            if name.startswith("_foreach_"):
                return _apply_foreach(func, name, args, kwargs)
            if name in ("numel", "nelement") and not is_stepping():
                return args[0].elements.shape.numel()
            is_reduction = rules.is_full_reduction(name, args, kwargs)
            if is_reduction and isinstance(args[0], ShardGradient):
                if _needs_graph(args[:1]):
                    return func(args[0].full_tensor(), *args[1:], **kwargs)
                return reduce(name, args, kwargs)
            return _apply_to_shards(func, name, args, kwargs)


def is_stepping() -> bool:
    """Return True while an optimizer of shards steps."""
    return ShardGradient.step_options() is not None


def _needs_graph(tensors: Sequence[Tensor]) -> bool:
    """Return True if autograd records operations on the tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class _FullTensor(torch.autograd.Function):
    """An autograd function that gathers the whole tensor from every rank's shard."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, elements: ElementRange, communicator: Communicator
    ) -> Tensor:
        ctx.elements = elements
        ctx.communicator = communicator
        ctx.shape = values.shape
        runs = [(elements.start, elements.stop, values)]
        return gather_runs(runs, elements.shape, communicator)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # The loss of a training step is the average of the ranks' losses, so average the gradients.
        average = gradient.to(ctx.communicator.device).contiguous().clone()
        ctx.communicator.divide_before_sum(average)
        ctx.communicator.all_reduce(average).wait()
        ctx.communicator.divide_after_sum(average, average.dtype)
        part = average.reshape(-1)[ctx.elements.start : ctx.elements.stop]
        return part.to(gradient.device).view(ctx.shape), None, None


def make_shard_gradient(
    values: Tensor, communicator: Communicator, elements: ElementRange
) -> ShardGradient:
    """Return `values` as the gradient of this rank's shard of a parameter."""
    gradient = values.as_subclass(ShardGradient)
    gradient.communicator = communicator
    gradient.elements = elements
    return gradient


def as_plain(tensor: Tensor) -> Tensor:
    """Return a ShardGradient as a plain tensor of its elements, and any other tensor unchanged."""
    return tensor.as_subclass(Tensor) if isinstance(tensor, ShardGradient) else tensor


def call_on_shards(func: Any, args: Any, kwargs: Any, as_gradient: Callable[[Any], Any]) -> Any:
    """Return the result of a torch function on shards of parameters.

    The rules for sharded gradients apply, except while an optimizer steps. Methods in `ON_OBJECT`,
    the registration of hooks, and attributes other than views are called unchanged.

    as_gradient: a function that returns a shard as a ShardGradient, and other values unchanged.
    """
    name = rules.get_python_name(func)
    is_access = getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")
    with torch._C.DisableTorchFunctionSubclass():
        is_on_object = name in rules.ON_OBJECT or name.startswith("register_")
        if is_stepping() or is_on_object:
            return func(*args, **kwargs)
        if is_access and (func.__name__ != "__get__" or name not in rules.VIEWS):
            return func(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        local_args, local_kwargs = tree_unflatten([as_gradient(leaf) for leaf in leaves], spec)
    result = ShardGradient.__torch_function__(func, (), local_args, local_kwargs)
    is_in_place = bool(args) and bool(local_args) and result is local_args[0]
    return args[0] if is_in_place else result


class _ElementwiseOnly(TorchDispatchMode):
    """A mode in which operators that need elements of other ranks raise RuntimeError."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        has_tensors = any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs)))
        if has_tensors and not rules.is_elementwise(func) and not name.startswith("new_"):
            raise _make_whole_tensor_error(name)
        return func(*args, **(kwargs or {}))


def _apply_to_shards(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Return a function's result on this rank's elements; raise RuntimeError if it needs others."""
    leaves = tree_leaves((args, kwargs))
    gradient = next(leaf for leaf in leaves if isinstance(leaf, ShardGradient))
    is_checked = not is_stepping() and name not in rules.ON_OBJECT
    if is_checked:
        _check_same_elements(name, leaves)
    if is_checked and name in rules.READS_MEMORY:
        raise _make_whole_tensor_error(name)
    # An assignment to the elements that a mask selects is element-wise, although indexing is not.
    has_mask = name == "__setitem__" and getattr(args[1], "dtype", None) == torch.bool
    with _ElementwiseOnly() if is_checked and not has_mask else nullcontext():
        if is_checked and not gradient.numel() and gradient.communicator.world > 1:
            # Some functions call no operator for an empty shard, but must raise as on other ranks.
            example_args, example_kwargs = tree_map_only(
                ShardGradient, lambda g: g.new_ones((2, *g.shape[1:])), (args, kwargs)
            )
            func(*example_args, **example_kwargs)
        result = func(*args, **kwargs)
    if name.startswith("new_") or isinstance(result, ShardGradient):
        return result
    if type(result) is Tensor and result.shape == gradient.shape:
        return make_shard_gradient(result, gradient.communicator, gradient.elements)
    if is_checked and any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
        raise _make_whole_tensor_error(name)
    return result


def _make_whole_tensor_error(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} needs elements of a gradient or parameter that other ranks have, or combines "
        f"this rank's elements with a tensor of other elements: {rules.REMEDY}"
    )


def _check_same_elements(name: str, leaves: Sequence[Any]) -> None:
    """Raise RuntimeError unless tensors are gradients of the same elements, or 0-dimensional.

    With a single rank, plain tensors of the same shape are accepted too.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    gradients = [tensor for tensor in tensors if isinstance(tensor, ShardGradient)]
    others = [tensor for tensor in tensors if tensor.numel() != 1 or tensor.dim()]
    if any(tensor.shape != gradients[0].shape for tensor in others) or any(
        gradient.elements != gradients[0].elements for gradient in gradients
    ):
        raise _make_whole_tensor_error(name)
    has_plain = any(not isinstance(tensor, ShardGradient) for tensor in others)
    if has_plain and gradients[0].communicator.world > 1:
        raise RuntimeError(
            f"{name} combines this rank's elements with a plain tensor of their shape, whose "
            "values may be equal on all ranks, as random numbers of equal seeds are: create it by "
            "zeros_like(p), p.detach().clone() or another operation on p or p.grad"
        )


def _apply_foreach(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Return a `_foreach_` operation's results, by the rules of `_apply_to_shards`."""
    if is_stepping():
        return _wrap_results(func(*args, **kwargs), args[0])
    lists = [arg for arg in args if isinstance(arg, list | tuple)]
    for leaves in zip(*lists, strict=False):
        # Replicated parameters have plain gradients.
        if any(isinstance(leaf, ShardGradient) for leaf in leaves):
            _check_same_elements(name, leaves)
    with _ElementwiseOnly():
        return _wrap_results(func(*args, **kwargs), args[0])


def _wrap_results(results: Any, gradients: Sequence[Tensor]) -> Any:
    """Return the results of a `_foreach_` operation, with plain tensors as ShardGradients."""
    if not isinstance(results, list | tuple):
        return results
    wrapped = []
    for result, gradient in zip(results, gradients, strict=True):
        if isinstance(gradient, ShardGradient) and type(result) is Tensor:
            result = make_shard_gradient(result, gradient.communicator, gradient.elements)
        wrapped.append(result)
    return wrapped
