"""Replaceable collectives of one process group, with a count of their payload bytes.

The caller may pass functions with torch.distributed's signatures for reduce-scatter, all-gather and
all-reduce. Their defaults on gloo are the functions of `zero.gloo_collectives`. If a collective
fails, the error names the unresponsive ranks or, if all ranks respond, their different calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zero.diagnostics import explain
from zero.gloo_collectives import (
    Work,
    compute_tag,
    direct_all_gather,
    direct_all_reduce,
    direct_reduce_scatter,
)

Collective = Callable[..., Any]


@dataclass(frozen=True)
class DryRun:
    """A simulated process group of `world` ranks, whose collectives count bytes and send nothing.

    With tensors on the meta device, a training step then needs neither memory nor other ranks.
    """

    world: int
    rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"expected 0 <= rank < world, got rank {self.rank} of {self.world}")


Group = dist.ProcessGroup | DryRun | DeviceMesh | None


#: Dtypes that gloo and NCCL send and sum. All-gathers and broadcasts send other dtypes as bytes.
NATIVE_DTYPES = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool,
}  # fmt: skip


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a uint8 view of a contiguous tensor, for collectives that only move data."""
    return tensor.reshape(-1).view(torch.uint8)


def check_separate_elements(description: str, tensor: Tensor) -> None:
    """Raise ValueError for an expanded tensor, because in-place writes to its elements fail.

    Elements of a dimension with stride 0 share memory. Tensors on the meta device are accepted.
    """
    is_expanded = any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    # A tensor on the meta device gets separate elements when memory is allocated for it.
    if is_expanded and tensor.numel() and not tensor.is_meta:
        raise ValueError(
            f"expected separate memory for each element of {description}, got shape "
            f"{tuple(tensor.shape)} with strides {tensor.stride()}, as expand() makes it: "
            "register the result of contiguous()"
        )


class Communicator:
    """The collectives of one group, with a count of the payload bytes of each collective.

    `bytes[name]` counts the full array of each call since the last `pop_bytes()`, as nccl-tests
    does: the input of a reduce-scatter, the output of an all-gather, the tensor of any other
    collective. `gather_objects` is not counted. Methods that start a collective return its handle.
    The default reduce-scatter and all-gather on gloo match only calls with equal labels.
    """

    def __init__(
        self,
        group: Group = None,
        *,
        reduce_scatter_tensor: Collective | None = None,
        all_gather_into_tensor: Collective | None = None,
        all_reduce: Collective | None = None,
    ) -> None:
        #: True within `Join`, where some ranks may have no inputs left.
        self.is_joining = False
        self._mesh = group if isinstance(group, DeviceMesh) else None
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(
                    f"expected a one-dimensional device mesh, got {group.ndim} dimensions: pass "
                    "the submesh over which tensors are sharded, such as mesh['dp_shard']"
                )
            group = group.get_group()
        self.group = group
        # The default group may be destroyed and created again while this communicator is alive.
        self._process_group: Any = group or dist.group.WORLD
        self.bytes: Counter[str] = Counter()
        self.device = torch.device("cpu")
        self._reduce_scatter = reduce_scatter_tensor or dist.reduce_scatter_tensor
        self._all_gather = all_gather_into_tensor or dist.all_gather_into_tensor
        self._all_reduce = all_reduce or dist.all_reduce
        #: True if the output of a reduce-scatter may be a part of its input.
        self.sums_in_place = False
        if isinstance(group, DryRun):
            self.rank = group.rank
            self.world = group.world
            self.device = torch.device("meta")
            self.sums_in_place = True
            return
        if not dist.is_initialized():
            raise RuntimeError(
                "expected an initialized process group: call torch.distributed.init_process_group "
                "first (torchrun sets its environment variables; a single rank suffices)"
            )
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(
                f"expected a group that contains this rank, got a group without global rank "
                f"{dist.get_rank()}: pass this rank's group"
            )
        # `get_backend` may return another name although all devices use gloo, for example with the
        # backend "cpu:gloo", or with the default backend on a machine without a GPU.
        config = dist.get_backend_config(group)
        if all(device.endswith(":gloo") for device in config.split(",")):
            self._reduce_scatter = reduce_scatter_tensor or direct_reduce_scatter
            self._all_gather = all_gather_into_tensor or direct_all_gather
            self._all_reduce = all_reduce or direct_all_reduce
        if dist.get_backend(group) == "nccl":
            self.device = torch.device("cuda")
        self.sums_in_place = self._reduce_scatter is direct_reduce_scatter

    def check_not_joining(self) -> None:
        """Raise RuntimeError within `Join`: ranks without inputs would not call the collective."""
        if self.is_joining:
            raise RuntimeError(
                "within Join, ranks without inputs do not take part in reductions and changes of "
                "single gradients: clip with ShardedOptimizer.clip_grad_norm_, and use no other "
                "norms, sums, loss scalers or edits"
            )

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks as a one-dimensional mesh, over which DTensors are sharded."""
        if self._mesh is None:
            assert not isinstance(self.group, DryRun)
            self._mesh = DeviceMesh.from_group(self._process_group, self.device.type)
        return self._mesh

    def divide_before_sum(self, gradients: Tensor) -> None:
        """Divide float16 gradients, in place, so that their sum over ranks does not overflow.

        The divisor is a power of two, so only quotients that are subnormal are rounded.
        """
        if gradients.dtype == torch.float16:
            gradients /= self._float16_divisor

    def divide_after_sum(self, total: Tensor, sent_dtype: torch.dtype) -> None:
        """Divide a sum of gradients, sent in `sent_dtype`, in place to obtain the average."""
        divisor: float = self.world
        if sent_dtype == torch.float16:
            divisor /= self._float16_divisor
        total /= divisor

    @property
    def _float16_divisor(self) -> int:
        """The smallest power of two that is at least the number of ranks."""
        return 1 << (self.world - 1).bit_length()

    def uses_same_group(self, other: Communicator) -> bool:
        """Return True if both communicators use the same process-group object."""
        return self._process_group is other._process_group

    def reduce_scatter(self, output: Tensor, input: Tensor, label: str = "") -> Work:
        """Start `output = sum over ranks of input[block of this rank]`."""
        if isinstance(self.group, DryRun):
            self.bytes["reduce_scatter"] += input.nbytes
            return DryReduceScatter(input, self.world)
        call = _add_tag(self._reduce_scatter, label)
        return self._start("reduce_scatter", input, call, output, input, label=label)

    def all_gather(self, output: Tensor, input: Tensor, label: str = "") -> Work:
        """Start `output = concatenation of every rank's input`, in rank order."""
        call = _add_tag(self._all_gather, label)
        if output.dtype not in NATIVE_DTYPES:
            output = as_bytes(output)
            input = as_bytes(input)
        return self._start("all_gather", output, call, output, input, label=label)

    def all_reduce(self, tensor: Tensor) -> Work:
        """Start the sum of `tensor` over the ranks of the group, in place."""
        return self._start("all_reduce", tensor, self._all_reduce, tensor)

    def reduce(self, tensor: Tensor, owner: int) -> Work:
        """Start summing `tensor` for group rank `owner`; any rank's tensor may change."""
        return self._start("reduce", tensor, dist.reduce, tensor, group_dst=owner)

    def broadcast(self, tensor: Tensor, owner: int) -> Work:
        """Start copying the contiguous `tensor` of group rank `owner` to all other ranks."""
        payload = tensor if tensor.dtype in NATIVE_DTYPES else as_bytes(tensor)
        return self._start("broadcast", payload, dist.broadcast, payload, group_src=owner)

    @torch.no_grad()
    def broadcast_buffers(self, module: nn.Module, source: int = 0) -> None:
        """Copy group rank `source`'s buffers to all ranks, one broadcast per dtype and device."""
        buffers_of: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for name, buffer in module.named_buffers():
            check_separate_elements(f"buffer {name}", buffer)
            if buffer.numel():
                buffers_of.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        for buffers in buffers_of.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            self.broadcast(flat, source).wait()
            parts = flat.split([buffer.numel() for buffer in buffers])
            # As in torch's DDP, a graph stays valid if it has saved a buffer, as batch norms do.
            with torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer.copy_(part.view(buffer.shape))

    def launch_flag_reduction(self, *flag_lists: Sequence[bool]) -> Callable[[], list[list[bool]]]:
        """Launch an OR-reduction of the flags over the ranks.

        Return a function that waits for the result and returns one list of flags per argument.
        """
        flags = [flag for flag_list in flag_lists for flag in flag_list]
        if isinstance(self.group, DryRun):
            self.bytes["all_reduce"] += 4 * len(flags)
            return lambda: [list(flag_list) for flag_list in flag_lists]
        counts = torch.tensor(flags, dtype=torch.int32, device=self.device)
        work = self.all_reduce(counts)

        def wait() -> list[list[bool]]:
            work.wait()
            lists = counts.gt(0).split([len(flag_list) for flag_list in flag_lists])
            return [part.tolist() for part in lists]

        return wait

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's `value` in rank order; every rank must call this method."""
        if isinstance(self.group, DryRun):
            return [value] * self.world
        values: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(values, value, group=self.group)
        except RuntimeError as error:
            raise explain(error, self.group, "all_gather_object") from error
        return values

    def pop_bytes(self) -> dict[str, int]:
        """Return the payload bytes of each collective since the last call, and reset the counts."""
        counted = dict(self.bytes)
        self.bytes = Counter()
        return counted

    def _start(
        self,
        name: str,
        payload: Tensor,
        call: Collective,
        *args: Any,
        label: str = "",
        **options: Any,
    ) -> Work:
        self.bytes[name] += payload.nbytes
        if isinstance(self.group, DryRun):
            return FINISHED
        description = f"{name} of {payload.nbytes} bytes" + (f" of {label}" if label else "")
        try:
            work = call(*args, group=self.group, async_op=True, **options)
        except RuntimeError as error:
            raise explain(error, self.group, description) from error
        return FINISHED if work is None else ExplainedWork(work, self.group, description)


class ExplainedWork:
    """The handle of a collective that names the ranks or calls at fault if the collective fails."""

    def __init__(self, work: Work, group: dist.ProcessGroup | None, description: str) -> None:
        self.work = work
        self.group = group
        self.description = description

    def wait(self) -> None:
        """Wait; if the work fails, raise the RuntimeError that `explain` returns."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise explain(error, self.group, self.description) from error


class DryReduceScatter:
    """A simulated reduce-scatter that allocates as much memory as `direct_reduce_scatter`."""

    def __init__(self, input: Tensor, world: int) -> None:
        self.received = input.new_empty(input.numel() // world * (world - 1))

    def wait(self) -> None:
        """Free the memory."""
        del self.received


class _FinishedWork:
    def wait(self) -> None:
        """Return immediately, because the collective has finished."""


FINISHED = _FinishedWork()


def wire_bytes(payload: dict[str, int], world: int) -> float:
    """Return the bytes that one rank sends, on average, for the payloads of `pop_bytes()`.

    Each element of a reduce-scatter, an all-gather, a reduce or a broadcast is sent n-1 times in
    total. Each of n ranks therefore sends (n-1)/n of the array on average. Every all-reduce is
    counted as a ring, which sends twice as much.
    """
    return (sum(payload.values()) + payload.get("all_reduce", 0)) * (world - 1) / world


def _add_tag(call: Collective, label: str) -> Collective:
    """Return a collective with a tag that its label determines.

    If ranks run different layers, their calls then time out instead of exchanging data. Without
    tags, gloo accepts a message that is shorter than expected, and aborts the process if it is
    longer. Return `call` unchanged if it is not a direct collective, or if `label` is empty.
    """
    if not label or call not in (direct_all_gather, direct_reduce_scatter):
        return call
    return partial(call, tag=compute_tag(f"{call.__name__} {label}"))
