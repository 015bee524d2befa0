"""Runs side by side: which variants became faster or slower, and whether the samples can tell.

Notable:
- a figure is paired by round: a variant's time over the peer's on the same rank in the same round,
  so that what slows a second slows both; runs are compared by these ratios, never by times;
- rounds in which a rank waited for a core and other programs were at work are left out, because
  such a wait does not cost all variants alike; where most are such, there is no verdict;
- runs of the same code differ as a whole by where their memory happens to lie (`APART`), which no
  number of rounds averages out: it is part of every interval, and several runs a side divide it;
- "slower" is said only of a difference above half of what is to be resolved, and only where it
  would be said of none of all variants by chance, 97 times in 100, however few the rounds are;
- a slow second outlasts a round: rounds that resemble the ones before them count for fewer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from llmsys_suite.config import UsageError
from llmsys_suite.folder import RunFolder, Sample
from llmsys_suite.measure import others
from llmsys_suite.measure.samples import PEER, WHOLE_STEP, loss_curves
from llmsys_suite.stages.results import Train

Array = np.ndarray
#: Variant -> log of its time over the peer's, round by round; how many rounds were disturbed.
Ratios = dict[str, tuple[Array, int]]
RESAMPLES = 400
#: A step is disturbed if its rank was kept from a core for more than this share of it, while other
#: programs did more than that share of the machine's work: a run's own threads are in no way odd.
DISTURBED, CROWDED = 0.05, 0.1
#: Rounds to be left for a verdict, and the share of all rounds.
LEAST_ROUNDS, LEAST_SHARE = 15, 0.5
#: By how much the ratios of runs of the same code were seen to differ as a whole.
APART = 0.007
#: Of a verdict on any variant, where the code is the same; what is as large as asked is found
#: with 1.64 standard errors to spare, 19 times in 20; a fifth more since errors are estimated.
CHANCE = 0.03
SPARE = 1.64
MARGIN = 1.2
#: Without these two runs do not compare; where the others differ, times may too.
MUST_AGREE = {
    "env.json": ("processor", "cores", "gpus"),
    "config.json": ("size", "world", "device", "backend", "rows", "context"),
}
SHOULD_AGREE = {
    "env.json": ("cpu_flags", "python", "torch", "platform", "driver", "governor", "text"),
    "config.json": ("seed", "steps", "epochs", "warmup", "learning_rate", "stages"),
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
    #: In each run; how many runs a side; how many variants are compared.
    rounds: int
    disturbed: int
    resolve: float
    runs: int = 1
    among: int = 1
    #: The standard error that more rounds would lessen.
    error: float = math.inf
    #: How likely so large a ratio is by chance, in any of the variants that are compared.
    chance: float = 1.0

    @property
    def verdict(self) -> str:
        """Return "slower", "faster" or "cannot tell"."""
        if not has_enough_rounds(self.rounds, self.disturbed) or self.chance > CHANCE:
            return "cannot tell"
        if self.ratio > 1 + self.resolve / 2:
            return "slower"
        return "faster" if self.ratio < 1 / (1 + self.resolve / 2) else "cannot tell"

    def needed(self, runs: int) -> float:
        """Return the rounds per run that resolve the difference, with `runs` runs per side."""
        errors = NormalDist().inv_cdf(1 - CHANCE / (2 * self.among)) + SPARE
        room = (math.log1p(self.resolve) / errors) ** 2 - 2 * APART**2 / runs
        error = MARGIN * self.error
        return self.rounds * self.runs / runs * error**2 / room if room > 0 else math.inf

    def __str__(self) -> str:
        line = f"{self.variant:>20}  {self.ratio:6.3f}x  [{self.low:.3f}, {self.high:.3f}]  "
        total = self.rounds + self.disturbed
        if math.isnan(self.ratio):
            line = f"{self.variant:>20}  {self.rounds} of {total} rounds to go by  "
        line += self.verdict
        if self.disturbed > total * (1 - LEAST_SHARE):
            return f"{line}: other programs had the cores in {self.disturbed} of {total} rounds"
        if self.verdict == "cannot tell" and self.needed(self.runs) > self.rounds:
            line += f": {self.resolve:.0%} needs about "
            runs = self.runs
            while math.isinf(self.needed(runs)):
                runs += 1
            ways = [f"--steps {math.ceil(self.needed(k))}" for k in (runs, runs + 1)]
            many = "" if runs == 1 else f" in each of {runs} runs a side"
            line += f"{ways[0]}{many}, or {ways[1]} in each of {runs + 1} runs a side"
        return line


def compare_runs(
    before: Sequence[RunFolder], after: Sequence[RunFolder], *, resolve: float = 0.05, seed: int = 0
) -> list[Comparison]:
    """One row for each variant but the peer that all runs trained.

    Raises UsageError where a run is incomplete, edited or of another version, or where machine or
    model differ.
    """
    for folder in (*before, *after):
        require_comparable(before[0], folder)
    old, new = ([round_ratios(f.samples()) for f in side] for side in (before, after))
    return compare_ratios(old, new, resolve=resolve, seed=seed)


def compare_ratios(
    old: Sequence[Ratios], new: Sequence[Ratios], *, resolve: float = 0.05, seed: int = 0
) -> list[Comparison]:
    """One row for each variant of all."""
    random = np.random.default_rng(seed)
    names = [name for name in old[0] if all(name in run for run in (*old, *new))]
    if not names:
        raise UsageError("no variant besides the peer was trained by all of these runs")
    return [
        _compare(n, [r[n] for r in old], [r[n] for r in new], resolve, len(names), random)
        for n in names
    ]


def has_enough_rounds(rounds: int, disturbed: int) -> bool:
    """Return True if so few rounds were disturbed that the others allow a verdict."""
    return rounds >= max(LEAST_ROUNDS, LEAST_SHARE * (rounds + disturbed))


def slower_than(rows: list[Comparison], percent: float) -> list[str]:
    """Return the variants whose whole interval lies above `percent` slower."""
    limit = 1 + percent / 100
    return [row.variant for row in rows if row.low > limit and row.verdict == "slower"]


def undecided_at(rows: list[Comparison], percent: float) -> list[str]:
    """Return the variants that may or may not be slower by more than `percent`.

    A variant is decided if its whole interval lies above or below the limit and there are enough
    undisturbed rounds. That no difference was found does not show that there is none.
    """
    limit = 1 + percent / 100
    slower = slower_than(rows, percent)
    return [
        row.variant
        for row in rows
        if row.variant not in slower
        and not (row.high <= limit and has_enough_rounds(row.rounds, row.disturbed))
    ]


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
    """For `--assert-equal`: every loss and every count in which the runs are not the same.

    Those of another machine are the same, too.
    """
    require_comparable(before, after, times=False)
    for key in ("seed", "steps", "epochs", "warmup", "learning_rate"):
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


def require_comparable(before: RunFolder, after: RunFolder, *, times: bool = True) -> None:
    """UsageError where a folder is not whole, or the model differs; or the machine, of `times`."""
    for folder in (before, after):
        folder.require_whole()
        if not folder.complete:
            raise UsageError(f"{folder.path} is an incomplete run; compare complete ones")
        if not isinstance(folder.results.get("train"), Train):
            raise UsageError(
                f"{folder.path} has no stage train that ended; compare runs of that stage"
            )
    for name, keys in MUST_AGREE.items():
        if name == "env.json" and not times:
            continue
        old, new = before.read_json(name), after.read_json(name)
        for key in keys:
            if old.get(key) != new.get(key):
                raise UsageError(
                    f"the runs differ in {key}: {_short(old.get(key), new.get(key))}; "
                    f"their {'times' if times else 'losses'} do not compare"
                )


def round_ratios(samples: list[Sample]) -> Ratios:
    """Variant -> log of its time over the peer's by round, the ranks' mean; disturbed rounds."""
    steps: dict[str, dict[int, dict[int, Sample]]] = defaultdict(lambda: defaultdict(dict))
    for s in samples:
        if s["stage"] == "train" and s["phase"] == WHOLE_STEP and not s["warmup"]:
            steps[s["variant"]][s["step"]][s["rank"]] = s
    # The peer's turns span whole rounds: what others did between two of its steps, they did in one.
    crowded = others.shares([s for ranks in steps[PEER].values() for s in ranks.values()])
    found = {}
    for name, rounds in steps.items():
        if name == PEER:
            continue
        ratios, disturbed = [], 0
        for step, ours in rounds.items():
            peer = steps[PEER][step]
            pairs = [(s, peer[rank]) for rank, s in ours.items() if rank in peer]
            alone = crowded.get(step, 1.0) <= CROWDED
            if not alone and any(_disturbed(s) for pair in pairs for s in pair):
                disturbed += 1
            elif pairs:
                logs = [math.log(s["seconds"] / p["seconds"]) for s, p in pairs]
                ratios.append(sum(logs) / len(logs))
        found[name] = np.array(ratios), disturbed
    return found


def _compare(
    name: str,
    before: list[tuple[Array, int]],
    after: list[tuple[Array, int]],
    resolve: float,
    among: int,
    random: np.random.Generator,
) -> Comparison:
    rounds, runs = (min(len(logs) for logs, _ in before + after), min(len(before), len(after)))
    lost = max(lost for _, lost in before + after)
    if rounds < 2:
        return Comparison(name, math.nan, 0.0, math.inf, rounds, lost, resolve, runs, among)
    away, within, between, frees = 0.0, 0.0, 0.0, []
    for sign, side in ((-1, before), (1, after)):
        middles, n = [_middle(logs) for logs, _ in side], len(side)
        errors, rounds_free = zip(*(_error(logs, random) for logs, _ in side), strict=True)
        away += sign * sum(middles) / n
        within += sum(e**2 for e in errors) / n**2
        # What the runs of this side show, where it is far more than is usual: two tell little.
        shown, usual = float(np.var(middles)) * n / max(n - 1, 1), APART**2
        alone = sum(e**2 for e in errors) / n
        between += (usual if shown < 4 * (usual + alone) else shown - alone) / n
        frees.append(sum(rounds_free))
    error, free = math.sqrt(within + between), min(frees)
    half = _student(0.975, free) * error
    chance = among * 2 * _beyond(abs(away) / error, free)
    return Comparison(name, math.exp(away), math.exp(away - half), math.exp(away + half), rounds,
                      lost, resolve, runs, among, math.sqrt(within), chance)  # fmt: skip


def _middle(logs: Array) -> float:
    """Return the mean of the middle half, which is as robust as the median and more efficient."""
    cut = len(logs) // 4
    return float(np.sort(logs)[cut : len(logs) - cut].mean())


def _error(logs: Array, random: np.random.Generator) -> tuple[float, float]:
    """Return the standard error of `_middle` and its degrees of freedom, by resampling rounds.

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
    """Return a quantile of Student's t (Abramowitz and Stegun 1964, 26.7.5)."""
    z = NormalDist().inv_cdf(share)
    return z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)


def _beyond(errors: float, free: float) -> float:
    """Return the probability that Student's t is larger (Abramowitz and Stegun 1964, 26.7.8)."""
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
COUNTED = ("plan.", "memory.", "scale.")


def _short(old: Any, new: Any) -> str:
    if isinstance(old, list) and isinstance(new, list):
        less, more = ([str(x) for x in a if x not in b] for a, b in ((old, new), (new, old)))
        return f"{' '.join(less) or 'nothing'} before, {' '.join(more) or 'nothing'} after"
    return f"{old} and {new}"
