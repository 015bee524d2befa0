"""Replicate the model, average the gradients while the backward pass runs."""

from ddp.compression import Cast, Compression, PowerSGD
from ddp.ddp import DDP
from ddp.meter import BucketRecord, Meter, StepRecord
from ddp.naive import all_reduce_gradients, all_reduce_gradients_flat
from ddp.overhead import Overhead, fit, optimal_bucket_bytes, overhead_seconds

__all__ = [
    "DDP",
    "BucketRecord",
    "Cast",
    "Compression",
    "Meter",
    "Overhead",
    "PowerSGD",
    "StepRecord",
    "all_reduce_gradients",
    "all_reduce_gradients_flat",
    "fit",
    "optimal_bucket_bytes",
    "overhead_seconds",
]
