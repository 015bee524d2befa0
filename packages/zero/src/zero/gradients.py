"""What `.grad` is once gradients have been averaged: this rank's elements, which act as the whole.

torch's own tools read and change `.grad`: GradScaler, `clip_grad_norm_`, `clip_grad_value_`, a
loop that scales or logs. Each rank holds 1/n of the average only, so on a plain tensor some of
these would be right (an element-wise change), some wrong without a word (a norm: every rank has
another).

Notable:
- an element-wise operation acts on the elements that are here, which is exact;
- a norm, a sum, a maximum over all elements is taken over all ranks: every rank must call it;
- GradScaler's look for infinities is agreed on, so that all ranks step or none does;
- what needs elements that are elsewhere raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import inf
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from zero.wire import Wire

aten = torch.ops.aten

# Element-wise as well, though torch does not tag them so.
ELEMENTWISE = {"zero_", "zeros_like", "ones_like", "copy_", "fill_", "clone", "_to_copy"}
UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


class Source(Protocol):
    """Where an AveragedGradient's elements are: a reducer."""

    wire: Wire

    def fetch(self, gradient: AveragedGradient) -> list[tuple[int, int, Tensor]]:
        """This rank's runs of elements (start, stop, values), when they have arrived."""


class AveragedGradient(Tensor):
    """`.grad` after backward at stages 1 and 2, in the parameter's shape; see this module.

    It holds no elements of its own: they lie in the reducer's buckets.
    """

    source: Source
    # What finds this gradient's elements, whatever it was sliced from; see Reducer.fetch.
    key: Any
    # Concrete elements, for the result of an operation.
    parts: list[tuple[int, int, Tensor]] | None
    # This rank's gradient of a later backward, not averaged yet.
    local: Tensor | None
    # Whether this rank's backward reached the parameter.
    used: bool

    @staticmethod
    def __new__(
        cls,
        like: Tensor,
        source: Source,
        key: Any,
        *,
        dtype: torch.dtype | None = None,
        parts: list[tuple[int, int, Tensor]] | None = None,
        used: bool = True,
    ) -> AveragedGradient:
        """Stand for the average of `like`'s gradient."""
        made: AveragedGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=dtype or like.dtype, device=like.device
        )
        made.source, made.key, made.parts = source, key, parts
        made.local, made.used = None, used
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def held(self) -> list[tuple[int, int, Tensor]]:
        """This rank's runs of the flattened average: (start, stop, values); never empty."""
        if self.parts is not None:
            return self.parts
        if self.local is not None:
            raise RuntimeError(
                "this gradient is an average plus what a later backward under no_sync() added on "
                "this rank: run the last backward of a step outside no_sync(), then look at .grad"
            )
        found = self.source.fetch(self)
        return found or [(0, 0, torch.empty(0, dtype=self.dtype, device=self.device))]

    def full_tensor(self) -> Tensor:
        """The whole average, on every rank; every rank calls it."""
        return _whole(self.held(), self.shape, self.source.wire)

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
        """Do `func` on the elements that are here, or over all ranks, or refuse."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "detach":
            return _alias(args[0])
        if name in ("add_", "add") and torch._C._current_graph_task_id() != -1:
            return _accumulate(name, *args)
        if name == UNSCALE:
            return _unscale(*args)
        if name.startswith("_foreach_"):
            return _each(name.removeprefix("_foreach_"), args, kwargs)
        if name in REDUCTIONS and _over_everything(name, args, kwargs):
            return _reduce(name, args, kwargs)
        if torch.Tag.pointwise in func.tags or name in ELEMENTWISE:
            return _elementwise(func, args, kwargs)
        raise RuntimeError(
            f"{name} needs all elements of an averaged gradient, of which this rank holds its "
            "share only: element-wise operations, norms, sums, means and extremes work; "
            "p.grad.full_tensor(), called by every rank, gathers it"
        )


def _whole(runs: Sequence[tuple[int, int, Tensor]], shape: torch.Size, wire: Wire) -> Tensor:
    first = runs[0][2]
    whole = torch.zeros(shape.numel(), dtype=first.dtype, device=wire.device)
    for start, stop, values in runs:
        whole[start:stop] = values.reshape(-1)
    # Adding zeros changes nothing, whatever the order.
    wire.all_reduce(whole).wait()
    return whole.to(first.device).view(shape)


def _alias(gradient: AveragedGradient) -> AveragedGradient:
    same = AveragedGradient(
        gradient, gradient.source, gradient.key, parts=gradient.parts, used=gradient.used
    )
    same.local = gradient.local
    return same


def _accumulate(name: str, gradient: Any, added: Any) -> Any:
    """Autograd adds this rank's gradient of one more backward: it is averaged in its turn."""
    if not isinstance(gradient, AveragedGradient) or isinstance(added, AveragedGradient):
        raise RuntimeError("an averaged gradient cannot take part in a backward")
    gradient = gradient if name == "add_" else _alias(gradient)
    gradient.local = added.clone() if gradient.local is None else gradient.local.add_(added)
    return gradient


def _elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    ours = [leaf for leaf in leaves if isinstance(leaf, AveragedGradient)]
    held = [gradient.held() for gradient in ours]
    runs = [(start, stop) for start, stop, _ in held[0]]
    in_place = func._schema.is_mutable
    if any([(a, b) for a, b, _ in other] != runs for other in held) or (
        in_place and not isinstance(args[0], AveragedGradient)
    ):
        raise RuntimeError(
            f"{func} mixes an averaged gradient, of which this rank holds its share, with a tensor "
            "that is held otherwise: p.grad.full_tensor(), called by every rank, gathers it"
        )
    results = []
    for number, (start, stop) in enumerate(runs):
        mine = iter(held)
        here = [
            next(mine)[number][2]
            if isinstance(leaf, AveragedGradient)
            else _part(leaf, ours[0].shape, start, stop)
            for leaf in leaves
        ]
        some_args, some_kwargs = tree_unflatten(here, spec)
        results.append((start, stop, func(*some_args, **some_kwargs)))
    if in_place:
        return args[0]
    first = ours[0]
    dtype = results[0][2].dtype
    return AveragedGradient(first, first.source, None, dtype=dtype, parts=results)


def _part(value: Any, shape: torch.Size, start: int, stop: int) -> Any:
    if not isinstance(value, Tensor) or value.numel() == 1:
        return value.reshape(()) if isinstance(value, Tensor) else value
    return value.expand(shape).reshape(-1)[start:stop]


def _each(name: str, args: Any, kwargs: Any) -> Any:
    """A `_foreach_` operation, tensor by tensor."""
    count = len(args[0])
    if name == "norm":
        return norms(args[0], *args[1:], **kwargs)
    each = [
        getattr(aten, name)(*(a[i] if isinstance(a, list | tuple) else a for a in args), **kwargs)
        for i in range(count)
    ]
    return None if name.endswith("_") else each


def _unscale(gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    unscale(pieces_of(gradients), wire_of(gradients), found_inf, inv_scale)


def unscale(pieces: list[Tensor], wire: Wire, found_inf: Tensor, inv_scale: Tensor) -> None:
    """GradScaler's: divide by the scale; set `found_inf` on every rank if any has found one."""
    if pieces:
        getattr(torch, UNSCALE)(pieces, found_inf, inv_scale)
    agreed = found_inf.to(wire.device)
    wire.all_reduce(agreed, op=dist.ReduceOp.MAX).wait()
    found_inf.copy_(agreed)


def pieces_of(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The elements that are here."""
    pieces = []
    for gradient in gradients:
        if isinstance(gradient, AveragedGradient):
            pieces += [values for start, stop, values in gradient.held() if start < stop]
        else:
            pieces.append(gradient)
    return pieces


def wire_of(gradients: Sequence[Any]) -> Wire:
    """The wire of the ranks that hold the rest."""
    for gradient in gradients:
        if isinstance(gradient, AveragedGradient):
            return gradient.source.wire
        if isinstance(gradient, ShardGradient):
            return gradient.wire
    raise AssertionError("no sharded gradient among them")


def _sharded(gradient: Tensor) -> bool:
    return isinstance(gradient, AveragedGradient | ShardGradient)


def norms(gradients: Sequence[Tensor], ord: float = 2, dtype: Any = None) -> list[Tensor]:
    """Each gradient's vector norm over all ranks, in one all-reduce; every rank calls it."""
    if ord <= 0:
        raise ValueError(f"the norm of order {ord} of a sharded gradient: use one above 0")
    powers = torch.zeros(len(gradients), dtype=torch.float64, device=gradients[0].device)
    for i, gradient in enumerate(gradients):
        for piece in pieces_of([gradient]):
            if not piece.numel():
                continue
            values = plain(piece)
            wide = torch.complex128 if values.is_complex() else torch.float64
            norm = torch.linalg.vector_norm(values.to(wide), ord)
            powers[i] = torch.maximum(powers[i], norm) if ord == inf else powers[i] + norm**ord
    everyone = _everyones(powers, wire_of(gradients))
    total = everyone.amax(0) if ord == inf else everyone.sum(0) ** (1 / ord)
    # What is replicated is counted once.
    alone = powers if ord == inf else powers ** (1 / ord)
    here = torch.tensor([_sharded(g) for g in gradients], device=powers.device)
    roots = torch.where(here, total, alone).unbind()
    kinds = (dtype or g.dtype for g in gradients)
    return [root.to(kind.to_real()) for root, kind in zip(roots, kinds, strict=True)]


def _everyones(values: Tensor, wire: Wire) -> Tensor:
    """Each rank's `values`, in rank order: what comes of them is alike on all ranks, NaNs too."""
    rows = values.new_zeros(wire.world, values.numel(), device=wire.device)
    rows[wire.rank] = values
    wire.all_reduce(rows).wait()
    return rows.to(values.device)


# Over all elements, to one number.
REDUCTIONS = {
    "norm",
    "linalg_vector_norm",
    "sum",
    "mean",
    "max",
    "amax",
    "min",
    "amin",
    "any",
    "all",
}


def _over_everything(name: str, args: Any, kwargs: Any) -> bool:
    """Whether the whole tensor is reduced, to one number."""
    given = dict(zip(("self", "ord", "dim") if "norm" in name else ("self", "dim"), args,
                     strict=False), **kwargs)  # fmt: skip
    dim = given.get("dim")
    return dim is None or (isinstance(dim, list | tuple) and not dim)


def _reduce(name: str, args: Any, kwargs: Any) -> Tensor:
    gradient = args[0]
    dtype = kwargs.get("dtype")
    if "norm" in name:
        order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
        return norms([gradient], 2 if order is None or order == "fro" else order, dtype)[0]
    return reduce_elements(name, pieces_of([gradient]), gradient, dtype)


def reduce_elements(
    name: str, pieces: Sequence[Tensor], gradient: Any, dtype: torch.dtype | None
) -> Tensor:
    """A sum, mean, extreme, any or all over the elements of all ranks."""
    if gradient.dtype.is_complex:
        raise RuntimeError(
            f"{name} of a sharded complex gradient: p.grad.full_tensor(), called by every rank, "
            "gathers it; norms, and sums of its abs(), work"
        )
    lowest = {"max": -inf, "amax": -inf, "min": inf, "amin": inf, "all": 1.0}.get(name, 0.0)
    kind = {"mean": "sum", "amax": "max", "amin": "min"}.get(name, name)
    here = torch.tensor([lowest, 0.0], dtype=torch.float64, device=gradient.device)
    flat = torch.cat([plain(piece).reshape(-1).double() for piece in pieces] or [here[:0]])
    if flat.numel():
        one = getattr(flat.bool() if kind in ("any", "all") else flat, kind)()
        here = torch.stack([one.double(), one.new_tensor(flat.numel()).double()])
    values, counts = _everyones(here, wire_of([gradient])).unbind(1)
    total: Tensor = getattr(values.bool() if kind in ("any", "all") else values, kind)()
    if name == "mean":
        total = total / counts.sum()
    return total if kind in ("any", "all") else total.to(dtype or gradient.dtype)


def plain(tensor: Tensor) -> Tensor:
    """Return this rank's elements of a ShardGradient as a tensor that is nothing but them."""
    return tensor.as_subclass(Tensor) if isinstance(tensor, ShardGradient) else tensor


class ShardGradient(Tensor):
    """`.grad` of one of FSDP's shards: its elements, and norms, sums and extremes over all ranks.

    While an optimizer steps it is the plain tensor of this rank's elements for everything else,
    which a trial has shown to be right; at other times what needs elements of others raises.
    """

    # Whether an optimizer of shards steps.
    stepping: ClassVar[bool] = False
    wire: Wire
    # Which elements of what they are.
    place: tuple[int, int, torch.Size]

    def full_tensor(self) -> Tensor:
        """The whole average, on every rank; every rank calls it."""
        start, stop, shape = self.place
        return _whole([(start, stop, plain(self))], shape, self.wire)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do `func` on this rank's elements, or over all ranks, or refuse."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name == UNSCALE:
                return unscale([plain(g) for g in args[0]], wire_of(args[0]), *args[1:])
            if name == "_foreach_norm":
                return norms(*args, **kwargs)
            name = {"vector_norm": "linalg_vector_norm", "linalg_norm": "norm"}.get(name, name)
            if (
                name in REDUCTIONS
                and isinstance(args[0], ShardGradient)
                and _over_everything(name, args, kwargs)
            ):
                if "norm" in name:
                    return _reduce(name, args, kwargs)
                return reduce_elements(name, [plain(args[0])], args[0], kwargs.get("dtype"))
            if name.startswith("_foreach_"):
                _check_alike(name, _is_elementwise(name[9:]), ())
                return _kept_each(func(*args, **kwargs), args[0])
            kept = _is_elementwise(name) or (
                name == "__setitem__" and isinstance(args[1], ShardGradient)
            )
            changes = name.rstrip("_") + "_" == name and name not in UNCHANGED
            leaves = tree_leaves((args, kwargs))
            if kept:
                _check_alike(name, True, leaves)
            elif changes or name in LOOKS:
                _check_alike(name, False, leaves)
            result = func(*args, **kwargs)
            if type(result) is Tensor and kept:
                given = next(leaf for leaf in leaves if isinstance(leaf, ShardGradient))
                _check_alike(name, given.shape == result.shape, ())
                return shard_gradient(result, given.wire, given.place)
            several = result if isinstance(result, list | tuple) else [result]
            if any(type(each) is Tensor for each in several) and not name.startswith("new_"):
                _check_alike(name, False, ())
            return result


def _check_alike(name: str, right: bool, leaves: Sequence[Any]) -> None:
    """Raise unless `name` is right on each rank's elements of these alone."""
    if ShardGradient.stepping:
        return
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, ShardGradient)]
    others = [tensor for tensor in tensors if tensor.numel() != 1 or tensor.dim()]
    if (
        not right
        or any(tensor.shape != ours[0].shape for tensor in others)
        or any(tensor.place != ours[0].place for tensor in ours)
    ):
        raise RuntimeError(
            f"{name} needs other elements of a gradient than this rank's, or mixes those with a "
            "tensor that is held otherwise: element-wise operations, norms, sums, means and "
            "extremes work; p.grad.full_tensor(), called by every rank, gathers it"
        )


def _kept_each(results: Any, given: Sequence[Tensor]) -> Any:
    if not isinstance(results, list | tuple):
        return results
    return [
        shard_gradient(result, g.wire, g.place)
        if isinstance(g, ShardGradient) and type(result) is Tensor
        else result
        for result, g in zip(results, given, strict=True)
    ]


# Element-wise as well, though torch does not tag them so.
KEPT = {
    "to", "double", "float", "half", "bfloat16", "type", "cpu", "cuda", "contiguous", "detach",
    "data", "real", "__deepcopy__", "empty_like", "full_like", "fill_", "nan_to_num", "clip",
    "where", "isfinite", "isreal", "multiply", "divide", "subtract", "negative", "absolute",
    "true_divide", "square", "clamp", "masked_fill",
}  # fmt: skip
# What ends like a change of elements and is none.
UNCHANGED = {"requires_grad_", "detach_", "share_memory_"}
# Numbers out of elements.
LOOKS = {"item", "tolist", "numpy", "equal", "allclose", "__array__", "__bool__", "__float__",
         "__int__", "is_nonzero", "__contains__", "__iter__", "__setitem__"}  # fmt: skip
OPERATORS = {"truediv": "div", "invert": "bitwise_not", "floordiv": "floor_divide",
             "mod": "remainder", "and": "bitwise_and", "or": "bitwise_or"}  # fmt: skip


@cache
def _is_elementwise(name: str) -> bool:
    core = name.strip("_")
    cores = [core, core[1:]] if name.startswith("__") else [core]
    for bare in (OPERATORS.get(core, core) for core in cores):
        packet = getattr(aten, bare, None) if bare else None
        overloads = [getattr(packet, each) for each in packet.overloads()] if packet else []
        tagged = any(torch.Tag.pointwise in overload.tags for overload in overloads)
        if tagged or not {bare, name, bare + "_"}.isdisjoint(KEPT | ELEMENTWISE):
            return True
    return False


def shard_gradient(values: Tensor, wire: Wire, place: tuple[int, int, torch.Size]) -> ShardGradient:
    """`values` as the gradient of this rank's shard, elements `place` of a parameter."""
    gradient = values.as_subclass(ShardGradient)
    gradient.wire, gradient.place = wire, place
    return gradient
