"""Execution of each collective call by one of the algorithms.

A call is compared with the other ranks' calls if necessary, then its algorithm is chosen and run.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from collectives.algorithms import hierarchical, ring, tree
from collectives.choice.cost import NATIVE, CostModel, list_candidates
from collectives.choice.tuning import tune
from collectives.communicator import Communicator
from collectives.errors import PeerError, RankLost
from collectives.shared_memory import fingerprint, protocol
from collectives.shared_memory.engine import Job
from collectives.shared_memory.fingerprint import Call, Lengths, gather_by_messages
from collectives.store import fetch

Function = Callable[..., None]

# The measured cost models, keyed by collective, the ranks' hosts and the ranks per host.
_models: dict[tuple[str, tuple[str, ...], tuple[int, ...]], CostModel] = {}

# For each algorithm, the function that runs each collective.
BY_MESSAGES: dict[str, dict[str, Function]] = {
    "ring": {
        "all_reduce": ring.all_reduce,
        "reduce_scatter": ring.reduce_scatter,
        "all_gather": ring.all_gather,
        "broadcast": ring.broadcast,
        "all_to_all": ring.all_to_all_single,
    },
    "tree": {
        "all_reduce": tree.all_reduce,
        "broadcast": tree.broadcast,
    },
}
HIERARCHICAL: dict[str, Function] = {
    "all_reduce": hierarchical.all_reduce,
    "broadcast": hierarchical.broadcast,
}
IN_SHARED_MEMORY: dict[str, Function] = {
    "all_reduce": protocol.all_reduce,
    "reduce_scatter": protocol.reduce_scatter,
    "all_gather": protocol.all_gather,
    "broadcast": protocol.broadcast,
}


def run(comm: Communicator, call: Call, *tensors: Tensor) -> None:
    """Run a collective on one flat tensor, or on (output, input) with parts of equal size."""
    algorithm = _prepare(comm, call, max(tensor.nbytes for tensor in tensors))
    topology = comm.topology
    kind = call.steps
    # The arguments that follow the tensors: the op or the root, if the collective has one.
    arguments: tuple[Any, ...] = (call.op,)
    if kind == "broadcast":
        arguments = (call.root,)
    elif kind in ("all_gather", "all_to_all"):
        arguments = ()
    if algorithm == "shared_memory":
        shared = [topology.find_shared_copies(tensors[0])] if kind == "all_reduce" else []
        IN_SHARED_MEMORY[kind](topology.require_arena(), *tensors, *arguments, call.packed, *shared)
    elif algorithm == "hierarchical":
        root = call.root if kind == "broadcast" else None
        # Only the leaders receive messages of other hosts.
        comm.operation.participants = hierarchical.list_host_leaders(topology.hosts, root)
        HIERARCHICAL[kind](
            topology.arena, comm.point_to_point, topology.hosts, *tensors, *arguments, call.packed
        )
    elif algorithm == NATIVE:
        _run_gloo(comm, call, *tensors)
    else:
        BY_MESSAGES[algorithm][kind](comm.point_to_point, *tensors, *arguments)


def all_to_all(
    comm: Communicator, call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> None:
    """Copy inputs[j] of rank i to outputs[i] of rank j, for all i and j."""
    arena = comm.topology.arena
    # Without the engine, messages are used on one host too.
    if arena is not None and arena.has_engine and _uses_shared_memory(comm, call):
        protocol.all_to_all(arena, outputs, inputs, call.packed)
        return
    compare_calls(comm, call)
    local = Lengths([part.numel() for part in inputs], [part.numel() for part in outputs])
    comm.operation.lengths = local
    # Always compare at least the part that this rank sends to itself: `copy_` would silently
    # broadcast a part of one element.
    lengths = {comm.rank: local}
    if comm.operation.compares_calls or comm.topology.is_single_host:
        lengths = _gather_lengths(comm, local)
    fingerprint.compare_lengths(lengths, range(comm.world_size))
    ring.all_to_all(comm.point_to_point, outputs, inputs)


def _gather_lengths(comm: Communicator, local: Lengths) -> dict[int, Lengths]:
    """Return the lengths of all ranks in an all-to-all."""
    numbers = torch.tensor(local.sends + local.receives, device="cpu")
    lengths = {}
    for rank, raw in enumerate(gather_by_messages(comm.point_to_point, numbers.numpy().tobytes())):
        values = torch.frombuffer(bytearray(raw), dtype=torch.int64).tolist()
        lengths[rank] = Lengths(values[: comm.world_size], values[comm.world_size :])
    return lengths


def make_job(comm: Communicator, call: Call, out: Tensor, source: Tensor) -> Job | None:
    """Return a call on contiguous tensors as an engine job, or None if the engine cannot run it."""
    if not _uses_shared_memory(comm, call):
        return None
    for tensor in (out, source):
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
    arena = comm.topology.require_arena()
    shared = comm.topology.find_shared_copies(out)
    return protocol.make_job(arena, call.kind, call.packed, out, source, call.op, call.root, shared)


def barrier(comm: Communicator, call: Call) -> None:
    """Wait until every rank has made this call."""
    compare_calls(comm, call)
    if not comm.topology.is_single_host:
        synchronize = torch.zeros(1, dtype=torch.uint8, device="cpu")
        tree.all_reduce(comm.point_to_point, synchronize, "SUM")


def _prepare(comm: Communicator, call: Call, size: int) -> str:
    """Return the algorithm of a call, after comparing the call with the other ranks' calls."""
    if _uses_shared_memory(comm, call):
        # The shared-memory algorithm compares calls itself, at a tick that it needs anyway.
        return "shared_memory"
    compare_calls(comm, call)
    if call.algorithm != "auto":
        return call.algorithm
    if comm.world_size == 1:
        return "ring"  # No algorithm sends a message.
    if call.kind == "all_to_all":
        # This is an all-to-all of equal parts that gloo can run. The number of gloo groups is
        # checked when the call runs, because earlier calls may still create groups.
        return NATIVE if comm.gloo.has_room_for(call.packed) else "ring"
    return _choose(comm, call, size)


def _uses_shared_memory(comm: Communicator, call: Call) -> bool:
    """Return True if the call runs in shared memory, which is the fastest at every size."""
    if call.algorithm == "auto":
        return comm.topology.is_single_host
    return call.algorithm == "shared_memory"


def compare_calls(comm: Communicator, call: Call) -> None:
    """Compare the ranks' calls: always on one host, between hosts only inside `checked`."""
    packed = call.packed
    if comm.topology.is_single_host:
        protocol.barrier(comm.topology.require_arena(), packed)
    elif comm.operation.compares_calls:
        fingerprint.compare(gather_by_messages(comm.point_to_point, packed), range(comm.world_size))
    comm.point_to_point.tag_by(packed)


def _choose(comm: Communicator, call: Call, size: int) -> str:
    """Return the algorithm with the lowest predicted time; measure the collective if necessary."""
    native = (
        size > 0
        and comm.gloo.can_run(call.kind, call.dtype, call.op)
        and comm.gloo.has_room_for(call.packed)
    )
    if call.steps not in comm.cost_models:
        comm.cost_models[call.steps] = _measure(comm, call.steps)
        comm.point_to_point.tag_by(call.packed)
    key = call.steps, size, native
    if key not in comm.choices:
        model = comm.cost_models[call.steps]
        hosts = comm.topology.ranks_per_host
        comm.choices[key] = model.choose(call.steps, size, hosts, native=native)
    return comm.choices[key]


def _measure(comm: Communicator, kind: str) -> CostModel:
    """Return rank 0's cost model from an earlier group of these hosts, or measure a new model."""
    key = kind, comm.topology.host_identities, comm.topology.ranks_per_host
    earlier = _models.get(key)
    text = _broadcast_text(comm, f"known/{kind}", earlier.to_json() if earlier else "")
    if text:
        return CostModel.from_json(text)
    # All ranks measure the same calls, so comparing them would only cost time.
    operation = comm.operation
    compares_calls = operation.compares_calls
    operation.compares_calls = False
    model = tune(
        kind,
        partial(_run_probe, comm, kind),
        comm.topology.ranks_per_host,
        comm.point_to_point,
        # All ranks use rank 0's model, because rounding could make them choose differently.
        partial(_broadcast_text, comm, f"model/{kind}"),
        native=comm.gloo.can_run(kind, torch.float32, ""),
    )
    operation.compares_calls = compares_calls
    operation.participants = range(comm.world_size)
    _models[key] = model
    return model


def _broadcast_text(comm: Communicator, key: str, text: str) -> bytes:
    """Return rank 0's `text`, which passes through the store; other ranks' texts are not used."""
    publish = {key: text} if comm.rank == 0 else {}
    deadline = time.monotonic() + comm.point_to_point.seconds_left
    try:
        return fetch(comm.store, {0: key}, deadline, publish)[0]
    except RankLost as error:
        # Rank 0 may have made a different call; the reports of all ranks then show this.
        raise PeerError(0, str(error)) from error


def _run_probe(comm: Communicator, kind: str, algorithm: str, size: int) -> None:
    """Run the collective `kind` on `size` bytes of zeros."""
    op = "SUM" if kind in ("all_reduce", "reduce_scatter") else ""
    call = Call(kind, (), torch.float32, op, algorithm=algorithm)
    part_numel = size // call.dtype.itemsize // comm.world_size
    whole = torch.zeros(part_numel * comm.world_size, dtype=call.dtype, device="cpu")
    part = torch.zeros(part_numel, dtype=call.dtype, device="cpu")
    pairs = {"reduce_scatter": (part, whole), "all_gather": (whole, part)}
    run(comm, call, *pairs.get(kind, (whole,)))


def validate(comm: Communicator, kind: str, algorithm: str, dtype: torch.dtype, op: str) -> None:
    """Raise ValueError if the group cannot run `kind` with `algorithm`."""
    if algorithm == "auto":
        return
    topology = comm.topology
    supported = list_candidates(kind, topology.ranks_per_host, shared=topology.is_single_host)
    if kind != "all_to_all" and comm.gloo.can_run(kind, dtype, op):
        supported = (*supported, NATIVE)
    if algorithm not in supported:
        raise ValueError(
            f"{kind} cannot run by {algorithm!r} on this group (ranks by host: {topology.hosts}); "
            f'use one of {", ".join(supported)}, or "auto"'
        )


def _run_gloo(comm: Communicator, call: Call, *tensors: Tensor) -> None:
    """Run a call by gloo's own collective, unless its tensors are empty."""
    # gloo rejects empty tensors. All ranks have the same sizes, so all of them return.
    if not tensors[0].numel():
        return
    if call.packed not in comm.gloo.groups:
        # gloo cannot be interrupted while it connects, so ranks that make different calls must
        # time out in these messages instead.
        gather_by_messages(comm.point_to_point, b"connect")
    seconds = comm.point_to_point.seconds_left
    comm.gloo.run(call.kind, call.packed, tensors, call.op, call.root, seconds)
