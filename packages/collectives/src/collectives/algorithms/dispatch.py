"""From a collective and an algorithm's name to the function that does it.

A call picks its algorithm, compares itself with the other ranks' where that is due, and goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from collectives.algorithms import halving_doubling, hierarchical, ring, tree
from collectives.choice.cost import NATIVE, CostModel, candidates
from collectives.choice.tuning import TunedModel, tune
from collectives.communicator import Communicator
from collectives.shared_memory import protocol
from collectives.shared_memory.fingerprint import (
    Call,
    Lengths,
    compare,
    compare_lengths,
    gather_by_messages,
)

# What was measured, by collective and hosts.
_models: dict[tuple[str, tuple[str, ...], tuple[int, ...]], TunedModel] = {}
BY_MESSAGES: dict[str, ModuleType] = {
    "ring": ring,
    "halving_doubling": halving_doubling,
    "tree": tree,
}


def all_reduce(comm: Communicator, call: Call, packed: bytes, flat: Tensor) -> None:
    """Reduce the flat tensor over all ranks, in place."""
    algorithm, topology = start(comm, call, packed, _size(flat)), comm.topology
    if algorithm == "shared_memory":
        protocol.all_reduce(topology.require(), flat, call.op, packed, topology.shared(flat))
    elif algorithm == "hierarchical":
        comm.talking = hierarchical.heads(topology.hosts)
        hierarchical.all_reduce(topology.arena, comm.wire, topology.hosts, flat, call.op, packed)
    elif algorithm == NATIVE:
        _on_gloo(comm, call, packed, flat)
    else:
        BY_MESSAGES[algorithm].all_reduce(comm.wire, flat, call.op)


def reduce_scatter(
    comm: Communicator, call: Call, packed: bytes, out: Tensor, flat: Tensor
) -> None:
    """out = this rank's slice of the reduction of `flat`."""
    algorithm = start(comm, call, packed, _size(flat))
    if algorithm == "shared_memory":
        protocol.reduce_scatter(comm.topology.require(), out, flat, call.op, packed)
    elif algorithm == NATIVE:
        _on_gloo(comm, call, packed, out, flat)
    else:
        BY_MESSAGES[algorithm].reduce_scatter(comm.wire, out, flat, call.op)


def all_gather(comm: Communicator, call: Call, packed: bytes, out: Tensor, own: Tensor) -> None:
    """out = every rank's `own`, one after the other."""
    algorithm = start(comm, call, packed, _size(out))
    if algorithm == "shared_memory":
        protocol.all_gather(comm.topology.require(), out, own, packed)
    elif algorithm == NATIVE:
        _on_gloo(comm, call, packed, out, own)
    else:
        BY_MESSAGES[algorithm].all_gather(comm.wire, out, own)


def broadcast(comm: Communicator, call: Call, packed: bytes, flat: Tensor) -> None:
    """Give every rank the tensor of rank `call.root`."""
    algorithm = start(comm, call, packed, _size(flat))
    if algorithm == "shared_memory":
        protocol.broadcast(comm.topology.require(), flat, call.root, packed)
    elif algorithm == "hierarchical":
        topology = comm.topology
        comm.talking = hierarchical.heads(topology.hosts, call.root)
        hierarchical.broadcast(topology.arena, comm.wire, topology.hosts, flat, call.root, packed)
    elif algorithm == NATIVE:
        _on_gloo(comm, call, packed, flat)
    else:
        BY_MESSAGES[algorithm].broadcast(comm.wire, flat, call.root)


def all_to_all(
    comm: Communicator,
    call: Call,
    packed: bytes,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
) -> None:
    """outputs[i] on rank j = inputs[j] on rank i."""
    # Sizes may differ between ranks, so nothing may depend on them.
    if start(comm, call, packed, 1 << 20) == "shared_memory":
        protocol.all_to_all(comm.topology.require(), outputs, inputs, packed)
        return
    comm.lengths = Lengths([part.numel() for part in inputs], [part.numel() for part in outputs])
    if comm.comparing or comm.topology.one_host:
        numbers = torch.tensor(comm.lengths.sends + comm.lengths.receives)
        everyone = gather_by_messages(comm.wire, numbers.numpy().tobytes())
        told = [torch.frombuffer(bytearray(each), dtype=torch.int64).tolist() for each in everyone]
        places = range(comm.world)
        lengths = {i: Lengths(told[i][: comm.world], told[i][comm.world :]) for i in places}
        compare_lengths(lengths, places)
    ring.all_to_all(comm.wire, outputs, inputs)


def barrier(comm: Communicator, packed: bytes) -> None:
    """Return when every rank is here."""
    agree(comm, packed)
    if not comm.topology.one_host:
        tree.all_reduce(comm.wire, torch.zeros(1), "SUM")


def start(comm: Communicator, call: Call, packed: bytes, size: int) -> str:
    """Pick the algorithm for this call, and compare the call with the other ranks'."""
    algorithm, one_host = call.algorithm, comm.topology.one_host
    if algorithm == "auto" and one_host:
        algorithm = _choose(comm, call, packed, size)
    if algorithm != "shared_memory":
        # Shared memory compares by itself, at a tick that it needs anyway.
        agree(comm, packed)
    if algorithm == "auto":
        if call.steps == "all_to_all":
            # The only one there is.
            return "ring"
        if call.steps not in comm.models:
            comm.models[call.steps] = _measured(comm, call.steps)
            comm.wire.speak_of(packed)
        algorithm = _choose(comm, call, packed, size)
    return algorithm


def agree(comm: Communicator, packed: bytes) -> None:
    """Compare this rank's call with the others', where that is due."""
    if comm.topology.one_host:
        protocol.barrier(comm.topology.require(), packed)
    elif comm.comparing:
        compare(gather_by_messages(comm.wire, packed), range(comm.world))
    comm.wire.speak_of(packed)


def _choose(comm: Communicator, call: Call, packed: bytes, size: int) -> str:
    # Nothing to measure on one host: memory costs less than messages at every size.
    native = not comm.topology.one_host and comm.gloo.can(call.steps, call.dtype, call.op)
    native = native and size > 0 and comm.gloo.has_room_for(packed)
    key = call.steps, size, native
    if key not in comm.choices:
        model, hosts = comm.models.setdefault(call.steps, CostModel()), comm.topology.ranks_per_host
        possible = model.candidates(call.steps, hosts)
        comm.choices[key] = min(
            [name for name in possible if native or name != NATIVE],
            key=lambda name: model.predict(call.steps, name, size, hosts),
        )
    return comm.choices[key]


def _measured(comm: Communicator, kind: str) -> CostModel:
    # A group on hosts where an earlier one was measured takes that over, if its rank 0 has it.
    where = kind, comm.topology.where, comm.topology.ranks_per_host
    if comm.rank == 0:
        known = _models.get(where)
        comm.store.set(f"known/{kind}", known.to_json() if known else "")
    if told := comm.store.get(f"known/{kind}"):
        return TunedModel.from_json(told)
    # The ranks agree on what they do.
    comparing, comm.comparing = comm.comparing, False
    probe = partial(_probe, comm, kind)
    hosts, native = comm.topology.ranks_per_host, comm.gloo.can(kind, torch.float32, "")
    model = tune(kind, probe, hosts, comm.wire, comm.store, native=native)
    comm.comparing, comm.talking = comparing, range(comm.world)
    _models[where] = model
    return model


def _probe(comm: Communicator, kind: str, algorithm: str, size: int) -> None:
    """A collective of that kind on `size` bytes of zeros."""
    op = "SUM" if kind in ("all_reduce", "reduce_scatter") else ""
    call = Call(kind, (), torch.float32, op, algorithm=algorithm)
    flat = torch.zeros(size // 4 // comm.world * comm.world)
    part = torch.zeros(size // 4 // comm.world)
    if kind == "all_reduce":
        all_reduce(comm, call, call.packed, flat)
    elif kind == "reduce_scatter":
        reduce_scatter(comm, call, call.packed, part, flat)
    elif kind == "all_gather":
        all_gather(comm, call, call.packed, flat, part)
    else:
        broadcast(comm, call, call.packed, flat)


def validate(comm: Communicator, kind: str, algorithm: str, dtype: torch.dtype, op: str) -> None:
    """Raise ValueError if the group cannot run `kind` by `algorithm`."""
    if algorithm == "auto":
        return
    topology = comm.topology
    possible = candidates(kind, topology.ranks_per_host, shared=topology.one_host)
    if comm.gloo.can(kind, dtype, op):
        possible = (*possible, NATIVE)
    if algorithm not in possible:
        raise ValueError(
            f"{kind} cannot run by {algorithm!r} here (ranks by host: {topology.hosts}); "
            f'use one of {", ".join(possible)}, or "auto"'
        )


def _size(flat: Tensor) -> int:
    return flat.numel() * flat.element_size()


def _on_gloo(comm: Communicator, call: Call, packed: bytes, *tensors: Tensor) -> None:
    # gloo does not take empty tensors; all ranks know that theirs are.
    if tensors[0].numel():
        left = comm.wire.seconds_left
        comm.gloo.run(call.steps, packed, tensors, op=call.op, root=call.root, seconds=left)
