"""Every tensor that is alive, operator by operator: what held the memory, and when it was most.

A dispatch mode sees what each operator makes, and a weak reference sees it go. On fake tensors
nothing is allocated, so that any module can be followed through a step of training anywhere; around
a real step it says what held the memory when there was none left.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import OutOfMemoryError, Tensor, nn, optim
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from accounting.breakdown import Breakdown, binary_size, product, total
from accounting.hardware import Hardware, find

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class Block:
    """One storage: its bytes, and who made it."""

    nbytes: int
    kind: str
    """`weights`, `inputs`, `gradients`, `optimizer`, `activations` or `backward`."""
    operator: str
    module: str


class Ledger(TorchDispatchMode):
    """Use as a context: `now` and `most` are bytes, `at_peak` what was alive at the most."""

    def __init__(self, *, rounding: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.phase, self.when = "activations", ""
        self.timeline: list[tuple[str, int]] = []
        self.at_peak: list[Block] = []
        self._rounding = rounding
        self._alive: dict[int, Block] = {}
        self._modules: list[str] = []
        self._hooks: list[RemovableHandle] = []

    def add(self, kind: str, *tensors: Tensor) -> None:
        """Count tensors that are there already."""
        for tensor in tensors:
            self._see(tensor, kind, "")
        self._note("start")

    def __enter__(self) -> Ledger:
        self._hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        if isinstance(error, Exception) and _is_out_of_memory(error):
            error.add_note(f"alive when it came, {binary_size(self.now)}:\n{self.table()}")

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, then count what it made."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf, self.phase, str(func))
        self._note(str(func))
        return result

    def table(self, blocks: list[Block] | None = None, rows: int = 12) -> str:
        """What is alive, the largest first, by kind, module and operator."""
        sizes: Counter[tuple[str, str, str]] = Counter()
        for block in self._alive.values() if blocks is None else blocks:
            sizes[block.kind, block.module, block.operator] += block.nbytes
        listed = [
            f"{binary_size(size):>10}  {kind:<12} {module or '-'}  {operator}".rstrip()
            for (kind, module, operator), size in sizes.most_common(rows)
        ]
        if len(sizes) > rows:
            rest = sum(sizes.values()) - sum(size for _, size in sizes.most_common(rows))
            listed.append(f"{binary_size(rest):>10}  in {len(sizes) - rows} others")
        return "\n".join(listed)

    def _see(self, tensor: Tensor, kind: str, operator: str) -> None:
        for inner in _plain_tensors(tensor):
            storage = inner.untyped_storage()
            key = storage._cdata
            if key in self._alive:
                continue
            size = -(-storage.nbytes() // self._rounding) * self._rounding
            module = "/".join(self._modules[-2:])
            self._alive[key] = Block(size, kind, operator, module)
            self.now += size
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._alive.pop(key).nbytes

    def _note(self, operator: str) -> None:
        self.timeline.append((self.phase, self.now))
        if self.now > self.most:
            self.most, self.when = self.now, f"{self.phase}, {operator}"
            self.at_peak = list(self._alive.values())

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        self._modules.append(type(module).__name__)

    def _leave_module(self, *_: Any) -> None:
        if self._modules:
            self._modules.pop()


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Whether a step of training has room, and what fills it at the worst moment."""

    peak: Breakdown
    when: str
    """The phase and the operator of the peak."""
    memory_bytes: int
    table: str
    timeline: tuple[tuple[str, int], ...]
    """Bytes after each operator, with the phase."""

    @property
    def fits(self) -> bool:
        """The peak is below what the device has."""
        return self.peak.total <= self.memory_bytes

    def __bool__(self) -> bool:
        return self.fits

    def explain(self) -> str:
        """The verdict, the parts of the peak, and the largest blocks."""
        verdict = "fits" if self.fits else "DOES NOT FIT"
        head = f"{binary_size(self.peak.total)} of {binary_size(self.memory_bytes)}: {verdict}"
        return f"{head}, most at {self.when}\n{self.peak.explain()}\n{self.table}"

    __str__ = explain


def fits(
    module: nn.Module,
    sample: Any,
    optimizer: Any = optim.AdamW,
    device: str | Hardware = "H100",
    *,
    loss: Callable[[Any], Tensor] | None = None,
    autocast: Any = None,
    rounding: int = 512,
) -> Fit:
    """Follow two steps of training on fake tensors; nothing is allocated and nothing changed.

    `sample` is what the module is called with: a tensor, a tuple of arguments or a dictionary of
    them. `optimizer` is a class (or a partial of one, for its options) or an instance, whose class
    and options are taken; None runs forward and backward alone. `loss` makes a scalar of the
    output: its `.loss` or its sum if not given. `autocast` is the dtype of mixed precision.
    `rounding` is the allocator's: 512 bytes on CUDA. Raises `ValueError` where a step depends on
    the values of tensors, which fake ones do not have.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    hardware = find(device)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    with mode:
        for tensor in (*module.parameters(), *module.buffers()):
            memo[id(tensor)] = _fake(mode, tensor)
        shadow = copy.deepcopy(module, memo)
        inputs = tree_map(lambda x: _fake(mode, x) if isinstance(x, Tensor) else x, sample)
    ledger = Ledger(rounding=rounding)
    mixed = _autocast(autocast)
    with mode:
        made = _optimizer(optimizer, shadow)
    ledger.add("weights", *shadow.parameters(), *shadow.buffers())
    ledger.add("inputs", *(x for x in tree_leaves(inputs) if isinstance(x, Tensor)))
    try:
        with mode, ledger:
            for _ in range(2):
                with mixed:
                    ledger.phase = "activations"
                    result = (loss or _loss)(_call(shadow, inputs))
                ledger.phase = "backward"
                with _gradients(ledger, shadow):
                    result.backward()
                del result
                if made is not None:
                    ledger.phase = "optimizer"
                    made.step()
                    made.zero_grad()
                else:
                    shadow.zero_grad()
    except DataDependentOutputException as error:
        raise ValueError(
            f"{type(module).__name__} looks at the values of tensors ({error}), which fake ones do "
            "not have; use Ledger around a real step"
        ) from None
    sizes: Counter[str] = Counter()
    for block in ledger.at_peak:
        sizes[block.kind] += block.nbytes
    parts = (product(kind, "B", bytes=size) for kind, size in sizes.most_common())
    return Fit(
        peak=total(f"peak memory of {type(module).__name__}", "B", *parts),
        when=ledger.when,
        memory_bytes=hardware.memory_bytes,
        table=ledger.table(ledger.at_peak),
        timeline=tuple(ledger.timeline),
    )


@contextmanager
def _gradients(ledger: Ledger, module: nn.Module) -> Iterator[None]:
    """What stays on a parameter is a gradient; what else the backward makes goes again."""

    def named(parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        for inner in _plain_tensors(parameter.grad):
            key = inner.untyped_storage()._cdata
            block = ledger._alive.get(key)
            if block:
                ledger._alive[key] = Block(block.nbytes, "gradients", block.operator, block.module)

    handles = [
        p.register_post_accumulate_grad_hook(named) for p in module.parameters() if p.requires_grad
    ]
    yield
    for handle in handles:
        handle.remove()


def _fake(mode: Any, tensor: Tensor) -> Tensor:
    import torch

    made = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_device(tensor)
    )
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _device(tensor: Tensor) -> str:
    # A fake tensor of the meta device has kernels of its own; that of the CPU has the CPU's.
    return "cpu" if tensor.device.type == "meta" else str(tensor.device)


def _optimizer(optimizer: Any, module: nn.Module) -> optim.Optimizer | None:
    if optimizer is None:
        return None
    trained = [p for p in module.parameters() if p.requires_grad]
    if isinstance(optimizer, optim.Optimizer):
        return type(optimizer)(trained, **optimizer.defaults)
    made: optim.Optimizer = optimizer(trained)
    return made


def _autocast(dtype: Any) -> AbstractContextManager[Any]:
    import torch

    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def _call(module: nn.Module, sample: Any) -> Any:
    if isinstance(sample, dict):
        return module(**sample)
    return module(*sample) if isinstance(sample, tuple | list) else module(sample)


def _loss(output: Any) -> Tensor:
    found = getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found
    first = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
    return first.float().sum() if first.is_floating_point() else first.sum()


def _plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors inside a subclass that wraps others, such as DTensor; else the tensor itself."""
    names = getattr(tensor, "__tensor_flatten__", None)
    if names is None or type(tensor).__name__ == "FakeTensor":
        return [tensor]
    # A DTensor lists its mesh among its parts.
    inside = (getattr(tensor, name) for name in names()[0])
    return [x for part in inside if isinstance(part, Tensor) for x in _plain_tensors(part)]


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)
    )
