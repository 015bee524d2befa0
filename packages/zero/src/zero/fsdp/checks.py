"""Checks of a model that stage 3 will shard, and of the wrappers around it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from zero.diagnostics import describe_difference
from zero.fsdp.shard import find_unit
from zero.parameter_checks import check_shardable
from zero.process_groups import Communicator


def check_module(
    module: nn.Module, adopted: set[nn.Parameter], sharded_cls: type[nn.Module]
) -> None:
    """Raise if a module cannot be sharded."""
    for name, inner in module.named_modules():
        if isinstance(inner, sharded_cls):
            raise ValueError(
                f"{name or 'the module'} is FSDP already: wrap the whole model once, and select "
                "the layers that are gathered separately with shard=(...)"
            )
        is_embedding = isinstance(inner, nn.Embedding | nn.EmbeddingBag)
        if is_embedding and inner.max_norm is not None:
            raise ValueError(
                f"{name or 'the module'} is {type(inner).__name__}(max_norm={inner.max_norm}), "
                "whose forward writes to its weight, and stage 3 would lose the written values: "
                "pass max_norm=None and renormalize the rows after each step"
            )
    for name, parameter in module.named_parameters():
        if find_unit(parameter) is not None and parameter not in adopted:
            raise ValueError(f"parameter {name} is another FSDP's shard: wrap a model once")


def check_parameters(named: Sequence[tuple[str, nn.Parameter]], communicator: Communicator) -> None:
    """Raise if parameters differ between ranks, or cannot be sharded."""
    described = [
        (name, tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad)
        for name, parameter in named
    ]
    problem = describe_difference(communicator.gather_objects(described))
    if problem:
        raise ValueError(problem)
    check_shardable(named)
    for name, parameter in named:
        if _has_hooks(parameter):
            raise ValueError(
                f"parameter {name} has hooks, which FSDP's parameters would not have: register "
                "them on the parameters of FSDP(module)"
            )


def _has_hooks(parameter: nn.Parameter) -> bool:
    """Return True if a parameter has hooks, except those of a ShardedOptimizer."""
    hooks = {**(parameter._backward_hooks or {}), **(parameter._post_accumulate_grad_hooks or {})}
    modules = [getattr(hook, "__module__", None) or "" for hook in hooks.values()]
    return any(not module.startswith("zero.optimizer.") for module in modules)


def refuse_ddp(module: nn.Module) -> None:
    """Let torch's DDP find no parameters in a sharded module, so that it refuses to wrap it.

    DDP would wait for gradients that autograd never computes, and would copy rank 0's shards to the
    other ranks.
    """
    names = [name for name, _ in module.named_parameters()]
    module.__dict__["_ddp_params_and_buffers_to_ignore"] = names
