"""Hook points of a `HookedDecoder`, and the functions that are added to them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor, nn

from interp.decoder.decoder import Decoder
from interp.hook_points import HookPoint, find_hook_points
from interp.lens import compute_head_outputs
from interp.tap import patch

#: A function called as `f(activation, hook=point)`. It returns the new activation, or None to keep
#: the activation. In the direction "bwd", the gradient takes the place of the activation.
HookFunction = Callable[..., Tensor | None]
#: A full hook name, or a predicate of hook names.
HookSelector = str | Callable[[str], bool]


@dataclass(frozen=True, eq=False)
class ModelHookPoint(HookPoint):
    """A hook point of a model, to which functions can be added."""

    model: HookManagement = field(repr=False)
    #: Values that hook functions store.
    ctx: dict[Any, Any] = field(default_factory=dict, repr=False)

    def add_hook(self, hook: HookFunction, dir: str = "fwd") -> None:
        """Call `hook` in all later calls of the model, until `model.reset_hooks()`."""
        self.model.add_hook(self.name, hook, dir)


@dataclass(frozen=True, eq=False)
class Hook:
    """A hook function, the name of its hook point, and its direction, "fwd" or "bwd"."""

    name: str
    function: HookFunction
    dir: str = "fwd"


class HookManagement:
    """Base class of `HookedDecoder` that adds, removes and looks up hook functions."""

    def __init__(self, decoder: Decoder, cfg: SimpleNamespace) -> None:
        self.decoder = decoder
        self.cfg = cfg
        results = [f"blocks.{i}.attn.hook_result" for i in range(cfg.n_layers)]
        names = [*find_hook_points(decoder, ["**"], "transformer_lens"), *results]
        #: All hook points by name.
        self.hook_dict = {name: ModelHookPoint(name, self) for name in names}
        self._hooks: list[Hook] = []

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Sequence[tuple[HookSelector, HookFunction]] = (),
        bwd_hooks: Sequence[tuple[HookSelector, HookFunction]] = (),
        reset_hooks_end: bool = True,
    ) -> Iterator[Self]:
        """Call hook functions in all calls of the model inside the `with` statement.

        With `reset_hooks_end=False`, the functions remain until `reset_hooks`.
        """
        added: list[Hook] = []
        for dir, pairs in (("fwd", fwd_hooks), ("bwd", bwd_hooks)):
            for name, function in pairs:
                added += self._create_hooks(name, function, dir)
        self._hooks = self._hooks + added
        try:
            yield self
        finally:
            if reset_hooks_end:
                self._hooks = [hook for hook in self._hooks if hook not in added]

    def add_hook(self, name: HookSelector, hook: HookFunction, dir: str = "fwd") -> None:
        """Call `hook` in all later calls of the model, until `reset_hooks`.

        With `dir="bwd"`, backward passes call it with the gradient of the activation, and the
        gradient that it returns replaces this gradient. Predicates do not select the scales of
        norms, which have no gradient.

        Raises ValueError for an unknown name, another direction, and the gradient of a scale.
        """
        self._hooks = self._hooks + self._create_hooks(name, hook, dir)

    def _create_hooks(self, name: HookSelector, function: HookFunction, dir: str) -> list[Hook]:
        matches = self._find_hooks(name)
        if dir == "bwd" and callable(name):
            matches = [match for match in matches if not match.endswith("hook_scale")]
        has_scale = any(match.endswith("hook_scale") for match in matches)
        if dir not in ("fwd", "bwd") or (dir == "bwd" and has_scale):
            raise ValueError(
                f"expected dir 'fwd', or 'bwd' for an activation with a gradient, got {dir!r} for "
                f"{name!r}; hook the residual stream instead of a scale"
            )
        return [Hook(match, function, dir) for match in matches]

    def reset_hooks(self) -> None:
        """Remove all hook functions and clear the values that they stored in `ctx`."""
        self._hooks = []
        for point in self.hook_dict.values():
            point.ctx.clear()

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Choose whether the outputs of single heads, `hook_result`, can be recorded and hooked."""
        self.cfg.use_attn_result = use_attn_result

    def _find_hooks(self, selector: HookSelector) -> list[str]:
        """Return the hook names that a name or a predicate selects.

        "hook_in" and "hook_out" of a block are its input and output streams. Raises ValueError for
        an unknown name.
        """
        known = [
            name
            for name in self.hook_dict
            if self.cfg.use_attn_result or not name.endswith("hook_result")
        ]
        if callable(selector):
            return [name for name in known if selector(name)]
        name = re.sub(r"^(blocks\.\d+\.hook)_in$", r"\1_resid_pre", selector)
        name = re.sub(r"^(blocks\.\d+\.hook)_out$", r"\1_resid_post", name)
        if name not in known:
            raise ValueError(f"no hook is named {selector!r}; {self.suggest_remedy(selector)}")
        return [name]

    def suggest_remedy(self, name: str) -> str:
        """Return advice for a name that is missing."""
        if name in self.hook_dict and name.endswith("hook_result"):
            return "call set_use_attn_result(True) first"
        return "hook_dict has the hooks; for other methods, use interp's functions with .decoder"

    def _is_before(self, name: str, stop: int | None) -> bool:
        """Return True if a hook's activation is computed before layer `stop`, or `stop` is None."""
        if stop is None:
            return True
        if name.startswith("blocks."):
            return self.hook_dict[name].layer() < stop
        return not name.startswith("ln_final.")

    @contextmanager
    def _install(self, hook: Hook, head_outputs_by_layer: dict[int, Tensor]) -> Iterator[None]:
        """Call the function of `hook` in all calls of the decoder inside the context.

        `head_outputs_by_layer` contains the latest outputs of the heads of each layer.
        """
        point = self.hook_dict[hook.name]

        def call(value: Tensor) -> Tensor:
            result = hook.function(value, hook=point)
            return value if result is None else result

        def call_backward(gradient: Tensor) -> Tensor | None:
            # The graph may outlive the hook, so check that it is still installed. Functions may
            # change the gradient in place, and autograd may use it again, so pass a copy.
            return call(gradient.clone()) if hook in self._hooks else None

        def watch_gradient(value: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                # Weights from `describe` do not require gradients by default, so `value` may not
                # be part of a graph yet.
                value = value if value.requires_grad else value.detach().requires_grad_()
                value.register_hook(call_backward)
            return value

        apply = call if hook.dir == "fwd" else watch_gradient
        if not hook.name.endswith("hook_result"):
            with patch(self.decoder, {hook.name: apply}, names="transformer_lens"):
                yield
            return
        layer = point.layer()
        attention = self.decoder.layers[layer].attention

        def add_changes(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            before = head_outputs_by_layer.get(layer)
            if before is None:
                outputs = compute_head_outputs(inputs[0], attention.o.weight, heads=attention.heads)
                before = torch.stack(list(outputs.values()), -2)
            head_outputs_by_layer[layer] = apply(before.clone())
            return output + (head_outputs_by_layer[layer] - before).sum(-2)

        handle = attention.o.register_forward_hook(add_changes)
        try:
            yield
        finally:
            handle.remove()
