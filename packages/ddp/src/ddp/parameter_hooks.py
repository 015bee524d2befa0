"""Hooks on the parameters of one `DDP`, and their transfer to a newer wrapper of the module."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ddp.weighting import GradientWeighting

#: A `ddp.replica.Replica`, whose module imports this one.
Replica = Any


class GradientHook(partial[None]):
    """The hook that marks a gradient as ready."""

    replica: Replica


class ParameterHooks:
    """The registered hooks of a replica.

    If a module is wrapped again, the newer wrapper averages its gradients: two wrappers with hooks
    on one parameter would average twice.
    """

    def __init__(self, replica: Replica, wrapper: object) -> None:
        self._replica = weakref.proxy(replica)
        self._handles: list[Any] = []
        #: For the handles of gradient hooks, by their index: the parameter and the hook.
        self._gradient_hooks: dict[int, tuple[nn.Parameter, Callable[[Tensor], None]]] = {}
        #: Replicas of newer wrappers that average some of these parameters.
        self._newer: list[Replica] = []
        # A module may outlive its wrapper. Its gradients are not averaged then.
        weakref.finalize(wrapper, _remove_all, self._handles)

    @property
    def are_replaced(self) -> bool:
        """True if a newer wrapper has taken over some of the parameters."""
        return bool(self._newer)

    def register(
        self,
        parameter: nn.Parameter,
        hook: Callable[[Tensor], None],
        weighting: GradientWeighting | None,
    ) -> None:
        """Call `hook` when the gradient of `parameter` is final."""
        self._gradient_hooks[len(self._handles)] = (parameter, hook)
        self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        if weighting is not None:
            self._handles.append(weighting.register_hook(parameter))

    def remove(self) -> None:
        """Remove all hooks, so that no gradient is averaged."""
        _remove_all(self._handles)
        self._handles.clear()
        self._gradient_hooks.clear()

    def move_to_end(self) -> bool:
        """Call the gradient hooks after all other hooks; return True if some were not the last.

        The caller may register hooks after wrapping. A hook that changes a gradient must run before
        its reduction is launched.
        """
        is_moved = False
        for index, (parameter, hook) in self._gradient_hooks.items():
            hooks: Any = parameter._post_accumulate_grad_hooks
            if next(reversed(hooks)) != self._handles[index].id:
                self._handles[index].remove()
                self._handles[index] = parameter.register_post_accumulate_grad_hook(hook)
                is_moved = True
        return is_moved

    def take_over(self, parameter: nn.Parameter, replica: Replica) -> None:
        """Remove the hooks that older wrappers registered on `parameter`."""
        for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
            if isinstance(hook, GradientHook) and hook.replica is not replica:
                hook.replica.hooks.remove()
                hook.replica.hooks._newer.append(replica)

    def find_successor(self) -> Replica | None:
        """Return the newer replica that averages all parameters in the same way, if there is one.

        Raises `RuntimeError` if a newer wrapper averages only some of the parameters, or averages
        them differently.
        """
        replica = self._replica
        if not self._newer:
            return None
        self._newer = [other for other in self._newer if other.has_wrapper]
        if not self._newer:
            # The newer wrappers were deleted: this one averages again.
            replica.make_reducer()
            return None
        parameters = {id(parameter) for parameter in replica.tracked.all}
        for other in self._newer:
            is_alike = (
                other.options.average == replica.options.average and other.group == replica.group
            )
            if is_alike and parameters <= {id(parameter) for parameter in other.tracked.all}:
                return other
        raise RuntimeError(
            "some parameters of this DDP's module were wrapped again, or for other ranks or "
            "another average; only the newest wrapper averages them, so use that one"
        )


def _remove_all(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
