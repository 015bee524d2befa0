"""The peak memory of a training step of any module, traced on fake tensors without memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_leaves, tree_map

from accounting import checks
from accounting.breakdown import Breakdown, format_bytes, multiply, sum_parts
from accounting.hardware import Hardware, find
from accounting.memory.fake_module import FakeTensors, copy_with
from accounting.memory.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Result of `fits`: the peak memory of a training step, and the tensors at the peak."""

    peak: Breakdown
    #: Phase and operator of the peak.
    when: str
    #: Memory of the device.
    memory_bytes: float
    #: The largest memory allocations at the peak, as text.
    table: str

    @property
    def fits(self) -> bool:
        """True if the peak is at most the memory of the device."""
        return self.peak.total <= self.memory_bytes

    def __bool__(self) -> bool:
        return self.fits

    def explain(self) -> str:
        """Return the verdict, the parts of the peak, and the largest allocations as text."""
        verdict = "fits" if self.fits else "DOES NOT FIT"
        head = f"{format_bytes(self.peak.total)} of {format_bytes(self.memory_bytes)}: {verdict}"
        return f"{head}, most at {self.when}\n{self.peak.explain()}\n{self.table}"

    __str__ = explain


# The step must not depend on the caller's grad or inference mode.
@torch.inference_mode(False)
@torch.enable_grad()
@checks.validate()
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

    `sample` is the input of the module: a tensor, a tuple or list of arguments, or a dictionary of
    keyword arguments. `optimizer` is an optimizer class, or a `functools.partial` of one, and
    trains all parameters that require gradients. With None, only the forward and the backward pass
    are traced. The peak is compared with the memory of `device`. `loss` computes a scalar from the
    output; the default is the output's `.loss`, or otherwise the sum of its first tensor. The
    output is released before the backward pass, as in `loss(module(sample)).backward()`. A loop
    that keeps the output in a variable, such as the logits of a language model, needs additional
    memory of their size. `autocast` is the dtype of mixed precision, `torch.bfloat16` or
    `torch.float16`; None disables autocast. `rounding` is the granularity of the allocator, 512
    bytes on CUDA. Tensors that are plain attributes of the module have the label `attributes`.

    Raises `ValueError` if a step depends on the values of tensors, which fake tensors do not have,
    or if it runs an operator with hidden memory, such as a fused LSTM. Also raises `ValueError` for
    a module that a fake copy cannot represent: one that has lazy or sharded parameters, sparse
    tensors, `torch.compile`, or hooks of modules or gradients. The same holds for a module that
    reads parameters of another module. Also raises `ValueError` for LBFGS, whose step needs a
    closure.
    """
    from torch._subclasses import fake_tensor

    hardware = find(device)
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(sample)):
        raise TypeError(f"expected sample to be a tensor or arguments with one, got {sample!r:.60}")
    checks.require_instance("module", module, nn.Module, "an nn.Module")
    # torch disables autocast for other dtypes, with a warning.
    checks.require_choice("autocast", autocast, (None, torch.bfloat16, torch.float16))
    if any(map(nn.parameter.is_lazy, module.parameters())):
        raise ValueError(
            "expected a module without lazy parameters; call it once to materialize them"
        )
    # The first backward creates autograd's threads, one per device. Fake tensors create fake GPUs,
    # whose threads can abort a process at exit, so a backward runs before there are fake tensors.
    torch.ones(1, requires_grad=True).backward()
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    _refuse_compiled(module)
    fakes = FakeTensors(mode)
    shadow = copy_with(fakes, module)
    with mode:
        inputs = tree_map(lambda x: fakes.convert(x) if isinstance(x, Tensor) else x, sample)
        optimizer_copy = _build_optimizer(optimizer, shadow)
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
                with ExitStack() as stack:
                    for kind in devices:
                        enabled = autocast is not None
                        stack.enter_context(torch.autocast(kind, autocast, enabled=enabled))
                    result = (loss or _compute_loss)(_call(shadow, inputs))
                _backward(result, ledger)
                del result
                ledger.phase = "optimizer"
                if optimizer_copy is not None:
                    optimizer_copy.step()
                (optimizer_copy or shadow).zero_grad()
    except (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
    ) as error:
        owner = optimizer_copy if ledger.phase == "optimizer" else module
        raise ValueError(
            f"{type(owner).__name__} depends on the values of tensors ({error}), which fake "
            "tensors do not have; use Ledger around a real step"
        ) from None
    sizes: Counter[str] = Counter()
    for block in ledger.at_peak:
        sizes[block.phase] += block.nbytes
    parts = (multiply(kind, "B", bytes=size) for kind, size in sizes.most_common())
    return Fit(
        peak=sum_parts(f"peak memory of {type(module).__name__}", "B", *parts),
        when=ledger.when,
        memory_bytes=hardware.memory_bytes,
        table=ledger.table(ledger.at_peak),
    )


#: Operators with hidden memory: packed weights are not tensors, and the fake kernels of LSTMs
#: return an empty workspace.
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
    """Raise `ValueError` for compiled modules, which run eagerly, with other memory, in a trace."""
    for name, part in module.named_modules():
        if hasattr(part, "_orig_mod") or part._compiled_call_impl is not None:
            raise ValueError(
                f"expected a module without torch.compile, but {name or type(part).__name__} is "
                "compiled; pass the module before torch.compile, whose step usually needs more "
                "memory"
            )


def _build_optimizer(optimizer: Any, module: nn.Module) -> optim.Optimizer | None:
    """Return an optimizer of the trainable parameters, built from its class; None for None."""
    if isinstance(optimizer, optim.Optimizer):
        raise TypeError(
            f"expected optimizer to be a class, a functools.partial of one, or None, got an "
            f"instance of {type(optimizer).__name__}; pass its class"
        )
    if optimizer is None:
        return None
    built: optim.Optimizer = optimizer([p for p in module.parameters() if p.requires_grad])
    if isinstance(built, optim.LBFGS):
        raise ValueError(
            "expected an optimizer whose step needs no closure, got LBFGS; use Ledger around a "
            "real step"
        )
    return built


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


def _compute_loss(output: Any) -> Tensor:
    output_loss = getattr(output, "loss", None)
    if isinstance(output_loss, Tensor):
        return output_loss
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            return leaf.sum()
    raise ValueError(
        f"expected the module to return a tensor, or a container or an object with `.loss`, got "
        f"{type(output).__name__}; pass loss=..., a function from the output to a scalar"
    )
