"""Command line: fit runs, or write a report about them."""

import argparse
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from scaling.fit.parametric import ParametricFit, fit_parametric
from scaling.fit.search import Loss
from scaling.isoflop.fit import IsoflopFit, fit_isoflop
from scaling.runs import Runs, ScalingWarning, load_runs

#: The text and the JSON of a command.
Output = tuple[list[str], dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, or 2 after printing an error to stderr.

    If `fit --plot` cannot draw a figure, because the runs do not identify a law, the answers are
    printed before the error.
    """
    arguments = _build_parser().parse_args(argv)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ScalingWarning)
            lines, result = arguments.command(arguments)
    except (ValueError, OSError, ImportError) as error:  # a missing extra raises ImportError
        print(f"scaling: {error}", file=sys.stderr)
        return 2
    for message in dict.fromkeys(str(w.message) for w in caught):
        print(f"warning: {message}", file=sys.stderr)
    print(json.dumps(_replace_nonfinite(result), indent=1) if arguments.json else "\n".join(lines))
    if "no_figure" in result:
        print(f"scaling: no figure is written: {result['no_figure']}", file=sys.stderr)
        return 2
    return 0


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scaling", description=__doc__)
    commands = parser.add_subparsers(required=True)
    source = argparse.ArgumentParser(add_help=False)
    add = source.add_argument
    add("runs", metavar="RUNS", help="CSV, JSON or JSONL")
    add("--history", metavar="COLUMN", help="column of run names; 'no' if every row is a run")
    for option, example, description in (
        ("--column", "loss=NAME", "the name of a column"),
        ("--unit", "parameters=1e6", "the unit of a column"),
        ("--where", "dataset=c4", "select rows by a column"),
        ("--ignore", "COLUMN", "do not read a column"),
    ):
        add(option, action="append", default=[], metavar=example, help=description)
    add("--without-highest", type=int, default=0, metavar="K", help="drop the K highest losses")
    add("--json", action="store_true", help="print the result as JSON")
    flops: dict[str, Any] = {"type": float, "metavar": "FLOPS", "nargs": "+", "default": []}
    file: dict[str, Any] = {"type": Path, "metavar": "FILE"}

    fit = commands.add_parser("fit", parents=[source], help="the best N and D at a budget")
    fit.add_argument("--at", help="budgets; default: ten times the largest run", **flops)
    fit.add_argument(
        "--method",
        choices=["parametric", "parabola"],
        default="parametric",
        help="a law of N and D, or valleys of each budget; default: parametric",
    )
    fit.add_argument(
        "--loss", choices=get_args(Loss), help="loss of parametric fits; default: huber"
    )
    fit.add_argument("--plot", help="save a figure", **file)
    fit.set_defaults(command=_fit)

    page = commands.add_parser("report", parents=[source], help="one HTML page about the runs")
    page.add_argument("--at", help="budgets; default: 10 and 100 times the largest run", **flops)
    page.add_argument("--to", default=Path("report.html"), help="default: report.html", **file)
    page.set_defaults(command=_report)

    return parser


def _load(arguments: argparse.Namespace) -> Runs:
    units = {}
    for name, unit in _parse_pairs(arguments.unit).items():
        try:
            units[name] = float(unit)
        except ValueError:
            raise ValueError(f"--unit: expected a number in '{name}={unit}'") from None
    runs = load_runs(
        arguments.runs,
        columns=_parse_pairs(arguments.column),
        units=units,
        where=_parse_pairs(arguments.where),
        history=False if arguments.history == "no" else arguments.history,
        ignore=arguments.ignore,
    )
    return runs.without_highest(arguments.without_highest)


def _parse_pairs(texts: Sequence[str]) -> dict[str, str]:
    """Return the pairs of NAME=VALUE strings.

    Raises `ValueError` for other strings, or two values of one name.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        if "=" not in text:
            raise ValueError(f"expected NAME=VALUE, got {text!r}")
        name, value = text.split("=", 1)
        if pairs.setdefault(name, value) != value:
            raise ValueError(f"{name!r} has two values, {pairs[name]!r} and {value!r}: pass one")
    return pairs


def _fit(arguments: argparse.Namespace) -> Output:
    runs = _load(arguments)
    budgets = arguments.at or [float(10 * runs.compute.max())]
    fit: ParametricFit | IsoflopFit
    if arguments.method == "parametric":
        fit = fit_parametric(runs, arguments.loss or "huber", prove=True)
        lines, result = ([], {}) if fit.unidentified else _describe_law(fit)
    elif arguments.loss is not None:
        raise ValueError("--loss is an option of --method parametric: drop one of them")
    else:
        fit = fit_isoflop(runs)
        lines, result = ([], {}) if fit.unidentified else _describe_valleys(fit, max(budgets))
    best = [fit.optimal(c) for c in budgets]
    if arguments.plot and fit.unidentified:
        result["no_figure"] = fit.unidentified
    elif arguments.plot:
        from scaling.plot import plot

        figure = plot(fit, up_to=max(budgets))
        _write_atomically(arguments.plot, lambda path: figure.savefig(path, dpi=150))
    result |= {"method": arguments.method, "runs": len(runs), "warnings": list(fit.warnings)}
    result["at"] = [asdict(optimum) for optimum in best]
    return [runs.explanation, *lines, *map(str, best)], result


def _describe_law(fit: ParametricFit) -> Output:
    """Return the constants of a law as text and JSON; their intervals do not include drift."""
    constants = asdict(fit.law) | {"exponent": fit.law.exponent}
    intervals = {k: fit.posterior.interval(k) for k in constants}
    lines = ["L(N, D) = E + A / N^alpha + B / D^beta, 95% of noise alone"]
    lines += [f"  {k:<9}{v:<12.6g}{intervals[k]}" for k, v in constants.items()]
    lines.append(
        f"  {fit.loss} objective {fit.objective:.9g}; {fit.proof.landed} of "
        f"{fit.proof.converged} converged starts reached it"
    )
    result = {"law": constants, "intervals": {k: asdict(v) for k, v in intervals.items()}}
    return lines, result | {"objective": fit.objective, "proof": asdict(fit.proof)}


def _describe_valleys(fit: IsoflopFit, compute: float) -> Output:
    """Return the law of N_opt as text and JSON; the text adds D_opt for C / (N D) at `compute`."""
    interval = fit.exponent_interval
    ratio = fit.flops_per_parameter_token(compute)
    lines = [
        f"N_opt = {fit.scale:.4g} C^{fit.exponent:.4f}, D_opt = C / ({ratio:.4g} N_opt)",
        f"  exponent    {fit.exponent:<12.4f}{interval} of noise alone",
    ]
    law = {"scale": fit.scale, "exponent": fit.exponent}
    return lines, {"law": law, "intervals": {"exponent": asdict(interval)}}


def _report(arguments: argparse.Namespace) -> Output:
    from scaling.page import report

    page = report(_load(arguments), at=arguments.at, title=f"Scaling laws of {arguments.runs}")
    _write_atomically(arguments.to, lambda path: path.write_text(page, "utf-8"))
    return [f"written to {arguments.to}"], {"written": str(arguments.to)}


def _replace_nonfinite(value: Any) -> Any:
    """Return a value with nan and inf replaced by None, because JSON has neither."""
    if isinstance(value, dict):
        return {k: _replace_nonfinite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under a temporary name, then rename it, so that it is never half written."""
    temporary = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    raise SystemExit(main())
