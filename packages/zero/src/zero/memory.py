"""The memory of a training step by kind, predicted before the step and measured while it runs.

The prediction runs the same code on the meta device with collectives that do nothing, so it needs
neither memory nor other ranks. The measurement reads the CUDA allocator or, on a CPU, counts the
storages that operators allocate. Both can be compared with the paper's formula, `zero_stage_bytes`.

The paper's stage 1 (Rajbhandari et al. 2020, section 5.1) needs 2 + 2 + 12/n bytes per element on n
ranks: 2-byte parameters and gradients, and a float32 master copy and two moments. This package
steps parameters in their own dtype, so float32 AdamW needs 4 + 4 + 8/n bytes. In both cases, each
rank sends 2 (n-1)/n times the size of the parameters per step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero.fsdp.fsdp import FSDP, find_fsdps
from zero.fsdp.shard import find_sharded
from zero.fsdp.unit import Unit
from zero.fsdp.wrapping import get_original_name
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.process_groups import DryRun, Group

Build = Callable[[Group], tuple[nn.Module, torch.optim.Optimizer]]
Loss = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Moment:
    """Bytes by kind at one moment of a step, and the peak since the previous moment.

    `activations` is determined after the forward pass only, and is 0 at other moments.
    """

    name: str
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    peak: int

    @property
    def total(self) -> int:
        """All bytes at this moment."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.activations


@dataclass(frozen=True)
class MemoryReport:
    """Memory of one rank at four moments.

    The moments are after initialization, after the forward pass, and before and after the
    optimizer's step. `measured` is empty if only a prediction was requested.
    """

    predicted: tuple[Moment, ...]
    measured: tuple[Moment, ...]
    #: Maps the name of each parameter that every rank stores whole between steps to the reason.
    replicated: dict[str, str]

    @property
    def predicted_peak(self) -> int:
        """The predicted peak of the step."""
        return max(moment.peak for moment in self.predicted)

    @property
    def measured_peak(self) -> int:
        """The measured peak of the step; 0 if nothing was measured."""
        return max((moment.peak for moment in self.measured), default=0)

    def __str__(self) -> str:
        columns = ("parameters", "gradients", "optimizer", "buffers", "activations", "peak")
        lines = ["MiB".rjust(20) + "".join(column.rjust(13) for column in columns)]
        for kind, moments in (("predicted", self.predicted), ("measured", self.measured)):
            for moment in moments:
                cells = (f"{getattr(moment, c) / 2**20:13.3f}" for c in columns)
                lines.append(f"{kind[:4]} {moment.name:>15}" + "".join(cells))
        names_of: dict[str, list[str]] = {}
        for name, reason in self.replicated.items():
            names_of.setdefault(reason, []).append(name)
        for reason, names in names_of.items():
            more = f" and {len(names) - 1} more" if names[1:] else ""
            lines.append(f"whole on every rank: {names[0]}{more}, {reason}")
        return "\n".join(lines)


def memory_report(
    build: Build,
    loss: Loss,
    *,
    world: int | None = None,
    device: str | torch.device = "cpu",
    group: dist.ProcessGroup | None = None,
) -> MemoryReport:
    """Return a rank's memory over a training step: predicted and, without `world`, also measured.

    Two steps are run. The first moment precedes them, and the other moments are in the second step.

    build: receives a group, passes it to ShardedOptimizer or FSDP, and returns model and optimizer.
    loss: receives the model, runs its forward pass, and returns the loss. Both functions must
        create tensors on the default device, which is meta for the prediction and `device` for the
        measurement.
    world: predict for rank 0 of this number of ranks, which need not exist, and do not measure.
    group: the process group of the measurement; by default, all ranks.
    """
    if world is not None:
        ranks = DryRun(world)
    elif dist.is_initialized():
        ranks = DryRun(dist.get_world_size(group), dist.get_rank(group))
    else:
        ranks = DryRun(1)
    with torch.device("meta"):
        predicted, replicated = _run_two_steps(build, loss, ranks, _OperatorCounter)
    if world is not None:
        return MemoryReport(predicted, (), replicated)
    counter_cls = _CudaCounter if torch.device(device).type == "cuda" else _OperatorCounter
    with torch.device(device):
        measured, _ = _run_two_steps(build, loss, group, counter_cls)
    return MemoryReport(predicted, measured, replicated)


def zero_stage_bytes(
    parameters: int,
    world: int,
    stage: int,
    *,
    parameter_bytes: float = 4,
    gradient_bytes: float = 4,
    state_bytes: float = 8,
) -> float:
    """Return the bytes of parameters, gradients and optimizer state on one rank by ZeRO's formula.

    The formula is `parameters * (parameter_bytes + gradient_bytes + state_bytes)`. `state_bytes` is
    divided by `world` at stages 1 to 3, `gradient_bytes` at stages 2 and 3, and `parameter_bytes`
    at stage 3. With the paper's mixed-precision Adam (2, 2 and 12 bytes), 7.5e9 parameters on 64
    ranks take 120, 31.4, 16.6 and 1.88 GB. Source: ZeRO, figure 1.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"expected a stage from 0 to 3, got {stage}")
    bytes_per_element = [parameter_bytes, gradient_bytes, state_bytes]
    for index in range(3 - stage, 3):
        bytes_per_element[index] /= world
    return parameters * sum(bytes_per_element)


def _find_replicated(model: nn.Module) -> dict[str, str]:
    """Return the names of the parameters that every rank stores whole, with the reasons."""
    module = model.module if isinstance(model, FSDP) else model
    ignored = {p for fsdp in find_fsdps(model) for p in fsdp.ignored_params}
    replicated = {}
    for name, parameter in module.named_parameters():
        if parameter in ignored:
            replicated[get_original_name(name)] = "in ignored_params"
        elif find_sharded(parameter) is None:
            replicated[get_original_name(name)] = "in no module that stage 3 shards"
    return replicated


def _run_two_steps(
    build: Build, loss: Loss, group: Group, counter_cls: type[_Counter]
) -> tuple[tuple[Moment, ...], dict[str, str]]:
    """Return the four moments of two steps, and the replicated parameters with the reasons."""
    model, optimizer = build(group)
    sizes = _count_bytes_by_kind(model, optimizer)
    moments = [Moment("initialized", **sizes, activations=0, peak=sum(sizes.values()))]
    # The first step creates the state and determines the order of the layers.
    loss(model).backward()
    _step(optimizer)
    optimizer.zero_grad()
    counter = counter_cls(sum(_count_bytes_by_kind(model, optimizer).values()), model)
    with counter.phase():
        value = loss(model)
    moments.append(_record_moment("forward", model, optimizer, counter))
    with counter.phase():
        value.backward()
    del value
    moments.append(_record_moment("before step", model, optimizer, counter))
    with counter.phase():
        _step(optimizer)
    moments.append(_record_moment("after step", model, optimizer, counter))
    optimizer.zero_grad()
    return tuple(moments), _find_replicated(model)


def _step(optimizer: torch.optim.Optimizer) -> None:
    # Optimizers read their step counts, so these must not be on the meta device.
    with torch.device("cpu"):
        optimizer.step()


def _record_moment(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, counter: _Counter
) -> Moment:
    sizes = _count_bytes_by_kind(model, optimizer)
    activations = max(0, counter.live - sum(sizes.values())) if name == "forward" else 0
    return Moment(name, **sizes, activations=activations, peak=counter.peak)


def _count_bytes_by_kind(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes of each kind of tensor, counting each storage once."""
    counts = {}
    for kind, tensors in collect_tensors(model, optimizer).items():
        storages = {id(s): s for s in (tensor.untyped_storage() for tensor in tensors)}
        counts[kind] = sum(storage.nbytes() for storage in storages.values())
    return counts


def collect_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[Tensor]]:
    """Return the tensors that a rank stores at this moment, by kind, without activations."""
    parameters: list[Tensor] = [*model.parameters()]
    parameters += [tensor for unit in _find_units(model) for tensor in (unit.shard, unit.full)]
    # The storage of an averaged gradient is empty; the reducer lists its elements.
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    inner = optimizer
    if isinstance(optimizer, ShardedOptimizer):
        gradients += optimizer.reducer.list_tensors()
        inner = optimizer.inner
        parameters += [p for group in inner.param_groups for p in group["params"]]
    state = [value for values in inner.state.values() for value in values.values()]
    return {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": [value for value in state if isinstance(value, Tensor)],
        "buffers": list(model.buffers()),
    }


def _find_units(model: nn.Module) -> list[Unit]:
    return [unit for fsdp in find_fsdps(model) for unit in fsdp.units]


class _OperatorCounter(TorchDispatchMode):
    """A counter of the bytes of storages, from allocation by an operator until deletion.

    `live` starts with `start`, and `peak` is the maximum of `live` within the latest phase.
    """

    def __init__(self, start: int, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = start
        self.peak = start
        self.units = _find_units(model)
        self.unsharded = 0

    @contextmanager
    def phase(self) -> Iterator[None]:
        self.peak = self.live
        self.unsharded = self._count_unsharded_bytes()
        with self:
            yield

    def add(self, nbytes: int) -> None:
        """Count an allocation, or a release if `nbytes` is negative."""
        self.live += nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage() for t in _find_tensors((args, kwargs))}
        # Views and in-place results have the storage of an input.
        for storage in {t.untyped_storage() for t in _find_tensors(result)} - inputs:
            self.add(storage.nbytes())
            weakref.finalize(storage, self.add, -storage.nbytes())
        # A unit's storage is resized without an operator.
        unsharded = self._count_unsharded_bytes()
        self.add(unsharded - self.unsharded)
        self.unsharded = unsharded
        self.peak = max(self.peak, self.live)
        return result

    def _count_unsharded_bytes(self) -> int:
        return sum(unit.unsharded_bytes for unit in self.units)


def _find_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class _CudaCounter:
    """The CUDA allocator's count of bytes, with the attributes of `_OperatorCounter`."""

    def __init__(self, start: int, model: nn.Module) -> None:
        self.live = start
        self.peak = start

    @contextmanager
    def phase(self) -> Iterator[None]:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        self.peak = self.live + torch.cuda.max_memory_allocated() - before
        self.live += torch.cuda.memory_allocated() - before


_Counter = _OperatorCounter | _CudaCounter
