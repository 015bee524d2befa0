"""The live bytes of a computation after each operator, on any device.

A dispatch mode records the storage of every tensor that an operator creates, and a finalizer of the
storage records its deletion. On the meta device nothing is allocated, so a 2.7B model can be traced
on a laptop.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accounting import checks


@dataclass(frozen=True)
class Allocation:
    """One block of memory, and the operator, modules and phase that allocated it."""

    nbytes: int
    operator: str
    #: Class names of the enclosing modules, the outermost first, joined by dots.
    module: str
    phase: str


class LiveMemory(TorchDispatchMode):
    """A context manager that records the live bytes after each operator.

    `timeline` lists the phase and the live bytes after each operator. `peak_bytes` is the maximum
    of the live bytes. `when` is the phase and operator at this maximum, and `at_peak` lists its
    allocations. `add` counts tensors that already exist. Set `phase` to label later allocations.
    The size of each storage is rounded up to a multiple of `rounding` bytes. Resizes are recorded
    too, because FSDP frees gathered weights by resizing their storages to 0 bytes.
    """

    def __init__(self, *, rounding: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        checks.require_integer("rounding", rounding)
        self.live_bytes = 0
        self.peak_bytes = 0
        self.phase = ""
        self.when = ""
        self.rounding = rounding
        self.timeline: list[tuple[str, int]] = []
        self.at_peak: list[Allocation] = []
        self._alive: dict[int, Allocation] = {}
        self._modules: list[str] = []
        self._hooks = ExitStack()

    def add(self, tensors: Iterable[Tensor], operator: str) -> None:
        """Count existing tensors, such as the parameters of a model."""
        for tensor in tensors:
            self._count(tensor, operator)
        self._record_live_bytes("start")

    def __enter__(self) -> Self:
        before = register_module_forward_pre_hook(self._enter_module)
        after = register_module_forward_hook(self._leave_module, always_call=True)
        self._hooks.callback(before.remove)
        self._hooks.callback(after.remove)
        self._hooks.enter_context(_calling_after_resize(self._record_resize))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, then count the tensors that it created."""
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf, str(func))
        self._record_live_bytes(str(func))
        return out

    def _count(self, tensor: Tensor, operator: str) -> None:
        for inner in list_plain_tensors(tensor):
            if inner.layout == torch._mkldnn:  # type: ignore[attr-defined]
                # An mkldnn tensor has no storage; its memory is freed with the tensor.
                self._count_block(inner, id(inner), inner.numel() * inner.element_size(), operator)
            else:
                storage = inner.untyped_storage()
                self._count_block(storage, storage._cdata, storage.nbytes(), operator)

    def _count_block(self, owner: object, key: int, nbytes: int, operator: str) -> None:
        size = -(-nbytes // self.rounding) * self.rounding
        known = self._alive.get(key)
        if known is None:
            module = ".".join(self._modules)
            self._alive[key] = Allocation(size, operator, module, self.phase)
            self.live_bytes += size
            weakref.finalize(owner, self._free, key)
        elif known.nbytes != size:
            if not known.nbytes:
                # A freed storage is reallocated: it belongs to the phase and module that resize it.
                known = replace(known, module=".".join(self._modules), phase=self.phase)
            self._alive[key] = replace(known, nbytes=size)
            self.live_bytes += size - known.nbytes

    def _record_resize(self, storage: torch.UntypedStorage) -> None:
        self._count_block(storage, storage._cdata, storage.nbytes(), "resize_")
        self._record_live_bytes("resize_")

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        self._modules.append(type(module).__name__)

    def _leave_module(self, *_: Any) -> None:
        if self._modules:
            self._modules.pop()

    def _free(self, key: int) -> None:
        self.live_bytes -= self._alive.pop(key).nbytes

    def _record_live_bytes(self, operator: str) -> None:
        self.timeline.append((self.phase, self.live_bytes))
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self.when = f"{self.phase}, {operator}"
            self.at_peak = list(self._alive.values())


@contextmanager
def _calling_after_resize(then: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `then` after each resize of a storage in this context.

    A dispatch mode cannot intercept the resize of a storage, because it is not an operator.
    """
    overridden = torch.UntypedStorage.__dict__.get("resize_")
    original: Any = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        then(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if overridden is None:
            del torch.UntypedStorage.resize_
        else:
            torch.UntypedStorage.resize_ = overridden  # type: ignore[method-assign]


#: Methods that return the dense tensors inside a sparse tensor, by layout.
_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys(
        (torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")
    ),
    **dict.fromkeys(
        (torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")
    ),
}


def list_plain_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that a sparse tensor or a wrapper such as DTensor consists of.

    For a plain tensor, the list contains the tensor itself.
    """
    if tensor.layout in _PARTS:
        return [getattr(tensor, part)() for part in _PARTS[tensor.layout]]
    names = getattr(tensor, "__tensor_flatten__", None)
    if names is None or type(tensor).__name__ == "FakeTensor":
        return [tensor]
    # A DTensor also lists its mesh, which is not a tensor.
    inside = (getattr(tensor, name) for name in names()[0])
    return [x for part in inside if isinstance(part, Tensor) for x in list_plain_tensors(part)]


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer state by one step with zero gradients.

    The step discards existing gradients, and weight decay changes the parameters.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    # In torch 2.11 Adam creates its step counter on the default device and reads the counter's
    # value, which a meta tensor does not have.
    with torch.device("cpu"):
        optimizer.step()
    optimizer.zero_grad()


def training_step_memory(
    model: torch.nn.Module, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer
) -> LiveMemory:
    """Run one training step and return its live memory, with parameters and optimizer state.

    Optimizer state counts from the start if it exists; see `make_state`.
    """
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
