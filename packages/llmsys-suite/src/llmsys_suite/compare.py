"""Two runs side by side: which variants became faster or slower, and whether the samples can tell.

The figure is the ratio of median step times, after over before, with a bootstrap interval; where
the interval holds 1 the answer is that the samples cannot tell.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmsys_suite.config import UsageError
from llmsys_suite.folder import RunFolder
from llmsys_suite.samples import step_seconds

RESAMPLES = 2000
#: Facts of the environment and of the configuration without which times do not compare.
SAME_ENVIRONMENT = ("processor", "cores", "gpus")
SAME_CONFIG = ("size", "world", "device", "rows", "context")


@dataclass(frozen=True)
class Comparison:
    """One variant: time after over time before, and its 95 % interval."""

    variant: str
    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Faster, slower, or not distinguishable."""
        if self.low <= 1.0 <= self.high:
            return "not distinguishable"
        return "slower" if self.ratio > 1.0 else "faster"

    def __str__(self) -> str:
        return (
            f"{self.variant:>20}  {self.ratio:6.3f}x  "
            f"[{self.low:.3f}, {self.high:.3f}]  {self.verdict}"
        )


def compare_runs(before: RunFolder, after: RunFolder, *, seed: int = 0) -> list[Comparison]:
    """One row for each variant that both runs trained.

    Raises UsageError where a run is incomplete, or the machine or the model differ.
    """
    _require_comparable(before, after)
    old, new = (step_seconds(_train_samples(folder)) for folder in (before, after))
    random = np.random.default_rng(seed)
    return [
        _compare(name, list(old[name].values()), list(new[name].values()), random)
        for name in old
        if name in new
    ]


def too_slow(rows: list[Comparison], percent: float) -> bool:
    """Whether any variant is slower by more than `percent`, beyond doubt."""
    return any(row.ratio > 1 + percent / 100 and row.verdict == "slower" for row in rows)


def _compare(
    name: str, before: list[float], after: list[float], random: np.random.Generator
) -> Comparison:
    medians = [
        np.median(random.choice(values, (RESAMPLES, len(values))), axis=1)
        for values in (before, after)
    ]
    low, high = np.quantile(medians[1] / medians[0], [0.025, 0.975])
    return Comparison(name, float(np.median(after) / np.median(before)), float(low), float(high))


def _train_samples(folder: RunFolder) -> list[dict[str, object]]:
    return [sample for sample in folder.samples() if sample["stage"] == "train"]


def _require_comparable(before: RunFolder, after: RunFolder) -> None:
    for folder in (before, after):
        if not folder.complete:
            raise UsageError(f"{folder.path} is an incomplete run; compare complete ones")
    for name, keys in (("env.json", SAME_ENVIRONMENT), ("config.json", SAME_CONFIG)):
        old, new = before.read_json(name), after.read_json(name)
        for key in keys:
            if old[key] != new[key]:
                raise UsageError(
                    f"the runs differ in {key}: {old[key]} and {new[key]}; "
                    "their times do not compare"
                )
