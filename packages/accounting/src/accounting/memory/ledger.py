"""Every tensor that is alive, operator by operator: what held the memory, and when it was most.

On fake tensors nothing is allocated, so that any module can be followed through a step of training
anywhere; around a real step it says what held the memory when there was none left.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import OutOfMemoryError, Tensor, nn, optim
from torch.utils._pytree import tree_leaves, tree_map

from accounting import checks
from accounting.breakdown import Breakdown, binary_size, product, total
from accounting.hardware import Hardware, find
from accounting.memory.live import Allocation, LiveMemory, plain_tensors


class Ledger(LiveMemory):
    """Use as a context; `table()` is what is alive, and what goes out of memory is told of it."""

    def __init__(self, *, rounding: int = 1) -> None:
        super().__init__(rounding=rounding)
        self.phase = "activations"

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, Exception) and _is_out_of_memory(error):
            error.add_note(f"alive when it came, {binary_size(self.live_bytes)}:\n{self.table()}")

    def table(self, blocks: list[Allocation] | None = None, rows: int = 12) -> str:
        """What is alive, the largest first, by kind, module and operator."""
        sizes: Counter[tuple[str, str, str]] = Counter()
        for block in self._alive.values() if blocks is None else blocks:
            where = "/".join(block.module.split(".")[-2:])
            sizes[block.phase, where, block.operator] += block.nbytes
        listed = [
            f"{binary_size(size):>10}  {kind:<12} {module or '-'}  {operator}".rstrip()
            for (kind, module, operator), size in sizes.most_common(rows)
        ]
        if len(sizes) > rows:
            rest = sum(sizes.values()) - sum(size for _, size in sizes.most_common(rows))
            listed.append(f"{binary_size(rest):>10}  in {len(sizes) - rows} others")
        return "\n".join(listed)

    def hold(self, kind: str, *tensors: Tensor) -> None:
        """Count tensors that are there already, as what they are."""
        phase, self.phase = self.phase, kind
        self.add(tensors, "")
        self.phase = phase

    def name_gradient(self, parameter: Tensor) -> None:
        """What stays on a parameter is a gradient; what else the backward makes goes again."""
        for inner in plain_tensors(parameter.grad) if parameter.grad is not None else ():
            key = inner.untyped_storage()._cdata
            if key in self._alive:
                self._alive[key] = replace(self._alive[key], phase="gradients")


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


@checks.entry()
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
    from torch._subclasses import fake_tensor

    hardware = find(device)
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(sample)):
        raise TypeError(f"sample is {sample!r:.60}; it must be a tensor, or arguments with one")
    checks.instance("module", module, nn.Module, "an nn.Module")
    if autocast is not None:
        checks.instance("autocast", autocast, torch.dtype, "a torch.dtype or None")
    if any(map(nn.parameter.is_lazy, module.parameters())):
        raise ValueError("module has lazy parameters; call it once, so that they have their shapes")
    # Autograd's threads are made by the first backward, one for each device; fake tensors bring
    # fake GPUs, whose threads can abort a process when it ends.
    torch.ones(1, requires_grad=True).backward()
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    with mode:
        for tensor in (*module.parameters(), *module.buffers()):
            memo[id(tensor)] = _fake(mode, tensor)
        shadow = copy.deepcopy(module, memo)
        inputs = tree_map(lambda x: _fake(mode, x) if isinstance(x, Tensor) else x, sample)
        made = _optimizer(optimizer, shadow)
    ledger = Ledger(rounding=rounding)
    for parameter in shadow.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(ledger.name_gradient)
    mixed = nullcontext() if autocast is None else torch.autocast("cpu", autocast)
    ledger.hold("weights", *shadow.parameters(), *shadow.buffers())
    ledger.hold("inputs", *(x for x in tree_leaves(inputs) if isinstance(x, Tensor)))
    try:
        with mode, ledger:
            for _ in range(2):
                with mixed:
                    ledger.phase = "activations"
                    result = (loss or _loss)(_call(shadow, inputs))
                ledger.phase = "backward"
                result.backward()
                del result
                if made is not None:
                    ledger.phase = "optimizer"
                    made.step()
                    made.zero_grad()
                else:
                    shadow.zero_grad()
    except (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
    ) as error:
        raise ValueError(
            f"{type(module).__name__} looks at the values of tensors ({error}), which fake ones do "
            "not have; use Ledger around a real step"
        ) from None
    sizes: Counter[str] = Counter()
    for block in ledger.at_peak:
        sizes[block.phase] += block.nbytes
    parts = (product(kind, "B", bytes=size) for kind, size in sizes.most_common())
    return Fit(
        peak=total(f"peak memory of {type(module).__name__}", "B", *parts),
        when=ledger.when,
        memory_bytes=hardware.memory_bytes,
        table=ledger.table(ledger.at_peak),
        timeline=tuple(ledger.timeline),
    )


def _fake(mode: Any, tensor: Tensor) -> Tensor:
    # A fake tensor of the meta device has kernels of its own; that of the CPU has the CPU's.
    device = "cpu" if tensor.device.type == "meta" else str(tensor.device)
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _optimizer(optimizer: Any, module: nn.Module) -> optim.Optimizer | None:
    if optimizer is None:
        return None
    trained = [p for p in module.parameters() if p.requires_grad]
    if isinstance(optimizer, optim.Optimizer):
        return type(optimizer)(trained, **optimizer.defaults)
    made: optim.Optimizer = optimizer(trained)
    return made


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


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)
    )
