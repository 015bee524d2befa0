"""The arguments of a process group's methods, in every form in which torch and users pass them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Options:
    """The arguments of a method that are not tensors."""

    op: Any
    root: int
    async_op: bool
    #: The timeout of the call, or None for the timeout of the group.
    timeout: timedelta | None

    @staticmethod
    def parse(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> "Options":
        """Return the arguments that follow the tensors; raise TypeError for further arguments.

        torch passes an options object. Users may pass the op, the root and the timeout instead, by
        keyword or in the order of `names`, with the timeout last. All of them may be omitted.
        """
        names = (*names, "timeout")
        by_name = {name: value for name, value in kwargs.items() if value is not None}
        options = args[0] if args else by_name.pop("opts", None)
        if hasattr(options, "asyncOp"):
            unknown = [*args[1:], *by_name]
            fields = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
            by_name = {
                name: getattr(options, field)
                for name, field in fields.items()
                if hasattr(options, field)
            }
            if options.timeout < timedelta():
                # The timeout of an options object is negative if it is not set.
                del by_name["timeout"]
        else:
            unknown = [*args[len(names) :], *(by_name.keys() - set(names[len(args) :]))]
            by_name |= {
                name: value for name, value in zip(names, args, strict=False) if value is not None
            }
        if unknown:
            known = ", ".join(names)
            raise TypeError(f"expected an options object, or some of {known}; got also {unknown}")
        return Options(
            op=by_name.get("op", dist.ReduceOp.SUM),
            root=by_name.get("root", 0),
            async_op=getattr(options, "asyncOp", True),
            timeout=by_name.get("timeout"),
        )


def unwrap_tensor(tensors: Any) -> Tensor:
    """Return the tensor of a method's argument: a tensor, or a list of one tensor per device."""
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(
            f"expected one tensor, because a rank has one CPU device, got {len(tensors)}; use a "
            "coalesced call for several tensors"
        )
    return unwrap_tensor(tensors[0])


def unwrap_list(tensor_lists: Any) -> list[Tensor]:
    """Return the argument as a flat list of tensors; `[[t1, t2]]` is accepted as `[t1, t2]`."""
    if not tensor_lists or isinstance(tensor_lists[0], Tensor):
        return list(tensor_lists)
    if len(tensor_lists) != 1:
        raise ValueError(
            f"expected one list of tensors, because a rank has one CPU device, got "
            f"{len(tensor_lists)} lists; make one call per list"
        )
    return list(tensor_lists[0])


def iter_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors in `values` and in the lists and tuples that it contains."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from iter_tensors(value)
