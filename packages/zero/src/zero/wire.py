"""The collectives that sharding needs, as arguments, with a count of the bytes they are given.

Notable:
- any function with torch.distributed's signature may stand in for torch's own;
- they default to torch's, but to the two of `zero.direct` on gloo, where torch's cost more;
- a collective that fails names the ranks to blame.
"""

from __future__ import annotations

import copy
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zero.direct import Work, direct_all_gather, direct_reduce_scatter
from zero.faults import explain

Collective = Callable[..., Any]


@dataclass(frozen=True)
class DryRun:
    """Stands for a group of `world` ranks that do not exist: collectives count and do nothing.

    With tensors on the meta device, a training step then runs without its memory and its peers.
    """

    world: int
    rank: int = 0


Group = dist.ProcessGroup | DryRun | DeviceMesh | None


# What gloo and NCCL move and sum as it is.
KNOWN = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool,
}  # fmt: skip


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, for what is only moved."""
    return tensor.reshape(-1).view(torch.uint8)


class Wire:
    """The collectives of one group, and the payload handed to each since the last `take()`.

    Of a mesh (replicate, shard) it is the second group; gradients' sums go on over the first.

    `bytes[name]` counts the whole array S of each call, as nccl-tests does: the input of a
    reduce-scatter or an all-to-all, the output of an all-gather, the tensor of any other.
    """

    def __init__(
        self,
        group: Group = None,
        *,
        reduce_scatter_tensor: Collective | None = None,
        all_gather_into_tensor: Collective | None = None,
        all_reduce: Collective | None = None,
    ) -> None:
        # Where each shard is held by several ranks (a mesh of two dimensions): the others of ours.
        self.replicas: Wire | None = None
        self._mesh = group if isinstance(group, DeviceMesh) else None
        if isinstance(group, DeviceMesh):
            if group.ndim not in (1, 2):
                raise ValueError(
                    f"a mesh of {group.ndim} dimensions: pass one of one (shard) or of two "
                    "(replicate, shard), such as mesh['dp_replicate', 'dp_shard']"
                )
            if group.ndim == 2:
                self.replicas = Wire(group.get_group(0), all_reduce=all_reduce)
            group = group.get_group(group.ndim - 1)
        self.group = group
        self.bytes: Counter[str] = Counter()
        self.device = torch.device("cpu")
        self._reduce_scatter = reduce_scatter_tensor or dist.reduce_scatter_tensor
        self._all_gather = all_gather_into_tensor or dist.all_gather_into_tensor
        self._all_reduce = all_reduce or dist.all_reduce
        # Whether the output of a reduce-scatter may be a part of its input.
        self.sums_in_place = False
        if isinstance(group, DryRun):
            self.rank, self.world = group.rank, group.world
            self.device = torch.device("meta")
            self.sums_in_place = True
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
        self.sums_in_place = self._reduce_scatter is direct_reduce_scatter

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks as a mesh, for DTensors; the last dimension shards."""
        if self._mesh is None:
            assert not isinstance(self.group, DryRun)
            self._mesh = DeviceMesh.from_group(self._whole, self.device.type)
        return self._mesh

    def same_ranks(self, other: Wire) -> bool:
        """Whether both send over the same group."""
        if self.replicas and other.replicas:
            return self._whole is other._whole and self.replicas.same_ranks(other.replicas)
        return self._whole is other._whole and self.replicas is other.replicas

    @property
    def _whole(self) -> Any:
        return self.group or dist.group.WORLD

    def __deepcopy__(self, memo: dict[int, Any]) -> Wire:
        """Return a wire of the same group, which counts by itself."""
        same: Wire = copy.copy(self)
        same.bytes = Counter()
        memo[id(self)] = same
        return same

    def reduce_scatter(self, output: Tensor, input: Tensor, label: str = "") -> Work:
        """Start `output = sum over ranks of input[rank's block]`.

        `label` says of what: on gloo, calls of different labels never meet.
        """
        if isinstance(self.group, DryRun):
            self.bytes["reduce_scatter"] += input.nbytes
            return _DryReduceScatter(input, self.world)
        call = self._labeled(self._reduce_scatter, label)
        work = self._start("reduce_scatter", input, call, output, input, label=label)
        return _Then(work, self.replicas, output) if self.replicas else work

    def all_gather(self, output: Tensor, input: Tensor, label: str = "") -> Work:
        """Start `output = every rank's input, in rank order`."""
        call = self._labeled(self._all_gather, label)
        if output.dtype not in KNOWN:
            output, input = as_bytes(output), as_bytes(input)
        return self._start("all_gather", output, call, output, input, label=label)

    @property
    def copies(self) -> int:
        """How many ranks' gradients are summed: all that hold a shard or a copy of one."""
        return self.world * (self.replicas.world if self.replicas else 1)

    def all_reduce_gradient(self, tensor: Tensor) -> Work:
        """Start the sum of `tensor` over `copies` ranks, in place."""
        work = self.all_reduce(tensor)
        return _Then(work, self.replicas, tensor) if self.replicas else work

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Work:
        """Start the sum of `tensor` over the ranks that hold shards, in place."""
        if tensor.dtype not in KNOWN and op == dist.ReduceOp.SUM:
            return self._sum_directly(tensor)
        return self._start("all_reduce", tensor, self._all_reduce, tensor, op=op)

    def _sum_directly(self, tensor: Tensor) -> Work:
        """Sum what gloo does not, from everyone's bytes, in rank order and rounded once."""
        everyones = tensor.new_empty(self.world, tensor.numel())
        work = self.all_gather(everyones, tensor.contiguous())
        wide = torch.float32 if tensor.is_floating_point() else torch.int64
        return _Finally(work, lambda: tensor.copy_(everyones.to(wide).sum(0).view(tensor.shape)))

    def all_to_all(self, blocks: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        """Send `blocks[r]` to rank r; return what each rank sent, of these lengths."""
        dtype = blocks[0].dtype
        if dtype not in KNOWN:
            # Lengths are those of bytes.
            parts = self.all_to_all(
                [as_bytes(block) for block in blocks], [n * dtype.itemsize for n in lengths]
            )
            return [part.view(dtype) for part in parts]
        outgoing = torch.cat(list(blocks))
        if self.device.type == "cuda":
            outgoing = outgoing.to(self.device)
        incoming = outgoing.new_empty(sum(lengths))
        sizes: dict[str, Any] = {"output_split_sizes": list(lengths)}
        sizes["input_split_sizes"] = [block.numel() for block in blocks]
        call = dist.all_to_all_single
        self._start("all_to_all", outgoing, call, incoming, outgoing, **sizes).wait()
        return list(incoming.to(blocks[0].device).split(list(lengths)))

    def reduce(self, tensor: Tensor, owner: int) -> Work:
        """Start the sum of `tensor` over ranks, in place on group rank `owner`."""
        if tensor.dtype not in KNOWN:
            return self.all_reduce_gradient(tensor)
        work = self._start("reduce", tensor, dist.reduce, tensor, group_dst=owner)
        mine = self.replicas if owner == self.rank else None
        return _Then(work, mine, tensor) if mine else work

    def broadcast(self, tensor: Tensor, owner: int) -> Work:
        """Start the copy of group rank `owner`'s `tensor` to every rank of the group."""
        moved = tensor.contiguous()
        sent = moved if moved.dtype in KNOWN else as_bytes(moved)
        work = self._start("broadcast", sent, dist.broadcast, sent, group_src=owner)
        return work if moved is tensor else _Finally(work, lambda: tensor.copy_(moved))

    def broadcast_first(self, tensor: Tensor) -> None:
        """Copy the first rank's `tensor` to all others, copies too."""
        self.broadcast(tensor, 0).wait()
        if self.replicas:
            self.replicas.broadcast(tensor, 0).wait()

    def any(self, flags: Sequence[bool], *, counted: bool = True) -> Callable[[], list[bool]]:
        """Start to find out which flags are set on any rank; call the result to have them.

        `counted`: as bytes of the backward pass; an optimizer's step has none of its own.
        """
        before = self.bytes["all_reduce"]
        if isinstance(self.group, DryRun):
            self.bytes["all_reduce"] += 4 * len(flags) * counted
            return lambda: list(flags)
        counts = torch.tensor(flags, dtype=torch.int32, device=self.device)
        work = self.all_reduce(counts)
        if not counted:
            self.bytes["all_reduce"] = before

        def wait() -> list[bool]:
            work.wait()
            found = [count > 0 for count in counts.tolist()]
            return self.replicas.any(found, counted=counted)() if self.replicas else found

        return wait

    def objects(self, mine: Any) -> list[Any]:
        """Every rank's `mine`; of a mesh, the first row of shards first."""
        if isinstance(self.group, DryRun):
            return [mine] * self.world
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, mine, group=self.group)
        if self.replicas:
            everyone = [entry for row in self.replicas.objects(everyone) for entry in row]
        return everyone

    def take(self) -> dict[str, int]:
        """Return the payload bytes of each collective since the last call, and start again at 0."""
        counted, self.bytes = dict(self.bytes), Counter()
        return counted

    def _labeled(self, call: Collective, label: str) -> Collective:
        """Let a rank that runs another layer wait in vain, and so be named, not receive this one's.

        gloo takes a shorter message for the one it waits for, and ends the process at a longer.
        """
        if not label or call not in (direct_all_gather, direct_reduce_scatter):
            return call
        return partial(call, tag=zlib.crc32(f"{call.__name__} {label}".encode()) >> 1)

    def _start(
        self,
        name: str,
        payload: Tensor,
        call: Collective,
        *args: Any,
        label: str = "",
        **more: Any,
    ) -> Work:
        self.bytes[name] += payload.nbytes
        if isinstance(self.group, DryRun):
            return _DONE
        what = f"{name} of {payload.nbytes} bytes" + (f" of {label}" if label else "")
        try:
            work = call(*args, group=self.group, async_op=True, **more)
        except RuntimeError as error:
            raise explain(error, self.group, what) from error
        return _DONE if work is None else _Explained(work, self.group, what)


def wire_bytes(payload: dict[str, int], world: int) -> float:
    """Bytes that one rank sends, on average, for these payloads.

    (n-1)/n of the array for a reduce-scatter, an all-gather, a reduce, a broadcast or an
    all-to-all, twice that for an all-reduce: each element leaves n-1 of n ranks, once or twice.
    """
    rounds = {"all_reduce": 2}
    total = sum(size * rounds.get(name, 1) for name, size in payload.items())
    return total * (world - 1) / world


class _Explained:
    """Work whose failure names the ranks to blame."""

    def __init__(self, work: Work, group: dist.ProcessGroup | None, what: str) -> None:
        self.work, self.group, self.what = work, group, what

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise explain(error, self.group, self.what) from error


class _Then:
    """A sum over shards, and when that is there, over their copies."""

    def __init__(self, work: Work, replicas: Wire, tensor: Tensor) -> None:
        self.work, self.replicas, self.tensor = work, replicas, tensor

    def wait(self) -> None:
        self.work.wait()
        self.replicas.all_reduce(self.tensor).wait()


class _Finally:
    """Work with a last step of our own."""

    def __init__(self, work: Work, call: Callable[[], Any]) -> None:
        self.work, self.call = work, call

    def wait(self) -> None:
        self.work.wait()
        self.call()


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
