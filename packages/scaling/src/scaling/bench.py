"""How fast and how sure: the fit beside L-BFGS-B, the bootstrap, the shortcuts, the sweeps."""

import argparse
import itertools
import json
import os
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from scipy.optimize import curve_fit, minimize

from scaling.fit.parametric import fit_parametric
from scaling.isoflop import fit_isoflop
from scaling.runs import Array, Runs, ScalingWarning, load_runs
from scaling.sweeps.batch_size import SETTINGS, sweep_learning_rate
from scaling.synthetic import CHINCHILLA, isoflop_runs, planned_runs
from scaling.uncertainty.bootstrap import bootstrap

T = TypeVar("T")
Row = dict[str, float | int | str]

SHORTCUTS = ("minimum", "minimum-linear", "minimum-offset")


def bench(
    *, device: str = "cpu", quick: bool = False, data: Path | None = None, starts: int | None = None
) -> list[Row]:
    """Rows of measurements on runs that the package generates; `device` is the sweeps'.

    `data` adds the fit of a file of runs (without its five highest losses, as Besiroglu et al. fit
    Chinchilla's); `starts` is how many of the 4,500 starts L-BFGS-B gets.
    """
    starts = starts or (40 if quick else 4500)
    noisy = isoflop_runs(budgets=tuple(np.geomspace(1e18, 3e21, 24)), per_budget=10, noise=5e-3)
    rows = _fits("generated", noisy, starts)
    if data:
        rows += _fits(data.stem, load_runs(data).without_highest(5), starts)
    fit, resamples = fit_parametric(noisy), 1000 if quick else 4000
    seconds, _ = _timed(lambda: bootstrap(fit, resamples=resamples))
    row: Row = {"case": "bootstrap", "runs": len(noisy), "resamples": resamples}
    return [*rows, {**row, "time_s": seconds}, *_shortcuts(), *_sweeps(device, quick)]


def _timed(function: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def _fits(name: str, runs: Runs, starts: int) -> list[Row]:
    """Ours, ours with its proof, and L-BFGS-B with exact gradients from some of 4,500 starts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScalingWarning)
        fit_parametric(runs)  # pays for loading LAPACK
        ours = [_timed(lambda: fit_parametric(runs)) for _ in range(9)]
        seconds, proved = _timed(lambda: fit_parametric(runs, prove=True))
    theirs, best = _timed(lambda: lbfgs(runs, starts))
    landed = f"scaling, {proved.proof.landed}/{proved.proof.converged} landed"
    timings = [
        ("scaling", 8, float(np.median([s for s, _ in ours])), ours[0][1].objective),
        (landed, proved.proof.starts, seconds, ours[0][1].objective),
        ("L-BFGS-B", starts, theirs, best),
    ]
    if starts < 4500:
        timings.append(("L-BFGS-B, in proportion", 4500, theirs * 4500 / starts, best))
    row: Row = {"case": "fit", "data": name, "runs": len(runs)}
    return [
        {**row, "method": method, "starts": count, "time_ms": 1e3 * seconds, "objective": least}
        for method, count, seconds, least in timings
    ]


def _shortcuts() -> list[Row]:
    """The best size at 1e24 FLOPs from noiseless runs, by every method, over the truth."""
    runs, truth = planned_runs(), CHINCHILLA.optimal(1e24).parameters
    found = {method: shortcut(runs, method)(1e24) for method in SHORTCUTS}
    options: dict[str, dict[str, Any]] = {"": {}, ", degree 2": {"degree": 2}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScalingWarning)
        for told, option in {**options, ", nearest 5": {"nearest": 5}}.items():
            found[f"parabola{told}"] = fit_isoflop(runs, **option).optimal(1e24).parameters
    found["parametric"] = fit_parametric(runs).law.optimal(1e24).parameters
    return [
        {"case": "noiseless", "method": method, "n_1e24": n, "over_truth": n / truth}
        for method, n in found.items()
    ]


def shortcut(runs: Runs, method: str) -> Callable[[float], float]:
    """What not to do: the best size at a compute, by the best run of each budget.

    "minimum" draws a line in logs through them, "minimum-linear" fits a C^b by least squares in N,
    "minimum-offset" a C^b + c, which contradicts C = 6 N D. Each is a size that somebody chose.
    """
    best = [group[[int(np.argmin(group.loss))]] for group in runs.budgets()]
    c, n = (np.array([getattr(b, k)[0] for b in best]) for k in ("compute", "parameters"))
    exponent, intercept = np.polyfit(np.log(c), np.log(n), 1)
    if method == "minimum":
        return lambda compute: float(np.exp(intercept) * compute**exponent)
    # In units of the means: curve_fit's steps are absolute.
    start = [np.exp(intercept) * c.mean() ** exponent / n.mean(), exponent]
    start += [0.0] * (method == "minimum-offset")

    def law(c: Any, a: float, b: float, offset: float = 0.0) -> Any:
        return a * c**b + offset

    found, _ = curve_fit(law, c / c.mean(), n / n.mean(), start, maxfev=20_000)
    return lambda compute: float(n.mean() * law(compute / c.mean(), *found))


def _sweeps(device: str, quick: bool) -> list[Row]:
    sweep_learning_rate(seeds=1, steps=1, device=device)  # pays for importing torch
    rows: list[Row] = []
    small: dict[str, Any] = {"seeds": 4, "steps": 5} if quick else {}
    for task, optimizer in SETTINGS:
        start = time.perf_counter()
        sweep = sweep_learning_rate(task, optimizer, device=device, **small)
        seconds, law, exact = time.perf_counter() - start, sweep.law, sweep.exact_rates
        error = float("nan") if exact is None else float(np.abs(sweep.best_rates / exact - 1).max())
        rows.append(
            {"case": "sweep", "task": task, "optimizer": optimizer, "runs": sweep.runs}
            | {"time_s": seconds, "error_percent": 100 * error, "shape": law.shape}
            | {"batch_size": law.batch_size, "noise_scale": sweep.critical_batch_size}
        )
    return rows


def lbfgs(runs: Runs, starts: int, delta: float = 1e-3) -> float:
    """The best Huber objective over some of the 4,500 starts of Hoffmann et al. 2022."""
    log_n, log_d, log_loss = np.log(runs.parameters), np.log(runs.tokens), np.log(runs.loss)
    large, small = np.arange(0, 30, 5.0), np.arange(0, 2.5, 0.5)
    every = [*itertools.product(large, large, np.arange(-1, 1.5, 0.5), small, small)]

    def value_and_gradient(theta: Array) -> tuple[float, Array]:
        a, b, e, alpha, beta = theta
        terms = np.stack([a - alpha * log_n, b - beta * log_d, np.full_like(log_n, e)])
        top = terms.max(0)
        weights = np.exp(terms - top)
        total = weights.sum(0)
        r = top + np.log(total) - log_loss
        share = weights / total * np.clip(r, -delta, delta)
        inside = np.minimum(np.abs(r), delta)
        slopes = [*share.sum(1), -(share[0] @ log_n), -(share[1] @ log_d)]
        return float((inside * (np.abs(r) - 0.5 * inside)).sum()), np.array(slopes)

    chosen = every[:: max(1, len(every) // starts)][:starts]
    ends = (minimize(value_and_gradient, s, jac=True, method="L-BFGS-B").fun for s in chosen)
    return float(min(ends))


def main(argv: Sequence[str] | None = None) -> None:
    """Print one table; write the rows as JSON if asked."""
    folder = os.environ.get("SCALING_DATA")
    points = Path(folder) / "chinchilla_svg_extracted_data.csv" if folder else None
    parser = argparse.ArgumentParser(prog="python -m scaling.bench", description=__doc__)
    add = parser.add_argument
    add("--device", default="cpu")
    add("--quick", action="store_true", help="seconds, not minutes")
    add("--json", type=Path, help="write the rows to this file")
    told = "also fit this file; default: Chinchilla's in $SCALING_DATA"
    add("--data", type=Path, default=points, help=told)
    add("--starts", type=int, help="starts of L-BFGS-B, up to 4500")
    options = vars(parser.parse_args(argv))
    file = options.pop("json")
    rows = bench(**options)
    if file:
        file.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


def table(rows: list[Row]) -> str:
    """Rows as aligned text, a block for each set of columns."""
    blocks = []
    for columns, group in itertools.groupby(rows, key=tuple):
        cells = [
            [f"{v:.4g}" if isinstance(v, float) else str(v) for v in r.values()] for r in group
        ]
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        lines = (map(str.rjust, line, widths) for line in ([*columns], *cells))
        blocks.append("\n".join(map("  ".join, lines)))
    return "\n\n".join(blocks)


if __name__ == "__main__":
    main()
