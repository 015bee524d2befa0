"""Stage 3: parameters sharded too, whole only in the layer that is running and the next.

    forward    all-gather layer i+1 while layer i runs, then free layer i    S (n-1)/n sent a rank
    backward   all-gather layer i-1 while layer i runs, then free layer i    S (n-1)/n
               reduce-scatter layer i's gradient while layer i-1 runs        S (n-1)/n

The last layer of forward is the first of backward and stays; an embedding's backward does not read
its weight, so that is not gathered again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero.faults import difference
from zero.marks import after_gradient, before_gradient, cast
from zero.norm import scale_to, square_sum
from zero.replicated import Replicated
from zero.unit import Unit
from zero.wire import Collective, DryRun, Wire
from zero.wrap import Materialise, clean, make_units


class FSDP(nn.Module):
    """Fully sharded data parallelism: modules of the classes in `shard` hold 1/n of themselves.

    Between steps `parameters()` are this rank's shards, one flat tensor a parameter, for any
    element-wise torch optimizer. Everything else is replicated, and its gradients are all-reduced.

    compute_dtype: parameters and inputs of sharded modules are cast to it; shards stay as they are.
    gradient_dtype: what gradients travel in; by default what they are computed in.
    device, initialise: where modules on the meta device get their memory, one sharded module at a
        time, and what then fills a module's own tensors; by default its `reset_parameters()`.
    in_flight: how many reduce-scatters may be under way.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        group: dist.ProcessGroup | DryRun | None = None,
        shard: tuple[type[nn.Module], ...] = (nn.Linear, nn.Embedding),
        gradient_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        initialise: Callable[[nn.Module], None] | None = None,
        in_flight: int = 2,
        reduce_scatter_tensor: Collective | None = None,
        all_gather_into_tensor: Collective | None = None,
        all_reduce: Collective | None = None,
    ) -> None:
        super().__init__()
        self.wire = Wire(
            group,
            reduce_scatter_tensor=reduce_scatter_tensor,
            all_gather_into_tensor=all_gather_into_tensor,
            all_reduce=all_reduce,
        )
        self.module = module
        self.compute_dtype = compute_dtype
        self.in_flight = in_flight
        self._sync = True
        named = list(module.named_parameters(remove_duplicate=False))
        self._names = [clean(name) for name, _ in named]
        mine = [(clean(n), tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in named]
        problem = difference(self.wire.objects(mine))
        if problem:
            raise ValueError(problem)
        place = torch.device(device) if device else self.wire.device
        materialise = None if isinstance(group, DryRun) else Materialise(place, initialise)
        self.units, self._units_of = make_units(
            module, shard, materialise, partial(Unit, self.wire, compute_dtype, gradient_dtype)
        )
        sharded = {p.local for unit in self.units for p in unit.parameters}
        rest = [p for p in module.parameters() if p not in sharded]
        self._replicated = Replicated(self.wire, rest)
        for tensor in [*rest, *module.buffers()]:
            self.wire.broadcast(tensor.detach(), 0).wait()
        self._order: list[Unit] = []
        self._position: dict[nn.Module, int] = {}
        self._last_order: list[Unit] = []
        self._in_backward = False
        self._reducing: deque[Unit] = deque()
        self._ready: dict[Unit, int] = {}
        self._hook_modules()
        self.wire.take()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's part of the batch."""
        if self._in_backward and torch._C._current_graph_task_id() == -1:
            self._forget_backward()
        self._last_order, self._order = self._order, []
        output = self.module(*args, **kwargs)
        kept = self._order[-1:] if torch.is_grad_enabled() else []
        for unit in self.units:
            if unit not in kept:
                unit.free()
        return before_gradient(output, self._begin_backward)

    def finish_gradient_synchronization(self) -> None:
        """Wait until every `.grad` is the average over ranks.

        The end of backward does this already; calling it again costs nothing.
        """
        if self._in_backward:
            self._end_backward()

    def gather_full_params(self) -> dict[str, Tensor]:
        """Every parameter whole, under the unwrapped module's names; every rank calls it."""
        whole: dict[str, Tensor] = {}
        for unit in self.units:
            whole |= unit.full_parameters()
        for compiled_name, parameter in self.module.named_parameters(remove_duplicate=False):
            name = clean(compiled_name)
            if name not in whole:
                whole[name] = self._tied(parameter, whole)
        return {name: whole[name] for name in self._names}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients pile up locally, unsharded: for every backward of a step but the last."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the averaged gradient to 2-norm `max_norm` at the most; return its norm before.

        `torch.nn.utils.clip_grad_norm_` would see this rank's shards only.
        """
        replicated = [p.grad for p in self._replicated.parameters if p.grad is not None]
        locals_ = [p.local.grad for unit in self.units for p in unit.parameters]
        shards = [gradient for gradient in locals_ if gradient is not None]
        total = square_sum(shards, self.wire.device)
        self.wire.all_reduce(total).wait()
        norm = (total + square_sum(replicated, self.wire.device)).sqrt()
        scale_to(max_norm, norm, shards + replicated)
        return norm.float()

    def _tied(self, parameter: nn.Parameter, whole: dict[str, Tensor]) -> Tensor:
        for unit in self.units:
            for sharded in unit.parameters:
                if sharded.local is parameter:
                    return whole[sharded.name]
        return parameter.detach().clone()

    def _hook_modules(self) -> None:
        for module in self._units_of:
            # A compiled module runs these between its graphs.
            before: Any = torch.compiler.disable(self._before_forward)
            after: Any = torch.compiler.disable(self._after_forward)
            module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            module.register_forward_hook(after, always_call=True)
        for unit in self.units:
            if unit.trainable:
                for sharded in unit.parameters:
                    ready = partial(self._gradient_ready, unit)
                    sharded.whole.register_post_accumulate_grad_hook(ready)
        for parameter in self._replicated.parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _: self._begin_backward())
        if self.compute_dtype is not None:
            self._replicated.keep_dtype(self.module)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        units = self._units_of[module]
        self._position[module] = len(self._order)
        for unit in units:
            unit.gather()
            unit.swap_in_whole()
            if not self._in_backward:
                self._order.append(unit)
        if not self._in_backward and len(self._order) < len(self._last_order):
            self._last_order[len(self._order)].start_gather()
        if self.compute_dtype is not None:
            args, kwargs = cast(self.compute_dtype, (args, kwargs))
        if torch.is_grad_enabled():
            args, kwargs = after_gradient((args, kwargs), partial(self._after_backward, module))
        return args, kwargs

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        # The last layer of forward is the first of backward.
        last = torch.is_grad_enabled() and self._order == self._last_order
        for unit in self._units_of[module]:
            unit.swap_in_local()
            if not last and not self._in_backward:
                unit.free()
        if isinstance(module, nn.Embedding) or self._in_backward:
            return output
        before = partial(self._before_backward, module, self._position[module])
        return before_gradient(output, before)

    def _before_backward(self, module: nn.Module, position: int) -> None:
        self._begin_backward()
        for unit in self._units_of[module]:
            unit.gather()
        if position and self._order[position - 1].read_in_backward:
            self._order[position - 1].start_gather()

    def _after_backward(self, module: nn.Module) -> None:
        for unit in self._units_of[module]:
            unit.free()

    def _gradient_ready(self, unit: Unit, _: Tensor) -> None:
        self._begin_backward()
        self._ready[unit] = self._ready.get(unit, 0) + 1
        if self._sync and self._ready[unit] == len(unit.parameters):
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        while len(self._reducing) >= self.in_flight:
            self._reducing.popleft().finish_reduce()
        unit.start_reduce()
        self._reducing.append(unit)

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)

    @torch.no_grad()
    def _end_backward(self) -> None:
        if not self._in_backward:
            return
        self._in_backward = False
        self._ready.clear()
        if self._sync:
            for unit in self.units:
                if unit.has_gradient():
                    self._reduce(unit)
            waits = self._replicated.start()
            while self._reducing:
                self._reducing.popleft().finish_reduce()
            for wait in waits:
                wait()
        for unit in self.units:
            unit.free()

    def _forget_backward(self) -> None:
        """Clean up after a backward that was broken off by an exception."""
        self._in_backward = False
        self._ready.clear()
        self._reducing.clear()
        for unit in self.units:
            unit.forget()

    def _apply(self, fn: Any, recurse: bool = True) -> FSDP:
        raise RuntimeError(
            "FSDP's shards cannot be moved or cast: call .to(...) on the module before FSDP(module)"
        )
