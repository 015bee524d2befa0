"""Two runs side by side: which variants became faster or slower, and whether the samples can tell.

Notable:
- a figure is paired by round: a variant's time over the peer's on the same rank in the same round,
  so that what slows a second slows both; runs are compared by these ratios, never by times;
- rounds in which a rank waited for a core that another program had are left out, because such a
  wait does not cost all variants alike; where most are such, there is no verdict;
- "slower" is said only where the whole 95 % interval lies beyond half of what is to be resolved:
  two runs of the same code differ a little by where their memory happens to lie; and only where it
  would be said of none of all variants by chance, 19 times in 20, however few the rounds are;
- a slow second outlasts a round: rounds that resemble the ones before them count for fewer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from llmsys_suite.config import UsageError
from llmsys_suite.folder import RunFolder, Sample
from llmsys_suite.measure.samples import PEER, WHOLE_STEP, loss_curves

Array = np.ndarray
#: Variant -> log of its time over the peer's, round by round; how many rounds were disturbed.
Ratios = dict[str, tuple[Array, int]]
RESAMPLES = 400
#: A step is disturbed if its rank was kept from a core for more than this share of it.
DISTURBED = 0.05
#: Rounds to be left for a verdict, and the share of all rounds.
LEAST_ROUNDS, LEAST_SHARE = 15, 0.5
#: Standard errors in half a resolution: 1.96 for the interval, 1.64 to find what is as large as it
#: 19 times in 20, and a tenth more since the error itself is estimated.
ERRORS_IN_HALF = 1.1 * (1.96 + 1.64)
#: Of a verdict on any variant, where the code is the same.
CHANCE = 0.05
#: Without these two runs do not compare; where the others differ, times may too.
MUST_AGREE = {
    "env.json": ("processor", "cores", "gpus"),
    "config.json": ("size", "world", "device", "backend", "rows", "context"),
}
SHOULD_AGREE = {
    "env.json": ("cpu_flags", "python", "torch", "platform", "driver", "governor", "text"),
    "config.json": ("seed", "steps", "warmup", "learning_rate", "stages"),
}
#: A loss on another machine: the audit's tolerance for one process and many.
LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Comparison:
    """One variant: its time after over its time before, both in units of the peer's."""

    variant: str
    ratio: float
    low: float
    high: float
    rounds: int
    disturbed: int
    resolve: float
    #: How likely so large a ratio is by chance, in any of the variants that are compared.
    chance: float = 0.0

    @property
    def resolved(self) -> float:
        """The least difference that so many rounds find nine times in ten."""
        error = math.log(self.high / self.low) / (2 * 1.96)
        return 2 * ERRORS_IN_HALF * error

    @property
    def verdict(self) -> str:
        """Slower, faster, or cannot tell."""
        total = self.rounds + self.disturbed
        if self.rounds < max(LEAST_ROUNDS, LEAST_SHARE * total) or self.chance > CHANCE:
            return "cannot tell"
        if self.low > 1 + self.resolve / 2:
            return "slower"
        return "faster" if self.high < 1 / (1 + self.resolve / 2) else "cannot tell"

    def __str__(self) -> str:
        line = f"{self.variant:>20}  {self.ratio:6.3f}x  [{self.low:.3f}, {self.high:.3f}]  "
        total = self.rounds + self.disturbed
        if math.isnan(self.ratio):
            line = f"{self.variant:>20}  {self.rounds} of {total} rounds to go by  "
        line += self.verdict
        if self.disturbed > total * (1 - LEAST_SHARE):
            return f"{line}: other programs had the cores in {self.disturbed} of {total} rounds"
        if self.verdict == "cannot tell" and self.resolved > self.resolve:
            needed = math.ceil(self.rounds * (self.resolved / self.resolve) ** 2)
            line += (
                f": {self.rounds} rounds resolve {self.resolved:.0%}; "
                f"{self.resolve:.0%} needs about --steps {needed}"
            )
        return line


def compare_runs(
    before: RunFolder, after: RunFolder, *, resolve: float = 0.05, seed: int = 0
) -> list[Comparison]:
    """One row for each variant but the peer that both runs trained.

    Raises UsageError where a run is incomplete, edited or of another version, or where machine or
    model differ.
    """
    require_comparable(before, after)
    old, new = (round_ratios(folder.samples()) for folder in (before, after))
    return compare_ratios(old, new, resolve=resolve, seed=seed)


def compare_ratios(
    old: Ratios, new: Ratios, *, resolve: float = 0.05, seed: int = 0
) -> list[Comparison]:
    """One row for each variant of both."""
    random = np.random.default_rng(seed)
    names = [name for name in old if name in new]
    return [_compare(n, old[n], new[n], resolve, len(names), random) for n in names]


def too_slow(rows: list[Comparison], percent: float) -> bool:
    """Whether any variant is slower by more than `percent`, beyond doubt."""
    return any(row.low > 1 + percent / 100 and row.verdict == "slower" for row in rows)


def warnings(before: RunFolder, after: RunFolder) -> list[str]:
    """Where the runs differ in what times, losses or both may depend on."""
    found = []
    for file, keys in SHOULD_AGREE.items():
        old, new = before.read_json(file), after.read_json(file)
        for key in keys:
            if old.get(key) != new.get(key):
                found.append(f"the runs differ in {key}: {_short(old.get(key), new.get(key))}")
    return found


def differences(before: RunFolder, after: RunFolder) -> Iterator[str]:
    """For `--assert-equal`: every loss and every count in which the runs are not the same."""
    require_comparable(before, after)
    for key in ("seed", "steps", "warmup", "learning_rate"):
        old, new = (getattr(folder.config, key) for folder in (before, after))
        if old != new:
            yield f"{key}: {old} and {new}"
    old_curves, new_curves = (
        loss_curves([s for s in folder.samples() if s["stage"] == "train"])
        for folder in (before, after)
    )
    for name in old_curves.keys() | new_curves.keys():
        ours, theirs = old_curves.get(name, []), new_curves.get(name, [])
        if len(ours) != len(theirs):
            yield f"{name}: {len(ours)} losses and {len(theirs)}"
        tolerance = LOSS_TOLERANCE * math.sqrt(max(1, len(ours)))
        for step, (x, y) in enumerate(zip(ours, theirs, strict=False)):
            if not abs(y - x) <= tolerance * abs(x):
                yield f"{name}, loss of step {step}: {x:.9g} and {y:.9g}"
                break
    old_counts, new_counts = (dict(_counts(folder.summary["stages"])) for folder in (before, after))
    for key in sorted(old_counts.keys() | new_counts.keys()):
        if old_counts.get(key) != new_counts.get(key):
            yield f"{key}: {old_counts.get(key)} and {new_counts.get(key)}"


def require_comparable(before: RunFolder, after: RunFolder) -> None:
    """UsageError where a folder is not whole, or machine or model differ."""
    for folder in (before, after):
        folder.require_whole()
        if not folder.complete:
            raise UsageError(f"{folder.path} is an incomplete run; compare complete ones")
        if "train" not in folder.summary["stages"]:
            raise UsageError(f"{folder.path} trained nothing; compare runs of the stage train")
    for name, keys in MUST_AGREE.items():
        old, new = before.read_json(name), after.read_json(name)
        for key in keys:
            if old.get(key) != new.get(key):
                raise UsageError(
                    f"the runs differ in {key}: {_short(old.get(key), new.get(key))}; "
                    "their times do not compare"
                )


def round_ratios(samples: list[Sample]) -> Ratios:
    """Variant -> log of its time over the peer's by round, the ranks' mean; disturbed rounds."""
    steps: dict[str, dict[int, dict[int, Sample]]] = defaultdict(lambda: defaultdict(dict))
    for s in samples:
        if s["stage"] == "train" and s["phase"] == WHOLE_STEP and not s["warmup"]:
            steps[s["variant"]][s["step"]][s["rank"]] = s
    found = {}
    for name, rounds in steps.items():
        if name == PEER:
            continue
        ratios, disturbed = [], 0
        for step, ours in rounds.items():
            peer = steps[PEER][step]
            pairs = [(s, peer[rank]) for rank, s in ours.items() if rank in peer]
            if any(_disturbed(s) for pair in pairs for s in pair):
                disturbed += 1
            elif pairs:
                logs = [math.log(s["seconds"] / p["seconds"]) for s, p in pairs]
                ratios.append(sum(logs) / len(logs))
        found[name] = np.array(ratios), disturbed
    return found


def _compare(
    name: str,
    before: tuple[Array, int],
    after: tuple[Array, int],
    resolve: float,
    among: int,
    random: np.random.Generator,
) -> Comparison:
    (old, old_lost), (new, new_lost) = before, after
    rounds, lost = min(len(old), len(new)), max(old_lost, new_lost)
    if rounds < 2:
        return Comparison(name, math.nan, 0.0, math.inf, rounds, lost, resolve)
    away = _middle(new) - _middle(old)
    (old_error, old_free), (new_error, new_free) = _error(old, random), _error(new, random)
    error, free = math.hypot(old_error, new_error), min(old_free, new_free)
    half = _student(0.975, free) * error
    low, high = math.exp(away - half), math.exp(away + half)
    chance = among * 2 * _beyond(abs(away) / error if error else math.inf, free)
    return Comparison(name, math.exp(away), low, high, rounds, lost, resolve, chance)


def _middle(logs: Array) -> float:
    """The mean of the middle half: a median that wastes less."""
    cut = len(logs) // 4
    return float(np.sort(logs)[cut : len(logs) - cut].mean())


def _error(logs: Array, random: np.random.Generator) -> tuple[float, float]:
    """The standard error of the middle by resampled rounds, and how many of them are free.

    What pulls the middle is each round cut to the quartiles; where that resembles the round's
    before by a share r, n rounds tell as much as n (1 - r) / (1 + r).
    """
    n = len(logs)
    drawn = np.sort(logs[random.integers(0, n, (RESAMPLES, n))], axis=1)
    cut = n // 4
    alone = float(drawn[:, cut : n - cut].mean(1).std())
    pull = logs.clip(*np.quantile(logs, [0.25, 0.75]))
    pull = pull - pull.mean()
    found = float(pull[1:] @ pull[:-1] / max(pull @ pull, 1e-300))
    # What a short series shows is too low, and uncertain by 1 / sqrt(n).
    alike = min(max(found + (1 + 4 * max(found, 0.0)) / n + 0.5 / math.sqrt(n), 0.0), 0.9)
    free = n * (1 - alike) / (1 + alike)
    return alone * math.sqrt(n / free), max(free - 1, 1.0)


def _student(share: float, free: float) -> float:
    """The quantile of Student's t (Abramowitz and Stegun 1964, 26.7.5)."""
    z = NormalDist().inv_cdf(share)
    return z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)


def _beyond(errors: float, free: float) -> float:
    """The chance that Student's t is larger (Abramowitz and Stegun 1964, 26.7.8)."""
    z = errors * (1 - 1 / (4 * free)) / math.sqrt(1 + errors**2 / (2 * free))
    return 1 - NormalDist().cdf(z)


def _disturbed(sample: Sample) -> bool:
    return bool(sample.get("queued_s", 0.0) > DISTURBED * sample["seconds"])


def _counts(value: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """Every integer of the stages' results by its place, but what is a matter of time."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _counts(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _counts(inner, f"{path}[{i}]")
    elif type(value) is int and path.startswith(COUNTED) and "measured" not in path:
        yield path, value


#: Stages whose integers follow from the configuration, whatever machine they are counted on.
COUNTED = ("plan.", "memory.", "scale.", "compress.")


def _short(old: Any, new: Any) -> str:
    if isinstance(old, list) and isinstance(new, list):
        less, more = ([str(x) for x in a if x not in b] for a, b in ((old, new), (new, old)))
        return f"{' '.join(less) or 'nothing'} before, {' '.join(more) or 'nothing'} after"
    return f"{old} and {new}"
