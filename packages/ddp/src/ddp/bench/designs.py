"""What the bench compares: all designs of this package, torch's own, and no communication."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp.compression.ways import PowerSGD
from ddp.ddp import DDP
from ddp.metering.meter import Meter
from ddp.naive import all_reduce_gradients, all_reduce_gradients_flat

GIVEN_SIZES_MB = (25.0, 100.0)
# Buckets of these sizes after a first one of 1 MB, as 25 MB has one in any case.
EARLY_SIZES_MB = (4.0, 10.0)

# A model, and what takes a wrapped model through this rank's batch to the loss.
Loss = Callable[[nn.Module], Tensor]
Workload = Callable[[torch.device], tuple[nn.Module, Loss]]


def transformer(device: torch.device) -> tuple[nn.Module, Loss]:
    """A transformer of 20.55 million parameters in 74 tensors, and two sequences of 64 tokens."""
    return _transformer(device, sequences=2)


def busy_transformer(device: torch.device) -> tuple[nn.Module, Loss]:
    """The same with ten sequences: more computation to hide communication behind."""
    return _transformer(device, sequences=10)


def many_tensors(device: torch.device) -> tuple[nn.Module, Loss]:
    """A small model of many tensors, 144 of 1.6 MB: what each tensor costs beside its bytes."""
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(12)
    ]
    x = torch.randn(2, 16, 64, device=device)
    return nn.Sequential(*layers).to(device), lambda wrapped: wrapped(x).square().mean()


def _transformer(device: torch.device, *, sequences: int) -> tuple[nn.Module, Loss]:
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(6)
    ]
    model = nn.Sequential(nn.Embedding(1600, 512), *layers, nn.Linear(512, 1600, bias=False))
    tokens = torch.randint(1600, (sequences, 65), device=device)

    def loss(wrapped: nn.Module) -> Tensor:
        logits = wrapped(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return model.to(device), loss


class Timing(NamedTuple):
    """Seconds of one step: all of it, the backward pass, the wait that follows, on a CPU.

    The last counts all threads of the process, those that serve the link included.
    """

    step: float
    backward: float
    after_backward: float
    cpu: float


@dataclass(frozen=True)
class Design:
    """One way to average gradients; `meter` tells what it sent, where it can."""

    name: str
    model: nn.Module
    synchronize: Callable[[], None]
    meter: Meter | None = None

    def step(self, loss: Loss, device: torch.device) -> Timing:
        """Run one step of SGD."""
        _finished(device)
        begin, cpu_begin = time.perf_counter(), time.process_time()
        self.model.zero_grad()
        # `DDP` times its forward pass by itself.
        plain = self.meter and not isinstance(self.model, DDP)
        with self.meter.forward() if self.meter and plain else nullcontext():
            value = loss(self.model)
        _finished(device)
        backward_begin = time.perf_counter()
        torch.autograd.backward(value)
        _finished(device)
        exposed_begin = time.perf_counter()
        self.synchronize()
        _finished(device)
        synchronized = time.perf_counter()
        # `DDP` waits at the end of `backward()`: its meter knows for how long.
        exposed = self.meter.last.exposed_seconds if self.meter else synchronized - exposed_begin
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-1e-4)
        _finished(device)
        return Timing(
            step=time.perf_counter() - begin,
            backward=synchronized - backward_begin - exposed,
            after_backward=exposed,
            cpu=time.process_time() - cpu_begin,
        )


def designs(
    module: nn.Module, sizes_mb: Sequence[float], wanted: Sequence[str], given: dict[str, Any]
) -> list[Design]:
    """Each design around a copy of `module` of its own; `wanted` names some, empty means all.

    `given` may hold `all_reduce` and `allocate`: then there are rows for them as well. The rows
    "hooks" and "unsent" leave passes out one after the other, to show what each of them costs:
    hooks that do nothing, and gradients that move into buckets which are then not summed; in
    "moved" nothing of `DDP` takes part, each gradient is copied once into memory from `allocate`.
    The last design gets `module` itself, so that one alone needs no second copy.
    """
    makers: dict[str, Callable[[nn.Module], Design]] = {
        "none": lambda model: Design("none", model, lambda: None),
        "hooks": _hooks,
        "unsent 100 MB": _Unsent(100.0),
        "naive": lambda model: _plain("naive", model, all_reduce_gradients),
        "flat": lambda model: _plain("flat", model, all_reduce_gradients_flat),
        "overlapped": lambda model: _ours("overlapped", model, None),
    }
    for size in sizes_mb:
        makers[f"{size:g} MB"] = _Sized(size)
    for size in EARLY_SIZES_MB:
        makers[f"early {size:g} MB"] = partial(_early, size)
    half, thin = {"gradient_dtype": torch.bfloat16}, {"compression": PowerSGD(4)}
    makers["bfloat16 10 MB"] = _Sized(10.0, "bfloat16 ", half)
    makers["PowerSGD 10 MB"] = _Sized(10.0, "PowerSGD ", thin)
    makers["torch"] = _torch
    makers["torch tuned"] = _torch_tuned
    if "allocate" in given:
        makers["given moved"] = _Moved("given moved", given["allocate"])
        makers["given unsent 100 MB"] = _Unsent(100.0, "given ", {"allocate": given["allocate"]})
    if given:
        for size in GIVEN_SIZES_MB:
            makers[f"given {size:g} MB"] = _Sized(size, "given ", given)
    unknown = set(wanted) - set(makers)
    if unknown:
        raise ValueError(f"no design is called {sorted(unknown)}; there are {list(makers)}")
    makers = {name: make for name, make in makers.items() if not wanted or name in wanted}
    *others, last = makers.values()
    return [*(make(copy.deepcopy(module)) for make in others), last(module)]


@dataclass(frozen=True)
class _Sized:
    size_mb: float
    prefix: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, model: nn.Module) -> Design:
        name = f"{self.prefix}{self.size_mb:g} MB"
        return _ours(name, model, self.size_mb, **self.given)


@dataclass(frozen=True)
class _Unsent:
    size_mb: float
    prefix: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, model: nn.Module) -> Design:
        wrapped = DDP(model, self.size_mb, all_reduce=lambda *_, **__: None, **self.given)
        name = f"{self.prefix}unsent {self.size_mb:g} MB"
        return Design(name, wrapped, wrapped.finish_gradient_synchronization)


@dataclass(frozen=True)
class _Moved:
    name: str
    allocate: Callable[..., Tensor]

    def __call__(self, model: nn.Module) -> Design:
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            place = self.allocate(parameter.numel(), dtype=parameter.dtype, group=None)
            hook = partial(_move, place.view_as(parameter))
            parameter.register_post_accumulate_grad_hook(hook)
        return Design(self.name, model, lambda: None)


def _move(place: Tensor, parameter: Tensor) -> None:
    assert parameter.grad is not None
    place.copy_(parameter.grad)
    parameter.grad = place


def _hooks(model: nn.Module) -> Design:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    return Design("hooks", model, lambda: None)


def _plain(name: str, model: nn.Module, function: Callable[..., None]) -> Design:
    meter = Meter()
    return Design(name, model, lambda: function(model, meter=meter), meter)


def _ours(name: str, model: nn.Module, size_mb: float | None, **given: Any) -> Design:
    wrapped = DDP(model, size_mb, **given)
    return Design(name, wrapped, wrapped.finish_gradient_synchronization, wrapped.meter)


def _early(size_mb: float, model: nn.Module) -> Design:
    return _ours(f"early {size_mb:g} MB", model, None, bucket_cap_mb_list=[1.0, size_mb])


def _torch(model: nn.Module) -> Design:
    return Design("torch", nn.parallel.DistributedDataParallel(model), lambda: None)


def _torch_tuned(model: nn.Module) -> Design:
    wrapped = nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True, static_graph=True
    )
    return Design("torch tuned", wrapped, lambda: None)


def _finished(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
