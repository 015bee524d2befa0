"""ZeRO: optimizer state, gradients and parameters sharded over data-parallel ranks."""

from zero.checkpoint.checkpoint import Saving, load_checkpoint, save_checkpoint
from zero.checkpoint.weights import save_safetensors
from zero.fsdp.fsdp import FSDP
from zero.gloo_collectives import direct_all_gather, direct_reduce_scatter
from zero.memory import MemoryReport, Moment, memory_report, zero_stage_bytes
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.process_groups import Communicator, DryRun, wire_bytes

__all__ = [
    "FSDP",
    "Communicator",
    "DryRun",
    "MemoryReport",
    "Moment",
    "Saving",
    "ShardedOptimizer",
    "direct_all_gather",
    "direct_reduce_scatter",
    "load_checkpoint",
    "memory_report",
    "save_checkpoint",
    "save_safetensors",
    "wire_bytes",
    "zero_stage_bytes",
]
