"""Stages 1 and 2: every rank steps its shard of the parameters and gathers all other shards.

    backward:  reduce-scatter the gradients, bucket by bucket    S (n-1)/n sent per rank
    step:      step the wrapped optimizer on this rank's shard   1/n of the state and of the work
               all-gather the parameters                         S (n-1)/n sent per rank

S is the size of the parameters in bytes, and n the number of ranks. `step()` uses gradients
averaged over ranks, so the model must not be wrapped in DDP.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.algorithms.join import Joinable

from zero.buffers import BufferHook
from zero.diagnostics import check_descriptions_match
from zero.fsdp.shard import Shard
from zero.optimizer import option_checks, parameter_groups
from zero.optimizer.flat_parameters import FlatParameters
from zero.optimizer.gradient_reducer import GradientReducer
from zero.optimizer.optimizer_kinds import (
    ELEMENTWISE,
    WHOLE_PARAMETERS,
    Split,
    choose_split,
    construct_probe,
)
from zero.optimizer.state_dict import get_options, load_state_dict, make_dtensor_state_dict
from zero.optimizer.uneven_inputs import UnevenInputs
from zero.parameter_checks import check_equal_on_all_ranks, check_shardable
from zero.process_groups import Collective, Communicator, Group


class ShardedOptimizer(torch.optim.Optimizer, Joinable):
    """An optimizer whose state and update are sharded across ranks.

    It wraps `optimizer_cls(params, **kwargs)`. Gradients are averaged during the backward pass.
    Then `.grad` is an AveragedGradient, and each rank stores only part of its elements. torch's
    GradScaler and `clip_grad_norm_` have the same effect on it as on the full gradient.

    At construction, parameters become views of one flat tensor per group, dtype and device, with
    rank 0's values. Raise ValueError if a parameter or the optimizer cannot be sharded, or if the
    parameters differ between ranks. Source: Rajbhandari et al. 2020, ZeRO, section 5.

    params: parameters or parameter groups, with the same shapes, dtypes and order on all ranks.
    optimizer_cls: the optimizer's class, or a function that constructs the optimizer.
    group: a process group, or a one-dimensional DeviceMesh; by default, all ranks.
    module: the module whose buffers are copied from rank 0 at construction and before its forward
        pass, as torch's DDP does. By default, each rank has its own buffers.
    shard_gradients: True frees each bucket of gradients after it has been sent (ZeRO's stage 2).
    elementwise: True declares that the optimizer updates every element independently of all other
        elements. Tensors are then split at arbitrary elements into equal shards, with padding at
        the end. A trial of 50 steps verifies the declaration for custom optimizer classes. False
        assigns each whole parameter to one rank, without a trial. None, the default, splits tensors
        for torch's element-wise optimizers, and assigns whole parameters for any other class. For
        custom classes, a trial then checks that no update of a parameter depends on another one.
        torch's Adafactor and Muon always get whole parameters, and reject True.
    bucket_size_mb: the target size of one collective in MiB, at least 0.
    reduce_scatter_tensor, all_gather_into_tensor, all_reduce: replacements for torch's functions.
    """

    def __init__(
        self,
        params: Any,
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        group: Group = None,
        module: nn.Module | None = None,
        shard_gradients: bool = False,
        elementwise: bool | None = None,
        bucket_size_mb: float = 8.0,
        reduce_scatter_tensor: Collective | None = None,
        all_gather_into_tensor: Collective | None = None,
        all_reduce: Collective | None = None,
        **kwargs: Any,
    ) -> None:
        params, members = parameter_groups.read_params(params)
        if not 0 <= bucket_size_mb < math.inf:
            raise ValueError(f"expected a finite bucket_size_mb >= 0, got {bucket_size_mb}")
        named = parameter_groups.name_members(members)
        check_shardable(
            (entry for entry in named if not isinstance(entry[1], Shard)),
            module.named_buffers() if module else (),
        )
        self.communicator = Communicator(
            group,
            reduce_scatter_tensor=reduce_scatter_tensor,
            all_gather_into_tensor=all_gather_into_tensor,
            all_reduce=all_reduce,
        )
        self._optimizer_cls = optimizer_cls
        self._options = kwargs
        self._elementwise = elementwise
        #: The split of each group's tensors: "elements" or "parameters".
        self.splits: list[Split] = []
        Joinable.__init__(self)
        #: The hook of the latest `Join` context; None if there was none.
        self._uneven_inputs: UnevenInputs | None = None
        self.reducer = GradientReducer(self.communicator, release_gradients=shard_gradients)
        #: The flat tensors of the parameters, and this rank's shards of them.
        self.flat = FlatParameters(self.communicator, int(bucket_size_mb * 2**20))
        self._parameters_of_group: list[list[nn.Parameter]] = []
        self._shards_of_group: list[list[nn.Parameter]] = []
        self._num_steps = 0
        #: True from the start of the inner optimizer's step until `step()` returns.
        self._is_step_incomplete = False
        self._options_after_step: option_checks.Options = []
        self.inner: torch.optim.Optimizer
        # Some optimizers have required options that are set per group.
        first_options = get_options(params[0]) if isinstance(params[0], dict) else {}
        probe = construct_probe(optimizer_cls, first_options, kwargs)
        # `optimizer_cls` may also be a function that constructs the optimizer.
        self._inner_cls = type(probe)
        super().__init__(params, probe.defaults)
        # Pass all groups to the constructor, because some optimizers create state in __init__.
        groups = zip(self.param_groups, self._shards_of_group, strict=True)
        self.inner = optimizer_cls(
            [{**get_options(group), "params": shards} for group, shards in groups], **kwargs
        )
        self.state = self._exposed_state = self.inner.state
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            outer.update(get_options(inner))
        self.module = module
        if module is not None:
            self.communicator.broadcast_buffers(module)
            # Do not count the initial broadcasts as training traffic.
            self.communicator.pop_bytes()
            module.register_forward_pre_hook(BufferHook(self).copy_before_forward)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Shard another group of parameters; every rank must add the same group."""
        param_group = parameter_groups.read_group(param_group)
        named = parameter_groups.name_members(param_group["params"])
        parameter_groups.check_in_one_group(named, self.param_groups)
        parameter_groups.check_without_owner(named, self)
        check_shardable(named)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            described = [(tuple(p.shape), str(p.dtype)) for p in group["params"]]
            check_descriptions_match(self.communicator.gather_objects(described))
            split = choose_split(
                self._inner_cls,
                self._options,
                next((p.device for p in group["params"] if not p.is_meta), None),
                elementwise=self._elementwise,
                group=get_options(group),
                shapes=[parameter.shape for parameter in group["params"]],
                dtypes=[parameter.dtype for parameter in group["params"]],
                make=self._optimizer_cls,
            )
        except BaseException:
            # A group without shards would break the next step.
            self.param_groups.pop()
            raise
        self.splits.append(split)
        parameters_of: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in group["params"]:
            key = parameter.dtype, parameter.device
            parameters_of.setdefault(key, []).append(parameter)
        shards = []
        for parameters in parameters_of.values():
            shards += self.flat.add(parameters, split, self.reducer)
        self._parameters_of_group.append(list(group["params"]))
        self._shards_of_group.append(shards)
        for parameter in group["params"]:
            parameter_groups.set_owner(parameter, self)
        if hasattr(self, "inner"):
            self.inner.add_param_group({**get_options(group), "params": shards})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Average the gradients, update this rank's shard, and gather all shards.

        Return the result of `closure`, or None without a closure. `kwargs` are passed to the
        wrapped optimizer's `step`. Every rank must call this method. Raise RuntimeError if ranks
        differ in options, in gradients that were cleared, or in parameters that were written to.
        """
        if self._is_step_incomplete:
            raise RuntimeError(
                f"rank {self.communicator.rank}: an earlier step raised while it updated the "
                "shards, so another step would apply the gradients twice, and parameters may "
                "differ between ranks: load a checkpoint into another ShardedOptimizer"
            )
        parameter_groups.check_groups_unchanged(self.param_groups, self._parameters_of_group)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._uneven_inputs:
            options = [get_options(group) for group in self.param_groups]
            self._uneven_inputs.announce("step", options)
        self._check_state()
        for parameter in self.flat.restore_views():
            # Replacing `.data` need not change the version, so mark the parameter as written.
            self.reducer.versions[parameter] = -1
        with_gradient = self._assign_gradients()
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(get_options(outer))
        self._is_step_incomplete = True
        _step_without_hooks(self.inner, **kwargs)
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            outer.update(get_options(inner))
        self._options_after_step = option_checks.list_numeric_options(self)
        self._copy_stored_gradients()
        self.flat.restore_shards()
        self.flat.gather()
        # Autograd must raise an error for graphs that saved the old values. The gather does not
        # change the parameters' versions, because flat tensors have separate version counters.
        increment_version(with_gradient)
        self.reducer.record_versions()
        for _, _, shard, _ in self.flat.shards:
            shard.grad = None
        self.expose_inner_state()
        self._is_step_incomplete = False
        return loss

    def expose_inner_state(self) -> None:
        """Set `state` to the inner optimizer's state or, if it is empty, to one empty entry.

        torch's tools require that `state` is empty on all ranks or on none, and a rank without
        shards has no state.
        """
        if self.inner.state:
            self.state = self.inner.state
        else:
            self.state = defaultdict(dict, {self.param_groups[0]["params"][0]: {}})
        self._exposed_state = self.state

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict that the unsharded optimizer would have.

        State tensors with the shape of their parameter are returned as DTensors. Every rank must
        call this method.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        parameter_groups.check_groups_unchanged(self.param_groups, self._parameters_of_group)
        state_dict = make_dtensor_state_dict(
            self.param_groups, self.flat.shards, self.inner, self.communicator
        )
        for hook in self._optimizer_state_dict_post_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, also of an unsharded optimizer; every rank must call this method."""
        parameter_groups.check_groups_unchanged(self.param_groups, self._parameters_of_group)
        # Pre-hooks may modify the dictionary, so pass them a shallow copy.
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        load_state_dict(self.param_groups, self.flat.shards, self.inner, state_dict)
        self.expose_inner_state()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "ShardedOptimizer belongs to a process group and to its parameters, so it cannot be "
            "copied or pickled: construct another one, and load state_dict() or a checkpoint"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, or fill them with zeros if `set_to_none` is False."""
        super().zero_grad(set_to_none)
        if set_to_none:
            self.reducer.reset()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate local gradients in the backward passes within the context.

        The first backward pass outside the context, `clip_grad_norm_`, or `step()` averages them.
        """
        before = self.reducer.enabled
        self.reducer.enabled = False
        try:
            yield
        finally:
            self.reducer.enabled = before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Average the remaining gradients, clip all gradients, and return their total norm.

        The arguments are those of `torch.nn.utils.clip_grad_norm_`. Raise ValueError if `norm_type`
        is not positive. Every rank must call this method.
        """
        if self._uneven_inputs:
            self._uneven_inputs.announce("clip", (max_norm, norm_type))
        self.reducer.finish()
        # Joined ranks call this method too (`announce`), so collectives are allowed here.
        is_joining = self.communicator.is_joining
        self.communicator.is_joining = False
        try:
            return nn.utils.clip_grad_norm_(list(self.flat.views), max_norm, norm_type)
        finally:
            self.communicator.is_joining = is_joining

    def join_hook(self, **options: Any) -> UnevenInputs:
        """Return the hook for `torch.distributed.algorithms.Join`, which handles uneven inputs."""
        self._uneven_inputs = UnevenInputs(self, options)
        self.reducer.before_backward = partial(self._uneven_inputs.announce, "backward")
        return self._uneven_inputs

    @property
    def join_device(self) -> torch.device:
        """The device of the collectives of `Join`."""
        return self.communicator.device

    @property
    def join_process_group(self) -> Any:
        """The group of the collectives of `Join`."""
        return self.communicator.group or dist.group.WORLD

    def copy_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks; within `Join`, those of the last rank with inputs."""
        assert self.module is not None
        source = self._uneven_inputs.announce("buffers") if self._uneven_inputs else 0
        self.communicator.broadcast_buffers(self.module, source)

    def _check_state(self) -> None:
        """Raise RuntimeError if the caller has changed `state` in a way that has no effect."""
        entries = [p for p in self.flat.views if self.state.get(p)]
        if self.state is not self._exposed_state or entries:
            received = f"entries of {len(entries)} parameters" if entries else "another object"
            raise RuntimeError(
                "expected `state` to be changed in place, with the shards of parameters as keys, "
                f"got {received}, which would have no effect: change the entries in "
                "state.values() in place, use state.clear() or load_state_dict()"
            )
        for parameter in self.flat.views:
            # The caller may have created an empty entry by reading `state[parameter]`.
            if parameter in self.inner.state:
                del self.inner.state[parameter]

    def _assign_gradients(self) -> set[nn.Parameter]:
        """Assign this rank's averaged gradients to the inner optimizer's parameters.

        Return the parameters that have a gradient on any rank.
        """
        changes = option_checks.find_changed_options(self, self._options_after_step)
        check = partial(
            option_checks.check_options_match, changes=changes, communicator=self.communicator
        )
        used = self.reducer.finish(option_checks.make_checksum_flags(changes), check)
        self._check_equal_on_all_ranks()
        for parameter, piece, shard, bucket in self.flat.shards:
            # The caller may have set attributes since the last step, such as a learning rate.
            vars(shard).update(vars(parameter))
            shard.grad = None
            if parameter in used and bucket.average is not None:
                shard.grad = bucket.get_average(piece).view(shard.shape)
        return used

    def _copy_stored_gradients(self) -> None:
        """Copy gradients that the optimizer has stored as state, because their memory is reused."""
        if self._inner_cls in ELEMENTWISE or self._inner_cls in WHOLE_PARAMETERS:
            return
        for _, _, shard, _ in self.flat.shards:
            if shard.grad is None or shard not in self.inner.state:
                continue
            memory = shard.grad.untyped_storage().data_ptr()
            state = self.inner.state[shard]
            for key, value in state.items():
                if isinstance(value, Tensor) and value.untyped_storage().data_ptr() == memory:
                    state[key] = value.clone()

    def _check_equal_on_all_ranks(self) -> None:
        """Raise RuntimeError if parameters that were written to differ between ranks."""
        num_steps = self._num_steps + 1
        # A write through `.data` changes the values but not the version counter. All parameters are
        # compared at steps 1, 2, 4, 8, ..., so that the average cost per step becomes negligible.
        compares_all = num_steps & (num_steps - 1) == 0
        written = [p for p in self.flat.views if compares_all or p in self.reducer.written]
        if written and not written[0].is_meta and self.communicator.world > 1:
            check_equal_on_all_ranks(written, self.communicator)
        # A step that raised is not counted, so that the next one compares the same parameters.
        self._num_steps = num_steps


def _step_without_hooks(optimizer: torch.optim.Optimizer, **kwargs: Any) -> None:
    """Step a wrapped optimizer without torch's global hooks, which the outer step runs already."""
    step: Any = type(optimizer).step
    # `torch.optim.Optimizer.__init__` wraps `step` of the class in a function that runs hooks.
    if "step" not in vars(optimizer) and getattr(step, "hooked", False):
        step.__wrapped__(optimizer, **kwargs)
    else:
        optimizer.step(**kwargs)
