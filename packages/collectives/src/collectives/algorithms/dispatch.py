"""From a collective and an algorithm's name to the function that does it.

A call picks its algorithm, compares itself with the other ranks' where that is due, and goes.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from collectives.algorithms import halving_doubling, hierarchical, ring, tree
from collectives.choice.cost import NATIVE, CostModel, candidates
from collectives.choice.tuning import tune
from collectives.communicator import Communicator
from collectives.errors import PeerError, RankLost
from collectives.faults import fetch
from collectives.shared_memory import fingerprint, protocol
from collectives.shared_memory.engine import Job
from collectives.shared_memory.fingerprint import Call, Lengths, gather_by_messages

# What was measured, by collective and hosts.
_models: dict[tuple[str, tuple[str, ...], tuple[int, ...]], CostModel] = {}
BY_MESSAGES = {"ring": ring, "halving_doubling": halving_doubling, "tree": tree}


def run(comm: Communicator, call: Call, packed: bytes, *tensors: Tensor) -> None:
    """Do a reduction, gather or broadcast on flat tensors: one, or (output, input)."""
    algorithm = start(comm, call, packed, max(each.nbytes for each in tensors))
    topology, kind = comm.topology, call.steps
    # What the functions take beside the tensors, all by the collective's name.
    rest: tuple[Any, ...] = {"all_gather": (), "broadcast": (call.root,)}.get(kind, (call.op,))
    if algorithm == "shared_memory":
        shared = [topology.shared(tensors[0])] if kind == "all_reduce" else []
        getattr(protocol, kind)(topology.require(), *tensors, *rest, packed, *shared)
    elif algorithm == "hierarchical":
        hosts, root = topology.hosts, call.root if kind == "broadcast" else None
        comm.operation.talking = hierarchical.heads(hosts, root)
        getattr(hierarchical, kind)(topology.arena, comm.wire, hosts, *tensors, *rest, packed)
    elif algorithm == NATIVE:
        _on_gloo(comm, call, packed, *tensors)
    else:
        getattr(BY_MESSAGES[algorithm], kind)(comm.wire, *tensors, *rest)


def all_to_all(
    comm: Communicator, call: Call, packed: bytes, outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
) -> None:  # fmt: skip
    """outputs[i] on rank j = inputs[j] on rank i."""
    # Sizes may differ between ranks, so nothing may depend on them.
    if start(comm, call, packed, 1 << 20) == "shared_memory":
        protocol.all_to_all(comm.topology.require(), outputs, inputs, packed)
        return
    own = Lengths([part.numel() for part in inputs], [part.numel() for part in outputs])
    comm.operation.lengths = own
    if comm.operation.comparing or comm.topology.one_host:
        numbers = torch.tensor(own.sends + own.receives)
        everyone = gather_by_messages(comm.wire, numbers.numpy().tobytes())
        told = [torch.frombuffer(bytearray(each), dtype=torch.int64).tolist() for each in everyone]
        places = range(comm.world)
        lengths = {i: Lengths(told[i][: comm.world], told[i][comm.world :]) for i in places}
        fingerprint.compare_lengths(lengths, places)
    ring.all_to_all(comm.wire, outputs, inputs)


def job(comm: Communicator, call: Call, out: Tensor, source: Tensor) -> Job | None:
    """What the engine does if it can: a call on tensors as they lie, all in shared memory."""
    in_memory = comm.topology.one_host and call.algorithm in ("auto", "shared_memory")
    plain = (t.is_contiguous() and not (t.is_conj() or t.is_neg()) for t in (out, source))
    if not (in_memory and all(plain)):
        return None
    arena, shared = comm.topology.require(), comm.topology.shared(out)
    return protocol.job(arena, call.kind, call.packed, out, source, call.op, call.root, shared)


def barrier(comm: Communicator, packed: bytes) -> None:
    """Return when every rank is here."""
    agree(comm, packed)
    if not comm.topology.one_host:
        tree.all_reduce(comm.wire, torch.zeros(1), "SUM")


def start(comm: Communicator, call: Call, packed: bytes, size: int) -> str:
    """Pick the algorithm for this call, and compare the call with the other ranks'."""
    algorithm, one_host = call.algorithm, comm.topology.one_host
    if algorithm == "auto" and one_host:
        # Nothing to measure: memory costs less than messages at every size.
        algorithm = "shared_memory"
    if algorithm != "shared_memory":
        # Shared memory compares by itself, at a tick that it needs anyway.
        agree(comm, packed)
    if algorithm == "auto":
        if call.steps == "all_to_all":
            # A shape is told where all parts are equal.
            return NATIVE if call.shape else "ring"
        algorithm = _choose(comm, call, packed, size)
    return algorithm


def agree(comm: Communicator, packed: bytes) -> None:
    """Compare this rank's call with the others', where that is due."""
    if comm.topology.one_host:
        protocol.barrier(comm.topology.require(), packed)
    elif comm.operation.comparing:
        fingerprint.compare(gather_by_messages(comm.wire, packed), range(comm.world))
    comm.wire.speak_of(packed)


def _choose(comm: Communicator, call: Call, packed: bytes, size: int) -> str:
    native = comm.gloo.can(call.kind, call.dtype, call.op)
    native = native and size > 0 and comm.gloo.has_room_for(packed)
    if call.steps not in comm.models:
        comm.models[call.steps] = _measured(comm, call.steps)
        comm.wire.speak_of(packed)
    key = call.steps, size, native
    if key not in comm.choices:
        model, hosts = comm.models[call.steps], comm.topology.ranks_per_host
        comm.choices[key] = model.choose(call.steps, size, hosts, native=native)
    return comm.choices[key]


def _measured(comm: Communicator, kind: str) -> CostModel:
    # A group on hosts where an earlier one was measured takes that over, if its rank 0 has it.
    where = kind, comm.topology.where, comm.topology.ranks_per_host
    known = _models.get(where)
    if told := _told_by_rank_0(comm, f"known/{kind}", known.to_json() if known else ""):
        return CostModel.from_json(told)
    # The ranks agree on what they do.
    operation = comm.operation
    comparing, operation.comparing = operation.comparing, False
    probe = partial(_probe, comm, kind)
    hosts, native = comm.topology.ranks_per_host, comm.gloo.can(kind, torch.float32, "")
    # One rank's arithmetic decides, or ranks could choose differently.
    agree = partial(_told_by_rank_0, comm, f"model/{kind}")
    model = tune(kind, probe, hosts, comm.wire, agree, native=native)
    operation.comparing, operation.talking = comparing, range(comm.world)
    _models[where] = model
    return model


def _told_by_rank_0(comm: Communicator, key: str, text: str) -> bytes:
    try:
        tell = {key: text} if comm.rank == 0 else {}
        until = time.monotonic() + comm.wire.seconds_left
        return fetch(comm.store, {0: key}, until, tell)[0]
    except RankLost as error:
        # It may have made another call: that is found out as for messages.
        raise PeerError(0, str(error)) from error


def _probe(comm: Communicator, kind: str, algorithm: str, size: int) -> None:
    """A collective of that kind on `size` bytes of zeros."""
    op = "SUM" if kind in ("all_reduce", "reduce_scatter") else ""
    call = Call(kind, (), torch.float32, op, algorithm=algorithm)
    flat = torch.zeros(size // 4 // comm.world * comm.world)
    part = torch.zeros(size // 4 // comm.world)
    pairs = {"reduce_scatter": (part, flat), "all_gather": (flat, part)}
    run(comm, call, call.packed, *pairs.get(kind, (flat,)))


def validate(comm: Communicator, kind: str, algorithm: str, dtype: torch.dtype, op: str) -> None:
    """Raise ValueError if the group cannot run `kind` by `algorithm`."""
    if algorithm == "auto":
        return
    topology = comm.topology
    possible = candidates(kind, topology.ranks_per_host, shared=topology.one_host)
    if kind != "all_to_all" and comm.gloo.can(kind, dtype, op):
        possible = (*possible, NATIVE)
    if algorithm not in possible:
        raise ValueError(
            f"{kind} cannot run by {algorithm!r} here (ranks by host: {topology.hosts}); "
            f'use one of {", ".join(possible)}, or "auto"'
        )


def _on_gloo(comm: Communicator, call: Call, packed: bytes, *tensors: Tensor) -> None:
    # gloo does not take empty tensors; all ranks know that theirs are.
    if tensors[0].numel():
        if packed not in comm.gloo.groups:
            # Nothing interrupts gloo while it connects, so ranks that disagree must not get there.
            gather_by_messages(comm.wire, b"connect")
        left = comm.wire.seconds_left
        comm.gloo.run(call.kind, packed, tensors, op=call.op, root=call.root, seconds=left)
