"""The cost of a language model before it runs: parameters, FLOPs, memory, time and price."""

from typing import TYPE_CHECKING, Any

from accounting import fermi
from accounting.breakdown import Breakdown
from accounting.flops import flops, mfu
from accounting.hardware import HARDWARE, Hardware
from accounting.kv_cache import kv_cache
from accounting.memory.peak import peak_memory
from accounting.memory.training import training_memory
from accounting.model.records import MLA, Experts, Window
from accounting.model.transformer import Transformer
from accounting.parameters import parameters
from accounting.plan import Plan
from accounting.precision import PRECISIONS, Precision
from accounting.time.communication import communication
from accounting.time.roofline import roofline
from accounting.time.step import step_time
from accounting.workload import Workload

if TYPE_CHECKING:
    from accounting.memory.fits import fits
    from accounting.memory.ledger import Ledger
    from accounting.search.answer import plan_for
    from accounting.search.plans import plans_that_fit


_LAZY = {
    "Ledger": "accounting.memory.ledger",
    "fits": "accounting.memory.fits",
    "plan_for": "accounting.search.answer",
    "plans_that_fit": "accounting.search.plans",
}


def __getattr__(name: str) -> Any:
    """Return an object of `_LAZY`, whose module is imported on first access.

    These modules need torch or most of the package. Raises `ModuleNotFoundError` with the install
    command if torch is missing.
    """
    if name in _LAZY:
        from importlib import import_module

        try:
            return getattr(import_module(_LAZY[name]), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            message = f'{name} needs torch, which is missing: pip install "accounting[torch]"'
            raise ModuleNotFoundError(message, name="torch") from error
    raise AttributeError(f"module 'accounting' has no attribute {name!r}")


__all__ = [
    "HARDWARE",
    "MLA",
    "PRECISIONS",
    "Breakdown",
    "Experts",
    "Hardware",
    "Ledger",
    "Plan",
    "Precision",
    "Transformer",
    "Window",
    "Workload",
    "communication",
    "fermi",
    "fits",
    "flops",
    "kv_cache",
    "mfu",
    "parameters",
    "peak_memory",
    "plan_for",
    "plans_that_fit",
    "roofline",
    "step_time",
    "training_memory",
]
