"""Benchmarked designs: those of this package, torch's DDP, and no communication."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp.ddp import DDP
from ddp.metering.meter import Meter
from ddp.naive import all_reduce_gradients, all_reduce_gradients_flat

#: Bucket sizes of the designs that use the functions from the command line.
CUSTOM_SIZES_MB = (25.0, 100.0)

#: A function that runs a wrapped model on this rank's batch and returns the loss.
Loss = Callable[[nn.Module], Tensor]
#: A function that returns a model and its `Loss`.
Workload = Callable[[torch.device], tuple[nn.Module, Loss]]
#: A function that wraps a model in a design.
Maker = Callable[[nn.Module], "Design"]


def transformer(device: torch.device) -> tuple[nn.Module, Loss]:
    """Return a transformer of 20.55 million parameters and a batch of two sequences."""
    return _make_transformer(device, sequences=2)


def busy_transformer(device: torch.device) -> tuple[nn.Module, Loss]:
    """Return the same model and a batch of ten sequences, which hides more communication."""
    return _make_transformer(device, sequences=10)


def many_tensors(device: torch.device) -> tuple[nn.Module, Loss]:
    """Return a model of 144 parameter tensors and 1.6 MB, which shows the cost per tensor."""
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(12)
    ]
    x = torch.randn(2, 16, 64, device=device)
    return nn.Sequential(*layers).to(device), lambda wrapped: wrapped(x).square().mean()


def thousand_parameters(device: torch.device) -> tuple[nn.Module, Loss]:
    """Return a model of 1,000 parameter tensors, which shows the cost of the first steps."""
    module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(500)])
    x = torch.randn(4, 8, device=device)
    return module.to(device), lambda wrapped: wrapped(x).sum()


def _make_transformer(device: torch.device, *, sequences: int) -> tuple[nn.Module, Loss]:
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(6)
    ]
    model = nn.Sequential(nn.Embedding(1600, 512), *layers, nn.Linear(512, 1600, bias=False))
    tokens = torch.randint(1600, (sequences, 65), device=device)

    def compute_loss(wrapped: nn.Module) -> Tensor:
        logits = wrapped(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return model.to(device), compute_loss


class Timing(NamedTuple):
    """Seconds of one step.

    `after_backward` is the wait for gradients, which `backward` excludes. `cpu` is the processor
    time of all threads of the process, including network threads.
    """

    step: float
    backward: float
    after_backward: float
    cpu: float


@dataclass(frozen=True)
class Design:
    """A model and the method that averages its gradients."""

    name: str
    model: nn.Module
    #: Averages gradients after the backward pass, unless `backward()` has done so.
    synchronize: Callable[[], None]
    #: Meter of the communication, if the design has one.
    meter: Meter | None = None

    def step(self, loss: Loss, device: torch.device) -> Timing:
        """Run one step of SGD."""
        _synchronize_device(device)
        start = time.perf_counter()
        cpu_start = time.process_time()
        self.model.zero_grad()
        # `DDP` measures its forward pass itself.
        meter = None if isinstance(self.model, DDP) else self.meter
        with meter.forward() if meter else nullcontext():
            value = loss(self.model)
        _synchronize_device(device)
        backward_start = time.perf_counter()
        torch.autograd.backward(value)
        _synchronize_device(device)
        wait_start = time.perf_counter()
        self.synchronize()
        _synchronize_device(device)
        synchronized = time.perf_counter()
        # `DDP` waits inside `backward()`, so the duration of its wait is taken from its meter.
        exposed = self.meter.last.exposed_seconds if self.meter else synchronized - wait_start
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-1e-4)
        _synchronize_device(device)
        return Timing(
            step=time.perf_counter() - start,
            backward=synchronized - backward_start - exposed,
            after_backward=exposed,
            cpu=time.process_time() - cpu_start,
        )


def make_designs(
    module: nn.Module, sizes_mb: Sequence[float], names: Sequence[str], custom: dict[str, Any]
) -> list[Design]:
    """Wrap a copy of `module` in each design of `names`. Empty `names` select all designs.

    If `custom` contains `all_reduce` or `allocate`, there are also designs that use these. The last
    design wraps `module` itself, so that a single design needs no copy. Raises `ValueError` if a
    name is unknown.
    """
    makers = _build_makers(sizes_mb, custom)
    unknown = set(names) - set(makers)
    if unknown:
        raise ValueError(f"expected designs among {list(makers)}, got {sorted(unknown)}")
    if names:
        makers = {name: make for name, make in makers.items() if name in names}
    *others, last = makers.values()
    return [*(make(copy.deepcopy(module)) for make in others), last(module)]


def _build_makers(sizes_mb: Sequence[float], custom: dict[str, Any]) -> dict[str, Maker]:
    makers: dict[str, Maker] = {
        "none": lambda model: Design("none", model, lambda: None),
        "naive": lambda model: _make_unwrapped_design("naive", model, all_reduce_gradients),
        "flat": lambda model: _make_unwrapped_design("flat", model, all_reduce_gradients_flat),
        "overlapped": partial(_wrap_with_ddp, "overlapped", bucket_size_mb=None),
    }
    for size in sizes_mb:
        name = f"{size:g} MB"
        makers[name] = partial(_wrap_with_ddp, name, bucket_size_mb=size)
    name = "bfloat16 10 MB"
    makers[name] = partial(_wrap_with_ddp, name, bucket_size_mb=10.0, gradient_dtype=torch.bfloat16)
    makers["torch"] = partial(_wrap_with_torch_ddp, "torch")
    makers["torch tuned"] = partial(
        _wrap_with_torch_ddp, "torch tuned", gradient_as_bucket_view=True, static_graph=True
    )
    for size in CUSTOM_SIZES_MB if custom else ():
        name = f"given {size:g} MB"
        makers[name] = partial(_wrap_with_ddp, name, bucket_size_mb=size, **custom)
    return makers


def _make_unwrapped_design(name: str, model: nn.Module, function: Callable[..., None]) -> Design:
    meter = Meter()
    return Design(name, model, lambda: function(model, meter=meter), meter)


def _wrap_with_ddp(name: str, model: nn.Module, **arguments: Any) -> Design:
    wrapped = DDP(model, **arguments)
    return Design(name, wrapped, wrapped.finish_gradient_synchronization, wrapped.meter)


def _wrap_with_torch_ddp(name: str, model: nn.Module, **arguments: Any) -> Design:
    wrapped = nn.parallel.DistributedDataParallel(model, **arguments)
    return Design(name, wrapped, lambda: None)


def _synchronize_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
