"""`fully_shard` with the signature of torch's FSDP2, so that only the import must change.

The module stays the same object, and its class gets the methods of `FSDPModule`. Each call creates
an FSDP of the module, which takes over the units of its submodules that were passed earlier.
FSDP2.md lists the differences from torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero.fsdp.fsdp import FSDP, FULLY_SHARDED
from zero.fsdp.unit import Unit
from zero.parameter_checks import hide_from_ddp

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: None = None,
) -> nn.Module:
    """Shard the parameters of `module` that no inner call has sharded or ignored.

    They form one unit per dtype; frozen parameters form separate units. Call this function
    bottom-up: for each block, then for the model. The module is changed in place and returned; its
    `parameters()` are this rank's shards. The arguments are those of
    `torch.distributed.fsdp.fully_shard`. Raise ValueError for unsupported arguments, and for a
    module that was passed before or whose parameters cannot be sharded.
    """
    # Importing this module takes as long as importing torch.
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    _check_module(module)
    unsupported: dict[str, Any] = {
        "shard_placement_fn": shard_placement_fn,
        "dp_mesh_dims": dp_mesh_dims,
        "offload_policy": offload_policy if isinstance(offload_policy, CPUOffloadPolicy) else None,
        "param_dtype_override_fn": getattr(mp_policy, "param_dtype_override_fn", None),
    }
    if not isinstance(reshard_after_forward, bool):
        unsupported["reshard_after_forward"] = reshard_after_forward
    for name, value in unsupported.items():
        if value is not None:
            raise ValueError(
                f"{name}={value} is not supported, because a unit has one dtype and is sharded "
                "over all ranks, on the device of its module: omit it"
            )
    sharded_modules = _list_sharded_modules(module)
    _check_resharded(sharded_modules)
    policy = mp_policy or MixedPrecisionPolicy()
    inner = dict.fromkeys(_get_fsdp(sharded) for sharded in sharded_modules)
    fsdp = FSDP(
        module,
        policy.param_dtype,
        gradient_dtype=policy.reduce_dtype,
        group=mesh,
        shard=lambda _, candidate: candidate is module,
        reshard_after_forward=reshard_after_forward is not False,
        ignored_params=ignored_params or (),
        inner=list(inner),
    )
    if policy.reduce_dtype is None:
        # As in torch since 2.15, gradients are reduced in the dtype of the sharded parameter.
        for unit in fsdp.units_of.get(module, []):
            unit.gradients.dtype = unit.shard.dtype
    if not policy.cast_forward_inputs:
        fsdp.input_dtypes[module] = None
    if policy.output_dtype is not None:
        fsdp.output_dtypes[module] = policy.output_dtype
    cls: Any = type(module)
    module.__class__ = _make_sharded_class(cls)
    hide_from_ddp(module)
    for sharded in _list_sharded_modules(module):
        sharded.__dict__[FULLY_SHARDED] = fsdp
    return module


class FSDPModule:
    """The methods that `fully_shard` adds to a module."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct an object of the original class, for example a slice of a container."""
        original = cls.__mro__[cls.__mro__.index(FSDPModule) + 1]
        return original(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        # Without this method, a copy would first construct a module without arguments.
        raise AssertionError(
            "a module passed to fully_shard cannot be copied; copy it before calling fully_shard, "
            "then load this module's state_dict() into the copy"
        )

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module; return a handle if `async_op`, otherwise None."""
        handle = UnshardHandle(_list_units(self))
        for unit in handle.units:
            unit.unshard()
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the full parameters of this module, unless it is running."""
        for unit in _list_units(self):
            unit.set_unsharded_by_caller(False)
            unit.reshard()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether the next backward passes average gradients or accumulate them locally."""
        for unit in _list_units(self, recurse):
            unit.gradients.sync = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether the forward pass frees the parameters or keeps them for the backward pass."""
        for unit in _list_units(self, recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Do nothing, because every backward pass completes without this call."""

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Do nothing, because every backward pass frees the parameters; results do not change."""

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Prefetch at least `len(modules)` units, in the order of the last forward pass.

        The number applies to all modules of the model, in forward and backward passes.
        """
        _get_fsdp(self).prefetch = max(_get_fsdp(self).prefetch, len(modules))

    set_modules_to_backward_prefetch = set_modules_to_forward_prefetch


class UnshardHandle:
    """The handle of all-gathers that `FSDPModule.unshard(async_op=True)` has started."""

    def __init__(self, units: list[Unit]) -> None:
        self.units = units

    def wait(self) -> None:
        """Wait until the full parameters have been gathered.

        They stay registered until `reshard` or the end of the module's next forward pass.
        """
        for unit in self.units:
            unit.wait_for_unshard()
            unit.set_unsharded_by_caller(True)


def _check_module(module: Any) -> None:
    """Raise ValueError if `module` is not a module, or was passed to `fully_shard` before."""
    if isinstance(module, FSDPModule):
        raise ValueError(f"{type(module).__name__} was passed to fully_shard before: pass it once")
    if not isinstance(module, nn.Module):
        raise ValueError(
            "expected one module, because each call shards one module, got a "
            f"{type(module).__name__}: pass a module that contains all of them"
        )


def _check_resharded(sharded_modules: list[Any]) -> None:
    """Raise ValueError if modules of earlier calls have full parameters, which cannot be adopted.

    The shards of these modules would be missing among the parameters of the outer module.
    """
    for unit in (unit for module in sharded_modules for unit in _list_units(module)):
        if unit.is_used:
            raise ValueError(
                "expected sharded parameters in the modules passed to earlier calls, got full "
                f"parameters of {unit.label}, which unshard() has gathered: call reshard() first"
            )


def _get_fsdp(module: Any) -> FSDP:
    return cast(FSDP, vars(module)[FULLY_SHARDED])


def _list_units(module: Any, recurse: bool = False) -> list[Unit]:
    fsdp = _get_fsdp(module)
    modules = _list_sharded_modules(module) if recurse else [module]
    return [unit for sharded in modules for unit in fsdp.units_of.get(sharded, [])]


def _list_sharded_modules(module: Any) -> list[Any]:
    return [inner for inner in module.modules() if isinstance(inner, FSDPModule)]


@cache
def _make_sharded_class(cls: Any) -> type[nn.Module]:
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
