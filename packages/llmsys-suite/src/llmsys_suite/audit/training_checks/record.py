"""The inputs of the checks of `plan` and `train`, so that a run folder can be audited again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from llmsys_suite.config import RunConfig
from llmsys_suite.folder import Sample
from llmsys_suite.measure.samples import CORE_WAIT, WHOLE_STEP, compute_loss_curves, count_ranks
from llmsys_suite.results import Plan, Train


def compute_clocked_seconds(sample: Sample) -> float:
    """Return the seconds of a step by the second clock.

    If this clock measured more time than the recorder, the rank may have waited for a core between
    their readings. The wait is subtracted, but not more than this difference.
    """
    passed: float = sample["ended"] - sample["began"]
    return passed - min(max(0.0, passed - sample["seconds"]), sample[CORE_WAIT])


@dataclass(frozen=True)
class Record:
    """Results, samples and evidence of a run."""

    config: RunConfig
    plan: Plan
    train: Train
    #: Samples of the stage `train`.
    samples: list[Sample]
    evidence: dict[str, Any]

    @property
    def num_steps(self) -> int:
        """The number of steps of each variant, warm-up included."""
        return self.config.warmup + self.config.steps

    @property
    def probes(self) -> dict[str, dict[str, Any]]:
        """The evidence of `probe` by variant."""
        variants: dict[str, dict[str, Any]] = self.evidence["probe"]
        return variants

    @cached_property
    def steps(self) -> dict[tuple[str, int], list[Sample]]:
        """The samples of whole steps, warm-up included, by variant and rank."""
        steps = defaultdict(list)
        for sample in self.samples:
            if sample["phase"] == WHOLE_STEP:
                steps[sample["variant"], sample["rank"]].append(sample)
        return steps

    def list_whole_steps(self, name: str) -> list[Sample]:
        """Return the samples of a variant's whole steps on all ranks."""
        steps_of_ranks = (steps for (variant, _), steps in self.steps.items() if variant == name)
        return list(chain(*steps_of_ranks))

    @cached_property
    def losses(self) -> dict[str, list[float]]:
        """The losses over the global batch of every step, by variant."""
        return compute_loss_curves(self.samples)

    def describe_missing(self) -> list[str]:
        """Return the variants and ranks that do not have exactly one loss or sample per step.

        Most checks would pass if there were no samples.
        """
        are_sockets_counted = self.evidence["sockets_count"]
        missing = []
        for name in self.probes:
            num_losses = len(self.train.losses.get(name, []))
            if num_losses != self.num_steps:
                missing.append(f"{name} has {num_losses} losses for {self.num_steps} steps")
            for rank in range(count_ranks(name, self.config.world)):
                steps = [
                    (sample["step"], sample["warmup"])
                    for sample in self.steps[name, rank]
                    if "received" in sample or not are_sockets_counted
                ]
                if steps != [(i, i < self.config.warmup) for i in range(self.num_steps)]:
                    missing.append(f"{name} does not have one sample per step on rank {rank}")
        return missing

    def compute_slowest_seconds(self) -> dict[str, dict[int, float]]:
        """Return {variant: {step: seconds of the slowest rank}} by the second clock.

        Warm-up steps are left out.
        """
        return self.reduce_by_step(compute_clocked_seconds, max)

    def reduce_by_step(
        self, seconds_of: Callable[[Sample], float], reduce: Callable[[list[float]], float]
    ) -> dict[str, dict[int, float]]:
        """Return {variant: {step: `reduce` of the ranks' seconds}} without warm-up steps."""
        seconds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for (name, _), samples in self.steps.items():
            for sample in samples:
                if not sample["warmup"]:
                    seconds[name][sample["step"]].append(seconds_of(sample))
        return {
            name: {step: reduce(rank_values) for step, rank_values in steps.items()}
            for name, steps in seconds.items()
        }
