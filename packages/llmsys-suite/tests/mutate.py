"""Inject every fault of the registry into a short run, and report the check that finds it.

    python packages/llmsys-suite/tests/mutate.py [--only WORD] [--list] [--write PAGE]

One group of processes injects all faults. First it runs the stages without a fault; all checks must
pass. Then it injects each fault into its stage and uses the honest results of the other stages. A
model of two layers and a few steps keep a fault at a second or two.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import textwrap
import time
from collections import ChainMap, Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

import torch.distributed as dist
from injected_faults import FAULTS, Fault
from llmsys_suite.audit import probe, stage_checks
from llmsys_suite.audit import run as audit
from llmsys_suite.audit.check import Check
from llmsys_suite.audit.stage_checks import probed_step
from llmsys_suite.config import STAGES, RunConfig, UsageError, add_dependencies
from llmsys_suite.folder import RunFolder, claim_folder
from llmsys_suite.learning import evaluation
from llmsys_suite.ranks import worker
from llmsys_suite.ranks.failure import KEY, report_failure
from llmsys_suite.ranks.launch import launch
from llmsys_suite.ranks.rank import Progress, Run
from llmsys_suite.stages import links, parallel, plan, scale, train
from llmsys_suite.text.generation import MODEL
from llmsys_suite.variants import list_variants
from llmsys_suite.variants.initial_weights import draw
from reported_figures import double_figure, list_figures
from run_folders import create_folder

#: Quick faults, one or two of each family, for the fast tests.
QUICK = (
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
    "learn: Adam's second moment decays twice as fast",
    "train: torch DDP is slowed",
    "train: torch DDP does additional work",
)
#: Passed to the ranks: the faults, the number of honest runs and of attempts, and the output file.
TASK = "LLMSYS_MUTATE"


@dataclass(frozen=True)
class Outcome:
    """The checks that a fault made fail."""

    fault: str
    failed_checks: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        return f"{self.fault} <- {self.failed_checks[0] if self.failed_checks else 'NOTHING'}"


def inject(
    names: list[str] | None = None,
    *,
    honest_runs: int = 0,
    attempts: int = 3,
    world: int = 2,
    figures: bool = False,
) -> list[Outcome]:
    """Return the outcomes of honest runs of every stage, then those of the named faults, or all.

    A check counts as failed in an honest run if it fails in all `attempts`: on a busy machine a
    comparison of clocks may fail once.

    Raises:
        RuntimeError: an honest check fails in all attempts, or a rank failed.
    """
    labels = [fault.label for fault in FAULTS]
    if unknown := [name for name in names or () if name not in labels]:
        raise UsageError(f"expected the name of a fault, got {unknown[0]!r}; see --list")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "outcomes.json")
        task = {
            "faults": labels if names is None else names,
            "honest_runs": honest_runs,
            "attempts": attempts,
            "figures": figures,
            "out": str(out),
        }
        path = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        with mock.patch.dict(os.environ, {TASK: json.dumps(task), "PYTHONPATH": path}):
            rows = 8 * world
            config = claim_folder(
                RunConfig(
                    size="mini",
                    world=world,
                    rows=rows,
                    context=64,
                    steps=4,
                    warmup=1,
                    learn=8,
                    out=Path(folder, "run"),
                )
            )
            status = launch(config, "mutate")
        if status or not out.exists():
            summary = json.loads(Path(folder, "run", "summary.json").read_text())
            reason = summary.get("reason", "see the messages of the ranks above")
            raise RuntimeError(f"a rank ended with exit status {status}: {reason}")
        return [
            Outcome(row["fault"], tuple(row["failed_checks"]), row["seconds"])
            for row in json.loads(out.read_text())
        ]


def format_table(outcomes: list[Outcome]) -> str:
    """Return Markdown: the number of faults that were found, by stage, and the check of each."""
    detected = sum(bool(outcome.failed_checks) for outcome in outcomes)
    stages: dict[str, list[Outcome]] = {stage: [] for stage in (*STAGES, "folder")}
    for outcome in outcomes:
        stages.setdefault(outcome.fault.partition(": ")[0], []).append(outcome)
    stages = {stage: part for stage, part in stages.items() if part}
    lines = [
        f"{detected} of {len(outcomes)} injected faults were found: "
        f"{detected / len(outcomes):.0%}.",
        "",
        "| stage | found | checks that found most |",
        "|---|---|---|",
    ]
    for stage, part in stages.items():
        num_detected = sum(bool(outcome.failed_checks) for outcome in part)
        lines.append(f"| {stage} | {num_detected} of {len(part)} | {_find_most_frequent(part)} |")
    for stage, part in stages.items():
        lines += ["", f"### Faults in {stage}", "", "| injected fault | found by |", "|---|---|"]
        lines += [
            f"| {o.fault.partition(': ')[2]} | {_describe_first_failed_check(o, stage)} |"
            for o in part
        ]
    return "\n".join(lines)


def _find_most_frequent(outcomes: list[Outcome]) -> str:
    """Return the three kinds of checks that found most of the faults first."""
    kinds = Counter(
        _get_kind(outcome.failed_checks[0]) for outcome in outcomes if outcome.failed_checks
    )
    return "; ".join(f"{kind} ({count})" for kind, count in kinds.most_common(3))


def _get_kind(check: str) -> str:
    """Return the name of a check without the stage, the variant and the rank."""
    for first in ("an error", "the folder's digests"):
        if check.startswith(first):
            return first
    return re.sub(r", rank \d+$", "", check.rpartition(": ")[2])


def _describe_first_failed_check(outcome: Outcome, stage: str) -> str:
    """Return the first failed check, without its stage, and the number of the other ones."""
    checks = outcome.failed_checks
    if not checks:
        return "**nothing**"
    first = textwrap.shorten(checks[0].removeprefix(f"{stage}: "), 120, placeholder=" …")
    return f"{first} and {len(checks) - 1} more" if len(checks) > 1 else first


def rank_main() -> int:
    """Run as one rank."""
    config = RunConfig.from_json(json.loads(sys.argv[1]))
    task = json.loads(os.environ[TASK])
    worker.end_with_parent(os.getppid())
    assert config.out is not None
    folder = config.out.parent
    faults = [fault for fault in FAULTS if fault.label in task["faults"]]
    with shorten_stages(), mock.patch.object(Run, "wait_for_ranks", _wait_or_fail):
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        run = worker.begin(config, rank, world, Progress(enabled=False))
        outcomes: list[Outcome] = []
        try:
            for seed in range(task["honest_runs"]):
                outcomes.append(_run_honestly(run, seed, task["attempts"]))
            if faults and not outcomes and not task["figures"]:
                _require_honest(run, {fault.stage for fault in faults}, task["attempts"])
            if task["figures"] and not task["honest_runs"]:
                with mock.patch.object(probed_step, "shutil"):
                    _require_honest(run, set(STAGES), task["attempts"])
            honest = dict(run.results)
            if task["figures"]:
                outcomes += inject_figures(run, honest)
            for number, fault in enumerate(faults):
                outcomes.append(_inject(run, fault, honest, folder / str(number)))
        except Exception as error:
            worker.fail(rank, run, error)
        if rank == 0:
            Path(task["out"]).write_text(json.dumps([asdict(outcome) for outcome in outcomes]))
        worker.leave(run, None)
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the destructors of torch and Triton, which may fail at the end of a process.
    os._exit(0)


@contextmanager
def shorten_stages() -> Iterator[None]:
    """Reduce all repetitions and sizes of the stages inside the block."""
    grid = tuple((c, (4, 8, 12, 16)) for c in (2.5e7, 5e7, 1e8))
    with ExitStack() as stack:
        for module, values in (
            (plan, {"PRODUCTS_SECONDS": 0.2}),
            (links, {"SIZES": (1 << 19, 1 << 20)}),
            (stage_checks.links, {"SIZES": (1 << 19, 1 << 20)}),
            (parallel, {"ITERATIONS": 4}),
            (stage_checks.parallel, {"ITERATIONS": 4}),
            (evaluation, {"WRITTEN_TOKENS": 2, "HELDOUT_ROWS": 8}),
            (stage_checks.learn, {"HELDOUT_ROWS": 8}),
            (scale, {"GRID": grid, "SEEDS": 1}),
            (stage_checks.scale, {"GRID": grid, "SEEDS": 1}),
        ):
            stack.enter_context(mock.patch.multiple(module, **values))
        yield


def _run_honestly(run: Run, seed: int, attempts: int) -> Outcome:
    start = time.perf_counter()
    run.config = replace(run.config, seed=seed)
    failed = _find_checks_failed_in_all(run, set(STAGES), attempts)
    return _report_outcome(run, Outcome(f"honest run {seed}", failed, time.perf_counter() - start))


def _require_honest(run: Run, stages: set[str], attempts: int) -> None:
    stages = stages - {"folder"} | {"train"}
    failed = _find_checks_failed_in_all(run, {*add_dependencies([*stages])}, attempts)
    if failed:
        raise RuntimeError("checks failed without a fault: " + "; ".join(failed))


def _find_checks_failed_in_all(run: Run, stages: set[str], attempts: int) -> tuple[str, ...]:
    """Return the checks that fail in every one of at most `attempts` runs of the stages."""
    failed: dict[str, str] = {}
    for attempt in range(attempts):
        run.results = {}
        if run.folder is not None:
            run.folder.restart()
            # The seed of the configuration may have changed.
            run.folder.write_json("config.json", run.config.to_json())
        for stage in STAGES:
            if stage in stages - {"audit", "report"}:
                worker.run_stage(run, stage)
        _, checks = audit.audit_run(run)
        now = {check.name: str(check) for check in checks if not check.passed}
        failed = {name: text for name, text in now.items() if not attempt or name in failed}
        if not any(run.gather(len(failed))):
            break
    return tuple(failed.values())


def _inject(run: Run, fault: Fault, honest: dict[str, Any], out: Path) -> Outcome:
    start = time.perf_counter()
    config = run.config
    assert config.out is not None
    run.config = replace(config, out=out)
    if run.rank == 0:
        run.folder = create_folder(run.config, {})
        if (config.out / MODEL).exists():
            shutil.copy(config.out / MODEL, out / MODEL)
        if "train" in honest:
            run.folder.add_stage("train", honest["train"])
    run.results = {stage: honest[stage] for stage in ("plan", "train") if stage in honest}
    trained = run.trained
    run.recorder._samples = []
    # A fault may change how the initial weights are drawn.
    draw.cache_clear()
    with ExitStack() as stack:
        few = [name for name in list_variants(run.device) if name in fault.variants]
        for module in (train, probe):
            stack.enter_context(mock.patch.object(module, "list_variants", return_value=few))
        patches = fault.make(run)
        for patch in patches if isinstance(patches, list) else [patches]:
            stack.enter_context(patch)
        try:
            failed = _list_failed_checks(run, fault.stage)
        except Exception as error:
            # An error that would end the run has detected the fault too.
            failed = [f"an error, {_recover(run, error)}"]
    draw.cache_clear()
    run.trained = trained
    run.config = config
    return _report_outcome(run, Outcome(fault.label, tuple(failed), time.perf_counter() - start))


def inject_figures(run: Run, honest: dict[str, Any]) -> list[Outcome]:
    """Double each reported figure of the honest run, one after the other, and audit again."""
    names = list_figures(honest) if run.rank == 0 else []
    run.results = dict(honest)
    evidence = _collect_evidence(run)
    outcomes = []
    # The audit deletes the checkpoints around the probed step when it has read them.
    with mock.patch.object(probed_step, "shutil"):
        for stage, name in run.gather(names)[0]:
            start = time.perf_counter()
            run.results = dict(honest)
            if run.rank == 0:
                run.results[stage] = double_figure(honest[stage], name)
            if stage in audit.RECORDED:
                checks = _run_stage_checks(run, stage)
            else:
                checks = _run_training_checks(run, evidence)
            failed = tuple(check.name for check in checks if not check.passed)
            seconds = time.perf_counter() - start
            outcomes.append(_report_outcome(run, Outcome(f"{stage}: {name}", failed, seconds)))
    return outcomes


def _collect_evidence(run: Run) -> dict[str, Any]:
    """Return the evidence for the checks of `plan` and `train`, on every rank."""
    return dict(ChainMap(audit.measure_evidence(run), *run.gather(audit.compute_evidence(run))))


def _run_stage_checks(run: Run, stage: str) -> list[Check]:
    """Return the checks of a stage on rank 0, which has the results of all stages."""
    checks = []
    if stage in audit.STAGES and (run.rank == 0 or stage in audit.COLLECTIVE):
        checks += audit.make_stage_checks(run, stage)
    if run.folder is not None:
        checks += audit.make_recorded_checks(run.folder, {stage: run.results[stage]}, {})
    return checks


def _run_training_checks(run: Run, evidence: dict[str, Any]) -> list[Check]:
    """Return the checks of `plan` and `train` on rank 0."""
    if run.folder is None:
        return []
    results = {stage: run.results[stage] for stage in ("plan", "train")}
    return audit.make_recorded_checks(run.folder, results, evidence)


class _OtherRankFailed(RuntimeError):
    """An injected fault raised an exception on another rank."""


def _wait_or_fail(run: Run) -> None:
    """Do what `Run.wait_for_ranks` does, but raise if another rank has failed in the meantime."""
    assert run.store is not None
    run._num_barriers += 1
    run.store.set(f"barrier {run._num_barriers} {run.rank}", "reached")
    while not run.store.check([f"barrier {run._num_barriers} {r}" for r in range(run.world)]):
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
    run._num_barriers = 0
    worker.make_group(run)
    return message


def _report_outcome(run: Run, outcome: Outcome) -> Outcome:
    if run.rank == 0:
        print(f"{outcome.seconds:5.1f} s  {outcome}", file=sys.stderr, flush=True)
    return outcome


def _list_failed_checks(run: Run, stage: str) -> list[str]:
    """Return the checks that fail; a folder that cannot be read back counts as one."""
    if stage == "plan":
        worker.run_stage(run, "plan")
    worker.run_stage(run, "train" if stage in ("plan", "folder") else stage)
    if stage in audit.RECORDED:
        checks = _run_stage_checks(run, stage)
    else:
        checks = _run_training_checks(run, _collect_evidence(run))
    failed = [check.name for check in checks if not check.passed]
    if run.folder is not None:
        run.folder.write_json("checks.json", [])
        run.folder.finish()
        try:
            RunFolder.open(run.folder.path)
        except UsageError as error:
            failed.append(f"the folder's digests: {type(error).__name__}")
    return failed


def main() -> int:
    """Run the command line; the exit status is 0 if every fault was found."""
    parser = argparse.ArgumentParser(description="Inject faults into short runs.")
    parser.add_argument("--only", nargs="*", help="inject the faults whose names contain a word")
    parser.add_argument("--list", action="store_true", help="print the names of the faults")
    parser.add_argument("--figures", action="store_true", help="also double each reported figure")
    parser.add_argument("--write", type=Path, help="write the table between this page's markers")
    arguments = parser.parse_args()
    labels = [fault.label for fault in FAULTS]
    if arguments.only:
        labels = [label for label in labels if any(word in label for word in arguments.only)]
    if arguments.list:
        print("\n".join(labels))
        return 0
    outcomes = inject(labels, figures=arguments.figures)
    print(format_table(outcomes))
    if arguments.write:
        before, _, rest = arguments.write.read_text().partition("<!-- injected -->\n")
        _, _, after = rest.partition("<!-- /injected -->")
        marked = f"<!-- injected -->\n{format_table(outcomes)}\n<!-- /injected -->"
        arguments.write.write_text(before + marked + after)
    return 0 if all(outcome.failed_checks for outcome in outcomes) else 1


if __name__ == "__main__":
    # Imported under its name, because patches and registry must be those that the stages import.
    module = importlib.import_module("mutate")
    sys.exit(module.rank_main() if TASK in os.environ else module.main())
