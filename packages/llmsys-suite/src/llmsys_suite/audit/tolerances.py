"""Tolerances that several checks share.

A tolerance whose comment states a factor is this factor times the largest deviation that
tests/test_honest.py measured in fault-free runs. The other tolerances are chosen limits.
"""

from llmsys_suite.config import RunConfig

#: Relative distance of each float32 gradient from float64. Measured: at most 8e-7; factor 6.
GRADIENT = 5e-6
#: `compute_loss_difference` of a loss from float64. Measured: at most 4e-7; factor 5.
REPLAYED_LOSS = 2e-6
#: Differences of weight changes and of losses after n steps, divided by sqrt(n). Adam divides small
#: gradients by their magnitude, so rounding errors grow with every step. Measured: at most 1e-4 for
#: weight changes and 2e-6 for losses; factor 5.
WEIGHT_CHANGE = 5e-4
LOSS = 1e-5
#: Error of sums of two to sixteen numbers in float32. Measured: 1e-7; factor 10.
SUMS = 1e-6
#: Relative error of predicted peaks, which omit the temporary memory inside operators. CPU kernels
#: use more of it.
PEAK_BYTES = {"cpu": 0.10, "cuda": 0.05}
#: Allowed relative difference between two clocks that are read in succession.
CLOCK = 0.02
#: Allowed factor between times of the same work at different moments or depths. It detects a factor
#: of two, regardless of the load that other programs put on the caches.
BAND = 1.6
#: Factor by which a stage's shortest time may be below the audit's shortest time.
SHORTEST_BAND = 3.0
#: Maximum seconds for which the audit repeats a timing that disagrees with the stage's timing.
MAX_RETIMING_S = 5.0
#: Allowed ratios of the run's time to the audit's time for the same torch baseline (DDP or FSDP2):
#: wall time without waits for a core, and CPU time. At a load average of up to 30 on two cores,
#: fault-free ratios over 20 rounds reached 1.32 and 1.18.
NEEDED_BAND = 1.4
PROCESSOR_BAND = 1.25
#: Allowed relative rounding error of a loss, and of AdamW's weight changes, by dtype of products.
LOSS_IN_DTYPE = {"fp32": 0.0, "tf32": 2.5e-3, "bf16": 1e-2}
WEIGHT_CHANGE_IN_DTYPE = {"fp32": 0.0, "tf32": 0.1, "bf16": 0.4}
#: Distance of AdamW's moments from float64 by dtype of products. In bf16, measured distances of
#: gradients are at most 0.012; factor 5. tf32 has three more bits.
MOMENTS = {"fp32": GRADIENT, "tf32": 1e-2, "bf16": 6e-2}


def compute_loss_tolerance(config: RunConfig, tolerance: float) -> float:
    """Return the larger of a loss tolerance in float32 and the rounding of the run's dtype."""
    return max(tolerance, LOSS_IN_DTYPE[config.dtype])


def compute_weight_tolerance(config: RunConfig, tolerance: float) -> float:
    """Return the larger of a weight tolerance in float32 and the rounding of the run's dtype."""
    return max(tolerance, WEIGHT_CHANGE_IN_DTYPE[config.dtype])
