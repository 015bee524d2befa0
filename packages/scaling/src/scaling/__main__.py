"""Laws of runs: fit, plan, report or design the next ones of RUNS; sweep learning rates."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from scaling.design import design
from scaling.fit.parametric import ParametricFit, fit_parametric
from scaling.fit.search import Loss
from scaling.isoflop import IsoflopFit, Method, fit_isoflop
from scaling.law import Interval, Optimum
from scaling.plan import plan
from scaling.runs import Runs, ScalingWarning, load_runs
from scaling.sweeps.batch_size import SETTINGS, sweep_learning_rate
from scaling.uncertainty.bootstrap import bootstrap

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; bad input is one line on stderr and status 2."""
    arguments = _parser().parse_args(argv)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ScalingWarning)
            lines, result = arguments.command(arguments)
    except (ValueError, OSError) as error:
        print(f"scaling: {error}", file=sys.stderr)
        return 2
    for message in dict.fromkeys(str(w.message) for w in caught):
        print(f"warning: {message}", file=sys.stderr)
    print(json.dumps(_plain(result), indent=1) if arguments.json else "\n".join(lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scaling", description=__doc__)
    commands = parser.add_subparsers(required=True)
    source = argparse.ArgumentParser(add_help=False)
    source.add_argument("runs", metavar="RUNS", help="CSV, JSON or JSONL")
    source.add_argument("--delimiter", help="of a CSV; found out by itself unless given")
    source.add_argument(
        "--column", action="append", default=[], metavar="loss=NAME", help="name a column"
    )
    source.add_argument(
        "--unit", action="append", default=[], metavar="parameters=1e6", help="of a column"
    )
    source.add_argument(
        "--where", action="append", default=[], metavar="dataset=c4", help="keep these rows"
    )
    source.add_argument("--without-highest", type=int, default=0, metavar="K", help="drop K losses")
    source.add_argument("--loss", choices=get_args(Loss), default="huber")
    source.add_argument("--json", action="store_true")

    fit = commands.add_parser("fit", parents=[source], help="the best N and D at a budget")
    fit.add_argument("--at", type=float, nargs="+", default=[], metavar="FLOPS")
    fit.add_argument("--method", choices=["parametric", *get_args(Method)], default="parametric")
    fit.add_argument("--nearest", type=int, help="runs of a parabola; default all")
    fit.add_argument("--resamples", type=int, default=4000)
    fit.add_argument("--plot", type=Path, metavar="FILE")
    fit.set_defaults(command=_fit)

    planned = commands.add_parser("plan", parents=[source], help="a model for a budget and a load")
    planned.add_argument("--budget", type=float, required=True, metavar="FLOPS")
    planned.add_argument("--served", type=float, default=0.0, metavar="TOKENS")
    planned.add_argument("--size", type=float, metavar="PARAMETERS", help="default: the best")
    planned.set_defaults(command=_plan)

    page = commands.add_parser("report", parents=[source], help="one HTML page about the runs")
    page.add_argument("--at", type=float, nargs="+", default=[], metavar="FLOPS")
    page.add_argument("--to", type=Path, default=Path("report.html"), metavar="FILE")
    page.set_defaults(command=_report)

    plan = commands.add_parser("design", parents=[source], help="which runs to train next")
    plan.add_argument("--budget", type=float, required=True, metavar="FLOPS")
    plan.add_argument("--target", type=float, required=True, metavar="FLOPS")
    plan.add_argument("--count", type=int, default=8, help="at most so many runs")
    plan.add_argument("--largest", type=float, default=math.inf, metavar="FLOPS", help="of one run")
    plan.add_argument(
        "--tokens-per-parameter", type=float, nargs=2, default=(5.0, 200.0), metavar=("LOW", "HIGH")
    )
    plan.set_defaults(command=_design)

    sweep = commands.add_parser("sweep", help="learning rate against batch size; needs torch")
    sweep.add_argument("--task", choices=sorted({t for t, _ in SETTINGS}), default="linear")
    sweep.add_argument("--optimizer", choices=sorted({o for _, o in SETTINGS}), default="sgd")
    sweep.add_argument("--seeds", type=int)
    sweep.add_argument("--device", default="cpu")
    sweep.add_argument("--plot", type=Path, metavar="FILE")
    sweep.add_argument("--json", action="store_true")
    sweep.set_defaults(command=_sweep)
    return parser


def _load(arguments: argparse.Namespace) -> Runs:
    columns, units, where = (
        dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        for pairs in (arguments.column, arguments.unit, arguments.where)
    )
    runs = load_runs(
        arguments.runs,
        delimiter=arguments.delimiter,
        columns=columns,
        units={name: float(unit) for name, unit in units.items()},
        where=where,
    )
    return runs.without_highest(arguments.without_highest)


Output = tuple[list[str], dict[str, Any]]


def _fit(arguments: argparse.Namespace) -> Output:
    runs = _load(arguments)
    at = arguments.at or [float(10 * runs.compute.max())]
    fit: ParametricFit | IsoflopFit
    if arguments.method == "parametric":
        fit = fit_parametric(runs, arguments.loss, prove=True)
        drawn = bootstrap(fit, resamples=arguments.resamples)
        # Not the bootstrap's: these allow for what earlier cuts of the runs got wrong.
        best = [fit.optimal(c) for c in at]
        constants = asdict(fit.law) | {"exponent": fit.law.exponent}
        intervals = {k: drawn.interval(k) for k in constants}
        lines = [runs.explanation, "L(N, D) = E + A / N^alpha + B / D^beta"]
        lines += [f"  {k:<9}{v:<12.6g}{_range(intervals[k])}" for k, v in constants.items()]
        result: dict[str, Any] = {
            "law": constants,
            "intervals": {k: asdict(v) for k, v in intervals.items()},
        }
        result |= {"objective": fit.objective, "proof": asdict(fit.proof)}
        lines.append(
            f"  {fit.loss} objective {fit.objective:.9g}; {fit.proof.landed} of "
            f"{fit.proof.converged} converged starts landed on it"
        )
    else:
        fit = fit_isoflop(runs, nearest=arguments.nearest)
        best = [fit.optimal(c) for c in at]
        lines = [runs.explanation]
        lines += [f"N_opt = {fit.scale:.4g} C^{fit.exponent:.4f}, D_opt = C / (6 N_opt)"]
        result = {"law": {"scale": fit.scale, "exponent": fit.exponent}}
    lines += [line for optimum in best for line in _describe(optimum)]
    if arguments.plot:
        from scaling.plot import plot

        _save(plot(fit, up_to=max(at)), arguments.plot)
    result |= {"method": arguments.method, "runs": len(runs), "warnings": list(fit.warnings)}
    return lines, result | {"at": [asdict(optimum) for optimum in best]}


def _design(arguments: argparse.Namespace) -> Output:
    fit = fit_parametric(_load(arguments), arguments.loss)
    chosen = design(
        fit,
        budget=arguments.budget,
        target=arguments.target,
        runs=arguments.count,
        largest=arguments.largest,
        tokens_per_parameter=arguments.tokens_per_parameter,
    )
    lines = [
        f"{chosen.quantity}: now within a factor of {chosen.factor_before:.3f}; after these runs"
    ]
    lines[0] += f" {chosen.factor_after:.3f}"
    rows = list(zip(chosen.parameters, chosen.tokens, chosen.compute, strict=True))
    lines += [f"  N = {n:.4g}  D = {d:.4g}  C = {c:.4g}" for n, d, c in rows]
    names = ("parameters", "tokens", "compute")
    result: dict[str, Any] = {
        "runs": [dict(zip(names, map(float, row), strict=True)) for row in rows]
    }
    return lines, result | {
        "factor_before": chosen.factor_before,
        "factor_after": chosen.factor_after,
    }


def _plan(arguments: argparse.Namespace) -> Output:
    runs = _load(arguments)
    fit = fit_parametric(runs, arguments.loss)
    made = plan(fit, arguments.budget, served_tokens=arguments.served, parameters=arguments.size)
    lines = [
        runs.explanation,
        f"for {made.budget:.4g} FLOPs, serving {made.served_tokens:.4g} tokens",
    ]
    lines += [
        f"  {k:<12}{getattr(made, k):<12.5g}{_range(made.intervals[k])}"
        for k in ("parameters", "tokens", "loss")
    ]
    lines.append(f"  training {made.training:.4g} FLOPs, serving {made.serving:.4g}")
    return lines, asdict(made)


def _report(arguments: argparse.Namespace) -> Output:
    from scaling.report.page import report

    page = report(_load(arguments), at=arguments.at, title=f"Scaling laws of {arguments.runs}")
    beside = arguments.to.with_name(f".{arguments.to.name}.part")
    beside.write_text(page, "utf-8")
    os.replace(beside, arguments.to)
    return [f"written to {arguments.to}"], {"written": str(arguments.to)}


def _sweep(arguments: argparse.Namespace) -> Output:
    sweep = sweep_learning_rate(
        arguments.task, arguments.optimizer, seeds=arguments.seeds, device=arguments.device
    )
    law = sweep.law
    lines = [f"{sweep.runs} runs; gradient noise scale {sweep.critical_batch_size:.3g}"]
    lines += [f"{law.shape}: rate {law.highest_rate:.3g}, batch size {law.batch_size:.3g}"]
    lines += ["batch size  best rate      exact  regime"]
    exact = [float("nan")] * len(sweep.rates) if sweep.exact_rates is None else sweep.exact_rates
    table = zip(sweep.batch_sizes, sweep.best_rates, exact, strict=False)
    lines += [f"{b:10.0f} {r:10.4g} {e:10.4g}  {law.regime(float(b))}" for b, r, e in table]
    if arguments.plot:
        from scaling.plot import plot

        _save(plot(sweep), arguments.plot)
    result = {"law": asdict(law), "critical_batch_size": sweep.critical_batch_size}
    names = ("batch_sizes", "best_rates", "rates", "loss")
    return lines, result | {name: getattr(sweep, name).tolist() for name in names}


def _describe(best: Optimum) -> list[str]:
    lines = [f"at {best.compute:.4g} FLOPs"]
    for name, interval in (best.intervals or {}).items():
        lines.append(f"  {name:<12}{getattr(best, name):<12.5g}{_range(interval)}")
    return lines


def _plain(value: Any) -> Any:
    """Without nan and inf, which JSON does not know."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _range(interval: Interval) -> str:
    return f"[{interval.low:.5g}, {interval.high:.5g}] {interval.level:.0%}"


def _save(figure: Figure, path: Path) -> None:
    """Write beside the target and rename, so that no half figure is left."""
    beside = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        figure.savefig(beside, dpi=150)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


if __name__ == "__main__":
    raise SystemExit(main())
