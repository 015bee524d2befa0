"""A readable description of a group: which ranks share memory, and what "auto" chooses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collectives.choice.cost import COLLECTIVES, CostModel, list_candidates
from collectives.groups import get_communicator
from collectives.shared_memory import engine

SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20, 100 << 20)
# The choice of "auto" for collectives that are never measured.
UNMEASURED = {"all_to_all": "gloo if it can run the call, otherwise ring"}


@dataclass(frozen=True)
class Description:
    """The properties of a group that decide how its collectives run; `str` formats them."""

    rank: int
    #: The ranks of the group by host.
    hosts: Sequence[Sequence[int]]
    #: True if all ranks share memory.
    shared_memory: bool
    #: For each rank that does not share memory with this rank, the reason.
    why_not_shared: Mapping[int, str]
    #: "compiled", or "Python" with the reason why the engine is not used.
    engine: str
    #: The cost model of each collective that has been measured. If ranks are on several hosts,
    #: "auto" measures a collective at its first call.
    models: Mapping[str, CostModel]
    timeout_seconds: float

    def picks(self, collective: str) -> dict[int, str]:
        """Return the choice of "auto" by size in bytes, or {} if it has not been measured.

        Raise ValueError if there is no such collective.
        """
        ranks_per_host = tuple(len(host) for host in self.hosts)
        algorithms = list_candidates(collective, ranks_per_host)
        if self.shared_memory:
            return dict.fromkeys(SIZES, algorithms[0])
        model = self.models.get(collective)
        if model is None:
            return {}
        return {size: model.choose(collective, size, ranks_per_host) for size in SIZES}

    def __str__(self) -> str:
        world_size = sum(len(host) for host in self.hosts)
        ranks = ", ".join(f"{list(host)}" for host in self.hosts)
        lines = [f"{world_size} ranks on {len(self.hosts)} hosts: {ranks}"]
        if self.shared_memory:
            lines.append("shared memory between all ranks")
        for rank, reason in self.why_not_shared.items():
            lines.append(f"no shared memory with rank {rank}: {reason}")
        lines.append(f"engine: {self.engine}")
        lines.append(f"timeout: {self.timeout_seconds:g} s")
        for collective in COLLECTIVES:
            picks = ", ".join(f"{size} B {name}" for size, name in self.picks(collective).items())
            default = UNMEASURED.get(collective, "not measured yet")
            lines.append(f"{collective}: {picks or default}")
            if collective in self.models and not self.shared_memory:
                prices = self.models[collective].get_prices().items()
                lines.append("  " + ", ".join(f"{name} {price:.3g}" for name, price in prices))
        return "\n".join(lines)


def describe(group: Any = None) -> Description:
    """Return the description of `group`, or of the default group if it is None.

    Every rank must make the first call on a group, because that call sets up the group.
    """
    comm = get_communicator(group)
    topology = comm.topology
    reason = engine.explain_refusal()
    if topology.arena is not None and not topology.arena.has_engine:
        reason = reason or "another rank of this host has no engine, or a different one"
    return Description(
        rank=comm.rank,
        hosts=tuple(tuple(host) for host in topology.hosts),
        shared_memory=topology.is_single_host,
        why_not_shared=dict(topology.why_not_shared),
        engine=f"Python ({reason})" if reason else "compiled",
        models=dict(comm.cost_models),
        timeout_seconds=comm.group_timeout,
    )
