"""Count the bytes that are alive, operator by operator, on any device.

A dispatch mode sees every tensor that an operator makes and a weak reference sees it go. On the
meta device nothing is allocated, so the memory of a 2.7B model can be drawn on a laptop.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class Allocation:
    """One block of memory: its bytes, the operator that made it and the module
    classes it was made in, outermost first."""

    nbytes: int
    operator: str
    module: str
    phase: str


class LiveMemory(TorchDispatchMode):
    """Use as a context; `timeline` then holds the live bytes after each operator.

    Tensors made before are counted by `add`. `phase` is free text that labels what follows. Each
    storage takes a multiple of `rounding` bytes.
    """

    def __init__(self, *, rounding: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self.phase = self.when = ""
        self.rounding = rounding
        self.timeline: list[tuple[str, int]] = []
        self.at_peak: list[Allocation] = []
        self._alive: dict[int, Allocation] = {}
        self._modules: list[str] = []
        self._hooks: list[RemovableHandle] = []

    def add(self, tensors: Iterable[Tensor], operator: str) -> None:
        """Count tensors that exist already, such as a model's parameters."""
        for tensor in tensors:
            self._count(tensor, operator)
        self._note("start")

    def __enter__(self) -> Self:
        self._hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, then count what it made."""
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf, str(func))
        self._note(str(func))
        return out

    def _count(self, tensor: Tensor, operator: str) -> None:
        for inner in plain_tensors(tensor):
            storage = inner.untyped_storage()
            key = storage._cdata
            if key in self._alive:
                continue
            size = -(-storage.nbytes() // self.rounding) * self.rounding
            module = ".".join(self._modules)
            self._alive[key] = Allocation(size, operator, module, self.phase)
            self.live_bytes += size
            weakref.finalize(storage, self._free, key)

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        self._modules.append(type(module).__name__)

    def _leave_module(self, *_: Any) -> None:
        if self._modules:
            self._modules.pop()

    def _free(self, key: int) -> None:
        self.live_bytes -= self._alive.pop(key).nbytes

    def _note(self, operator: str) -> None:
        self.timeline.append((self.phase, self.live_bytes))
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.when = self.live_bytes, f"{self.phase}, {operator}"
            self.at_peak = list(self._alive.values())


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors inside a subclass that wraps others, such as DTensor; else the tensor itself."""
    names = getattr(tensor, "__tensor_flatten__", None)
    if names is None or type(tensor).__name__ == "FakeTensor":
        return [tensor]
    # A DTensor lists its mesh among its parts.
    inside = (getattr(tensor, name) for name in names()[0])
    return [x for part in inside if isinstance(part, Tensor) for x in plain_tensors(part)]


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """What the optimizer keeps from its first step on, without a backward pass to get there."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def training_step_memory(
    model: torch.nn.Module, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer
) -> LiveMemory:
    """The live bytes of one training step, parameters and what the optimizer holds included."""
    memory = LiveMemory()
    memory.add(model.parameters(), "parameter")
    memory.add(model.buffers(), "buffer")
    state = (leaf for leaf in tree_leaves(optimizer.state_dict()) if isinstance(leaf, Tensor))
    memory.add(state, "optimizer state")
    with memory:
        memory.phase = "forward"
        value = loss()
        memory.phase = "backward"
        value.backward()
        del value
        memory.phase = "optimizer"
        optimizer.step()
        optimizer.zero_grad()
    return memory
