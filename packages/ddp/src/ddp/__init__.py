"""Data parallelism: replicate a module, and average its gradients during the backward pass."""

from ddp.ddp import DDP
from ddp.metering.meter import Meter
from ddp.metering.overhead import optimal_bucket_bytes, overhead_seconds
from ddp.metering.records import BucketRecord, StepRecord
from ddp.naive import all_reduce_gradients, all_reduce_gradients_flat

__all__ = [
    "DDP",
    "BucketRecord",
    "Meter",
    "StepRecord",
    "all_reduce_gradients",
    "all_reduce_gradients_flat",
    "optimal_bucket_bytes",
    "overhead_seconds",
]
