"""Replicate the model, average the gradients while the backward pass runs."""

from ddp.compression.ways import Cast, Compression, PowerSGD
from ddp.ddp import DDP
from ddp.metering.meter import Meter
from ddp.metering.records import BucketRecord, StepRecord
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
