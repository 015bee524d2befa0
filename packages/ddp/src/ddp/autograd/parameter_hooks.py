"""Hooks on the parameters of one `DDP`, and their transfer to a newer wrapper of the module."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn


class GradientHook(partial[None]):
    """The hook that marks a gradient as ready."""

    #: The hooks of the wrapper that registered this hook.
    owner: ParameterHooks


class ParameterHooks:
    """The registered hooks of one wrapper.

    If a module is wrapped again, the newer wrapper averages its gradients: two wrappers with hooks
    on one parameter would average twice.
    """

    def __init__(self, wrapper: object) -> None:
        self._handles: list[Any] = []
        #: The parameter and the hook of each handle.
        self._registered: list[tuple[nn.Parameter, GradientHook]] = []
        #: True if a newer wrapper has taken over some of the parameters.
        self.are_replaced = False
        # A module may outlive its wrapper. Its gradients are then no longer averaged.
        weakref.finalize(wrapper, _remove_all, self._handles)

    def register(self, parameter: nn.Parameter, function: Callable[..., None], *args: Any) -> None:
        """Call `function(*args, parameter)` when the gradient of `parameter` is final."""
        hook = GradientHook(function, *args)
        hook.owner = self
        self._registered.append((parameter, hook))
        self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        """Remove all hooks, so that no gradient is averaged."""
        _remove_all(self._handles)
        self._handles.clear()
        self._registered.clear()

    def move_to_end(self) -> bool:
        """Move each hook behind the other hooks of its parameter; return True if a hook was moved.

        The caller may register hooks after wrapping. A hook that changes a gradient must run before
        the gradient is reduced.
        """
        is_moved = False
        for index, (parameter, hook) in enumerate(self._registered):
            hooks: Any = parameter._post_accumulate_grad_hooks
            if next(reversed(hooks)) != self._handles[index].id:
                self._handles[index].remove()
                self._handles[index] = parameter.register_post_accumulate_grad_hook(hook)
                is_moved = True
        return is_moved

    def take_over(self, parameter: nn.Parameter) -> None:
        """Remove all hooks of older wrappers that average `parameter`."""
        for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
            if isinstance(hook, GradientHook) and hook.owner is not self:
                hook.owner.remove()
                hook.owner.are_replaced = True

    def check_not_replaced(self) -> None:
        """Raise `RuntimeError` if a newer wrapper averages some of the parameters."""
        if self.are_replaced:
            raise RuntimeError(
                "parameters of this DDP were wrapped again, and only the newest wrapper averages "
                "their gradients; train with the newest wrapper, or wrap the module again"
            )


def _remove_all(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
