"""The inputs of the checks of `plan` and `train`, so that a run folder can be audited again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

from llmsys_suite.config import RunConfig
from llmsys_suite.folder import Sample
from llmsys_suite.measure.samples import CORE_WAIT, PHASES, WHOLE_STEP, loss_curves, ranks_of
from llmsys_suite.results import Plan, Train

#: Parts of the evidence of `plan` and `train`.
PARTS = {
    "config", "probe", "split", "peers", "product_flops_per_second", "shares_memory",
    "sockets_count", "row_digests", "initial_scales", "model_counts", "saved_bytes", "trajectory",
}  # fmt: skip
#: Required keys of each row of `train`, of each variant's final weights, and of each step's sample.
ROW_KEYS = ("step_ms", "mfu", "final_loss", *(f"{phase}_share" for phase in PHASES))
WEIGHT_KEYS = ("ranks", "differ", "from_one_process", "stored")
SAMPLE_KEYS = {"loss", "seconds", "began", "ended", "row_digests", CORE_WAIT}


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

    @cached_property
    def losses(self) -> dict[str, list[float]]:
        """The losses over the global batch by variant."""
        return loss_curves(self.samples)

    def missing(self) -> list[str]:
        """Return the results, samples and evidence that are missing although checks read them."""
        missing = [f"evidence of {part}" for part in sorted(PARTS - self.evidence.keys())]
        if missing:
            return missing
        rows = {row.get("variant"): row for row in self.train.rows}
        for name in self.probes:
            # A variant without a row is named by the check of the variants.
            if name in rows:
                missing += [f"{name}: {key}" for key in ROW_KEYS if key not in rows[name]]
            if len(self.train.losses.get(name, [])) != self.num_steps:
                missing.append(f"{name}: a loss of every step")
            weights = self.train.final_weights.get(name, {})
            missing += [f"{name}: {key}" for key in WEIGHT_KEYS if key not in weights]
            missing += self._missing_samples(name)
        return missing

    def _missing_samples(self, name: str) -> list[str]:
        """Return the steps of a variant without exactly one complete sample of each rank."""
        keys = SAMPLE_KEYS | ({"received"} if self.evidence["sockets_count"] else set())
        steps = []
        for rank in range(ranks_of(name, self.config.world)):
            samples = defaultdict(list)
            for s in self.steps[name, rank]:
                samples[s["step"]].append(s)
            for step in range(self.num_steps):
                where = f"{name} step {step} rank {rank}"
                if len(samples[step]) != 1:
                    steps.append(where)
                    continue
                (s,) = samples[step]
                steps += [f"{where}: {key}" for key in sorted(keys - s.keys())]
                if s["warmup"] != (step < self.config.warmup):
                    steps.append(f"{where}: warmup")
        return steps

    def slowest_seconds(self) -> dict[str, dict[int, float]]:
        """Return {variant: {step: seconds of the slowest rank}}, measured by the second clock.

        The time for which the rank waited for a core is subtracted, up to the difference between
        the two clocks.
        """

        def seconds(s: Sample) -> float:
            passed: float = s["ended"] - s["began"]
            return passed - min(max(0.0, passed - s["seconds"]), s[CORE_WAIT])

        return self._slowest(seconds)

    def recorded_seconds(self) -> dict[str, dict[int, float]]:
        """Return {variant: {step: seconds of the slowest rank}}, measured by the recorder."""
        return self._slowest(itemgetter("seconds"))

    def _slowest(self, seconds: Callable[[Sample], float]) -> dict[str, dict[int, float]]:
        """Return the largest of the ranks' seconds by variant and step, without warm-up steps."""
        slowest: dict[str, dict[int, float]] = defaultdict(dict)
        for (name, _), rank_samples in self.steps.items():
            for s in rank_samples:
                if not s["warmup"]:
                    slowest[name][s["step"]] = max(slowest[name].get(s["step"], 0.0), seconds(s))
        return slowest
