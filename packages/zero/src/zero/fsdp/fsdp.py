"""Stage 3: parameters sharded too, whole only in the layer that is running and the next.

    forward    all-gather layer i+1 while layer i runs, then free layer i    S (n-1)/n sent a rank
    backward   all-gather layer i-1 while layer i runs, then free layer i    S (n-1)/n
               reduce-scatter layer i's gradient while layer i-1 runs        S (n-1)/n

The last layer of forward is the first of backward and stays; an embedding's backward does not read
its weight, so that is not gathered again.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from zero.faults import difference
from zero.fsdp.marks import after_gradient, before_gradient, cast, hides_tensors
from zero.fsdp.optimizers import install
from zero.fsdp.replicated import Replicated
from zero.fsdp.unit import ShardedParameter, Unit, home_of
from zero.fsdp.whole import StateDictionaries, summoned
from zero.fsdp.wrap import (
    Materialize,
    bytes_by_class,
    clean,
    make_units,
    reads_weight_in_backward,
    watch,
)
from zero.wire import Collective, DryRun, Group, Wire

# A class of modules that holds this fraction of the model, or more, unsharded is worth a warning.
WHOLE_FRACTION = 0.05


class FSDP(nn.Module):
    """Fully sharded data parallelism: modules of the classes in `shard` hold 1/n of themselves.

    Between steps `parameters()` are this rank's shards, one flat tensor a parameter, for any
    element-wise torch optimizer. Everything else is replicated, and its gradients are all-reduced.

    compute_dtype: parameters and inputs of sharded modules are cast to it; shards stay as they are.
    gradient_dtype: what gradients travel in; by default what they are computed in.
    device, initialize: where modules on the meta device get their memory, one sharded module at a
        time, and what then fills a module's own tensors; by default its `reset_parameters()`.
    in_flight: how many reduce-scatters may be under way; each holds a layer's gradients.
    group: a process group, or a DeviceMesh: of one dimension to shard over, or of two, to replicate
        over the first and shard over the second (hybrid sharding).
    reshard_after_forward: False keeps layers whole until their backward, and gathers each once.
    prefetch: how many layers are gathered ahead of the one that runs.
    ignored_params: left to the caller, not sharded, averaged or made equal on all ranks.
    elementwise_optimizers: classes besides torch's own that treat every element by itself, and may
        step shards. A trial verifies this at the first step. Any other class of optimizer gets each
        parameter whole, on one rank, while it steps.
    cpu_offload: shards and their gradients lie on the host, where an optimizer keeps its state and
        steps; a device holds the layers that run.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        group: Group = None,
        shard: tuple[type[nn.Module], ...] = (nn.Linear, nn.Embedding),
        gradient_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        initialize: Callable[[nn.Module], None] | None = None,
        in_flight: int = 1,
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        ignored_params: Iterable[nn.Parameter] = (),
        elementwise_optimizers: Iterable[type[torch.optim.Optimizer]] = (),
        cpu_offload: bool = False,
        reduce_scatter_tensor: Collective | None = None,
        all_gather_into_tensor: Collective | None = None,
        all_reduce: Collective | None = None,
    ) -> None:
        super().__init__()
        for name, inner in module.named_modules():
            if isinstance(inner, FSDP):
                raise ValueError(
                    f"{name or 'the module'} is FSDP already: wrap the whole model once, and say "
                    "with shard=(...) which layers are gathered by themselves"
                )
            embeds = isinstance(inner, nn.Embedding | nn.EmbeddingBag)
            if embeds and inner.max_norm is not None:
                raise ValueError(
                    f"{name or 'the module'} is {type(inner).__name__}(max_norm={inner.max_norm}), "
                    "whose forward writes to its weight; that would be lost at stage 3: pass "
                    "max_norm=None and renormalize the rows after each step"
                )
        for name, parameter in module.named_parameters():
            if home_of(parameter) is not None:
                raise ValueError(f"parameter {name} is another FSDP's shard: wrap a model once")
        self.wire = Wire(
            group,
            reduce_scatter_tensor=reduce_scatter_tensor,
            all_gather_into_tensor=all_gather_into_tensor,
            all_reduce=all_reduce,
        )
        self.module = module
        self.compute_dtype = compute_dtype
        self.in_flight = in_flight
        self.reshard_after_forward = reshard_after_forward
        self.prefetch = prefetch
        self._sync = True
        ignored = set(ignored_params)
        named = list(module.named_parameters(remove_duplicate=False))
        self._names = [clean(name) for name, _ in named]
        mine = [
            (clean(n), tuple(p.shape), str(p.dtype), p.requires_grad)
            for n, p in named
            if p not in ignored
        ]
        problem = difference(self.wire.objects(mine))
        if problem:
            raise ValueError(problem)
        place = torch.device(device) if device else self.wire.device
        materialize = None if isinstance(group, DryRun) else Materialize(place, initialize)
        self.units, self._units_of = make_units(
            module,
            shard,
            materialize,
            partial(Unit, self.wire, compute_dtype, gradient_dtype, cpu_offload),
            ignored,
        )
        for unit in self.units:
            unit.elementwise_optimizers = tuple(elementwise_optimizers)
        sharded = {p.local for unit in self.units for p in unit.parameters}
        rest = [p for p in module.parameters() if p not in sharded | ignored]
        self._replicated = Replicated(self.wire, rest)
        #: Bytes of the parameters that every rank keeps whole, by the class of their module.
        self.whole_bytes = bytes_by_class(module, rest)
        if self.wire.rank == 0:
            self._warn_of_whole_parameters(shard)
        for tensor in [*rest, *module.buffers()]:
            self.wire.broadcast_first(tensor.detach())
        self._order: list[Unit] = []
        self._position: dict[nn.Module, int] = {}
        self._last_order: list[Unit] = []
        self._hooked: set[nn.Parameter] = set()
        self._in_backward = False
        # Whether what runs is a backward(), and not torch.autograd.grad().
        self._accumulates = False
        self._reducing: deque[Unit] = deque()
        self._ready: dict[Unit, int] = {}
        # Each shard's unit; the units that were read without a call of their module since the
        # latest step, the modules that they are gathered with since, where in the tree those are.
        self._sharded: dict[nn.Parameter, tuple[Unit, ShardedParameter]] = {}
        self._read_outside: list[Unit] = []
        self._version = -1
        self._lifted: dict[nn.Module, set[Unit]] = {}
        self._path_of: dict[Unit, str] = {}
        # How many sharded modules, and the whole, are in their forward, one within the other.
        self._running = 0
        self._summoned = False
        self.state_dictionaries = StateDictionaries(self.wire)
        self._hook_ids: dict[nn.Module, set[int]] = {}
        self._hook_modules()
        if compute_dtype is not None:
            self._replicated.keep_dtype(module)
        install()
        self.wire.take()

    def _warn_of_whole_parameters(self, shard: tuple[type[nn.Module], ...]) -> None:
        """Warn if a considerable part of the model is not sharded, and say how to shard it."""
        sharded = sum(p.whole.numel() * p.local.itemsize for u in self.units for p in u.parameters)
        total = sharded + sum(self.whole_bytes.values())
        large = {k: v / total for k, v in self.whole_bytes.items() if v >= WHOLE_FRACTION * total}
        if not large:
            return
        parts = ", ".join(f"{name} {fraction:.0%}" for name, fraction in large.items())
        classes = ", ".join([*(cls.__name__ for cls in shard), *large])
        warnings.warn(
            f"FSDP keeps {1 - sharded / total:.0%} of the model whole on every rank ({parts}), "
            f"because these classes are not in shard=: pass shard=({classes},)",
            stacklevel=3,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's part of the batch."""
        return self.module(*args, **kwargs)

    def _begin_forward(self) -> None:
        """Before the outermost module that runs: `fsdp.module(x)` is `fsdp(x)`."""
        if self._in_backward and torch._C._current_graph_task_id() == -1:
            self._forget_backward()
        self._running += 1
        if self._summoned:
            raise RuntimeError("leave summon_full_params before the next forward")
        if self._running > 1 or self._in_backward:
            return
        self._last_order, self._order = self._order, []
        for unit in self.units:
            unit.expire()
        self._follow()
        version = sum(unit.shard._version for unit in self.units)
        if version != self._version:
            # Until a step, earlier forwards' backward may still come.
            self._version = version
            self._read_outside.clear()
        self.state_dictionaries.forget()

    def _end_forward(self, output: Any) -> Any:
        self._running = max(0, self._running - 1)
        if self._running or self._in_backward:
            return output
        for unit in self._read_outside:
            unit.check_unchanged()
        self._lift()
        if torch.is_grad_enabled():
            kept = self._order[-1:] if self.reshard_after_forward else self._order
        else:
            kept = []
        for unit in self.units:
            unit.pinned = False
            if unit not in kept:
                unit.free()
        return before_gradient(output, self._begin_backward)

    @contextmanager
    def summon_full_params(self, writeback: bool = True) -> Iterator[None]:
        """Let modules hold whole parameters for a while, all of them; every rank calls it.

        `writeback`: afterwards each rank takes its own elements of what they are then, so all ranks
        make the same changes.
        """
        if self._running or self._in_backward or self._summoned:
            raise RuntimeError("summon_full_params works between steps, once at a time")
        for unit in self.units:
            unit.expire()
        self._summoned = True
        try:
            with summoned(self.units, writeback=writeback):
                yield
        finally:
            self._summoned = False

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

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` of everything but ignored parameters."""
        shards = [p.local for unit in self.units for p in unit.parameters]
        return nn.utils.clip_grad_norm_(shards + self._replicated.parameters, max_norm)

    def _tied(self, parameter: nn.Parameter, whole: dict[str, Tensor]) -> Tensor:
        for unit in self.units:
            for sharded in unit.parameters:
                if sharded.local is parameter:
                    return whole[sharded.name]
        return parameter.detach().clone()

    def _hook_modules(self) -> None:
        # The whole module begins and ends a forward, if it has no parameters of its own either.
        self._units_of.setdefault(self.module, [])
        for module in self._units_of:
            self._hook_module(module)
        owners: dict[nn.Module, dict[str, tuple[Unit, ShardedParameter]]] = {}
        for unit in self.units:
            for sharded in unit.parameters:
                self._sharded[sharded.local] = unit, sharded
                for module, attribute in sharded.places:
                    watch(module, self._read)
                    owners.setdefault(module, {})[attribute] = unit, sharded
        for module, own in owners.items():
            ids = self.state_dictionaries.attach(module, own)
            self._hook_ids.setdefault(module, set()).update(ids)
        self._follow()

    def _hook_module(self, module: nn.Module) -> None:
        # A compiled module runs these between its graphs.
        before: Any = torch.compiler.disable(self._before_forward)
        after: Any = torch.compiler.disable(self._after_forward)
        first = module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        then = module.register_forward_hook(after, always_call=True)
        self._hook_ids.setdefault(module, set()).update((first.id, then.id))

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
            self._hook_gradient(parameter, self._replicated_ready)

    def _hook_gradient(self, parameter: nn.Parameter, call: Callable[[Tensor], None]) -> None:
        if parameter.requires_grad and parameter not in self._hooked:
            self._hooked.add(parameter)
            parameter.register_post_accumulate_grad_hook(call)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if module is self.module and not self._in_backward:
            # An interrupt may have left an earlier forward without its end.
            self._running = 0
        self._begin_forward()
        units = self._units_of[module]
        self._position[module] = len(self._order)
        for unit in units:
            unit.gather()
            unit.swap_in_whole()
            if not self._in_backward:
                self._order.append(unit)
        if not self._in_backward:
            for unit in self._last_order[len(self._order) :][: self.prefetch]:
                unit.start_gather()
        if units and self.compute_dtype is not None:
            args, kwargs = cast(self.compute_dtype, (args, kwargs))
        if units and torch.is_grad_enabled():
            done = partial(self._after_backward, module)
            again = partial(self._before_backward_again, module)
            args, kwargs = after_gradient((args, kwargs), done, again)
        return args, kwargs

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        # The last layer of forward is the first of backward.
        keep = torch.is_grad_enabled() and (
            self._order == self._last_order or not self.reshard_after_forward
        )
        units = self._units_of[module]
        for unit in units if output is not None else ():
            # Without an output the forward has raised.
            unit.check_unchanged()
        for unit in units:
            unit.swap_in_local()
            if not keep and not self._in_backward:
                unit.free()
        if units and reads_weight_in_backward(module, self._hook_ids[module]):
            # What is recomputed in backward has a backward of its own, without layers before it.
            position = 0 if self._in_backward else self._position[module]
            before = partial(self._before_backward, module, position)
            if torch.is_grad_enabled() and hides_tensors(output):
                raise TypeError(
                    f"{type(module).__name__} returns a {type(output).__name__} in which no tensor "
                    "is found, so its weights could not be gathered for backward: return tensors "
                    "in containers or attributes"
                )
            output = before_gradient(output, before, args)
        return self._end_forward(output)

    def _before_backward(self, module: nn.Module, position: int) -> None:
        self._begin_backward()
        for unit in self._units_of[module]:
            unit.gather()
        for unit in self._lifted.get(module, ()):
            unit.pinned = True
        for unit in self._order[max(0, position - self.prefetch) : position][::-1]:
            if unit.read_in_backward:
                unit.start_gather()

    def _before_backward_again(self, module: nn.Module) -> None:
        """Gather for a backward of a backward (create_graph=True), which reads the weights too."""
        self._begin_backward()
        for unit in self._units_of[module]:
            unit.gather()
            unit.pinned = True

    def _after_backward(self, module: nn.Module) -> None:
        for unit in self._lifted.get(module, set()).difference(self._read_outside):
            unit.pinned = False
        for unit in self._units_of[module]:
            unit.free()

    @torch.no_grad()
    def _gradient_ready(self, unit: Unit, _: Tensor) -> None:
        self._begin_backward()
        # Of a backward within a backward, as of reentrant checkpoints, the outer graph shows none.
        self._accumulates = True
        self._ready[unit] = self._ready.get(unit, 0) + 1
        if self._sync and self._ready[unit] == unit.expected_gradients():
            self._reduce(unit)

    def _replicated_ready(self, _: Tensor) -> None:
        self._begin_backward()
        self._accumulates = True

    def _reduce(self, unit: Unit) -> None:
        while len(self._reducing) >= self.in_flight:
            self._reducing.popleft().finish_reduce()
        unit.start_reduce()
        self._reducing.append(unit)

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._accumulates = self._gradients_are_accumulated()
            for unit in self.units:
                unit.drop_what_was_dropped()
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)
            for unit in self._read_outside:
                unit.gather()
                unit.pinned = True

    def _gradients_are_accumulated(self) -> bool:
        """Whether this is a backward(), not a torch.autograd.grad() of something else."""
        wholes = [p.whole for unit in self.units for p in unit.parameters]
        trained = (p for p in [*wholes, *self._replicated.parameters] if p.requires_grad)
        try:
            # In a plain backward() this is so of each.
            return any(
                torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
                for parameter in trained
            )
        except RuntimeError:
            # What torch says of a parameter that is an input of torch.autograd.grad.
            return False

    @torch.no_grad()
    def _end_backward(self) -> None:
        if not self._in_backward:
            return
        self._in_backward = False
        self._ready.clear()
        if self._sync and self._accumulates:
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
            if not self._sync:
                unit.show_waiting()
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
        own = ("_hooked", "_hook_ids", "_sharded", "state_dictionaries")
        copied.__dict__.update(
            copy.deepcopy({k: v for k, v in self.__dict__.items() if k not in own}, memo)
        )
        copied._hooked, copied._hook_ids, copied._sharded = set(), {}, {}
        copied.state_dictionaries = StateDictionaries(copied.wire)
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
