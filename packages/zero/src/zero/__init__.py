"""Shard what data parallelism replicates: optimizer state, gradients, parameters."""

from zero.checkpoint.checkpoint import Saving, load_checkpoint, save_checkpoint
from zero.checkpoint.weights import save_safetensors
from zero.direct import direct_all_gather, direct_reduce_scatter
from zero.fsdp.fsdp import FSDP
from zero.memory import MemoryReport, Moment, memory_report, zero_stage_bytes
from zero.optimizer.optimizer import ShardedOptimizer
from zero.wire import DryRun, Wire, wire_bytes

__all__ = [
    "FSDP",
    "DryRun",
    "MemoryReport",
    "Moment",
    "Saving",
    "ShardedOptimizer",
    "Wire",
    "direct_all_gather",
    "direct_reduce_scatter",
    "load_checkpoint",
    "memory_report",
    "save_checkpoint",
    "save_safetensors",
    "wire_bytes",
    "zero_stage_bytes",
]
