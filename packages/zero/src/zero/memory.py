"""Where the bytes of a training step are, predicted before and measured while it runs.

Notable:
- the prediction runs the same code on the meta device, with collectives that do nothing, so it
  needs neither the memory nor the other ranks;
- the measurement is the allocator's on a GPU, and on a CPU a count of what operators allocate;
- `zero_stage_bytes` is the paper's closed formula, to hold both against.

What differs from ZeRO's published stage 1 (Rajbhandari et al. 2020, section 5.1): its 12 bytes of
state an element are a float32 master copy and two moments beside 2-byte parameters; ours steps the
parameters in their own dtype, so float32 AdamW holds 4 + 4 + 8/n. Both send 2 S.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero.fsdp.fsdp import FSDP
from zero.gradients import AveragedGradient
from zero.host import on_host
from zero.optimizer.optimizer import ShardedOptimizer
from zero.wire import DryRun

Group = dist.ProcessGroup | DryRun | None
Build = Callable[[Group], tuple[nn.Module, torch.optim.Optimizer]]
Loss = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Moment:
    """Bytes held at one moment of a step, and the peak since the moment before.

    `host` is what cpu_offload keeps off the device: neither in the other kinds nor in the peak.
    """

    name: str
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    peak: int
    host: int = 0

    @property
    def total(self) -> int:
        """All bytes that the device holds at this moment."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.activations


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one rank when initialized, after forward, before and after the optimizer's step."""

    predicted: tuple[Moment, ...]
    measured: tuple[Moment, ...]
    #: Bytes of parameters that stage 3 keeps whole on every rank, by the class of their module.
    whole: dict[str, int] = field(default_factory=dict)

    @property
    def predicted_peak(self) -> int:
        """The most bytes at any time, predicted."""
        return max(moment.peak for moment in self.predicted)

    @property
    def measured_peak(self) -> int:
        """The most bytes at any time, measured; 0 if nothing was measured."""
        return max((moment.peak for moment in self.measured), default=0)

    def __str__(self) -> str:
        columns = ("parameters", "gradients", "optimizer", "buffers", "activations", "peak", "host")
        lines = ["".join(c.rjust(20 if i == 0 else 13) for i, c in enumerate(("MiB", *columns)))]
        for kind, moments in (("predicted", self.predicted), ("measured", self.measured)):
            for moment in moments:
                cells = (f"{getattr(moment, c) / 2**20:13.3f}" for c in columns)
                lines.append(f"{kind[:4]} {moment.name:>15}" + "".join(cells))
        for name, count in self.whole.items():
            lines.append(f"whole on every rank: {count / 2**20:.3f} MiB of {name}, not in shard=")
        return "\n".join(lines)


def memory_report(
    build: Build,
    loss: Loss,
    *,
    world: int | None = None,
    device: str | torch.device = "cpu",
    group: dist.ProcessGroup | None = None,
) -> MemoryReport:
    """Predict, and measure unless `world` is given, one rank's memory over a training step.

    `build(group)` makes model and optimizer and `loss(model)` runs forward, both on the default
    device, which is set for them: meta for the prediction, `device` for the measurement. `group`
    goes to ShardedOptimizer or FSDP, if there is one. `world` asks for a prediction alone, for a
    number of ranks that need not exist. Two steps are run and the second is reported.
    """
    ranks = DryRun(world or (dist.get_world_size(group) if dist.is_initialized() else 1))
    if world is None and dist.is_initialized():
        ranks = DryRun(ranks.world, dist.get_rank(group))
    with torch.device("meta"):
        predicted, whole = _run(build, loss, ranks, _LiveBytes)
    if world is not None:
        return MemoryReport(predicted, (), whole)
    count = _CudaBytes if torch.device(device).type == "cuda" else _LiveBytes
    with torch.device(device):
        return MemoryReport(predicted, _run(build, loss, group, count)[0], whole)


def zero_stage_bytes(
    parameters: int,
    world: int,
    stage: int,
    *,
    parameter_bytes: float = 4,
    gradient_bytes: float = 4,
    state_bytes: float = 8,
) -> float:
    """Bytes of parameters, gradients and optimizer state of one rank, by ZeRO's formula.

    P (b_p + b_g + b_s), with b_s divided by the world from stage 1 on, b_g from 2, b_p from 3.
    The paper's mixed-precision Adam is 2, 2 and 12 bytes: 7.5e9 parameters on 64 ranks take 120,
    31.4, 16.6 and 1.88 GB. Source: ZeRO, figure 1.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"ZeRO has stages 0 to 3; got {stage}")
    share = [parameter_bytes, gradient_bytes, state_bytes]
    for index in range(3 - stage, 3):
        share[index] /= world
    return parameters * sum(share)


def _run(
    build: Build, loss: Loss, group: Group, count: type[_Count]
) -> tuple[tuple[Moment, ...], dict[str, int]]:
    """Return the moments of a step, and what the model keeps whole."""
    model, optimizer = build(group)
    held = _held(model, optimizer)
    moments = [Moment("initialized", **held, activations=0, peak=_on_device(held))]
    # The first step makes the state and learns the order of the layers.
    loss(model).backward()
    _step(optimizer)
    optimizer.zero_grad()
    counter = count(_on_device(_held(model, optimizer)), model)
    counter.host.update(t.untyped_storage() for t in held_tensors(model, optimizer)["host"])
    with counter.phase():
        value = loss(model)
    moments.append(_moment("forward", model, optimizer, counter))
    with counter.phase():
        value.backward()
    del value
    moments.append(_moment("before step", model, optimizer, counter))
    with counter.phase():
        _step(optimizer)
    moments.append(_moment("after step", model, optimizer, counter))
    optimizer.zero_grad()
    return tuple(moments), model.whole_bytes if isinstance(model, FSDP) else {}


def _step(optimizer: torch.optim.Optimizer) -> None:
    # Optimizers count their steps on the default device, and read the count.
    with torch.device("cpu"):
        optimizer.step()


def _moment(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, counter: _Count
) -> Moment:
    held = _held(model, optimizer)
    activations = max(0, counter.live - _on_device(held)) if name == "forward" else 0
    return Moment(name, **held, activations=activations, peak=counter.peak)


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes by kind, each storage once."""
    return {kind: _bytes(tensors) for kind, tensors in held_tensors(model, optimizer).items()}


def _on_device(held: dict[str, int]) -> int:
    return sum(held.values()) - held["host"]


def held_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[Tensor]]:
    """What a rank keeps from one moment to the next, by kind."""
    units = model.units if isinstance(model, FSDP) else []
    parameters: list[Tensor] = [*model.parameters()]
    parameters += [tensor for unit in units for tensor in (unit.shard, unit.full)]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    gradients = [g for g in grads if not isinstance(g, AveragedGradient)]
    inner = optimizer
    if isinstance(optimizer, ShardedOptimizer):
        gradients += optimizer.reducer.held()
        inner = optimizer.inner
        parameters += [p for group in inner.param_groups for p in group["params"]]
    kinds: dict[str, list[Tensor]] = {"parameters": parameters, "gradients": gradients}
    host = [t for tensors in kinds.values() for t in tensors if on_host(t.untyped_storage())]
    for kind, tensors in kinds.items():
        kinds[kind] = [t for t in tensors if not on_host(t.untyped_storage())]
    kinds["optimizer"] = []
    for parameter, values in inner.state.items():
        there = host if on_host(parameter.untyped_storage()) else kinds["optimizer"]
        there += [value for value in values.values() if isinstance(value, Tensor)]
    return {**kinds, "buffers": list(model.buffers()), "host": host}


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {id(s): s for s in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


class _Count:
    """Live bytes from `start` on, and the peak within the latest phase."""

    def __init__(self, start: int, model: nn.Module) -> None:
        self.live = self.peak = start
        self.model = model
        # What is on the host, and so not counted.
        self.host: WeakSet[torch.UntypedStorage] = WeakSet()

    @contextmanager
    def phase(self) -> Iterator[None]:
        raise NotImplementedError


class _LiveBytes(_Count):
    """Counts storages from the operator that makes them until the last tensor lets go of them."""

    @contextmanager
    def phase(self) -> Iterator[None]:
        self.peak = self.live
        with _Watch(self):
            yield


class _Watch(TorchDispatchMode):
    def __init__(self, count: _LiveBytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = count
        # A sharded layer's storage is emptied and refilled without an operator.
        self.units = count.model.units if isinstance(count.model, FSDP) else []
        self.unsharded = sum(unit.unsharded_bytes for unit in self.units)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage() for t in _tensors((args, kwargs))}
        for storage in {t.untyped_storage() for t in _tensors(result)} - given:
            # Views and in-place results lie in a storage that was given; what is made of the
            # host's tensors alone is the host's.
            if given and all(on_host(some) or some in self.count.host for some in given):
                self.count.host.add(storage)
                continue
            self.count.live += storage.nbytes()
            weakref.finalize(storage, self._free, storage.nbytes())
        now = sum(unit.unsharded_bytes for unit in self.units)
        self.count.live += now - self.unsharded
        self.unsharded = now
        self.count.peak = max(self.count.peak, self.count.live)
        return result

    def _free(self, nbytes: int) -> None:
        self.count.live -= nbytes


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class _CudaBytes(_Count):
    """Reads the CUDA allocator."""

    @contextmanager
    def phase(self) -> Iterator[None]:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        self.peak = self.live + torch.cuda.max_memory_allocated() - before
        self.live += torch.cuda.memory_allocated() - before
