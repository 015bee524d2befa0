"""What a group has found out about itself, in words: who shares memory, and what `auto` picks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collectives.choice.cost import CostModel, candidates
from collectives.communicator import communicator
from collectives.shared_memory import engine

SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20, 100 << 20)
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")


@dataclass(frozen=True)
class Description:
    """A group as its collectives see it; `str` tells it.

    `hosts` are the group's ranks by host. `why_not_shared` says for each rank that this one shares
    no memory with what the reason is. `models` are the prices by collective, once they were
    measured; where ranks are on several hosts, `auto` measures at its first call of each.
    """

    rank: int
    hosts: Sequence[Sequence[int]]
    shared_memory: bool
    why_not_shared: Mapping[int, str]
    engine: str
    models: Mapping[str, CostModel]
    timeout_seconds: float

    def picks(self, collective: str) -> dict[int, str]:
        """What `auto` runs, by size in bytes; empty before it was measured."""
        ranks = tuple(map(len, self.hosts))
        if self.shared_memory:
            return dict.fromkeys(SIZES, candidates(collective, ranks)[0])
        model = self.models.get(collective)
        return {size: model.choose(collective, size, ranks) for size in SIZES} if model else {}

    def __str__(self) -> str:
        ranks = ", ".join(f"{list(host)}" for host in self.hosts)
        lines = [f"{sum(map(len, self.hosts))} ranks on {len(self.hosts)} hosts: {ranks}"]
        if self.shared_memory:
            lines.append("shared memory between all ranks")
        for rank, why in self.why_not_shared.items():
            lines.append(f"no shared memory with rank {rank}: {why}")
        lines += [f"engine: {self.engine}", f"timeout: {self.timeout_seconds:g} s"]
        for collective in KINDS:
            told = ", ".join(f"{size} B {name}" for size, name in self.picks(collective).items())
            lines.append(f"{collective}: {told or 'not measured yet'}")
            if collective in self.models and not self.shared_memory:
                prices = self.models[collective].prices().items()
                lines.append("  " + ", ".join(f"{name} {price:.3g}" for name, price in prices))
        return "\n".join(lines)


def describe(group: Any = None) -> Description:
    """What is known of a group (torch's default one if None); the first time on every rank."""
    comm = communicator(group)
    topology = comm.topology
    compiled = "compiled" if engine.library() is not None else f"Python ({engine.why_not()})"
    return Description(
        rank=comm.rank, hosts=tuple(tuple(host) for host in topology.hosts),
        shared_memory=topology.one_host, why_not_shared=dict(topology.why_not),
        engine=compiled, models=dict(comm.models), timeout_seconds=comm.timeout,
    )  # fmt: skip
