"""ZeRO: optimizer state, gradients and parameters sharded over data-parallel ranks."""

from typing import TYPE_CHECKING, Any

from zero.fsdp.fsdp import FSDP
from zero.fsdp.fully_shard import FSDPModule, fully_shard
from zero.gloo_collectives import direct_all_gather, direct_reduce_scatter
from zero.memory import MemoryReport, Moment, memory_report, zero_stage_bytes
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.process_groups import Communicator, DryRun, wire_bytes

if TYPE_CHECKING:
    from zero.checkpoint.checkpoint import load_checkpoint, save_checkpoint

#: The modules of names that are imported on first access, because importing
#: torch.distributed.checkpoint takes as long as importing torch.
_LAZY = {
    "load_checkpoint": "zero.checkpoint.checkpoint",
    "save_checkpoint": "zero.checkpoint.checkpoint",
}


def __getattr__(name: str) -> Any:
    """Import the module of a name in `_LAZY`."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'zero' has no attribute {name!r}")


__all__ = [
    "FSDP",
    "Communicator",
    "DryRun",
    "FSDPModule",
    "MemoryReport",
    "Moment",
    "ShardedOptimizer",
    "direct_all_gather",
    "direct_reduce_scatter",
    "fully_shard",
    "load_checkpoint",
    "memory_report",
    "save_checkpoint",
    "wire_bytes",
    "zero_stage_bytes",
]
