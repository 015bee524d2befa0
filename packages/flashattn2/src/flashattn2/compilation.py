"""Support for `torch.compile` and for other tools that intercept operators."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _functorch,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from flashattn2.validation import PLAIN_TYPES


def should_call_operator(*tensors: Tensor) -> bool:
    """Return True if a function must be called as an operator of `torch.library`.

    Compiled graphs, modes such as FLOP counters, transforms and subclasses of `Tensor` see only
    operators.  Tensors on the meta device have no values.  The dispatcher resolves the negative bit
    of a view such as `x.conj().imag`.  A kernel that is called directly would read values with the
    wrong sign.
    """
    if is_compiling() or _len_torch_dispatch_stack() or _len_torch_function_stack():
        return True
    is_plain = all(type(x) in PLAIN_TYPES and not (x.is_meta or x.is_neg()) for x in tensors)
    return not (is_plain and is_untransformed())


def is_recorded() -> bool:
    """Return True if `make_fx` records operators outside of `torch.compile` and `torch.export`.

    The recorded graph must be valid for other lengths.  It must therefore not contain torch's CPU
    kernel, whose alignment of causal attention is right for equal lengths only.
    """
    if is_compiling() or not (_len_torch_dispatch_stack() or _len_torch_function_stack()):
        return False
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def is_untransformed() -> bool:
    """Return True if neither forward-mode AD nor a `torch.func` transform is active."""
    return forward_ad._current_level < 0 and not _are_functorch_transforms_active()


def is_mapped(x: Tensor) -> bool:
    """Return True if `torch.func.vmap` maps a dimension of `x`."""
    if is_compiling() or not _are_functorch_transforms_active():
        return False
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False


def constant_in_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function whose result is a constant of a compiled graph.

    `torch.compiler.assume_constant_result` sets the same attribute, but imports the whole compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
