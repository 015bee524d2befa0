"""What a language model costs, before it runs: size, arithmetic, memory, traffic, time, money."""

from accounting import fermi
from accounting.breakdown import Breakdown
from accounting.flops import flops, hfu, mfu
from accounting.hardware import HARDWARE, Hardware
from accounting.kv_cache import kv_cache
from accounting.memory.peak import peak_memory
from accounting.memory.training import training_memory
from accounting.model.transformer import Transformer
from accounting.parameters import parameters
from accounting.plan import Plan
from accounting.precision import PRECISIONS, Precision
from accounting.search.plans import plans_that_fit
from accounting.time.communication import communication
from accounting.time.roofline import roofline
from accounting.time.step import step_time

__all__ = [
    "HARDWARE",
    "PRECISIONS",
    "Breakdown",
    "Hardware",
    "Plan",
    "Precision",
    "Transformer",
    "communication",
    "fermi",
    "flops",
    "hfu",
    "kv_cache",
    "mfu",
    "parameters",
    "peak_memory",
    "plans_that_fit",
    "roofline",
    "step_time",
    "training_memory",
]
