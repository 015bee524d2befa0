"""A ledger of all live tensors by operator, and the peak memory of any module.

On fake tensors nothing is allocated, so a training step of any module can be traced on any machine.
Around a real step, the ledger adds the largest live tensors to an out-of-memory error.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import OutOfMemoryError, Tensor, nn, optim
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from accounting import checks
from accounting.breakdown import Breakdown, binary_size, product, total
from accounting.hardware import Hardware, find
from accounting.memory.live import Allocation, LiveMemory, plain_tensors


class Ledger(LiveMemory):
    """A context manager around a training step that lists the live tensors.

    A compiled module runs eagerly inside the context, so the list describes its eager step.
    `table()` returns the list, and an out-of-memory error receives it as a note. Tensors of all
    devices count. A tensor that existed before the context is not counted until an operator returns
    it or a view of it, so pass weights and optimizer state to `hold`. `rounding` is the granularity
    of the allocator in bytes.
    """

    def __init__(self, *, rounding: int = 1) -> None:
        super().__init__(rounding=rounding)
        self.phase = "activations"

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, Exception) and _is_out_of_memory(error):
            size = binary_size(self.live_bytes)
            error.add_note(f"live tensors when memory ran out, {size}:\n{self.table()}")

    def table(self, blocks: list[Allocation] | None = None, rows: int = 12) -> str:
        """Return the live bytes by kind, module and operator as text, the largest first.

        `blocks` replaces the live blocks, for example by `at_peak`. `rows` is the maximum
        number of rows.
        """
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
        """Count tensors that already exist, such as weights, under the label `kind`."""
        phase, self.phase = self.phase, kind
        self.add(tensors, "")
        self.phase = phase

    def name_gradient(self, parameter: Tensor) -> None:
        """Change the label of a parameter's stored gradient to `gradients`."""
        for inner in plain_tensors(parameter.grad) if parameter.grad is not None else ():
            key = inner.untyped_storage()._cdata
            if key in self._alive:
                self._alive[key] = replace(self._alive[key], phase="gradients")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Result of `fits`: the peak memory of a training step, and the tensors at the peak."""

    peak: Breakdown
    #: Phase and operator of the peak.
    when: str
    #: Memory of the device.
    memory_bytes: int
    #: The largest blocks at the peak, as text.
    table: str

    @property
    def fits(self) -> bool:
        """Return True if the peak is at most the memory of the device."""
        return self.peak.total <= self.memory_bytes

    def __bool__(self) -> bool:
        return self.fits

    def explain(self) -> str:
        """Return the verdict, the parts of the peak, and the largest blocks."""
        verdict = "fits" if self.fits else "DOES NOT FIT"
        head = f"{binary_size(self.peak.total)} of {binary_size(self.memory_bytes)}: {verdict}"
        return f"{head}, most at {self.when}\n{self.peak.explain()}\n{self.table}"

    __str__ = explain


# The step must not depend on the caller's grad or inference mode.
@torch.inference_mode(False)
@torch.enable_grad()
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
    """Trace two training steps on fake tensors and return their peak memory; nothing is allocated.

    `sample` is the input of the module: a tensor, a tuple of arguments, or a dictionary of keyword
    arguments. `optimizer` is an optimizer class, or a `functools.partial` of one, and trains all
    parameters that require gradients; None traces forward and backward only. `device` provides the
    memory with which the peak is compared. `loss` computes a scalar from the output; the default is
    the output's `.loss`, or otherwise the sum of its first tensor. The output is released before
    the backward, as in `loss(module(sample)).backward()`. A loop that keeps the output in a
    variable, such as the logits of a language model, needs its bytes in addition. `autocast` is the
    dtype of mixed precision. `rounding` is the granularity of the allocator, 512 bytes on CUDA.
    Tensors that are plain attributes of the module have the label `attributes`.

    Raises `ValueError` if a step depends on the values of tensors, which fake tensors do not have,
    or runs an operator whose memory is hidden, such as a fused LSTM. Also raises `ValueError` for
    modules that a fake copy cannot represent: those with lazy or sharded parameters, sparse
    tensors, `torch.compile`, hooks on gradients, or hooks that close over tensors, modules or
    containers, and those that read parameters of another module.
    """
    from torch._subclasses import fake_tensor

    hardware = find(device)
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(sample)):
        raise TypeError(f"expected sample to be a tensor or arguments with one, got {sample!r:.60}")
    checks.instance("module", module, nn.Module, "an nn.Module")
    if autocast is not None:
        checks.instance("autocast", autocast, torch.dtype, "a torch.dtype or None")
    if any(map(nn.parameter.is_lazy, module.parameters())):
        raise ValueError(
            "expected a module without lazy parameters; call it once to materialize them"
        )
    # The first backward creates autograd's threads, one per device. Fake tensors create fake GPUs,
    # whose threads can abort a process at exit, so a backward runs before there are fake tensors.
    torch.ones(1, requires_grad=True).backward()
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    _refuse_compiled(module)
    _refuse_hooks(module)
    fakes = _FakeTensors(mode)
    shadow = _copy_with(fakes, module)
    with mode:
        inputs = tree_map(lambda x: fakes.of(x) if isinstance(x, Tensor) else x, sample)
        optimizer_copy = _optimizer(optimizer, shadow)
    ledger = _FakeLedger(rounding=rounding)
    for parameter in shadow.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(ledger.name_gradient)
    devices = {tensor.device.type for tensor in fakes.copies}
    ledger.hold("weights", *shadow.parameters(), *shadow.buffers())
    ledger.hold("inputs", *(x for x in tree_leaves(inputs) if isinstance(x, Tensor)))
    ledger.hold("attributes", *fakes.copies)
    # Without other references, tensors that the module replaces during the step are freed.
    fakes.forget()
    try:
        with mode, ledger:
            for _ in range(2):
                ledger.phase = "activations"
                with _autocast(devices, autocast):
                    result = (loss or _loss)(_call(shadow, inputs))
                _backward(result, ledger)
                del result
                ledger.phase = "optimizer"
                _update(shadow, optimizer_copy)
    except (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
    ) as error:
        raise ValueError(
            f"{type(module).__name__} depends on the values of tensors ({error}), which fake "
            "tensors do not have; use Ledger around a real step"
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
    )


class _FakeTensors:
    """Fake copies of real tensors; they share storages if the real tensors do."""

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        self.copies: list[Tensor] = []
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._storages: dict[int, Tensor] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Return the fake copy of a tensor; the same tensor has the same copy."""
        if id(tensor) not in self._copies:
            # Keep the real tensor alive, because otherwise another tensor could get its id.
            self._copies[id(tensor)] = tensor, self._fake(tensor)
            self.copies.append(self._copies[id(tensor)][1])
        return self._copies[id(tensor)][1]

    def forget(self) -> None:
        """Drop references to the copies, so that the module alone keeps them alive."""
        self.copies.clear()
        self._copies.clear()
        self._storages.clear()

    def _fake(self, tensor: Tensor) -> Tensor:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        if not plain or tensor.is_quantized or tensor.is_nested:
            raise ValueError(
                f"expected plain dense tensors, got {type(tensor).__name__} of layout "
                f"{tensor.layout}; use Ledger around a real step"
            )
        with self.mode:
            flat = self._storage(tensor)
            elements = flat[: flat.numel() // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
            copy_of_tensor = elements.as_strided(
                tensor.shape, tensor.stride(), tensor.storage_offset()
            )
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(copy_of_tensor, requires_grad=tensor.requires_grad)
            return copy_of_tensor.requires_grad_(tensor.requires_grad and tensor.is_leaf)

    def _storage(self, tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in self._storages:
            # A fake tensor on the meta device would use other kernels than one on the CPU.
            device = "cpu" if tensor.device.type == "meta" else str(tensor.device)
            nbytes = tensor.untyped_storage().nbytes()
            self._storages[key] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._storages[key]


class _FakeCopies(TorchFunctionMode):
    """A mode in which `copy.deepcopy` replaces each tensor by its fake copy."""

    def __init__(self, fakes: _FakeTensors) -> None:
        super().__init__()
        self.fakes = fakes

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return the fake copy of a tensor that is copied or cloned; otherwise run the function."""
        # `nn.Parameter` is copied by cloning its data.
        if func in (Tensor.__deepcopy__, Tensor.clone):
            return self.fakes.of(args[0])
        return func(*args, **(kwargs or {}))


# Operators with hidden memory: packed weights are not tensors, and the fake kernels of LSTMs return
# an empty workspace.
_HIDE_MEMORY = ("quantized.", "aten.mkldnn_rnn_layer.", "aten._cudnn_rnn.", "aten.miopen_rnn.")


class _FakeLedger(Ledger):
    """A ledger of fake tensors that also counts the real tensors that a step reads.

    Raises `ValueError` if the step reads parameters of another module, runs an operator with hidden
    memory, or creates a sparse tensor.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count the real tensors among the arguments, then run the operator."""
        from torch._subclasses.fake_tensor import FakeTensor

        if str(func).startswith(_HIDE_MEMORY):
            raise ValueError(
                f"{func} has packed weights or a workspace, whose size is not known without "
                "running it; use Ledger around a real step"
            )
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor):
                if leaf.requires_grad and leaf.is_leaf:
                    raise ValueError(
                        f"{func} reads a parameter of shape {tuple(leaf.shape)} that the module "
                        "does not own; register it, or use Ledger around a real step"
                    )
                self.hold("attributes", leaf)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.layout != torch.strided:
                raise ValueError(
                    f"{func} makes a tensor of layout {leaf.layout}, whose size depends on values; "
                    "use Ledger around a real step"
                )
        return out


def _refuse_compiled(module: nn.Module) -> None:
    """Raise `ValueError` for compiled modules, which run eagerly under a dispatch mode."""
    for name, part in module.named_modules():
        if hasattr(part, "_orig_mod") or part._compiled_call_impl is not None:
            raise ValueError(
                f"expected a module without torch.compile, but {name or type(part).__name__} is "
                "compiled; pass the module before torch.compile, whose step usually needs more "
                "memory"
            )


def _refuse_hooks(module: nn.Module) -> None:
    """Raise `ValueError` for hooks that a copy of the module would lose or share."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"{name} has hooks on its gradient, which a copy cannot run; use Ledger around a "
                "real step"
            )
    for name, part in module.named_modules():
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        for hook in (hook for kind in kinds for hook in getattr(part, kind).values()):
            cells = getattr(hook, "__closure__", None) or ()
            if any(isinstance(cell.cell_contents, _SHARED) for cell in cells):
                raise ValueError(
                    f"a hook of {name or type(part).__name__} closes over tensors, modules or "
                    "containers, which a copy would share; use Ledger around a real step"
                )


_SHARED = (Tensor, nn.Module, list, dict, set)


def _copy_with(fakes: _FakeTensors, module: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    for tensor in module.parameters():
        memo[id(tensor)] = fakes.of(tensor)
    with _FakeCopies(fakes):
        try:
            return copy.deepcopy(module, memo)
        except (TypeError, RuntimeError) as error:
            raise ValueError(
                f"{type(module).__name__} cannot be copied ({error}); use Ledger around a real step"
            ) from error


def _optimizer(optimizer: Any, module: nn.Module) -> optim.Optimizer | None:
    """Build an optimizer of the trainable parameters from its class; return None for None."""
    if isinstance(optimizer, optim.Optimizer):
        raise TypeError(
            f"expected optimizer to be a class, a functools.partial of one, or None, got an "
            f"instance of {type(optimizer).__name__}; pass its class"
        )
    if optimizer is None:
        return None
    built: optim.Optimizer = optimizer([p for p in module.parameters() if p.requires_grad])
    return built


def _autocast(devices: Iterable[str], dtype: torch.dtype | None) -> ExitStack:
    """Return a context with autocast to `dtype` on each kind of device; None disables autocast."""
    stack = ExitStack()
    for device in devices:
        stack.enter_context(torch.autocast(device, dtype, enabled=dtype is not None))
    return stack


def _call(module: nn.Module, sample: Any) -> Any:
    if isinstance(sample, dict):
        return module(**sample)
    return module(*sample) if isinstance(sample, tuple | list) else module(sample)


def _backward(result: Tensor, ledger: Ledger) -> None:
    if not result.requires_grad:
        raise ValueError(
            "expected a loss with a gradient, got one that depends on no parameter and no input "
            "that requires a gradient"
        )
    ledger.phase = "backward"
    result.backward()


def _update(module: nn.Module, optimizer: optim.Optimizer | None) -> None:
    if optimizer is None:
        module.zero_grad()
    else:
        optimizer.step()
        optimizer.zero_grad()


def _loss(output: Any) -> Tensor:
    output_loss = getattr(output, "loss", None)
    if isinstance(output_loss, Tensor):
        return output_loss
    first = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
    return first.sum()


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)
    )
