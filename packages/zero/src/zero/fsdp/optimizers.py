"""Torch's optimizers on shards: whole matrices for those that need them, whole state dictionaries.

Notable:
- an optimizer that is not known to be element-wise gets whole tensors from its first step on; each
  of its tensors has one owner, which receives it and its gradient, steps it, and sends the shards
  back, so that all state of a tensor is on one rank;
- in state dictionaries what is as large as a parameter is a DTensor; loading takes those, whole
  tensors, or shards as they are.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zero.fsdp.unit import ShardedParameter, Unit, home_of
from zero.gradients import ShardGradient, plain
from zero.optimizer.elementwise import (
    ELEMENTWISE,
    REFUSED,
    WHOLE_PARAMETERS,
    how_to_split,
    options_from,
)
from zero.optimizer.state import options_of
from zero.partition import by_parameter
from zero.rows import Run, in_order, state_rows
from zero.wire import Wire


@cache
def install() -> None:
    """Look at each optimizer of this process when it steps."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def adopt(optimizer: torch.optim.Optimizer) -> OnShards | None:
    """What is to be done for an optimizer of shards; None for any other."""
    found, known = _known.get(optimizer, (None, 0))
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if count != known:
        if any(home_of(p) for group in optimizer.param_groups for p in group["params"]):
            found = found or OnShards(optimizer)
            found.look(optimizer)
        _known[optimizer] = found, count
    return found


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    found = adopt(optimizer)
    if found is None:
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is not None:
        # Its backward makes the gradients.
        with torch.enable_grad():
            loss = closure()
        args, kwargs = args[:1], {**kwargs, "closure": lambda: loss}
    ShardGradient.stepping = False
    found.agree(optimizer)
    for exchange in found.exchanges:
        exchange.lend()
    ShardGradient.stepping = True
    return args, kwargs


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    found, _ = _known.get(optimizer, (None, 0))
    if found is None:
        return
    ShardGradient.stepping = False
    for state in optimizer.state.values():
        # What is kept of a gradient is no gradient.
        state.update({k: plain(v) for k, v in state.items() if isinstance(v, ShardGradient)})
    for exchange in found.exchanges:
        for parameter in exchange.give_back():
            # Empty on all ranks or on none, as torch's tools ask.
            optimizer.state.setdefault(parameter, {})


class OnShards:
    """An optimizer of FSDP's parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.exchanges: list[Exchange] = []
        optimizer.register_state_dict_post_hook(self._as_rows)
        optimizer.register_load_state_dict_pre_hook(self._from_rows)

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Find what must be whole; cut what was loaded before the optimizer was known."""
        kinds: dict[tuple[Wire, torch.dtype], list[tuple[nn.Parameter, Unit, ShardedParameter]]]
        kinds = {}
        for group in optimizer.param_groups:
            held = [(p, *home) for p in group["params"] if (home := home_of(p)) is not None]
            if held and _sees_whole_tensors(optimizer, group, held):
                for parameter, unit, sharded in held:
                    kind = kinds.setdefault((unit.wire, parameter.dtype), [])
                    kind.append((parameter, unit, sharded))
        self.exchanges = [Exchange(wire, held) for (wire, _), held in kinds.items()]
        if optimizer.state:
            given = {"state": optimizer.state, "param_groups": optimizer.param_groups}
            kept = self._from_rows(optimizer, given)["state"]
            optimizer.state.clear()
            optimizer.state.update(kept)

    def agree(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if a shard has a gradient on some ranks only."""
        held: dict[Wire, list[tuple[nn.Parameter, str]]] = {}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            home = home_of(parameter)
            if home is not None:
                held.setdefault(home[0].wire, []).append((parameter, home[1].name))
        for wire, named in held.items():
            used = [parameter.grad is not None for parameter, _ in named]
            found = wire.any([*used, *(not one for one in used)], counted=False)()
            both = zip(named, found[: len(used)], found[len(used) :], strict=True)
            for (_, name), here, there in both:
                if here and there:
                    raise RuntimeError(
                        f"{name} has a gradient on some ranks only: set .grad to None, or skip "
                        "the step, on every rank or on none"
                    )

    def run(self, parameter: nn.Parameter) -> Run | None:
        """What this rank's state of a parameter is of; None if another rank has it."""
        home = home_of(parameter)
        if home is None:
            return Run(0, parameter.numel(), parameter.shape)
        for exchange in self.exchanges:
            owner = exchange.owner.get(parameter)
            if owner is not None:
                shape = home[1].shape
                return Run(0, shape.numel(), shape) if owner == exchange.wire.rank else None
        return Run(home[1].start, home[1].stop, parameter.shape)

    def _as_rows(self, optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        state = dict(given["state"])
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            home, run = home_of(parameter), self.run(parameter)
            if home is not None:
                held = [(run, state.pop(number, {}))] if run else []
                unit, sharded = home
                found = state_rows(held, sharded.whole, unit.wire)
                if found:
                    state[number] = found
        return {**given, "state": dict(sorted(state.items()))}

    def _from_rows(self, optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        state = dict(given["state"])
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        keys = [key for group in given["param_groups"] for key in group["params"]]
        for parameter, key, entry in zip(parameters, keys, in_order(given), strict=False):
            home, run = home_of(parameter), self.run(parameter)
            shape = home[1].shape if home else parameter.shape
            if entry:
                state[key] = {k: run.of(shape, k, v) for k, v in entry.items()} if run else {}
        return {**given, "state": state}


# Of each optimizer of this process that has stepped: what there is to do, its parameters' number.
_known: WeakKeyDictionary[torch.optim.Optimizer, tuple[OnShards | None, int]] = WeakKeyDictionary()


class Exchange:
    """Tensors of one dtype that are whole, each on its owner, while an optimizer steps."""

    def __init__(self, wire: Wire, held: list[tuple[nn.Parameter, Unit, ShardedParameter]]) -> None:
        self.wire, self.held = wire, held
        split = by_parameter([s.shape.numel() for _, _, s in held], wire.world, 1 << 62)
        # Those without elements belong to nobody, so to the first.
        self.owner = dict.fromkeys((parameter for parameter, _, _ in held), 0)
        for rank in range(wire.world):
            self.owner.update((held[piece.index][0], rank) for piece in split.shard_pieces(rank))
        # Each rank's run of each parameter.
        self._runs = [[unit.run_of(s, rank) for _, unit, s in held] for rank in range(wire.world)]
        # While the optimizer steps: each parameter's shard, and its gradient.
        self._lent: dict[int, tuple[Tensor, Tensor | None]] = {}

    @torch.no_grad()
    def lend(self) -> None:
        """Let each owner see whole parameters and gradients, and others nothing."""
        parameters = [parameter for parameter, _, _ in self.held]
        # On all ranks or on none.
        stepped = [i for i, parameter in enumerate(parameters) if parameter.grad is not None]
        if not stepped:
            return
        for _, unit, _ in self.held:
            unit.lent = True
        self._lent = {i: (parameters[i].data, parameters[i].grad) for i in stepped}
        values = self._gather([data for data, _ in self._lent.values()])
        grads = self._gather([plain(grad) for _, grad in self._lent.values() if grad is not None])
        for index in stepped:
            parameters[index].grad = None
            if index in values:
                parameters[index].data = values[index]
                parameters[index].grad = grads[index]

    @torch.no_grad()
    def give_back(self) -> list[nn.Parameter]:
        """Take this rank's shards of what the owners have made; return what was stepped."""
        if not self._lent:
            return []
        wholes = {i: self.held[i][0].data.reshape(-1) for i in self._of(self.wire.rank)}
        outgoing = [[wholes[i][slice(*runs[i])] for i in wholes] for runs in self._runs]
        mine = self._runs[self.wire.rank]
        expected = [[mine[i] for i in self._of(rank)] for rank in range(self.wire.world)]
        incoming = self._exchange(outgoing, expected)
        for rank, parts in enumerate(incoming):
            for index, part in zip(self._of(rank), parts, strict=True):
                parameter, (data, grad) = self.held[index][0], self._lent[index]
                parameter.grad = None
                parameter.data = data
                parameter.copy_(part.view_as(data))
                parameter.grad = grad
        for _, unit, _ in self.held:
            unit.lent = False
        stepped, self._lent = [self.held[index][0] for index in self._lent], {}
        return stepped

    def _of(self, rank: int) -> list[int]:
        """What a rank owns of what is stepped."""
        return [index for index in self._lent if self.owner[self.held[index][0]] == rank]

    def _gather(self, shards: list[Tensor]) -> dict[int, Tensor]:
        """Whole tensors, of those that this rank owns, from everyone's shards."""
        shard = dict(zip(self._lent, shards, strict=True))
        outgoing = [[shard[i].reshape(-1) for i in self._of(r)] for r in range(self.wire.world)]
        mine = self._of(self.wire.rank)
        expected = [[runs[i] for i in mine] for runs in self._runs]
        wholes = {i: shard[i].new_empty(self.held[i][2].shape) for i in mine}
        incoming = self._exchange(outgoing, expected)
        for parts, runs in zip(incoming, expected, strict=True):
            for index, part, run in zip(mine, parts, runs, strict=True):
                wholes[index].view(-1)[slice(*run)] = part
        return wholes

    def _exchange(
        self, outgoing: list[list[Tensor]], expected: list[list[tuple[int, int]]]
    ) -> list[list[Tensor]]:
        """Send each rank its parts; return each rank's, of runs of these lengths."""
        none = self.held[0][1].shard[:0]
        lengths = [[stop - start for start, stop in runs] for runs in expected]
        incoming = self.wire.all_to_all(
            [torch.cat([none, *parts]) for parts in outgoing], [sum(each) for each in lengths]
        )
        return [
            list(a.split(each)) if each else [] for a, each in zip(incoming, lengths, strict=True)
        ]


def _sees_whole_tensors(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    held: list[tuple[nn.Parameter, Unit, ShardedParameter]],
) -> bool:
    """Return True if a group's tensors may not be cut; raise if the optimizer cannot be sharded."""
    cls = type(optimizer)
    is_known = cls in ELEMENTWISE or cls in WHOLE_PARAMETERS or cls in REFUSED
    declared = any(cls in unit.elementwise_optimizers for _, unit, _ in held)
    try:
        split = how_to_split(
            cls,
            {} if is_known else options_from(optimizer, group),
            held[0][0].device,
            elementwise=True if declared else None,
            group=options_of(group),
            shapes=[sharded.shape for _, _, sharded in held],
            as_columns=True,
        )
    except ValueError as error:
        raise RuntimeError(str(error)) from error
    return split == "parameters"
