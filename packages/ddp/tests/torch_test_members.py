"""Private members of torch's DDP that only torch's own tests read, for `torch_oracle`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from ddp import DDP
from ddp.compat import ReducerFacade
from ddp.consistency.buffers import gather_participating_ranks
from ddp.consistency.model_agreement import BROADCAST_BYTES, broadcast_tensors
from ddp.reducer import Reducer
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch_logging_data import collect_logging_data

TORCH_SET_IGNORED = staticmethod(
    torch.nn.parallel.distributed.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
)


FILL = Reducer._fill
# A rank without inputs fills no bucket.
Reducer.unreported = ()
#: All sets of parameters that were missing in a step.
Reducer.patterns = frozenset()


def record_and_fill(reducer, bucket):
    """Record which parameters no hook reported in this step, before they are filled in."""
    if bucket is reducer.buckets[0]:
        reducer.unreported = []
    for slot, index in enumerate(bucket.indices):
        if slot not in bucket.ready:
            reducer.unreported.append(index)
    if bucket is reducer.buckets[-1]:
        reducer.patterns |= {tuple(reducer.unreported)}
    FILL(reducer, bucket)


Reducer._fill = record_and_fill


class TestedDDP(DDP):
    """`DDP` with the members that torch's tests read."""

    broadcast_bucket_size = BROADCAST_BYTES
    _builtin_hook_name = ""
    _has_joined = False
    _set_params_and_buffers_to_ignore_for_model = TORCH_SET_IGNORED

    @property
    def reducer(self):
        return TestedReducer(self._replica)

    @property
    def parameters_to_ignore(self):
        return self._ignored

    @property
    def bucket_bytes_cap(self):
        return int(self._options.bucket_bytes[-1])

    @property
    def bucket_bytes_cap_list(self):
        sizes = self._options.bucket_bytes
        return [int(size) for size in sizes] if len(sizes) > 1 else []

    def join_hook(self, **arguments):
        self._has_joined = True
        hook = super().join_hook(**arguments)
        synchronize = hook.post_hook

        def post_hook(is_last_joiner):
            candidates = gather_participating_ranks(self._replica, is_participating=is_last_joiner)
            self._authoritative_rank = candidates[-1]
            synchronize(is_last_joiner)

        hook.post_hook = post_hook
        return hook

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate):
        if sample_rate < 1:
            raise ValueError(f"expected a sample rate >= 1, got {sample_rate}")

    def _get_ddp_logging_data(self):
        data = collect_logging_data(self._replica, self.meter)
        data["join_uneven_inputs"] = self._has_joined
        if self._builtin_hook_name:
            data["comm_hook"] = self._builtin_hook_name
        return data

    def _register_builtin_comm_hook(self, comm_hook_type):
        is_fp16 = comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS
        hook = default_hooks.fp16_compress_hook if is_fp16 else default_hooks.allreduce_hook
        self.register_comm_hook(self.process_group, hook)
        self._builtin_hook_name = str(comm_hook_type)

    def _set_static_graph(self):
        if self._replica.reducer.num_steps:
            raise RuntimeError("_set_static_graph() should be called before training loop starts")
        self._options = replace(self._options, static_graph=True)
        self._replica.options = self._options
        self._replica.hooks.remove()
        self._replica.reducer = self._replica._make_reducer()

    def _remove_autograd_hooks(self):
        self._replica.hooks.remove()

    def _set_ddp_sink_clone(self, val):
        pass  # outputs are never cloned

    def _check_reducer_finalized(self):
        if self._replica.reducer.is_open:
            raise RuntimeError("Expected to have finished reduction: a backward pass is running")

    def _build_params_for_reducer(self):
        tracked = self._replica.tracked
        return list(tracked.trained.values()), [name in tracked.sparse for name in tracked.trained]

    def _build_debug_param_to_name_mapping(self, parameters):
        indices = {id(parameter): index for index, parameter in enumerate(parameters)}
        trained = self._replica.tracked.trained
        for name, parameter in trained.items():
            if id(parameter) not in indices:
                raise ValueError(f"Param with name {name} is averaged, but was not passed")
        if len(indices) != len(trained):
            raise ValueError(
                f"Expected param to name mapping to cover all parameters: got {len(indices)}, "
                f"but {len(trained)} are averaged"
            )
        return {indices[id(parameter)]: name for name, parameter in trained.items()}

    def _default_broadcast_coalesced(self, bufs=None, bucket_size=None, authoritative_rank=0):
        if bufs is None:
            bufs = list(self._replica.tracked.collect_buffers().values())
        broadcast_tensors(
            bufs,
            self.process_group,
            self._replica.failures,
            "the broadcast of a test",
            source=authoritative_rank,
        )


@dataclass(frozen=True)
class TestedReducer(ReducerFacade):
    """The reducer with the members that torch's tests read."""

    def _get_local_used_map(self):
        replica = self._replica
        missing = {replica.reducer.names[index] for index in replica.reducer.unreported}
        used = torch.tensor([int(name not in missing) for name in replica.tracked.trained])
        used = used.to(replica.device, torch.int32)
        dist.all_reduce(used, group=replica.group.process_group)
        return used

    def _ddp_graph_static(self):
        return len(self._replica.reducer.patterns) < 2
