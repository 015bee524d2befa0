"""Data parallelism: every rank holds the model, and gradients are averaged while they are made.

Notable:
- a hook on each parameter runs when its gradient is final; the bucket that it completes is sent at
  once and travels while autograd computes the layers below;
- the backward pass itself waits, at its end, for what is still under way: a training loop that
  knows only `loss.backward()` and `optimizer.step()` is right as it is;
- buckets follow the order of the backward pass: in the first step a guess (parameters reversed),
  from the second on the order in which gradients became ready on rank 0;
- the mean of a mean is itself, so that a second loss, or a pass after one that was synchronized,
  adds to `.grad` and is averaged together with what lies there;
- a gradient is scaled into its bucket in one pass, and `.grad` is that place from then on;
- buckets carry flags, so that ranks which disagree find out at no cost (see `bucket`).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.utils._pytree import tree_map_only

from ddp.average import Average
from ddp.bucket import Allocate
from ddp.collective import AllReduce
from ddp.compression.comm_hook import CommHook, Hook, check_hook
from ddp.compression.mixed_precision import MixedPrecision, call, cast_buffers
from ddp.compression.ways import Compression, Uncompressed
from ddp.consistency.join import Shadow
from ddp.exchange import MOST_EXACT_RANKS
from ddp.metering.meter import Meter
from ddp.options import Options, check_module, device_of, group_of, refuse, size_of
from ddp.replica import Replica
from ddp.torch_members import TorchMembers, nodes

# What belongs to the ranks of one run, and is made anew for a copy.
_OF_THIS_RUN = ("_replica", "meter")


class DDP(TorchMembers, nn.Module, Joinable):
    """Wrap `module`; after `backward()` gradients are means over the ranks.

        model = DDP(module)
        loss(model(batch)).backward()
        optimizer.step()

    Construction gives every rank the weights and buffers of rank 0; after each step the buffers
    are rank 0's again. Parameters that are unfrozen, replaced or added later are averaged from the
    next forward pass on.

    - `bucket_size_mb`: in 2**20 bytes; None sends each parameter by itself as it becomes ready. At
      25 the first of several takes 1 at most, so that the link has work early.
    - `group`, or torch's `process_group` or `device_mesh`: the ranks; all, if none is given.
    - `all_reduce`: called like `torch.distributed.all_reduce`, which is the default.
    - `allocate`: `allocate(numel, dtype=..., group=...)` makes the memory of each bucket.
    - `gradient_dtype`: what travels, for example bfloat16; sums are made in the gradients' dtype.
    - `compression`: any other way to sum, such as `PowerSGD(rank)`.
    - `average`: "ranks" for the mean over the ranks, "sum", or a function that says what a backward
      pass counts for, such as its number of tokens: then gradients are means by that weight.
    - `find_unused_parameters`: count a gradient that some ranks lack as zero; otherwise an error.
    - `check_nan`: look at each bucket before it is sent.
    - `static_graph`: every step computes the same, so that a gradient may be made in several parts
      (reentrant checkpoints of a shared layer): the first step counts them.
    - `gradient_as_bucket_view=False`: `.grad` is memory of its own, a second set of gradients.
    - `mixed_precision`: torch's `_MixedPrecision`: forward and backward passes in `param_dtype`,
      sums in `reduce_dtype`, over weights and gradients that keep theirs.
    - the other arguments of torch's DDP have its names and meaning; those without a meaning here
      are refused by name.

    Raises ValueError on every rank if modules or options differ across ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float | Sequence[Any] | None = 25.0,
        *,
        group: dist.ProcessGroup | None = None,
        all_reduce: AllReduce | None = None,
        allocate: Allocate | None = None,
        gradient_dtype: torch.dtype | None = None,
        compression: Compression | None = None,
        average: Average = "ranks",
        find_unused_parameters: bool = False,
        check_nan: bool = False,
        broadcast_buffers: bool | None = None,
        forward_sync_buffers: bool | None = None,
        init_sync: bool = True,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        mixed_precision: MixedPrecision | None = None,
        process_group: dist.ProcessGroup | None = None,
        device_mesh: Any = None,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        bucket_cap_mb: float | None = None,
        bucket_cap_mb_list: Sequence[float] | None = None,
        **others_of_torch: Any,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        refuse(others_of_torch)
        if isinstance(bucket_size_mb, Sequence):
            # torch's second positional argument is device_ids.
            device_ids, bucket_size_mb = bucket_size_mb, 25.0
        if broadcast_buffers is not None:
            warnings.warn(
                "broadcast_buffers is called forward_sync_buffers from torch 2.13 on: pass that",
                FutureWarning,
                stacklevel=2,
            )
        synced = (forward_sync_buffers, broadcast_buffers, True)
        self._ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        check_module(module, self._ignored)
        self._options = Options(
            bucket_size_mb=size_of(bucket_size_mb, bucket_cap_mb, bucket_cap_mb_list),
            all_reduce=all_reduce,
            allocate=allocate,
            gradient_dtype=gradient_dtype,
            compression=compression,
            average=average,
            find_unused_parameters=find_unused_parameters,
            check_nan=check_nan,
            broadcast_buffers=next(given for given in synced if given is not None),
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            mixed_precision=mixed_precision,
            device=device_of(device_ids, output_device, module),
        )
        if mixed_precision is not None:
            cast_buffers(module, mixed_precision, self._ignored)
        self.module = module
        self.mixed_precision = mixed_precision
        self.require_backward_grad_sync = True
        self.device_mesh = device_mesh
        self._group = group_of(group, process_group, device_mesh)
        self._comm_hook: CommHook | None = None
        self._start()
        # As in torch: only the older of the two names leaves buffers alone from the start.
        alone = broadcast_buffers is False and forward_sync_buffers is None
        given = "weights" if alone else "weights and buffers"
        self._replica.connect(same_model=init_sync, give=given if init_sync else "")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if self._options.device is not None:
            args, kwargs = _moved((args, kwargs), self._options.device)
        if not torch.is_grad_enabled():
            return call(self.module, self.mixed_precision, self._ignored, args, kwargs)
        self._replica.look()
        self._call_buffer_hook(before_forward=True)
        with self.meter.forward():
            output = call(self.module, self.mixed_precision, self._ignored, args, kwargs)
        self._call_buffer_hook(before_forward=False)
        if self.require_backward_grad_sync or self._options.average != "ranks":
            for node in nodes(output):
                node.register_prehook(self._replica.queue_finish)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on this rank: backward passes in here send nothing.

        If the block raises, its gradients are incomplete: the other ranks are told, and this model
        refuses to go on.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        except BaseException as error:
            if self._replica.connected:
                self._replica.blame.fail(f"no_sync() was left by {type(error).__name__}: {error}")
            raise
        finally:
            self.require_backward_grad_sync = before

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Wait until every `.grad` is the mean over the ranks; `backward()` has done so already.

        Only where no backward pass was synchronized since the last call is there something left:
        gradients that `no_sync` passes made are sent here, and a rank without any gradient takes
        part in the others' step. Raises what `backward()` would.
        """
        replica = self._replica
        replica.meet_late()
        replica.blame.check()
        if not replica.synchronized and replica.left_to is None:
            replica.begin()
            replica.finish()
        replica.synchronized = False

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Let `hook(state, bucket)` sum the buckets; call it once, before a backward pass."""
        check_hook(hook)
        if not isinstance(self._options.way_to_send, Uncompressed) or self._options.all_reduce:
            raise ValueError("gradient_dtype, compression, all_reduce or a hook: pass one of them")
        if self._options.average != "ranks":
            raise ValueError("a communication hook averages by itself; leave average out")
        if self._comm_hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        self._comm_hook = CommHook(state, hook)
        self._replica.use(self._comm_hook)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context in which ranks may take different numbers of steps.

        A rank that leaves it early takes part in their steps with zeros until the last one is done,
        and gets that one's weights. With `divide_by_initial_world_size=False` the mean is over the
        ranks that still have inputs. Names and meaning are those of torch's DDP.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, *, divide_by_initial_world_size: bool = True, **_: Any) -> JoinHook:
        """For `torch.distributed.algorithms.Join`."""
        replica = self._replica
        replica.has_joined = True
        replica.meet_late()
        replica.look()
        world = replica.link.world
        if not divide_by_initial_world_size and world > MOST_EXACT_RANKS:
            raise ValueError(
                f"counting the ranks that take part is exact up to {MOST_EXACT_RANKS} ranks, not "
                f"{world}; pass divide_by_initial_world_size=True"
            )
        by_initial = divide_by_initial_world_size or self._options.average != "ranks"
        replica.exchange.divide_by_initial_world_size = by_initial
        return Shadow(self, replica)

    @property
    def join_device(self) -> torch.device:
        """For `torch.distributed.algorithms.Join`."""
        return self._replica.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """For `torch.distributed.algorithms.Join`."""
        return self._replica.link.group

    # ----- copies -----

    def _start(self) -> None:
        """What a DDP is without its peers."""
        self.meter = Meter()
        self._replica = Replica(self, self.module, self._options, self._ignored, self._group)
        if self._comm_hook is not None:
            self._replica.use(self._comm_hook)

    def __getstate__(self) -> dict[str, Any]:
        if self._group is not None:
            raise RuntimeError(
                "a DDP over a process group of its own cannot be pickled; save its .module, or its "
                "state_dict()"
            )
        return {key: value for key, value in self.__dict__.items() if key not in _OF_THIS_RUN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._start()
        self._replica.wait_for_gradients()

    def __deepcopy__(self, memo: dict[int, Any]) -> DDP:
        # A group cannot be copied, nor need it be: the copy is averaged over the same ranks.
        made = self.__new__(type(self))
        memo[id(self)] = made
        shared = {name: getattr(self, name) for name in ("_group", "_options", "_comm_hook")}
        state = {k: v for k, v in self.__dict__.items() if k not in (*_OF_THIS_RUN, *shared)}
        made.__setstate__(copy.deepcopy(state, memo) | shared)
        return made


def _moved(inputs: Any, device: torch.device) -> Any:
    """Nested inputs on `device`."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs)


# So that `isinstance(model, torch.nn.parallel.DistributedDataParallel)` says what checkpoints and
# trainers want to know: there is a `.module` to unwrap.
nn.parallel.DistributedDataParallel.register(DDP)
