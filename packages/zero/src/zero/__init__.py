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


def __getattr__(name: str) -> Any:
    """Import the functions of checkpoints when they are first used.

    They need torch.distributed.checkpoint, whose import takes as long as that of torch.
    """
    if name not in ("load_checkpoint", "save_checkpoint"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from zero.checkpoint import checkpoint

    return getattr(checkpoint, name)
