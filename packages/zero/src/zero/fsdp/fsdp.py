"""Stage 3: parameters sharded too, whole only in the layer that is running and the next.

    forward    all-gather layer i+1 while layer i runs, then free layer i    S (n-1)/n sent a rank
    backward   all-gather layer i-1 while layer i runs, then free layer i    S (n-1)/n
               reduce-scatter layer i's gradient while layer i-1 runs        S (n-1)/n

The last layer of forward is the first of backward and stays; an embedding's backward does not read
its weight, so that is not gathered again.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero.faults import difference
from zero.fsdp.marks import after_gradient, before_gradient, cast
from zero.fsdp.replicated import Replicated
from zero.fsdp.unit import ShardedParameter, Unit
from zero.fsdp.wrap import Materialize, clean, make_units, watch
from zero.gradients import plain
from zero.norm import scale_to, square_sum
from zero.wire import Collective, DryRun, Wire


class FSDP(nn.Module):
    """Fully sharded data parallelism: modules of the classes in `shard` hold 1/n of themselves.

    Between steps `parameters()` are this rank's shards, one flat tensor a parameter, for any
    element-wise torch optimizer. Everything else is replicated, and its gradients are all-reduced.

    compute_dtype: parameters and inputs of sharded modules are cast to it; shards stay as they are.
    gradient_dtype: what gradients travel in; by default what they are computed in.
    device, initialize: where modules on the meta device get their memory, one sharded module at a
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
        initialize: Callable[[nn.Module], None] | None = None,
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
        materialize = None if isinstance(group, DryRun) else Materialize(place, initialize)
        self.units, self._units_of = make_units(
            module, shard, materialize, partial(Unit, self.wire, compute_dtype, gradient_dtype)
        )
        sharded = {p.local for unit in self.units for p in unit.parameters}
        rest = [p for p in module.parameters() if p not in sharded]
        self._replicated = Replicated(self.wire, rest)
        for tensor in [*rest, *module.buffers()]:
            self.wire.broadcast(tensor.detach(), 0).wait()
        self._order: list[Unit] = []
        self._position: dict[nn.Module, int] = {}
        self._last_order: list[Unit] = []
        self._hooked: set[nn.Parameter] = set()
        self._in_backward = False
        self._reducing: deque[Unit] = deque()
        self._ready: dict[Unit, int] = {}
        # Each shard's unit; the units that were read without a call of their module in the latest
        # forward, the modules that they are gathered with since, and where in the tree those are.
        self._sharded: dict[nn.Parameter, tuple[Unit, ShardedParameter]] = {}
        self._read_outside: list[Unit] = []
        self._lifted: dict[nn.Module, set[Unit]] = {}
        self._path_of: dict[Unit, str] = {}
        self._running = False
        self._hook_ids: dict[nn.Module, set[int]] = {}
        self._hook_modules()
        if compute_dtype is not None:
            self._replicated.keep_dtype(module)
        self.wire.take()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's part of the batch."""
        if self._in_backward and torch._C._current_graph_task_id() == -1:
            self._forget_backward()
        self._last_order, self._order = self._order, []
        for unit in self.units:
            unit.expire()
        self._follow()
        self._read_outside.clear()
        self._running = True
        try:
            output = self.module(*args, **kwargs)
        finally:
            self._running = False
            self._lift()
        kept = self._order[-1:] if torch.is_grad_enabled() else []
        for unit in self.units:
            unit.pinned = False
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
        shards = [plain(gradient) for gradient in locals_ if gradient is not None]
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
            self._hook_module(module)
        for unit in self.units:
            for sharded in unit.parameters:
                self._sharded[sharded.local] = unit, sharded
                for module, _ in sharded.places:
                    watch(module, self._read)
        self._follow()

    def _hook_module(self, module: nn.Module) -> None:
        # A compiled module runs these between its graphs.
        before: Any = torch.compiler.disable(self._before_forward)
        after: Any = torch.compiler.disable(self._after_forward)
        first = module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        then = module.register_forward_hook(after, always_call=True)
        self._hook_ids[module] = {first.id, then.id}

    def _read(self, parameter: nn.Parameter) -> nn.Parameter:
        """What a module sees that reads another's sharded parameter without calling it."""
        found = self._sharded.get(parameter)
        if found is None or not (self._running or self._in_backward):
            return parameter
        unit, sharded = found
        unit.gather()
        unit.pinned = True
        if unit not in self._read_outside:
            self._read_outside.append(unit)
        return sharded.whole

    def _lift(self) -> None:
        """From now on gather what was read by others with a module further out, up to the root."""
        for unit in self._read_outside:
            path = self._path_of.get(unit) or unit.parameters[0].name
            if unit in self._path_of and not path:
                continue
            path = self._path_of[unit] = path.rpartition(".")[0]
            reader = self.module.get_submodule(path)
            if reader not in self._units_of:
                self._units_of[reader] = []
                self._hook_module(reader)
            if unit not in self._units_of[reader]:
                self._units_of[reader].append(unit)
            unit.read_in_backward = True
            self._lifted.setdefault(reader, set()).add(unit)

    def _follow(self) -> None:
        """Let backward reach what is trainable now, which a caller may have changed."""
        for unit in self.units:
            unit.follow()
            for sharded in unit.parameters:
                self._hook_gradient(sharded.whole, partial(self._gradient_ready, unit))
        for parameter in self._replicated.parameters:
            self._hook_gradient(parameter, lambda _: self._begin_backward())

    def _hook_gradient(self, parameter: nn.Parameter, call: Callable[[Tensor], None]) -> None:
        if parameter.requires_grad and parameter not in self._hooked:
            self._hooked.add(parameter)
            parameter.register_post_accumulate_grad_hook(call)

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
        for unit in self._lifted.get(module, ()):
            unit.pinned = True
        if position and self._order[position - 1].read_in_backward:
            self._order[position - 1].start_gather()

    def _after_backward(self, module: nn.Module) -> None:
        for unit in self._lifted.get(module, set()).difference(self._read_outside):
            unit.pinned = False
        for unit in self._units_of[module]:
            unit.free()

    def _gradient_ready(self, unit: Unit, _: Tensor) -> None:
        self._begin_backward()
        self._ready[unit] = self._ready.get(unit, 0) + 1
        if self._sync and self._ready[unit] == unit.expected_gradients():
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
            for unit in self._read_outside:
                unit.gather()
                unit.pinned = True

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
            agreed = self.wire.any([used for unit in self.units for used in unit.used])
            waits = self._replicated.start()
            while self._reducing:
                self._reducing.popleft().finish_reduce()
            for wait in waits:
                wait()
            anywhere = iter(agreed())
            for unit in self.units:
                unit.settle([next(anywhere) for _ in unit.parameters])
        for unit in self.units:
            unit.expire()

    def _forget_backward(self) -> None:
        """Clean up after a backward that was broken off by an exception."""
        self._in_backward = False
        self._ready.clear()
        self._reducing.clear()
        for unit in self.units:
            unit.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> FSDP:
        """Return a copy over the same ranks, with shards of its own."""
        if self._running or self._in_backward:
            raise RuntimeError("FSDP cannot be copied while it runs: copy it between steps")
        for unit in self.units:
            unit.expire()
        copied: FSDP = type(self).__new__(type(self))
        memo[id(self)] = copied
        for unit in [copy.deepcopy(unit, memo) for unit in self.units]:
            unit.find_places(memo)
        own = ("_hooked", "_hook_ids", "_sharded")
        copied.__dict__.update(
            copy.deepcopy({k: v for k, v in self.__dict__.items() if k not in own}, memo)
        )
        copied._hooked, copied._hook_ids, copied._sharded = set(), {}, {}
        for module, ids in self._hook_ids.items():
            twin = memo[id(module)]
            for hooks in vars(twin).values():
                if isinstance(hooks, OrderedDict):
                    for key in ids & hooks.keys():
                        del hooks[key]
        copied._hook_modules()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "FSDP holds this rank's share only, so it is not pickled: use save_checkpoint, or "
            "gather_full_params() and save what it returns"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> FSDP:
        raise RuntimeError(
            "FSDP's shards cannot be moved or cast: call .to(...) on the module before FSDP(module)"
        )
