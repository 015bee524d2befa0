"""The three kinds of methods of the registered backend: this package's, gloo's, and refused ones.

Methods of the first two kinds pass tensors of other devices to the backends of those devices.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch.distributed as dist

from collectives.execution.timeouts import limit_calls
from collectives.execution.work import MessageWork, Work
from collectives.process_group.method_arguments import Options, iter_tensors

Method = Callable[..., Any]
#: The handle of a call, or None if the call has finished.
OptionalWork = dist.Work | None


def dispatch_by_device(method: Method) -> Method:
    """Return a method that forwards tensors of another device to the backend of that device."""
    name = method.__name__

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = next(iter_tensors([*args, *kwargs.values()]), None)
        if tensor is not None and not tensor.is_cpu:
            return getattr(self.get_backend(tensor.device), name)(*args, **kwargs)
        work = method(self, *args, **kwargs)
        if self._coalescing is not None:  # inside a coalesced block
            self._coalescing.append(work)
        return work

    return call


def collective_method(*names: str) -> Callable[[Callable[..., OptionalWork]], Method]:
    """Return a decorator that makes a method of torch's ProcessGroup from a function.

    The function receives the method's tensors and `Options`. Its first argument contains the
    outputs. It returns the handle of the call, or None if the call has finished.

    Args:
        names: the options that users may pass by position, after the tensors.
    """

    def decorate(function: Callable[..., OptionalWork]) -> Method:
        tensor_names = list(inspect.signature(function).parameters)[1:-1]

        @wraps(function)
        def call_method(self: Any, *args: Any, **kwargs: Any) -> dist.Work:
            tensors = dict(zip(tensor_names, args, strict=False))
            for name in tensor_names[len(args) :]:
                if name in kwargs:
                    tensors[name] = kwargs.pop(name)
            options = Options.parse(names, args[len(tensor_names) :], kwargs)
            with limit_calls(options.timeout):
                work = function(self, **tensors, options=options)
            if work is None:
                return Work.make_completed(list(iter_tensors([tensors[tensor_names[0]]])))
            return work

        return dispatch_by_device(call_method)

    return decorate


def use_gloo(name: str) -> Method:
    """Return a method that calls gloo's method of the same name.

    The inherited method would deadlock. It holds the GIL while gloo may wait for its own thread.
    That thread needs the GIL to free the tensors of an earlier call.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        work = getattr(self._gloo, name)(*args, **kwargs)
        # `monitored_barrier` waits itself and returns None.
        return None if work is None else MessageWork(work, self._gloo.options._timeout)

    forward.__name__ = name
    return dispatch_by_device(forward)


def refuse_call(name: str, backend: str, remedy: str) -> Method:
    """Return a method that raises NotImplementedError.

    The inherited method would affect gloo only, not the calls of this package.
    """

    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"the {backend} backend does not support {name}; {remedy}")

    refuse.__name__ = name
    refuse.__doc__ = f"Raise NotImplementedError: {remedy}."
    return refuse
