"""Calls that a compiled wrapper does not trace."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch


def call_uncompiled(function: Callable[[], None]) -> None:
    """Call `function` without tracing its code, also in a compiled wrapper.

    `torch.compile(DDP(module))` also traces functions that the wrapper calls. While it traces the
    allocation of buckets, Dynamo may raise an error.
    """
    # `torch.compiler.disable` imports Dynamo, which takes seconds.
    if "torch._dynamo" in sys.modules:
        function = torch.compiler.disable(function)
    function()
