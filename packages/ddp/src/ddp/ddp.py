"""Data parallelism: every rank holds the model, and gradients are averaged while they are made.

Notable:
- a hook on each parameter runs when its gradient is final; the bucket that it completes is sent at
  once and travels while autograd computes the layers below;
- the backward pass itself waits, at its end, for what is still under way: a training loop that
  knows only `loss.backward()` and `optimizer.step()` is right as it is;
- buckets follow the order of the backward pass: in the first step a guess (parameters reversed),
  from the second on the order in which gradients became ready on rank 0;
- the mean of a mean is itself, so that a second loss, or a pass after one that was synchronised,
  adds to `.grad` and is averaged together with what lies there;
- a gradient is scaled into its bucket in one pass, and `.grad` is that place from then on;
- buckets carry flags, so that ranks which disagree find out at no cost (see `bucket`).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.utils._pytree import tree_map_only

from ddp.average import Average, Weighing
from ddp.bucket import Allocate
from ddp.collective import AllReduce, Link, link
from ddp.compression.comm_hook import CommHook, Hook, check_hook
from ddp.compression.sparse import average_sparse
from ddp.compression.ways import Compression, Uncompressed
from ddp.consistency.agreement import (
    broadcast_state,
    broadcast_tensors,
    check_same,
    check_same_model,
    check_same_weights,
    describe,
)
from ddp.consistency.blame import Blame
from ddp.consistency.buffers import broadcast_buffers
from ddp.consistency.inventory import Inventory
from ddp.consistency.join import Shadow, common_rank
from ddp.exchange import MOST_EXACT_RANKS, Exchange
from ddp.metering.meter import Meter
from ddp.options import Options, check_module, device_of, group_of, refuse
from ddp.reducer import Reducer

# What belongs to the ranks of one run, and is made anew for a copy.
_OF_THIS_RUN = (
    "_link",
    "_blame",
    "_exchange",
    "_reducer",
    "_inventory",
    "_removal",
    "_weighing",
    "meter",
)


class DDP(nn.Module, Joinable):
    """Wrap `module`; after `backward()` gradients are means over the ranks.

        model = DDP(module)
        loss(model(batch)).backward()
        optimizer.step()

    Construction gives every rank the weights and buffers of rank 0; after each step the buffers
    are rank 0's again. Parameters that are unfrozen, replaced or added later are averaged from the
    next forward pass on.

    - `bucket_size_mb`: in 2**20 bytes; None sends each parameter by itself as it becomes ready.
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
    - the other arguments of torch's DDP have its names and meaning; those without a meaning here
      are refused by name.

    Raises ValueError on every rank if modules or options differ across ranks.
    """

    _link: Link
    _blame: Blame
    _inventory: Inventory
    _exchange: Exchange
    _reducer: Reducer
    _weighing: Weighing | None
    _finish_queued: bool
    _looked: bool
    _synchronised: bool

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
        process_group: dist.ProcessGroup | None = None,
        device_mesh: Any = None,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        bucket_cap_mb: float | None = None,
        **others_of_torch: Any,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        refuse(others_of_torch)
        if isinstance(bucket_size_mb, Sequence):
            # torch's second positional argument is device_ids.
            device_ids, bucket_size_mb = bucket_size_mb, 25.0
        synced = (forward_sync_buffers, broadcast_buffers, True)
        self._ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        check_module(module, self._ignored)
        self._options = Options(
            bucket_size_mb=bucket_size_mb if bucket_cap_mb is None else bucket_cap_mb,
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
            device=device_of(device_ids, output_device, module),
        )
        self.module = module
        self.require_backward_grad_sync = True
        self.device_mesh = device_mesh
        self._group = group_of(group, process_group, device_mesh)
        self._comm_hook: CommHook | None = None
        self._start()
        self._connect(same_model=init_sync)
        if init_sync:
            with self._blame.naming("the broadcast of the weights"):
                # As in torch: only the older of the two names leaves buffers alone from the start.
                alone = broadcast_buffers is False and forward_sync_buffers is None
                group = self._link.group
                broadcast_state(module, group, ignored=self._ignored, buffers=not alone)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if self._options.device is not None:
            args, kwargs = _moved((args, kwargs), self._options.device)
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self._look()
        with self.meter.forward():
            output = self.module(*args, **kwargs)
        if self.require_backward_grad_sync or self._weighing is not None:
            for node in _nodes(output):
                node.register_prehook(_queue_from_output(weakref.ref(self)))
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
            if self._reducer is not None:
                self._blame.fail(f"no_sync() was left by {type(error).__name__}: {error}")
            raise
        finally:
            self.require_backward_grad_sync = before

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Wait until every `.grad` is the mean over the ranks; `backward()` has done so already.

        Only where no backward pass was synchronised since the last call is there something left:
        gradients that `no_sync` passes made are sent here, and a rank without any gradient takes
        part in the others' step. Raises what `backward()` would.
        """
        if self._reducer is None:
            self._meet()
        self._blame.check()
        if not self._synchronised:
            self._begin()
            self._finish()
        self._synchronised = False

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Let `hook(state, bucket)` sum the buckets; call it once, before a backward pass."""
        check_hook(hook)
        if not isinstance(self._options.way_to_send, Uncompressed) or self._options.all_reduce:
            raise ValueError("gradient_dtype, compression, all_reduce or a hook: pass one of them")
        if self._weighing is not None:
            raise ValueError("a communication hook averages by itself; leave average out")
        if self._comm_hook is not None:
            raise RuntimeError("register_comm_hook can only be called once for a DDP")
        self._comm_hook = self._exchange.compression = CommHook(state, hook)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context in which ranks may take different numbers of steps.

        A rank that leaves it early keeps the others company with zeros until the last one is done,
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
        if self._reducer is None:
            self._meet()
        self._look()
        if not divide_by_initial_world_size and self._link.world > MOST_EXACT_RANKS:
            raise ValueError(
                f"counting the ranks that take part is exact up to {MOST_EXACT_RANKS} ranks, not "
                f"{self._link.world}; pass divide_by_initial_world_size=True"
            )
        by_initial = divide_by_initial_world_size or self._weighing is not None
        self._exchange.divide_by_initial_world_size = by_initial
        return Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """For `torch.distributed.algorithms.Join`."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """For `torch.distributed.algorithms.Join`."""
        return self._link.group

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks to average over."""
        return self._link.group

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

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, names: Iterable[str]
    ) -> None:
        """Leave these parameters and buffers to the caller, as torch's method of that name does."""
        module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]

    # ----- a step -----

    def _opens(self) -> bool:
        """Whether a gradient that arrives now is to be sent: then a step begins with it."""
        if self._weighing is not None:
            self._queue_finish()
        if not self.require_backward_grad_sync:
            # While a join is on, ranks agree at the start of a step that is sent, and only there.
            if not self._join_config.enable:
                self._reducer.follow_order()
            return False
        self._begin()
        self._queue_finish()
        return True

    def _begin(self) -> None:
        self._blame.check()
        looked, self._looked = self._looked, False
        if not looked and self._inventory.changed():
            reason = "parameters changed since the last forward pass of the wrapper"
            self._blame.fail(reason)
            raise RuntimeError(f"{reason}: call the wrapper, not its .module, to train")
        if self._join_config.enable:
            Join.notify_join_context(self)
        self._open()

    def _open(self, *, taking_part: bool = True) -> None:
        share = None
        if self._weighing is not None:
            device = self.join_device
            share = self._weighing.begin(self._blame, device, taking_part=taking_part)
        self._reducer.begin(share)

    def _queue_finish(self) -> None:
        """Have autograd call `_backward_ended` at the end of the pass that runs now."""
        if not self._finish_queued:
            self._finish_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        self._finish_queued = False
        if self._weighing is not None:
            self._weighing.pass_ended()
        if self._reducer is not None and self._reducer.open:
            self._finish()
            self._synchronised = True

    @torch.no_grad()
    def _finish(self, *, taking_part: bool = True) -> None:
        share, sparse = self._reducer.share, self._inventory.sparse
        self._reducer.finish(taking_part=taking_part)
        weighing = self._weighing
        if weighing is not None:
            for parameter in sparse.values():
                weighing.make_room(parameter)
        average_sparse(sparse, self._link, self._blame, share if taking_part else 0.0)
        if weighing is not None:
            weighing.end([*self._reducer.parameters, *sparse.values()])
        if not self._options.broadcast_buffers:
            return
        if buffers := self._inventory.buffers():
            joining = self._join_config.enable
            source = common_rank(self, candidate=taking_part) if joining else 0
            broadcast_buffers(buffers, self._link, self._blame, source)

    # ----- parameters that come and go -----

    def _look(self) -> None:
        """Before a forward pass: is the last step over, are the parameters still the same?"""
        if self._reducer is None:
            return
        self._blame.check()
        if self._reducer.superseded:
            raise RuntimeError(
                "parameters of this DDP's module were wrapped again: one wrapper averages them, "
                "the newer one; use that, and do not wrap modules within wrapped modules"
            )
        if self._reducer.open and torch._C._current_graph_task_id() == -1:
            reason = "the last backward pass ended in an error before its gradients were averaged"
            self._blame.fail(reason)
            raise RuntimeError(f"rank {self._link.rank}: {reason}; this step cannot be mended")
        if self._inventory.changed():
            self._adopt_changes()
        self._looked = True

    def _adopt_changes(self) -> None:
        if self._join_config.enable:
            raise RuntimeError("parameters changed inside join(); change them outside of it")
        known = [*self._inventory.dense.values(), *self._inventory.sparse.values()]
        self._reducer.release()
        self._inventory.take()
        why = "parameters were unfrozen, replaced or added"
        everyone = self._blame.meet(why, describe(self.module, self._ignored))
        check_same(everyone)
        added = [p for p in self.module.parameters() if not any(p is one for one in known)]
        with self._blame.naming("the broadcast of new weights"):
            broadcast_tensors(added, self._link.group)
        self._make_reducer()

    # ----- making and copying -----

    def _start(self) -> None:
        """What a DDP is without its peers."""
        self.meter = Meter()
        self._weighing = None
        self._reducer = None  # type: ignore[assignment]
        self._finish_queued = False
        # Whether a forward pass looked at the parameters since the last step.
        self._looked = False
        # Whether a backward pass was synchronised since finish_gradient_synchronization().
        self._synchronised = False

    def _connect(self, *, same_model: bool) -> None:
        """Meet the other ranks."""
        self._link = link(self._group, self._options.all_reduce)
        self._blame = Blame(self._link.group)
        if same_model:
            with self._blame.naming("the comparison of the models"):
                settings = self._options.to_agree_on
                check_same_model(self.module, settings, self._link.group, self._ignored)
        self._inventory = Inventory(self.module, self._ignored)
        self._make_reducer()

    def _make_reducer(self) -> None:
        if self._reducer is None:
            self._exchange = Exchange(
                link=self._link,
                blame=self._blame,
                meter=self.meter,
                compression=self._comm_hook or self._options.way_to_send,
                find_unused_parameters=self._options.find_unused_parameters,
                check_nan=self._options.check_nan,
            )
        else:
            self._removal()
        ours, dense = weakref.ref(self), self._inventory.dense

        def opens() -> bool:
            return _still(ours)._opens()

        if self._options.average != "ranks":
            self._weighing = Weighing(self._options.average, self._link, opens)
        self._reducer = Reducer(
            list(dense),
            list(dense.values()),
            exchange=self._exchange,
            opens=opens,
            make_room=self._weighing.make_room if self._weighing is not None else None,
            bucket_bytes=self._options.bucket_bytes,
            allocate=self._options.allocate,
            static_graph=self._options.static_graph,
            as_view=self._options.gradient_as_bucket_view,
        )
        arrive = self._reducer.arrive
        hooks: list[tuple[nn.Parameter, Callable[[Tensor], None]]]
        hooks = [(p, partial(arrive, index)) for index, p in enumerate(dense.values())]
        hooks += [(p, self._reducer.arrive_sparse) for p in self._inventory.sparse.values()]
        self._hook(hooks)

    def _hook(self, hooks: Iterable[tuple[nn.Parameter, Callable[[Tensor], None]]]) -> None:
        handles = []
        for parameter, hook in hooks:
            if self._reducer is not None:
                self._reducer.supersede(parameter)
            handles.append(parameter.register_post_accumulate_grad_hook(hook))
            if self._weighing is not None:
                handles.append(parameter.register_hook(self._weighing.hook(parameter)))
        # A module that outlives its wrapper, and is maybe wrapped again, sends nothing for it.
        self._removal = weakref.finalize(self, _remove, handles)

    def _meet(self) -> None:
        """A copy's first collective; until then it only waits for gradients, which it stops now."""
        self._removal()
        self._connect(same_model=True)
        check_same_weights(self.module, self._link.group)

    def _late(self, parameter: Tensor) -> None:
        """The first gradient of a copy: only now do its ranks meet."""
        self._meet()
        if self._weighing is not None and parameter.grad is not None:
            # What should have gone before its accumulation.
            weighted = self._weighing.hook(cast(nn.Parameter, parameter))(parameter.grad)
            parameter.grad = parameter.grad if weighted is None else weighted
        for index, one in enumerate(self._reducer.parameters):
            if one is parameter:
                self._reducer.arrive(index, parameter)

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
        ours = weakref.ref(self)
        trained = [p for p in self.module.parameters() if p.requires_grad]
        self._hook((p, lambda one: _still(ours)._late(one)) for p in trained)

    def __deepcopy__(self, memo: dict[int, Any]) -> DDP:
        # A group cannot be copied, nor need it be: the copy is averaged over the same ranks.
        made = self.__new__(type(self))
        memo[id(self)] = made
        shared = {name: getattr(self, name) for name in ("_group", "_options", "_comm_hook")}
        state = {k: v for k, v in self.__dict__.items() if k not in (*_OF_THIS_RUN, *shared)}
        made.__setstate__(copy.deepcopy(state, memo) | shared)
        return made


def _still(ours: weakref.ref[DDP]) -> DDP:
    ddp = ours()
    assert ddp is not None, "its hooks go with it"
    return ddp


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


def _queue_from_output(ours: weakref.ref[DDP]) -> Callable[[Any], None]:
    """Queue the wait from where the backward pass enters the module.

    A reentrant checkpoint runs a pass within the pass; from a gradient in there the wait would be
    queued at the end of the inner one, when most gradients are yet to come.
    """

    def queue(_: Any) -> None:
        ddp = ours()
        if ddp is not None and (ddp.require_backward_grad_sync or ddp._weighing is not None):
            ddp._queue_finish()

    return queue


def _moved(inputs: Any, device: torch.device) -> Any:
    """Nested inputs on `device`."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs)


def _nodes(output: Any) -> set[Any]:
    """The nodes of autograd's graph that made the tensors in `output`."""
    if isinstance(output, Tensor):
        return {output.grad_fn} if output.grad_fn is not None else set()
    if isinstance(output, Mapping):
        return set().union(*map(_nodes, output.values()))
    if isinstance(output, list | tuple):
        return set().union(*map(_nodes, output))
    if is_dataclass(output):
        return set().union(*(_nodes(getattr(output, field.name)) for field in fields(output)))
    return set()
