"""The inputs of the checks of `plan` and `train`, so that a run folder can be audited again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llmsys_suite.config import RunConfig
from llmsys_suite.folder import Sample
from llmsys_suite.measure.samples import CORE_WAIT, WHOLE_STEP, loss_curves, ranks_of
from llmsys_suite.results import Plan, Train


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
        """The samples of whole steps by variant and rank."""
        steps = defaultdict(list)
        for s in self.samples:
            if s["phase"] == WHOLE_STEP:
                steps[s["variant"], s["rank"]].append(s)
        return steps

    def steps_of(self, name: str) -> list[Sample]:
        """Return the samples of a variant's whole steps on all ranks."""
        return [s for (variant, _), steps in self.steps.items() if variant == name for s in steps]

    @cached_property
    def losses(self) -> dict[str, list[float]]:
        """The losses over the global batch by variant."""
        return loss_curves(self.samples)

    def missing(self) -> list[str]:
        """Return missing and unexpected losses and samples. Most checks would pass without them."""
        counted = self.evidence["sockets_count"]
        missing = []
        for name in self.probes:
            if len(self.train.losses.get(name, [])) != self.num_steps:
                missing.append(f"{name}: a loss of every step")
            for rank in range(ranks_of(name, self.config.world)):
                samples = (s for s in self.steps[name, rank] if "received" in s or not counted)
                steps = [(s["step"], s["warmup"]) for s in samples]
                if steps != [(i, i < self.config.warmup) for i in range(self.num_steps)]:
                    missing.append(f"{name} rank {rank}: one sample of every step")
        return missing

    def slowest_seconds(self) -> dict[str, dict[int, float]]:
        """Return {variant: {step: seconds of the slowest rank}}, measured by the second clock.

        The time for which the rank waited for a core is subtracted, up to the difference between
        the two clocks.
        """

        def seconds(s: Sample) -> float:
            passed: float = s["ended"] - s["began"]
            return passed - min(max(0.0, passed - s["seconds"]), s[CORE_WAIT])

        return self.by_step(seconds, max)

    def by_step(
        self, seconds: Callable[[Sample], float], of_ranks: Callable[[list[float]], float]
    ) -> dict[str, dict[int, float]]:
        """Return `of_ranks` of the ranks' seconds by variant and step, without warm-up steps."""
        ranks: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for (name, _), rank_samples in self.steps.items():
            for s in rank_samples:
                if not s["warmup"]:
                    ranks[name][s["step"]].append(seconds(s))
        return {
            name: {step: of_ranks(values) for step, values in steps.items()}
            for name, steps in ranks.items()
        }
