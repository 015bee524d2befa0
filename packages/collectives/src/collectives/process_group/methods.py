"""Decorators that make methods of torch's ProcessGroup from functions.

A method forwards tensors of another device to the backend of that device, is implemented by a
collective of this package, by gloo, or is refused.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor

from collectives.communicator import limit_calls
from collectives.execution.work import Work
from collectives.process_group.method_arguments import Options, first_tensor

Method = Callable[..., Any]
#: The handle of a call, or None if it has finished, and the tensors that it has written.
Started = tuple[dist.Work | None, Sequence[Tensor]]


def by_device(method: Method) -> Method:
    """Forward calls with tensors that are not on the CPU to the backend of their device."""
    name = method.__name__

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = first_tensor([*args, *kwargs.values()])
        if tensor is not None and not tensor.is_cpu:
            return getattr(self.get_backend(tensor.device), name)(*args, **kwargs)
        work = method(self, *args, **kwargs)
        if self._coalescing is not None:
            # If the body of torch's `_coalescing_manager` raises, torch does not end coalescing.
            # Handles of finished calls must not keep tensors alive until the next coalescing. Calls
            # finish in order, so the first handle that is pending ends the search.
            while self._coalescing and _has_succeeded(self._coalescing[0]):
                self._coalescing.popleft()
            self._coalescing.append(work)
        return work

    return call


def collective_method(*names: str) -> Callable[[Callable[..., Started]], Method]:
    """Return a decorator that makes a method of torch's ProcessGroup from a function.

    The function receives the method's tensors and its `Options`. `names` are the options that users
    may pass by position, after the tensors.
    """

    def decorate(function: Callable[..., Started]) -> Method:
        *tensor_names, _ = list(inspect.signature(function).parameters)[1:]

        @wraps(function)
        def method(self: Any, *args: Any, **kwargs: Any) -> dist.Work:
            count = len(tensor_names)
            by_name = {name: kwargs.pop(name) for name in tensor_names if name in kwargs}
            options = Options.parse(names, args[count:], kwargs)
            with limit_calls(options.timeout):
                work, results = function(self, *args[:count], options=options, **by_name)
            return Work.completed(list(results)) if work is None else work

        return by_device(method)

    return decorate


def on_gloo(name: str) -> Method:
    """Return a method that calls gloo's method of the same name.

    The inherited method would deadlock: it holds the GIL while gloo may wait for its own thread,
    and that thread needs the GIL to free the tensors of an earlier call.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._gloo, name)(*args, **kwargs)

    forward.__name__ = name
    return by_device(forward)


def refused(name: str, backend: str, remedy: str) -> Method:
    """Return a method that raises NotImplementedError.

    The inherited method would address the gloo backend only, without any effect on our calls.
    """

    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"the {backend} backend does not support {name}; {remedy}")

    refuse.__name__ = name
    refuse.__doc__ = f"Raise NotImplementedError: {remedy}."
    return refuse


def _has_succeeded(work: dist.Work) -> bool:
    return isinstance(work, Work) and work.is_success()
