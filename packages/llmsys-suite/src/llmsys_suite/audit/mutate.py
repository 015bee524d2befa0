"""Plant every defect of the registry in a short run, and say which check finds it.

One group of processes does all of them: first the honest stages, all of whose checks must pass,
then each defect in the stage that it is in, with the others' honest results. A model of two layers
and a few steps keep a defect at a second or two.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from llmsys_suite.audit import probe
from llmsys_suite.audit import run as audit
from llmsys_suite.audit.mutations import DEFECTS, Defect
from llmsys_suite.config import STAGES, RunConfig, UsageError
from llmsys_suite.folder import RunFolder, claim
from llmsys_suite.ranks import worker
from llmsys_suite.ranks.failure import KEY, report_failure
from llmsys_suite.ranks.launch import launch
from llmsys_suite.ranks.rank import Run
from llmsys_suite.report.progress import Progress
from llmsys_suite.stages import inspect, learn, links, memory, parallel, plan, profile, scale, train
from llmsys_suite.step import process, sweep
from llmsys_suite.variants import variants_here

#: The ten that `make test` plants: one or two of each family, quick ones.
TEN = (
    "train: a parameter's averaged gradient is not copied back (flat)",
    "train: a sum instead of a mean, which Adam hides (naive)",
    "train: attention is not causal",
    "train: the sampler repeats each batch",
    "train: a rank reports half its time",
    "train: utilization's numerator is doubled",
    "train: gradients are sent twice and used once",
    "attention: a kernel's output is scaled by 1.5",
    "parallel: a tensor-parallel gradient is ten times as large",
    "compress: the loss is that of the uncompressed model",
)
OUT = "LLMSYS_KILLS"
WANTED = "LLMSYS_DEFECTS"
HONEST = "LLMSYS_HONEST"


@dataclass(frozen=True)
class Outcome:
    """What became of one defect."""

    defect: str
    killed_by: tuple[str, ...]
    seconds: float

    @property
    def killed(self) -> bool:
        """Whether any check was red."""
        return bool(self.killed_by)

    def __str__(self) -> str:
        return f"{self.defect} <- {self.killed_by[0] if self.killed else 'NOTHING'}"


def mutate(names: list[str] | None = None, world: int = 2) -> list[Outcome]:
    """Plant the named defects, or all; RuntimeError where the honest run is not green."""
    labels = [defect.label for defect in DEFECTS]
    if unknown := [name for name in names or () if name not in labels]:
        raise UsageError(f"no defect is called {unknown[0]!r}; `llmsys audit --list` names them")
    return _launch(world, {WANTED: json.dumps(labels if names is None else names)})


def false_alarms(runs: int, *, world: int = 2) -> list[Outcome]:
    """As many honest short runs of every stage, of as many seeds: whatever is red is an alarm."""
    return _launch(world, {WANTED: "[]", HONEST: str(runs)})


def _launch(world: int, environment: dict[str, str]) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "kills.json")
        with mock.patch.dict(os.environ, environment | {OUT: str(out)}):
            config = claim(_config(world, Path(folder, "run")))
            if launch(config, __name__) or not out.exists():
                raise RuntimeError("planting defects ended early; what it said stands above")
        return [
            Outcome(**row | {"killed_by": tuple(row["killed_by"])})
            for row in json.loads(out.read_text())
        ]


def table(outcomes: list[Outcome]) -> str:
    """Markdown: how many were found, and each defect with the check that found it."""
    killed = sum(outcome.killed for outcome in outcomes)
    lines = [
        f"{killed} of {len(outcomes)} planted defects were found: {killed / len(outcomes):.0%}."
    ]
    lines += ["", "| planted defect | found by |", "|---|---|"]
    for outcome in outcomes:
        found = outcome.killed_by[0] if outcome.killed else "**nothing**"
        more = f" and {len(outcome.killed_by) - 1} more" if len(outcome.killed_by) > 1 else ""
        lines.append(f"| {outcome.defect} | {found}{more} |")
    return "\n".join(lines)


def main() -> int:
    """One rank."""
    config = RunConfig.from_json(json.loads(sys.argv[1]))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    worker.end_with_parent(os.getppid())
    wanted = json.loads(os.environ[WANTED])
    defects = [defect for defect in DEFECTS if defect.label in wanted]
    assert config.out is not None
    folder = config.out.parent
    with shortened(), mock.patch.object(Run, "meet", _meet_or_fail):
        run = worker.begin(config, rank, world, Progress(enabled=False))
        outcomes = [_sound(run, seed) for seed in range(int(os.environ.get(HONEST, "0")))]
        honest = _honest(run, {d.stage for d in defects}) if defects else {}
        outcomes += [_plant(run, d, honest, folder / str(i)) for i, d in enumerate(defects)]
        run.meet()
    if rank == 0:
        Path(os.environ[OUT]).write_text(json.dumps([asdict(o) for o in outcomes]))
    return 0


@contextmanager
def shortened() -> Iterator[None]:
    """Fewer and smaller of everything that a stage repeats."""
    with ExitStack() as stack:
        for module, values in (
            (plan, {"PRODUCTS_SECONDS": 0.05}),
            (links, {"SIZES": (1 << 20,)}),
            (profile, {"SIZES_TIMED": ()}),
            (sweep, {"in_a_process": lambda case, *_, **__: process.measure(case)}),
            (parallel, {"ITERATIONS": 4}),
            (memory, {"DRAWN_BESIDE": {}}),
            (learn, {"LETTERS": 2, "HELDOUT_ROWS": 8}),
            (inspect, {"INDUCTION_STEPS": 2}),
            (scale, {"GRID": tuple((c, (4, 8, 12, 16)) for c in (2.5e7, 5e7, 1e8)), "SEEDS": 1}),
        ):
            stack.enter_context(mock.patch.multiple(module, **values))
        yield


def _honest(run: Run, stages: set[str]) -> dict[str, Any]:
    """Every stage's results with nothing planted; all checks must pass.

    RuntimeError where they do not pass twice: a machine may be too busy once.
    """
    for _ in range(2):
        red = _all_red(run, {"plan", "train", *stages})
        if not any(run.gather(red)):
            return dict(run.results)
    raise RuntimeError("the honest run is red: " + "; ".join(red))


def _sound(run: Run, seed: int) -> Outcome:
    begin = time.perf_counter()
    run.config = replace(run.config, seed=seed)
    red = _all_red(run, set(STAGES))
    return _said(run, Outcome(f"honest run {seed}", tuple(red), time.perf_counter() - begin))


def _all_red(run: Run, stages: set[str]) -> list[str]:
    run.results = {}
    if run.folder is not None:
        run.folder.restart()
    for stage in STAGES:
        if stage in stages - {"audit", "report"}:
            worker.run_stage(run, stage)
    _, checks = audit.audit_run(run)
    return [str(check) for check in checks if not check.passed]


def _plant(run: Run, defect: Defect, honest: dict[str, Any], out: Path) -> Outcome:
    begin = time.perf_counter()
    if run.rank == 0:
        run.folder = RunFolder.create(replace(run.config, out=out), {})
    run.results = {"plan": honest["plan"]}
    stage = "train" if defect.stage == "folder" else defect.stage
    trained, run.recorder._samples = run.trained, []
    with ExitStack() as stack:
        few = [name for name in variants_here(run.device) if name in defect.variants]
        for module in (train, probe):
            stack.enter_context(mock.patch.object(module, "variants_here", return_value=few))
        planted = defect.plant(run)
        for patch in planted if isinstance(planted, list) else [planted]:
            stack.enter_context(patch)
        try:
            killed = _red(run, stage)
        except Exception as error:
            # An error that would end the run has detected the defect too.
            killed = [f"an error, {_recover(run, error)}"]
    run.trained = trained
    return _said(run, Outcome(defect.label, tuple(killed), time.perf_counter() - begin))


class _OtherRankFailed(RuntimeError):
    """An injected fault raised an exception on another rank."""


def _meet_or_fail(run: Run) -> None:
    """Do what `Run.meet` does, but raise if another rank has failed in the meantime."""
    assert run.store is not None
    run._meetings += 1
    run.store.set(f"meeting {run._meetings} {run.rank}", "reached")
    while not run.store.check([f"meeting {run._meetings} {r}" for r in range(run.world)]):
        if run.store.check([KEY]):
            raise _OtherRankFailed(run.store.get(KEY).decode())
        time.sleep(0.01)


def _recover(run: Run, error: Exception) -> str:
    """Replace the process group that an error has broken; return the first rank's message.

    A run ends at its first failure. Here the next fault is to be injected into the same ranks, so
    every rank leaves the broken group, which ends the collectives of the others, and joins another.
    """
    assert run.store is not None
    if not isinstance(error, _OtherRankFailed):
        report_failure(run.store, f"rank {run.rank}: {type(error).__name__}: {error}")
    dist.destroy_process_group()
    run.store.wait([KEY])
    message = run.store.get(KEY).decode()
    run.store = dist.PrefixStore("recovered", run.store)
    run._meetings = 0
    worker.make_group(run)
    return message


def _said(run: Run, outcome: Outcome) -> Outcome:
    if run.rank == 0:
        print(f"{outcome.seconds:5.1f} s  {outcome}", file=sys.stderr, flush=True)
    return outcome


def _red(run: Run, stage: str) -> list[str]:
    """Return the checks that fail; a folder that cannot be read back counts as one."""
    if stage == "plan":
        worker.run_stage(run, "plan")
    worker.run_stage(run, "train" if stage == "plan" else stage)
    _, checks = audit.audit_run(run)
    red = [check.name for check in checks if not check.passed]
    if run.folder is not None:
        run.folder.write_json("checks.json", [])
        run.folder.finish()
        try:
            RunFolder.open(run.folder.path)
        except UsageError as error:
            red.append(f"the folder's digests: {type(error).__name__}")
    return red


def _config(world: int, out: Path) -> RunConfig:
    rows = 8 * world
    return RunConfig(
        size="mini", world=world, rows=rows, context=64, steps=4, warmup=1, learn=8, out=out
    )


if __name__ == "__main__":
    # Not as __main__: patches and registry must be those that the stages import.
    sys.exit(importlib.import_module("llmsys_suite.audit.mutate").main())
