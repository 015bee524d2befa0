"""The collectives that sharding needs, as arguments, with a count of the bytes they are given.

Notable:
- any function with torch.distributed's signature may stand in for torch's own;
- torch's reduce-scatter on gloo is an all-reduce for each rank, twice the bytes that are needed,
  so gloo gets `direct_reduce_scatter`, which also fixes the order of the sum: rank 0, 1, 2, ...
- torch's all-gather on gloo copies everything twice on the way, `direct_all_gather` nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zero.faults import explain

# Keeps our messages apart from a caller's own point-to-point traffic on the same group.
TAG = 0x5A45


class Work(Protocol):
    """What a collective returns with `async_op=True`."""

    def wait(self) -> Any:
        """Block until the result may be used."""


Collective = Callable[..., Any]


@dataclass(frozen=True)
class DryRun:
    """Stands for a group of `world` ranks that do not exist: collectives count and do nothing.

    With tensors on the meta device, a training step then runs without its memory and its peers.
    """

    world: int
    rank: int = 0


class Wire:
    """The collectives of one group, and the payload handed to each since the last `take()`.

    `bytes[name]` counts the whole array S of each call, as nccl-tests does: the input of a
    reduce-scatter, the output of an all-gather, the tensor of an all-reduce, broadcast or reduce.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DryRun | None = None,
        *,
        reduce_scatter_tensor: Collective | None = None,
        all_gather_into_tensor: Collective | None = None,
        all_reduce: Collective | None = None,
    ) -> None:
        self.group = group
        self.bytes: Counter[str] = Counter()
        self.device = torch.device("cpu")
        self._reduce_scatter = reduce_scatter_tensor or dist.reduce_scatter_tensor
        self._all_gather = all_gather_into_tensor or dist.all_gather_into_tensor
        self._all_reduce = all_reduce or dist.all_reduce
        if isinstance(group, DryRun):
            self.rank, self.world = group.rank, group.world
            return
        if not dist.is_initialized():
            raise RuntimeError(
                "no process group: call torch.distributed.init_process_group first (torchrun sets "
                "what it needs; a world of one is fine)"
            )
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"global rank {dist.get_rank()} is not in the given group")
        backend = dist.get_backend(group)
        if backend == "gloo":
            self._reduce_scatter = reduce_scatter_tensor or direct_reduce_scatter
            self._all_gather = all_gather_into_tensor or direct_all_gather
        if backend == "nccl":
            self.device = torch.device("cuda")

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Work:
        """Start `output = sum over ranks of input[rank's block]`."""
        if isinstance(self.group, DryRun):
            self.bytes["reduce_scatter"] += input.nbytes
            return _DryReduceScatter(input, self.world)
        return self._start("reduce_scatter", input, self._reduce_scatter, output, input)

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        """Start `output = every rank's input, in rank order`."""
        return self._start("all_gather", output, self._all_gather, output, input)

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Work:
        """Start the sum of `tensor` over ranks, in place."""
        return self._start("all_reduce", tensor, self._all_reduce, tensor, op=op)

    def reduce(self, tensor: Tensor, owner: int) -> Work:
        """Start the sum of `tensor` over ranks, in place on group rank `owner`."""
        return self._start("reduce", tensor, dist.reduce, tensor, group_dst=owner)

    def broadcast(self, tensor: Tensor, owner: int) -> Work:
        """Start the copy of group rank `owner`'s `tensor` to every rank."""
        return self._start("broadcast", tensor, dist.broadcast, tensor, group_src=owner)

    def any(self, flags: Sequence[bool]) -> Callable[[], list[bool]]:
        """Start to find out which flags are set on any rank; call the result to have them."""
        if isinstance(self.group, DryRun):
            self.bytes["all_reduce"] += 4 * len(flags)
            return lambda: list(flags)
        counts = torch.tensor(flags, dtype=torch.int32, device=self.device)
        work = self.all_reduce(counts)

        def wait() -> list[bool]:
            work.wait()
            return [count > 0 for count in counts.tolist()]

        return wait

    def objects(self, mine: Any) -> list[Any]:
        """Every rank's `mine`."""
        if isinstance(self.group, DryRun):
            return [mine] * self.world
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def take(self) -> dict[str, int]:
        """Return the payload bytes of each collective since the last call, and start again at 0."""
        counted, self.bytes = dict(self.bytes), Counter()
        return counted

    def _start(self, name: str, payload: Tensor, call: Collective, *args: Any, **more: Any) -> Work:
        self.bytes[name] += payload.nbytes
        if isinstance(self.group, DryRun):
            return _DONE
        what = f"{name} of {payload.nbytes} bytes"
        try:
            work = call(*args, group=self.group, async_op=True, **more)
        except RuntimeError as error:
            raise explain(error, self.group, what) from error
        return _DONE if work is None else _Explained(work, self.group, what)


def wire_bytes(payload: dict[str, int], world: int) -> float:
    """Bytes that one rank sends, on average, for these payloads.

    (n-1)/n of the array for a reduce-scatter, an all-gather, a reduce or a broadcast, twice that
    for an all-reduce: each element must leave n-1 of n ranks, once or twice.
    """
    rounds = {"all_reduce": 2}
    total = sum(size * rounds.get(name, 1) for name, size in payload.items())
    return total * (world - 1) / world


def direct_reduce_scatter(
    output: Tensor,
    input: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """`torch.distributed.reduce_scatter_tensor` by n-1 sends of one block each: (n-1)/n of S.

    Rank r sends block j of `input` straight to rank j and sums the blocks that reach it in rank
    order, so the result does not depend on timing. Half precision is summed in float32 and rounded
    once. Only SUM; the sum happens in `wait()`.
    """
    if op != dist.ReduceOp.SUM:
        raise ValueError(f"direct_reduce_scatter sums; got {op}: scale the result instead")
    world = dist.get_world_size(group)
    if input.numel() != world * output.numel() or input.dtype != output.dtype:
        raise ValueError(
            f"output of {output.numel()} {output.dtype} does not fit input of {input.numel()} "
            f"{input.dtype} on {world} ranks: the input is world size blocks of the output's size"
        )
    work = _DirectReduceScatter(output, input, group)
    if async_op:
        return work
    work.wait()
    return None


def direct_all_gather(
    output: Tensor,
    input: Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """`torch.distributed.all_gather_into_tensor` by n-1 sends of `input`, received in their places.

    `input` may be this rank's own block of `output`.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if output.numel() != world * input.numel() or input.dtype != output.dtype:
        raise ValueError(
            f"input of {input.numel()} {input.dtype} does not fit output of {output.numel()} "
            f"{output.dtype} on {world} ranks: the output is world size blocks of the input's size"
        )
    blocks = output.view(world, -1)
    work = _AllOf(_exchange([input.view(-1)] * world, list(blocks), group))
    if blocks[rank].data_ptr() != input.data_ptr():
        blocks[rank].copy_(input.view(-1))
    if async_op:
        return work
    work.wait()
    return None


def _exchange(
    outgoing: Sequence[Tensor], incoming: Sequence[Tensor], group: dist.ProcessGroup | None
) -> list[Work]:
    """Start to send and receive one block for each other rank."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    # Start with the next rank, so that not all send to rank 0 at once.
    peers = [(rank + step) % world for step in range(1, world)]
    receives = [dist.irecv(incoming[p], group=group, group_src=p, tag=TAG) for p in peers]
    sends = [dist.isend(outgoing[p], group=group, group_dst=p, tag=TAG) for p in peers]
    return [work for work in (*receives, *sends) if work is not None]


class _AllOf:
    def __init__(self, works: list[Work]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class _DirectReduceScatter:
    def __init__(self, output: Tensor, input: Tensor, group: dist.ProcessGroup | None) -> None:
        self.output = output
        self.rank, world = dist.get_rank(group), dist.get_world_size(group)
        blocks = input.contiguous().view(world, -1)
        self.arrived = [
            blocks[r] if r == self.rank else torch.empty_like(blocks[r]) for r in range(world)
        ]
        self.work = _exchange(list(blocks), self.arrived, group)

    def wait(self) -> None:
        if not self.arrived:
            return
        for work in self.work:
            work.wait()
        first, *others = self.arrived
        if self.output.dtype in (torch.float16, torch.bfloat16) and others:
            total = first.float()
            for block in others:
                total += block
            self.output.view(-1).copy_(total)
        elif others:
            torch.add(first, others[0], out=self.output.view(-1))
            for block in others[1:]:
                self.output.view(-1).add_(block)
        else:
            self.output.view(-1).copy_(first)
        self.arrived, self.work = [], []


class _Explained:
    """Work whose failure names the ranks to blame."""

    def __init__(self, work: Work, group: dist.ProcessGroup | None, what: str) -> None:
        self.work, self.group, self.what = work, group, what

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise explain(error, self.group, self.what) from error


class _DryReduceScatter:
    """Holds what `direct_reduce_scatter` holds."""

    def __init__(self, input: Tensor, world: int) -> None:
        self.arrived = input.new_empty(input.numel() // world * (world - 1))

    def wait(self) -> None:
        del self.arrived


class _Done:
    def wait(self) -> None:
        """Nothing is under way: the collective has finished already."""


_DONE = _Done()
