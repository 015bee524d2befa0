"""ZeRO: optimizer state, gradients and parameters sharded over data-parallel ranks."""

from zero.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from zero.fsdp.fsdp import FSDP
from zero.fsdp.fully_shard import FSDPModule, fully_shard
from zero.gloo_collectives import direct_all_gather, direct_reduce_scatter
from zero.memory import MemoryReport, Moment, memory_report, zero_stage_bytes
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.process_groups import Communicator, DryRun, wire_bytes

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
