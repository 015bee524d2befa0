"""The learning rate of a step, and the steps with evaluations and checkpoints."""

from __future__ import annotations

import math

#: Peak learning rate relative to that of `train`, and the fraction of steps in the warm-up.
RATE, WARM = 2.0, 0.05


def is_due(step: int, total: int, times: int) -> bool:
    """Return True at equal intervals, `times` per training, and after the last step."""
    return step == total or step % max(1, total // times) == 0


def schedule(progress: float) -> float:
    """Return the learning-rate factor: a linear warm-up, then half a cosine."""
    return min(1.0, progress / WARM + 1e-2) * (0.05 + 0.475 * (1 + math.cos(math.pi * progress)))
