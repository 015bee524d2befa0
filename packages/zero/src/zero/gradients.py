"""The tensors in `.grad` after gradients have been averaged: each rank's elements act as the whole.

Note [Operations on a sharded gradient]
GradScaler, `clip_grad_norm_`, `clip_grad_value_` and training loops read and change `.grad`. Each
rank stores 1/n of the average only. On a plain tensor of these elements, an element-wise change
would be right and a norm would silently be wrong, because every rank would compute a different one.
Therefore:
- an element-wise operation acts on this rank's elements, which is exact;
- a norm, sum, mean, maximum or minimum over all elements is reduced over ranks, so every rank must
  call it, and every rank gets the same value;
- random numbers in the shape of a gradient are those that one process draws;
- GradScaler's check for infinities is reduced too, so that either all ranks step or no rank does;
- any other operation raises, and names `full_tensor()` as the remedy.

Between steps stage 3's parameters are shards too, and a loss may read them: the same rules hold for
them (`shard_function`). Reductions of tensors that need a gradient are computed on `full_tensor()`,
whose backward returns the average of the ranks' gradients.

Note [Two classes of sharded gradients]
At stages 1 and 2 parameters are whole, so `.grad` must have the parameter's shape, although this
rank's elements of it are somewhere in buckets. `AveragedGradient` is a wrapper subclass without
memory. It is intercepted in `__torch_dispatch__`, because autograd itself adds later gradients to
it. At stage 3 a parameter is a shard with the same elements as its gradient, on which an
optimizer's fused kernels must run directly. `ShardGradient` is a tensor with memory that
intercepts Python calls only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from zero.process_groups import Communicator

aten = torch.ops.aten

UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
NORMS = {"norm", "linalg_vector_norm"}
#: Each reduction of all elements to one number: its function and its neutral element.
REDUCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "sum": (torch.sum, 0.0),
    "mean": (torch.sum, 0.0),
    "max": (torch.max, -inf),
    "amax": (torch.max, -inf),
    "min": (torch.min, inf),
    "amin": (torch.min, inf),
    "any": (torch.any, 0.0),
    "all": (torch.all, 1.0),
}
#: Operators of aten that are element-wise without torch's tag `pointwise`.
ELEMENTWISE_OPERATORS = {
    "zero_", "zeros_like", "ones_like", "copy_", "fill_", "clone", "_to_copy",
}  # fmt: skip
#: Python functions and methods that are element-wise and are not operators tagged `pointwise`.
ELEMENTWISE_FUNCTIONS = {
    "to", "double", "float", "half", "bfloat16", "type", "cpu", "cuda", "contiguous", "detach",
    "data", "real", "__deepcopy__", "empty_like", "full_like", "fill_", "nan_to_num", "clip",
    "where", "isfinite", "isreal", "multiply", "divide", "subtract", "negative", "absolute",
    "true_divide", "square", "clamp", "masked_fill",
}  # fmt: skip
#: Functions that draw random numbers in the shape of a tensor.
RANDOM = {"rand_like", "randn_like"}
#: Attributes that are other views of all elements.
VIEWS = {"data", "real", "imag", "T", "mT", "H", "mH"}
#: Methods that end with an underscore and do not change elements.
NOT_IN_PLACE = {"requires_grad_", "detach_", "share_memory_"}
#: Methods that return values of elements as Python or NumPy objects, or assign to elements.
READS_ELEMENTS = {
    "item", "tolist", "numpy", "equal", "allclose", "__array__", "__bool__", "__float__", "__int__",
    "is_nonzero", "__contains__", "__iter__", "__setitem__",
}  # fmt: skip
#: Python operators whose operators in aten have other names.
OPERATOR_NAMES = {
    "truediv": "div", "invert": "bitwise_not", "floordiv": "floor_divide", "mod": "remainder",
    "and": "bitwise_and", "or": "bitwise_or",
}  # fmt: skip

REMEDY = (
    "element-wise operations, norms, sums, means, maxima and minima work; p.grad.full_tensor(), "
    "or p.full_tensor() at stage 3, called by every rank, gathers the elements"
)


class Source(Protocol):
    """The object that stores an AveragedGradient's elements: a reducer or a unit."""

    communicator: Communicator

    def fetch_runs(self, gradient: AveragedGradient) -> list[tuple[int, int, Tensor]]:
        """Return this rank's runs of elements (start, stop, values) after they were averaged."""


class AveragedGradient(Tensor):
    """`.grad` after backward at stages 1 and 2, in the parameter's shape.

    The elements are stored in the reducer's buckets. See Note [Operations on a sharded gradient]
    and Note [Two classes of sharded gradients].
    """

    source: Source
    #: The identity by which the source finds this gradient's elements.
    key: Any
    #: The elements themselves, if the gradient is the result of an operation.
    runs: list[tuple[int, int, Tensor]] | None
    #: This rank's gradient of a later backward, which has not been averaged yet.
    unreduced: Tensor | None
    #: True if this rank's backward reached the parameter.
    is_used: bool

    @staticmethod
    def __new__(
        cls,
        like: Tensor,
        source: Source,
        key: Any,
        *,
        dtype: torch.dtype | None = None,
        runs: list[tuple[int, int, Tensor]] | None = None,
        is_used: bool = True,
    ) -> AveragedGradient:
        """Create the averaged gradient of `like`."""
        gradient: AveragedGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=dtype or like.dtype, device=like.device
        )
        gradient.source = source
        gradient.key = key
        gradient.runs = runs
        gradient.unreduced = None
        gradient.is_used = is_used
        return gradient

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def local_runs(self) -> list[tuple[int, int, Tensor]]:
        """Return this rank's runs of the flattened average: (start, stop, values), at least one."""
        if self.runs is not None:
            return self.runs
        if self.unreduced is not None:
            raise RuntimeError(
                "this gradient is an average plus a local gradient that a later backward under "
                "no_sync() added on this rank: run the last backward of a step outside no_sync(), "
                "then read .grad"
            )
        runs = self.source.fetch_runs(self)
        return runs or [(0, 0, torch.empty(0, dtype=self.dtype, device=self.device))]

    def full_tensor(self) -> Tensor:
        """Return the whole average on every rank; every rank must call it."""
        return _gather_runs(self.local_runs(), self.shape, self.source.communicator)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AveragedGradient({tuple(self.shape)}, {self.dtype}; full_tensor() gathers it)"

    def __deepcopy__(self, memo: Any) -> AveragedGradient:
        result: AveragedGradient = self.clone()  # type: ignore[assignment]
        memo[id(self)] = result
        return result

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
            return _accumulate(name, *args)
        if name == UNSCALE:
            gradients, found_inf, inv_scale = args
            return unscale(gradients, found_inf, inv_scale)
        if name.startswith("_foreach_"):
            return _apply_foreach(name.removeprefix("_foreach_"), args, kwargs)
        if _reduces_all_elements(name, args, kwargs):
            return _reduce(name, args, kwargs)
        if name in RANDOM:
            return _draw_like(func, args[0], kwargs)
        if torch.Tag.pointwise in func.tags or name in ELEMENTWISE_OPERATORS:
            return _apply_elementwise(func, args, kwargs)
        raise RuntimeError(
            f"{name} needs all elements of an averaged gradient, of which this rank has its shard "
            f"only: {REMEDY}"
        )


def _alias(gradient: AveragedGradient) -> AveragedGradient:
    alias = AveragedGradient(
        gradient, gradient.source, gradient.key, runs=gradient.runs, is_used=gradient.is_used
    )
    alias.unreduced = gradient.unreduced
    return alias


def _accumulate(name: str, gradient: Any, added: Any) -> Any:
    """Add the local gradient of another backward, which will be averaged later."""
    if not isinstance(gradient, AveragedGradient) or isinstance(added, AveragedGradient):
        raise RuntimeError("an averaged gradient cannot take part in a backward")
    gradient = gradient if name == "add_" else _alias(gradient)
    if gradient.unreduced is None:
        gradient.unreduced = added.clone()
    else:
        gradient.unreduced.add_(added)
    return gradient


def _apply_elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Apply an element-wise operator to each run of this rank's elements."""
    leaves, spec = tree_flatten((args, kwargs))
    gradients = [leaf for leaf in leaves if isinstance(leaf, AveragedGradient)]
    runs_of = [gradient.local_runs() for gradient in gradients]
    ranges = [(start, stop) for start, stop, _ in runs_of[0]]
    have_same_ranges = all([(a, b) for a, b, _ in runs] == ranges for runs in runs_of)
    is_in_place = func._schema.is_mutable
    if not have_same_ranges or (is_in_place and not isinstance(args[0], AveragedGradient)):
        raise RuntimeError(
            f"{func} combines an averaged gradient, of which this rank has its shard only, with a "
            f"tensor of other elements: {REMEDY}"
        )
    shape = gradients[0].shape
    results = []
    for index, (start, stop) in enumerate(ranges):
        values = iter([runs[index][2] for runs in runs_of])
        local_leaves = [
            next(values)
            if isinstance(leaf, AveragedGradient)
            else _slice_argument(leaf, shape, start, stop)
            for leaf in leaves
        ]
        local_args, local_kwargs = tree_unflatten(local_leaves, spec)
        results.append((start, stop, func(*local_args, **local_kwargs)))
    if is_in_place:
        return args[0]
    dtype = results[0][2].dtype
    return AveragedGradient(gradients[0], gradients[0].source, None, dtype=dtype, runs=results)


def _draw_like(func: Any, gradient: AveragedGradient, kwargs: Any) -> AveragedGradient:
    """Draw random numbers for all elements, as one process does, and keep this rank's."""
    whole = func(
        torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device), **kwargs
    )
    flat = whole.reshape(-1)
    runs = [(start, stop, flat[start:stop]) for start, stop, _ in gradient.local_runs()]
    return AveragedGradient(gradient, gradient.source, None, dtype=whole.dtype, runs=runs)


def _slice_argument(value: Any, shape: torch.Size, start: int, stop: int) -> Any:
    """Return the elements of another argument that belong to a run; numbers stay as they are."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() == 1:
        return value.reshape(())
    return value.expand(shape).reshape(-1)[start:stop]


def _apply_foreach(name: str, args: Any, kwargs: Any) -> Any:
    """Apply a `_foreach_` operation tensor by tensor."""
    if name == "norm":
        return norms(args[0], *args[1:], **kwargs)
    operator = getattr(aten, name)
    results = []
    for index in range(len(args[0])):
        row = [arg[index] if isinstance(arg, list | tuple) else arg for arg in args]
        results.append(operator(*row, **kwargs))
    return None if name.endswith("_") else results


def _gather_runs(
    runs: Sequence[tuple[int, int, Tensor]], shape: torch.Size, communicator: Communicator
) -> Tensor:
    """Return the whole tensor, of which each rank passes its runs of elements."""
    communicator.check_not_joining()
    first = runs[0][2]
    whole = torch.zeros(shape.numel(), dtype=first.dtype, device=communicator.device)
    for start, stop, values in runs:
        whole[start:stop] = values.reshape(-1)
    # Every element is nonzero on one rank only, so the order of the sum does not matter.
    communicator.all_reduce(whole).wait()
    return whole.to(first.device).view(shape)


def unscale(gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Divide gradients by GradScaler's scale; set `found_inf` if any rank has an infinity."""
    pieces = [plain(piece) for piece in _local_pieces(gradients)]
    if pieces:
        getattr(torch, UNSCALE)(pieces, found_inf, inv_scale)
    communicator = communicator_of(gradients)
    communicator.check_not_joining()
    found_anywhere = found_inf.to(communicator.device)
    communicator.all_reduce(found_anywhere, op=dist.ReduceOp.MAX).wait()
    found_inf.copy_(found_anywhere)


def _local_pieces(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's elements of the gradients."""
    pieces = []
    for gradient in gradients:
        if isinstance(gradient, AveragedGradient):
            pieces += [values for start, stop, values in gradient.local_runs() if start < stop]
        else:
            pieces.append(gradient)
    return pieces


def communicator_of(gradients: Sequence[Any]) -> Communicator:
    """Return the communicator of the ranks that share the first sharded gradient."""
    for gradient in gradients:
        if isinstance(gradient, AveragedGradient):
            return gradient.source.communicator
        if isinstance(gradient, ShardGradient):
            return gradient.communicator
    raise AssertionError("expected at least one sharded gradient")


def norms(gradients: Sequence[Tensor], ord: float = 2, dtype: Any = None) -> list[Tensor]:
    """Return each gradient's vector norm over all ranks, in one all-reduce.

    Every rank must call it.
    """
    if ord <= 0:
        raise ValueError(f"expected a norm of order > 0 of a sharded gradient, got order {ord}")
    # The sum of |x|^ord, or the maximum of |x|.
    powers = torch.zeros(len(gradients), dtype=torch.float64, device=gradients[0].device)
    for index, gradient in enumerate(gradients):
        for piece in _local_pieces([gradient]):
            if not piece.numel():
                continue
            values = plain(piece)
            wide = torch.complex128 if values.is_complex() else torch.float64
            norm = torch.linalg.vector_norm(values.to(wide), ord)
            if ord == inf:
                powers[index] = torch.maximum(powers[index], norm)
            else:
                powers[index] += norm**ord
    everyone = _all_gather_rows(powers, communicator_of(gradients))
    if ord == inf:
        sharded = everyone.amax(0)
        replicated = powers
    else:
        sharded = everyone.sum(0) ** (1 / ord)
        replicated = powers ** (1 / ord)
    results = []
    for index, gradient in enumerate(gradients):
        is_sharded = isinstance(gradient, AveragedGradient | ShardGradient)
        norm = sharded[index] if is_sharded else replicated[index]
        results.append(norm.to((dtype or gradient.dtype).to_real()))
    return results


def _all_gather_rows(values: Tensor, communicator: Communicator) -> Tensor:
    """Return every rank's `values` as rows, so that all ranks compute equal results."""
    communicator.check_not_joining()
    rows = values.new_zeros(communicator.world, values.numel(), device=communicator.device)
    rows[communicator.rank] = values
    communicator.all_reduce(rows).wait()
    return rows.to(values.device)


def _reduces_all_elements(name: str, args: Any, kwargs: Any) -> bool:
    """Return True if an operation reduces the whole tensor to one number."""
    names: tuple[str, ...]
    if name in NORMS:
        names = ("self", "ord", "dim")
    elif name in REDUCTIONS:
        names = ("self", "dim")
    else:
        return False
    arguments = dict(zip(names, args, strict=False)) | kwargs
    dim = arguments.get("dim")
    return dim is None or (isinstance(dim, list | tuple) and not dim)


def _reduce(name: str, args: Any, kwargs: Any) -> Tensor:
    gradient = args[0]
    dtype = kwargs.get("dtype")
    if name in REDUCTIONS:
        return _reduce_elements(name, gradient, dtype)
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    if order is None or order == "fro":
        order = 2
    return norms([gradient], order, dtype)[0]


def _reduce_elements(name: str, gradient: Any, dtype: torch.dtype | None) -> Tensor:
    """Return a sum, mean, maximum, minimum, any or all over the elements of all ranks."""
    if gradient.dtype.is_complex:
        raise RuntimeError(
            f"{name} of a sharded complex gradient is not supported: p.grad.full_tensor(), called "
            "by every rank, gathers it; norms, and sums of its abs(), work"
        )
    function, neutral = REDUCTIONS[name]
    local = torch.tensor([neutral, 0.0], dtype=torch.float64, device=gradient.device)
    pieces = [plain(piece).reshape(-1).double() for piece in _local_pieces([gradient])]
    flat = torch.cat([local[:0], *pieces])
    if flat.numel():
        local[0] = function(flat)
        local[1] = flat.numel()
    values, counts = _all_gather_rows(local, communicator_of([gradient])).unbind(1)
    result: Tensor = function(values)
    if name in ("any", "all"):
        return result
    if name == "mean":
        result = result / counts.sum()
    return result.to(dtype or gradient.dtype)


@dataclass(frozen=True)
class ElementRange:
    """Elements `start` to `stop` of a flattened tensor of shape `shape`."""

    start: int
    stop: int
    shape: torch.Size


class ShardGradient(Tensor):
    """`.grad` of one of FSDP's shards: this rank's elements of the average.

    See Note [Operations on a sharded gradient]. While an optimizer steps, operations that would
    raise act on this rank's elements instead, because the optimizer is known or verified to be
    element-wise.
    """

    #: True while an optimizer of shards steps.
    is_stepping: ClassVar[bool] = False
    communicator: Communicator
    elements: ElementRange

    def full_tensor(self) -> Tensor:
        """Return the whole average on every rank; every rank must call it."""
        full: Tensor = _FullTensor.apply(plain(self), self.elements, self.communicator)
        return full

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` on this rank's elements or over all ranks, or raise."""
        kwargs = kwargs or {}
        name = _python_name(func)
        with torch._C.DisableTorchFunctionSubclass():
            if name == UNSCALE:
                return unscale(*args)
            if name == "_foreach_norm":
                return norms(*args, **kwargs)
            if name.startswith("_foreach_"):
                lists = [arg for arg in args if isinstance(arg, list | tuple)]
                for leaves in zip(*lists, strict=False):
                    # Replicated parameters have plain gradients.
                    if any(isinstance(leaf, ShardGradient) for leaf in leaves):
                        is_local = _is_elementwise(name.removeprefix("_foreach_"))
                        _check_is_local(name, is_local, leaves)
                return _wrap_results(func(*args, **kwargs), args[0])
            if _reduces_all_elements(name, args, kwargs) and isinstance(args[0], ShardGradient):
                if torch.is_grad_enabled() and args[0].requires_grad:
                    return func(args[0].full_tensor(), *args[1:], **kwargs)
                return _reduce(name, args, kwargs)
            if name in RANDOM:
                like, elements = args[0], args[0].elements
                whole = func(like.new_empty(elements.shape), *args[1:], **kwargs)
                part = whole.reshape(-1)[elements.start : elements.stop].view(like.shape)
                return shard_gradient(part, like.communicator, elements)
            return _apply_to_shards(func, name, args, kwargs)


class _FullTensor(torch.autograd.Function):
    """The whole tensor, of which each rank has a shard."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, elements: ElementRange, communicator: Communicator
    ) -> Tensor:
        ctx.elements = elements
        ctx.communicator = communicator
        ctx.shape = values.shape
        runs = [(elements.start, elements.stop, values)]
        return _gather_runs(runs, elements.shape, communicator)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # The loss of a training step is the average of the ranks' losses.
        average = gradient.to(ctx.communicator.device).contiguous().clone()
        ctx.communicator.all_reduce(average).wait()
        average /= ctx.communicator.world
        part = average.reshape(-1)[ctx.elements.start : ctx.elements.stop]
        return part.to(gradient.device).view(ctx.shape), None, None


def shard_gradient(
    values: Tensor, communicator: Communicator, elements: ElementRange
) -> ShardGradient:
    """Return `values` as the gradient of this rank's shard of a parameter."""
    gradient = values.as_subclass(ShardGradient)
    gradient.communicator = communicator
    gradient.elements = elements
    return gradient


def plain(tensor: Tensor) -> Tensor:
    """Return a ShardGradient's elements as a plain tensor."""
    return tensor.as_subclass(Tensor) if isinstance(tensor, ShardGradient) else tensor


def shard_function(func: Any, args: Any, kwargs: Any, as_gradient: Callable[[Any], Any]) -> Any:
    """Run a function of torch on shards of parameters by the rules for their gradients.

    as_gradient: returns a shard as a ShardGradient, and any other value as it is.
    """
    name = _python_name(func)
    is_access = getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")
    with torch._C.DisableTorchFunctionSubclass():
        is_of_object = name in NOT_IN_PLACE or name.startswith(("register_", "__reduce"))
        if ShardGradient.is_stepping or is_of_object:
            return func(*args, **kwargs)
        if is_access and (func.__name__ != "__get__" or name not in VIEWS):
            if name == "data":
                args = args[0], *[plain(arg) for arg in args[1:]]
            return func(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        local_args, local_kwargs = tree_unflatten([as_gradient(leaf) for leaf in leaves], spec)
    result = ShardGradient.__torch_function__(func, (), local_args, local_kwargs)
    is_in_place = bool(args) and bool(local_args) and result is local_args[0]
    return args[0] if is_in_place else result


def _python_name(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        name = func.__self__.__name__
    return {"vector_norm": "linalg_vector_norm", "linalg_norm": "norm"}.get(name, name)


def _apply_to_shards(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Run a function on this rank's elements, or raise if the whole gradient is needed."""
    leaves = tree_leaves((args, kwargs))
    is_assignment = name == "__setitem__" and isinstance(args[1], ShardGradient)
    is_elementwise = _is_elementwise(name) or is_assignment
    is_in_place = name.rstrip("_") + "_" == name and name not in NOT_IN_PLACE
    if is_elementwise or is_in_place or name in READS_ELEMENTS:
        _check_is_local(name, is_elementwise, leaves)
    result = func(*args, **kwargs)
    if is_elementwise and type(result) is Tensor:
        gradient = next(leaf for leaf in leaves if isinstance(leaf, ShardGradient))
        _check_is_local(name, gradient.shape == result.shape, ())
        return shard_gradient(result, gradient.communicator, gradient.elements)
    results = result if isinstance(result, list | tuple) else [result]
    if any(type(entry) is Tensor for entry in results) and not name.startswith("new_"):
        _check_is_local(name, False, ())
    return result


def _check_is_local(name: str, is_local: bool, leaves: Sequence[Any]) -> None:
    """Raise unless `name` is right on each rank's elements of the arguments alone."""
    if ShardGradient.is_stepping:
        return
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    gradients = [tensor for tensor in tensors if isinstance(tensor, ShardGradient)]
    others = [tensor for tensor in tensors if tensor.numel() != 1 or tensor.dim()]
    if (
        not is_local
        or any(tensor.shape != gradients[0].shape for tensor in others)
        or any(gradient.elements != gradients[0].elements for gradient in gradients)
    ):
        raise RuntimeError(
            f"{name} needs elements of a gradient or parameter that other ranks have, or combines "
            f"this rank's elements with a tensor of other elements: {REMEDY}"
        )
    has_plain = any(not isinstance(tensor, ShardGradient) for tensor in others)
    if has_plain and gradients[0].communicator.world > 1:
        raise RuntimeError(
            f"{name} combines this rank's elements with a plain tensor of their shape, whose "
            "values may be equal on all ranks, as random numbers of equal seeds are: create it by "
            "zeros_like(p), randn_like(p), p.detach().clone() or another operation on p or p.grad"
        )


def _wrap_results(results: Any, gradients: Sequence[Tensor]) -> Any:
    """Return the results of a `_foreach_` operation as gradients of the same shards."""
    if not isinstance(results, list | tuple):
        return results
    wrapped = []
    for result, gradient in zip(results, gradients, strict=True):
        if isinstance(gradient, ShardGradient) and type(result) is Tensor:
            result = shard_gradient(result, gradient.communicator, gradient.elements)
        wrapped.append(result)
    return wrapped


@cache
def _is_elementwise(name: str) -> bool:
    """Return True if a function or method of torch is element-wise, in place or not."""
    known = ELEMENTWISE_FUNCTIONS | ELEMENTWISE_OPERATORS
    stripped = name.strip("_")
    candidates = [stripped]
    if name.startswith("__"):
        # The method `__iadd__` is `add` in place.
        candidates.append(stripped[1:])
    for candidate in candidates:
        operator = OPERATOR_NAMES.get(candidate, candidate)
        if {operator, name, operator + "_"} & known:
            return True
        packet = getattr(aten, operator, None) if operator else None
        if packet is None:
            continue
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        if any(torch.Tag.pointwise in overload.tags for overload in overloads):
            return True
    return False
