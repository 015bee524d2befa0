"""Support for `torch.compile`."""

from collections.abc import Callable
from typing import Any


def constant_in_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function whose result is a constant of a compiled graph.

    This does what `torch.compiler.assume_constant_result` does.  The original would import the
    whole compiler to set this attribute.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
