"""Import this to name "collectives" in init_process_group, and run torch's own trainers on it.

    import collectives.backend
    torch.distributed.init_process_group("cpu:collectives,cuda:nccl")   # or just "collectives"

Notable:
- what this package has no algorithm for (gather, scatter, lists of tensors, send and receive) goes
  to gloo, over which the messages travel too;
- an asynchronous call from torch (DDP's buckets, FSDP2's prefetch) runs on the progress thread.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from collectives import collective
from collectives.communicator import Communicator
from collectives.work import Work

NAME = "collectives"


# Its methods have several signatures each in torch's stubs; torch calls the ones given here.
_ProcessGroup: Any = dist.ProcessGroup


def _on_gloo(name: str) -> Callable[..., Any]:
    """gloo's own method.

    The base class would find it too, but holds the interpreter while it calls: gloo may then wait
    for its own thread, and that for the interpreter, to drop the tensors of an earlier call.
    """

    def forward(self: CollectivesProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._gloo, name)(*args, **kwargs)

    return forward


class CollectivesProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group whose collectives are this package's."""

    def __init__(self, store: Store, rank: int, world: int, timeout: timedelta) -> None:
        super().__init__(rank, world)
        self._gloo: Any = ProcessGroupGloo(store, rank, world, timeout)
        # torch asks the group which backend serves a device.
        kind = dist.ProcessGroup.BackendType.GLOO
        self._register_backend(torch.device("cpu"), kind, self._gloo)
        self._set_default_backend(kind)
        self.communicator = Communicator(self._gloo, store=store, timeout=timeout)

    def getBackendName(self) -> str:
        """What get_backend says."""
        return NAME

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """torch.distributed.all_reduce."""
        if tensors[0].is_sparse:
            on_gloo: dist.Work = self._gloo.allreduce(tensors, opts)
            return on_gloo
        return self._run(
            opts, tensors, lambda **go: collective.all_reduce(tensors[0], opts.reduceOp, **go)
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """One all-reduce after the other."""
        return self._each(opts, [[tensor] for tensor in tensors], self.allreduce)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """torch.distributed.broadcast."""
        return self._run(
            opts,
            tensors,
            lambda **go: collective.broadcast(tensors[0], group_src=opts.rootRank, **go),
        )

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """torch.distributed.all_gather_into_tensor."""
        return self._run(
            opts, [output], lambda **go: collective.all_gather_into_tensor(output, input, **go)
        )

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """torch.distributed.reduce_scatter_tensor."""
        return self._run(
            opts,
            [output],
            lambda **go: collective.reduce_scatter_tensor(output, input, opts.reduceOp, **go),
        )

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """One all-gather after the other."""
        return self._each(opts, zip(outputs, inputs, strict=True), self._allgather_base)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """One reduce-scatter after the other."""
        return self._each(opts, zip(outputs, inputs, strict=True), self._reduce_scatter_base)

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        """torch.distributed.all_to_all_single."""
        return self._run(
            opts,
            [output],
            lambda **go: collective.all_to_all_single(
                output, input, list(output_split_sizes), list(input_split_sizes), **go
            ),
        )

    def barrier(self, opts: Any = None) -> dist.Work:
        """torch.distributed.barrier."""
        return self._run(opts, [], lambda **go: collective.barrier(**go))

    # torch 2.12 and later call the same things by these names.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    allgather = _on_gloo("allgather")
    allgather_coalesced = _on_gloo("allgather_coalesced")
    alltoall = _on_gloo("alltoall")
    gather = _on_gloo("gather")
    monitored_barrier = _on_gloo("monitored_barrier")
    recv = _on_gloo("recv")
    recv_anysource = _on_gloo("recv_anysource")
    reduce = _on_gloo("reduce")
    reduce_scatter = _on_gloo("reduce_scatter")
    scatter = _on_gloo("scatter")
    send = _on_gloo("send")

    def shutdown(self) -> None:
        """Stop the progress thread."""
        self.communicator.close()

    def _run(
        self, opts: Any, result: list[Tensor], call: Callable[..., dist.Work | None]
    ) -> dist.Work:
        waits = opts is not None and not opts.asyncOp
        work = call(group=self, async_op=not waits)
        return work if work is not None else Work.done(result)

    def _each(self, opts: Any, arguments: Any, call: Callable[..., dist.Work]) -> dist.Work:
        work: dist.Work = Work.done([])
        # Calls are done in order, so the last one's end is the end of all.
        for each in arguments:
            work = call(each, opts) if isinstance(each, list) else call(*each, opts)
        return work


def _create(store: Store, rank: int, world: int, timeout: timedelta) -> CollectivesProcessGroup:
    return CollectivesProcessGroup(store, rank, world, timeout)


dist.Backend.register_backend(NAME, _create, devices=["cpu"])
