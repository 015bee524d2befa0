"""Tolerances of several checks.

Those on weights, gradients and losses are the largest deviation that tests/test_honest.py finds in
fault-free runs, times the factor stated in the comment. The other tolerances are chosen limits.
"""

from llmsys_suite.config import RunConfig

#: Distance of a float32 gradient from float64 per parameter: 8e-7 at most, times six.
GRADIENT = 5e-6
#: Relative difference of the first losses: 4e-7 at most, times five.
REPLAYED_LOSS = 2e-6
#: Adam divides small gradients by their magnitude, so rounding grows with every step: after n
#: steps weight changes differ by 1e-4 sqrt(n) and losses by 2e-6 sqrt(n) at most, times five.
WEIGHT_CHANGE = 5e-4
LOSS = 1e-5
#: Distance of DiLoCo's first rounds with one row per rank. A weight whose gradient is only rounding
#: takes a whole step in either direction. Over 300 seeds 1.3e-3 at most, times five.
DILOCO_WEIGHT_CHANGE = 6.5e-3
#: Ratio of DiLoCo's last loss to one process's, because its ranks diverge: at most 1.084 over the
#: first 50 steps and six seeds of the tiny model. The band is twice as wide.
DILOCO_LOSS_RATIO = 1.17
#: Sums of two to sixteen numbers in float32 beside float64: 1e-7. Times ten.
SUMS = 1e-6
#: The temporary memory of operators is not predicted; CPU kernels use more of it.
PEAK_BYTES = {"cpu": 0.10, "cuda": 0.05}
#: Allowed relative difference between two clocks that are read in succession.
CLOCK = 0.02
#: Allowed factor between times of the same work at different moments or depths. It detects a factor
#: of two, regardless of the load that other programs put on the caches.
BAND = 1.6
#: Allowed factor between the shortest times of the same work at different moments, of which other
#: programs may disturb one.
SHORTEST_BAND = 3.0
#: Allowed factor between rates of a product that are measured in two processes.
RATE_BAND = 2.5
#: Allowed factor between a peer of the run and the audit's, timed in the same rounds.
PEER_BAND = 1.4
#: Relative rounding of a loss, and of the change of weights by AdamW, by the dtype of products.
LOSS_IN_DTYPE = {"fp32": 0.0, "tf32": 2.5e-3, "bf16": 1e-2}
WEIGHT_CHANGE_IN_DTYPE = {"fp32": 0.0, "tf32": 0.1, "bf16": 0.4}


def loss_tolerance(config: RunConfig, tolerance: float) -> float:
    """Return the tolerance of a loss: that of float32, or the rounding of the run's dtype."""
    return max(tolerance, LOSS_IN_DTYPE[config.dtype])


def weight_tolerance(config: RunConfig, tolerance: float) -> float:
    """Return the tolerance of a change of weights, as for losses."""
    return max(tolerance, WEIGHT_CHANGE_IN_DTYPE[config.dtype])
