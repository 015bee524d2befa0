"""One rank's copy of the module: whose gradients are averaged, and when a step begins and ends.

Notable:
- a step begins with the first gradient of a backward pass that is synchronized, and ends with the
  pass: autograd calls back;
- before a forward pass it is looked whether the parameters are still the same;
- a copy of a wrapper meets the other ranks when its first gradient comes, not when it is made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import is_
from typing import Any, NoReturn, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from ddp.average import Weighing
from ddp.collective import Link, link
from ddp.compression.comm_hook import CommHook
from ddp.compression.sparse import average_sparse
from ddp.compression.ways import Compression
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
from ddp.consistency.join import common_rank
from ddp.exchange import Exchange
from ddp.layout import Layout
from ddp.metering.meter import Meter
from ddp.options import Options
from ddp.reducer import Reducer


class Wrapper(Protocol):
    """What a replica asks its wrapper, which may come and go without it."""

    meter: Meter
    require_backward_grad_sync: bool
    _join_config: Any


class Arrival(partial[None]):
    """The hook on a parameter: a gradient has arrived."""

    replica: Replica


class Replica:
    """The parameters of `module` on this rank. Not connected, it only waits for gradients."""

    link: Link
    blame: Blame
    exchange: Exchange
    inventory: Inventory
    reducer: Reducer

    def __init__(
        self,
        wrapper: Wrapper,
        module: nn.Module,
        options: Options,
        ignored: Collection[str],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._wrapper = weakref.ref(wrapper)
        self.module, self.options, self.ignored, self._group = module, options, ignored, group
        self.compression: Compression = options.way_to_send
        self.weighing: Weighing | None = None
        self.connected = False
        # Whether a backward pass was synchronized since finish_gradient_synchronization().
        self.synchronized = False
        # Whether a forward pass looked at the parameters since the last step.
        self._looked = False
        self._forward_of_all = True
        self._finish_queued = False
        # What no rank used in the last step, though that was not announced.
        self._unused: list[str] = []
        # The first two different ones of what was not used: a second one tells a dynamic graph.
        self.patterns: set[tuple[int, ...]] = set()
        # Whether a hook makes buffers equal, and what it said would be waited for.
        self.buffers_by_hook = False
        self.futures: list[torch.futures.Future[Any]] = []
        self.has_joined = False
        self._handles: list[Any] = []
        self._waiting_for: list[nn.Parameter] = []
        # Those that took some of these parameters over, because their module was wrapped again.
        self._newer: list[Replica] = []
        # A module that outlives its wrapper, and is maybe wrapped again, sends nothing for it.
        weakref.finalize(wrapper, _remove, self._handles)

    # ----- meeting the others -----

    def connect(self, *, same_model: bool, give: str = "") -> None:
        """Meet the other ranks; `give` them rank 0's "weights", or "weights and buffers"."""
        self.remove_hooks()
        self.link = link(self._group, self.options.all_reduce)
        self.blame = Blame(self.link.group)
        if same_model:
            with self.blame.naming("the comparison of the models"):
                agreed = self.options.to_agree_on
                check_same_model(self.module, agreed, self.link.group, self.ignored)
        # Before there are buckets, as it takes memory for a moment.
        if give:
            with self.blame.naming("the broadcast of the weights"):
                buffers = give == "weights and buffers"
                broadcast_state(self.module, self.link.group, ignored=self.ignored, buffers=buffers)
        self.inventory = Inventory(self.module, self.ignored)
        self.exchange = Exchange(
            link=self.link,
            blame=self.blame,
            meter=self._ddp.meter,
            compression=self.compression,
            find_unused_parameters=self.options.find_unused_parameters,
            check_nan=self.options.check_nan,
        )
        self.connected, self._waiting_for = True, []
        self._make_reducer()

    def use(self, compression: Compression) -> None:
        """Sum buckets in another way from now on."""
        self.compression = compression
        if self.connected:
            self.exchange.compression = compression

    def change(self, options: Options) -> None:
        """Other options from the first step on."""
        self.options = options
        if self.connected:
            self.remove_hooks()
            self._make_reducer()

    @property
    def comm_hook_name(self) -> str:
        """The function that sums buckets, if one was registered."""
        hook = getattr(self.compression, "hook", None)
        return getattr(hook, "__qualname__", "")

    def meet_late(self) -> None:
        """Meet the other ranks, as the copy of a wrapper: weights must be the same already."""
        if not self.connected:
            self.connect(same_model=True)
            check_same_weights(self.module, self.link.group)

    def wait_for_gradients(self) -> None:
        """Meet the others when the first gradient comes."""
        trained = [p for p in self.module.parameters() if p.requires_grad]
        if len(trained) == len(self._waiting_for) and all(map(is_, trained, self._waiting_for)):
            return
        # The first time, or parameters were unfrozen or replaced before the first gradient came.
        self.remove_hooks()
        self._waiting_for = trained
        for parameter in trained:
            self._hook(parameter, self._arrive_late)

    def _arrive_late(self, parameter: Tensor) -> None:
        self.meet_late()
        if self.weighing is not None and parameter.grad is not None:
            # What should have gone before its accumulation.
            parameter.grad = self.weighing.weigh(cast(nn.Parameter, parameter), parameter.grad)
        for index, one in enumerate(self.reducer.layout.parameters):
            if one is parameter:
                self.reducer.arrive(index, parameter)

    # ----- hooks -----

    def _make_reducer(self) -> None:
        dense = self.inventory.dense
        if self.options.average != "ranks" and self.weighing is None:
            # One for all reducers: it knows which gradients are averages already.
            self.weighing = Weighing(self.options.average, self.link, self._opens)
        layout = Layout(
            list(dense.values()),
            list(dense),
            self.link.group,
            self.options.bucket_bytes_of(dense.values()),
            self.options.allocate,
            self.options.gradient_as_bucket_view,
        )
        self.reducer = Reducer(
            layout,
            self.exchange,
            opens=self._opens,
            make_room=self.weighing.make_room if self.weighing is not None else None,
            static_graph=self.options.static_graph,
        )
        for index, parameter in enumerate(dense.values()):
            self._take_over(parameter)
            hook = Arrival(self.reducer.arrive, index)
            hook.replica = self
            self._hook(parameter, hook)
        for parameter in self.inventory.sparse.values():
            self._take_over(parameter)
            self._hook(parameter, self._arrive_sparse)

    def _hook(self, parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
        self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        if self.weighing is not None:
            self._handles.append(self.weighing.hook(parameter))

    def remove_hooks(self) -> None:
        """Average nothing any more."""
        _remove(self._handles)
        self._handles.clear()

    def _take_over(self, parameter: nn.Parameter) -> None:
        """Average `parameter` in the place of the wrappers that did so before."""
        for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
            if isinstance(hook, Arrival) and hook.replica is not self:
                hook.replica.remove_hooks()
                hook.replica._newer.append(self)

    def _arrive_sparse(self, _: Tensor) -> None:
        """A gradient that no bucket holds: it may open a step, too."""
        if not self.reducer.open:
            self._opens()

    # ----- a step -----

    @property
    def _ddp(self) -> Wrapper:
        ddp = self._wrapper()
        assert ddp is not None, "its hooks go with it"
        return ddp

    def queue_finish(self, _: Any = None) -> None:
        """Have autograd call `_backward_ended` at the end of the pass that runs now.

        Also a hook on the outputs of the module: where the backward pass enters it. A reentrant
        checkpoint runs a pass within the pass; from a gradient in there the wait would be queued at
        the end of the inner one, when most gradients are yet to come.
        """
        ddp = self._wrapper()
        wanted = ddp is not None and (ddp.require_backward_grad_sync or self.weighing is not None)
        if wanted and not self._newer and not self._finish_queued:
            self._finish_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        self._finish_queued = False
        if self.weighing is not None:
            self.weighing.pass_ended()
        if self.connected and self.reducer.open:
            self.finish()
            self.synchronized = True

    def _opens(self) -> bool:
        """Whether a gradient that arrives now is to be sent: then a step begins with it."""
        ddp = self._ddp
        self.queue_finish()
        if not ddp.require_backward_grad_sync:
            # While a join is on, ranks agree at the start of a step that is sent, and only there.
            if not ddp._join_config.enable:
                self.reducer.follow_order()
            return False
        self.begin()
        return True

    def begin(self) -> None:
        """Begin a step that this rank takes part in."""
        self.blame.check()
        looked, self._looked = self._looked, False
        if not looked and self.inventory.changed():
            reason = "parameters changed since the last forward pass of the wrapper"
            self.blame.fail(reason)
            raise RuntimeError(f"{reason}: call the wrapper, not its .module, to train")
        if self.reducer.steps == 0 and any(map(_steps_in_backward, self.inventory.all)):
            raise RuntimeError(
                "an optimizer that steps within the backward pass uses gradients before they are "
                "averaged; step it after backward()"
            )
        if self._ddp._join_config.enable:
            Join.notify_join_context(self._ddp)  # type: ignore[arg-type]
        self.open()

    def open(self, *, taking_part: bool = True) -> None:
        """Begin a step, maybe without gradients of one's own."""
        share = None
        if self.weighing is not None:
            share = self.weighing.begin(self.blame, self.device, taking_part=taking_part)
        self.reducer.begin(share)

    @torch.no_grad()
    def finish(self, *, taking_part: bool = True) -> None:
        """Wait for all gradients, then make the buffers equal."""
        share, sparse = self.reducer.share, self.inventory.sparse
        self._note_unused(self.reducer.finish(taking_part=taking_part))
        weighing = self.weighing
        if weighing is not None:
            for parameter in sparse.values():
                weighing.make_room(parameter)
        hook = self.compression if isinstance(self.compression, CommHook) else None
        average_sparse(sparse, self.link, self.blame, share if taking_part else 0.0, hook)
        if weighing is not None:
            weighing.end([*self.reducer.layout.parameters, *sparse.values()])
        for future in self.futures:
            future.wait()
        self.futures.clear()
        if not self.options.broadcast_buffers or self.buffers_by_hook:
            return
        if buffers := list(self.inventory.named_buffers().values()):
            joining = self._ddp._join_config.enable
            source = common_rank(self, candidate=taking_part) if joining else 0
            broadcast_buffers(buffers, self.link, self.blame, source)

    def _note_unused(self, unused: Collection[int]) -> None:
        options = self.options
        allowed = options.find_unused_parameters or options.static_graph or not self._forward_of_all
        layout = self.reducer.layout
        if len(self.patterns) < 2:
            self.patterns.add(tuple(self.reducer.absent))
        # What was frozen since is not meant to have a gradient.
        found = () if allowed else (i for i in unused if layout.parameters[i].requires_grad)
        self._unused = [layout.names[index] for index in sorted(found)]

    def _refuse_unused(self) -> NoReturn:
        """As torch's DDP does, in its words, but with names."""
        names, rank = list(self.inventory.trained), self.link.rank
        lacking = f"did not receive grad for rank {rank}: "
        raise RuntimeError(
            "Expected to have finished reduction in the prior iteration before starting a new one: "
            "its loss did not depend on every parameter, on any rank. Make sure that all "
            "`forward` function outputs participate in calculating loss; freeze what is not "
            "trained; or allow it, at no cost, by passing the keyword argument "
            "`find_unused_parameters=True`. (Names are shown without having to set the environment "
            "variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL.) "
            f"Parameters which {lacking}{', '.join(self._unused)}. Parameter indices which "
            f"{lacking}{' '.join(str(names.index(name)) for name in self._unused)}"
        )

    @property
    def device(self) -> torch.device:
        """Where small things that all ranks agree on are sent from."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    # ----- parameters that come and go -----

    def look(self, *, of_all: bool = True) -> None:
        """Before a forward pass: is the last step over, are the parameters still the same?

        The pass may be one of an older wrapper, and not of all that is averaged here.
        """
        if not self.connected:
            self.wait_for_gradients()
            return
        self.blame.check()
        if (newer := self.left_to) is not None:
            newer.look(of_all=False)
            return
        if self.reducer.open and torch._C._current_graph_task_id() == -1:
            reason = "the last backward pass ended in an error before its gradients were averaged"
            self.blame.fail(reason)
            raise RuntimeError(f"rank {self.link.rank}: {reason}; this step cannot be mended")
        if self.inventory.changed():
            self._adopt_changes()
        self._forward_of_all = of_all
        if self._unused and self._ddp.require_backward_grad_sync:
            self._refuse_unused()
        self._looked = True

    @property
    def left_to(self) -> Replica | None:
        """The newer wrapper's that averages these parameters, all of them and in the same way."""
        if not self._newer:
            return None
        self._newer = [other for other in self._newer if other._wrapper() is not None]
        if not self._newer:
            self._make_reducer()
            return None
        own = set(map(id, self.inventory.all))
        for other in self._newer:
            alike = other.options.average == self.options.average and other.link == self.link
            if alike and own <= set(map(id, other.inventory.all)):
                return other
        raise RuntimeError(
            "some parameters of this DDP's module were wrapped again, or for other ranks or "
            "another average: one wrapper averages them, the newer one; use that"
        )

    def _adopt_changes(self) -> None:
        if self._ddp._join_config.enable:
            raise RuntimeError("parameters changed inside join(); change them outside of it")
        known = self.inventory.all
        self.reducer.layout.release()
        self.inventory.take()
        why = "parameters were unfrozen, replaced or added"
        check_same(self.blame.meet(why, describe(self.module, self.ignored)))
        added = [p for p in self.module.parameters() if not any(p is one for one in known)]
        with self.blame.naming("the broadcast of new weights"):
            broadcast_tensors(added, self.link.group)
        self.remove_hooks()
        self._unused = []
        self._make_reducer()


def _steps_in_backward(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "_in_backward_optimizers")


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
