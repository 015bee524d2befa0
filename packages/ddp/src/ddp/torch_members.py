"""Members of torch's DDP beside its methods, which trainers, profilers and pipelines read.

They are private there, and yet called by others: Lightning prepares `reducer` by hand, torch's
pipelines too, fleets collect `_get_ddp_logging_data`, models sum their counters in a buffer hook.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.compression.comm_hook import Hook
from ddp.consistency.agreement import BROADCAST_BYTES, broadcast_tensors
from ddp.metering.records import StepRecord
from ddp.options import Options
from ddp.replica import Replica

_DTYPES = {torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half"}
_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
_OF_GLOO = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")


@dataclass
class BufferHook:
    """Called as hook(state, buffers by name) in each forward pass, in the place of a broadcast."""

    state: Any
    hook: Callable[[Any, dict[str, Tensor]], Any]
    before_forward: bool


class TorchMembers:
    """What torch's DDP has besides, with its names and meaning."""

    module: nn.Module
    require_backward_grad_sync: bool
    register_comm_hook: Callable[[object, Hook], None]
    _replica: Replica
    _options: Options
    _ignored: set[str]
    _buffer_hook: BufferHook | None = None
    _sample_rate = 1
    _builtin_hook = ""

    broadcast_bucket_size = BROADCAST_BYTES
    dim = 0
    is_multi_device_module = False
    require_forward_param_sync = True

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks to average over."""
        return self._replica.link.group

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether buffers are kept equal; `broadcast_buffers` is its older name."""
        return self._options.broadcast_buffers

    broadcast_buffers = forward_sync_buffers

    @property
    def static_graph(self) -> bool:
        """Whether every step computes the same."""
        return self._options.static_graph

    @property
    def find_unused_parameters(self) -> bool:
        """Whether a gradient that some ranks lack counts as zero."""
        return self._options.find_unused_parameters

    @property
    def gradient_as_bucket_view(self) -> bool:
        """Whether `.grad` lies in a bucket."""
        return self._options.gradient_as_bucket_view

    @property
    def parameters_to_ignore(self) -> set[str]:
        """Parameters and buffers that are left to the caller."""
        return self._ignored

    @property
    def bucket_bytes_cap(self) -> int:
        """The size of the buckets; of several, the last."""
        return int(self._options.bucket_bytes[-1])

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """The sizes of the buckets, where they differ."""
        sizes = self._options.bucket_size_mb
        return [int(size * 2**20) for size in sizes] if isinstance(sizes, tuple) else []

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._replica.device

    @property
    def device_ids(self) -> list[int] | None:
        """The one GPU that inputs are moved to, if any."""
        device = self._options.device
        return None if device is None else [device.index]

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Leave these parameters and buffers to the caller."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]

    # ----- the graph -----

    @property
    def reducer(self) -> Reducer:
        """What others ask of torch's reducer."""
        return Reducer(self._replica)

    def _set_static_graph(self) -> None:
        """The older way to pass static_graph=True."""
        if self._replica.connected and self._replica.reducer.steps:
            raise RuntimeError(
                "_set_static_graph() should be called before training loop starts; or pass "
                "static_graph=True"
            )
        self._options = replace(self._options, static_graph=True)
        self._replica.change(self._options)

    def _remove_autograd_hooks(self) -> None:
        """Average nothing any more."""
        self._replica.remove_hooks()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Nothing to set: outputs are never cloned here."""

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        inventory = self._replica.inventory
        trained = inventory.trained
        return list(trained.values()), [name in inventory.sparse for name in trained]

    def _build_debug_param_to_name_mapping(
        self, parameters: Sequence[nn.Parameter]
    ) -> dict[int, str]:
        index = {id(parameter): number for number, parameter in enumerate(parameters)}
        named = self._replica.inventory.trained
        for name, parameter in named.items():
            if id(parameter) not in index:
                raise ValueError(f"Param with name {name} is averaged, but not in what was given")
        if len(index) != len(named):
            raise ValueError(
                f"Expected param to name mapping to cover all parameters: {len(index)} were given, "
                f"{len(named)} are averaged"
            )
        return {index[id(parameter)]: name for name, parameter in named.items()}

    # ----- hooks -----

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """`register_comm_hook` for one of torch's two by number."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        fp16 = comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS
        hook = default_hooks.fp16_compress_hook if fp16 else default_hooks.allreduce_hook
        self.register_comm_hook(self._replica.link.group, hook)
        self._builtin_hook = str(comm_hook_type)

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[..., Any], comm_hook_location: Any = None
    ) -> None:
        """Let `hook(state, buffers by name)` make buffers equal, in the place of a broadcast.

        It is called after each forward pass that gradients follow, or before (a location whose name
        is PRE_FORWARD); futures that it returns are waited for at the end of the backward pass.
        """
        if not callable(hook):
            raise TypeError(f"hook must be callable, got {type(hook).__name__}")
        before = getattr(comm_hook_location, "name", "") == "PRE_FORWARD"
        self._buffer_hook = BufferHook(state, hook, before)
        self._replica.buffers_by_hook = True

    def _call_buffer_hook(self, *, before_forward: bool) -> None:
        hook = self._buffer_hook
        if hook is None or hook.before_forward != before_forward:
            return
        if self._options.broadcast_buffers and self.require_backward_grad_sync:
            buffers = self._replica.inventory.named_buffers()
            with (
                torch.no_grad(),
                torch.autograd._unsafe_preserve_version_counter(tuple(buffers.values())),
            ):
                self._replica.futures += (hook.hook(hook.state, buffers) or []) if buffers else []

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Give every rank the buffers of one."""
        given = list(self._replica.inventory.named_buffers().values()) if bufs is None else bufs
        at_once = bucket_size or self.broadcast_bucket_size
        group = self._replica.link.group
        broadcast_tensors(given, group, authoritative_rank, at_once=at_once)

    # ----- the log -----

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """After ten steps, show the times of every `sample_rate`th only."""
        if sample_rate < 1:
            raise ValueError(f"the sample rate is {sample_rate}; it must be 1 or more")
        self._sample_rate = sample_rate

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """What is set and what was measured, by torch's names; times in nanoseconds."""
        replica, options = self._replica, self._options
        hook = self._builtin_hook or replica.comm_hook_name
        data: dict[str, Any] = {
            "module_name": type(self.module).__name__,
            "device_ids": ", ".join(map(str, self.device_ids or ())),
            "output_device": self.device_ids[0] if self.device_ids else -1,
            "broadcast_buffers": int(options.broadcast_buffers),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "find_unused_parameters": int(options.find_unused_parameters),
            "gradient_as_bucket_view": int(options.gradient_as_bucket_view),
            "static_graph": int(options.static_graph),
            # Whether that would be worth a warning: nothing is gained by it here.
            "can_set_static_graph": False,
            "is_multi_device_module": 0,
            "has_sync_bn": int(
                any(isinstance(one, nn.SyncBatchNorm) for one in self.module.modules())
            ),
            **({"comm_hook": hook} if hook else {}),
            **{name.lower(): os.environ.get(name, "N/A") for name in _ENVIRONMENT},
        }
        if replica.connected:
            data |= _of_the_group(replica) | _of_the_buckets(replica)
        if steps := replica.connected and replica.reducer.steps:
            late = (steps - 1) % self._sample_rate if steps > 10 else 0
            records = list(replica.exchange.meter.steps)
            data["iteration"] = steps - 1 - late
            data |= _times(records[max(-len(records), -1 - late)])
            for name in _DURATIONS:
                each = [_times(record)[name] for record in records]
                data[f"avg_{name}"] = sum(each) // len(each)
        return data


@dataclass(frozen=True)
class Reducer:
    """What Lightning and torch's pipelines ask of `ddp.reducer`, and what its tests look at."""

    _replica: Replica

    def _rebuild_buckets(self) -> bool:
        """Whether buckets were made anew; they follow the order of the first step by themselves."""
        return False

    def prepare_for_forward(self) -> None:
        """Nothing to prepare."""

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """A backward pass through `outputs` will be synchronized."""
        for node in nodes(outputs):
            node.register_prehook(self._replica.queue_finish)

    def _get_local_used_map(self) -> Tensor:
        """On how many ranks each parameter got a gradient in the last step. A collective."""
        replica = self._replica
        names = replica.reducer.layout.names
        absent = {names[index] for index in replica.reducer.absent}
        used = torch.tensor([int(name not in absent) for name in replica.inventory.trained])
        used = used.to(replica.device, torch.int32)
        dist.all_reduce(used, group=replica.link.group)
        return used

    def _ddp_graph_static(self) -> bool:
        """Whether every step so far used the same parameters."""
        return len(self._replica.patterns) < 2

    def _check_reducer_finalized(self) -> None:
        """Raise RuntimeError while gradients are under way."""
        if self._replica.reducer.open:
            raise RuntimeError("Expected to have finished reduction: a backward pass is under way")


def nodes(output: Any) -> set[Any]:
    """The nodes of autograd's graph that made the tensors in `output`."""
    if isinstance(output, Tensor):
        return {output.grad_fn} if output.grad_fn is not None else set()
    if isinstance(output, Mapping):
        return set().union(*map(nodes, output.values()))
    if isinstance(output, list | tuple):
        return set().union(*map(nodes, output))
    if is_dataclass(output):
        return set().union(*(nodes(getattr(output, field.name)) for field in fields(output)))
    return set()


def _of_the_group(replica: Replica) -> dict[str, Any]:
    link = replica.link
    data: dict[str, Any] = {
        "world_size": link.world,
        "rank": link.rank,
        "backend_name": dist.get_backend(link.group),
        "join_uneven_inputs": replica.has_joined,
    }
    if data["backend_name"] == "gloo":
        data |= {name.lower(): os.environ.get(name, "N/A") for name in _OF_GLOO}
    return data


def _of_the_buckets(replica: Replica) -> dict[str, Any]:
    trained, layout = list(replica.inventory.trained.values()), replica.reducer.layout
    kinds = {_DTYPES.get(p.dtype, str(p.dtype).removeprefix("torch.")) for p in trained}
    sizes = ", ".join(str(sum(bucket.bytes_of)) for bucket in layout.buckets)
    data = {
        "num_parameter_tensors": len(trained),
        "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in trained),
        "dtypes": ", ".join(sorted(kinds)),
        "bucket_sizes": sizes,
        "has_rebuilt_buckets": int(replica.reducer.steps > 1),
        "unused_parameter_size": sum(
            layout.parameters[index].nbytes
            for index, ranks in replica.exchange.lacking.items()
            if ranks == replica.link.world
        ),
    }
    if replica.reducer.steps > 1:
        data["rebuilt_bucket_sizes"] = sizes
        data["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, layout.order))
        runs = (" ".join(map(str, bucket.indices)) for bucket in layout.buckets)
        data["rebuilt_per_bucket_param_indices"] = ", ".join(runs)
    return data


_DURATIONS = (
    "forward_compute_time",
    "backward_compute_time",
    "backward_comm_time",
    "backward_compute_comm_overlap_time",
)


def _times(record: StepRecord) -> dict[str, int]:
    sent = min((bucket.sent for bucket in record.buckets), default=record.waiting[0])
    done = max((bucket.done for bucket in record.buckets), default=record.waiting[0])
    begin = min((begin for begin, _ in record.forwards), default=record.backward[0])
    seconds = {
        "forward_compute_time": sum(end - begin for begin, end in record.forwards),
        "backward_compute_time": record.backward[1] - record.backward[0],
        "backward_comm_time": done - sent,
        "backward_compute_comm_overlap_time": record.hidden_seconds,
        "forward_compute_time_start": begin,
        "backward_compute_time_start": record.backward[0],
        "backward_compute_time_end": record.backward[1],
        "backward_comm_time_start": sent,
        "backward_comm_time_end": done,
    }
    return {name: round(1e9 * value) for name, value in seconds.items()}
