"""Benchmarks of the fit (against L-BFGS-B), the bootstrap, the first answer and the sweeps."""

import argparse
import itertools
import json
import os
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from scipy.optimize import minimize

from scaling.fit.parametric import fit_parametric
from scaling.runs import Runs, ScalingWarning, load_runs
from scaling.sweeps.batch_size import SETTINGS, exact_rate, sweep_learning_rate
from scaling.synthetic import CHINCHILLA, isoflop_runs
from scaling.uncertainty.bootstrap import bootstrap
from scaling.units import Array

T = TypeVar("T")
Row = dict[str, float | int | str]


def bench(*, device: str = "cpu", quick: bool = False, data: Path | None = None) -> list[Row]:
    """Return rows of measurements on synthetic runs.

    The sweeps run on `device`. `data` is a file of further runs. As in Besiroglu et al., they are
    fitted without their five highest losses. L-BFGS-B runs from 243 of Hoffmann et al.'s 4,500
    starts. With `quick`, it runs from 20 starts, all data and sweeps are smaller, and each call is
    timed once.
    """
    starts = 20 if quick else 243
    calls = 1 if quick else 9
    budgets = tuple(np.geomspace(1e18, 3e21, 6 if quick else 24))
    noisy = isoflop_runs(budgets=budgets, per_budget=10, noise=5e-3)
    rows = _measure_fits("generated", noisy, starts, calls)
    if data:
        rows += _measure_fits(data.stem, load_runs(data).without_highest(5), starts, calls)
    fit = fit_parametric(noisy)
    resamples = 200 if quick else 4000
    seconds, _ = _measure_call(lambda: bootstrap(fit, resamples=resamples))
    row: Row = {"case": "bootstrap", "runs": len(noisy), "resamples": resamples}
    rows += [{**row, "time_s": seconds}, *_measure_answers(1000 if quick else 100_000, calls)]
    return [*rows, *_measure_sweeps(device, quick)]


def _measure_call(function: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def _measure_fits(name: str, runs: Runs, starts: int, calls: int) -> list[Row]:
    """Time `fit_parametric` without and with `prove`, and L-BFGS-B from a number of starts.

    The first time is the median of several calls.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScalingWarning)
        fit_parametric(runs)  # the first call loads LAPACK
        ours = [_measure_call(lambda: fit_parametric(runs)) for _ in range(calls)]
        seconds, proved = _measure_call(lambda: fit_parametric(runs, prove=True))
    theirs, best = _measure_call(lambda: minimize_by_lbfgs(runs, starts))
    landed = f"scaling, {proved.proof.landed}/{proved.proof.converged} landed"
    fit = ours[0][1]
    timings = [
        ("scaling", fit.proof.starts, float(np.median([s for s, _ in ours])), fit.objective),
        (landed, proved.proof.starts, seconds, proved.objective),
        ("L-BFGS-B", starts, theirs, best),
    ]
    row: Row = {"case": "fit", "data": name, "runs": len(runs)}
    return [
        {**row, "method": method, "starts": count, "time_ms": 1e3 * time_s, "objective": objective}
        for method, count, time_s, objective in timings
    ]


def _measure_answers(num_rows: int, calls: int) -> list[Row]:
    """Time the first optimum of a fit, and the fit of a table of `num_rows` rows with its reading.

    The first optimum includes the posterior and the drift; its time is the median of several fits.
    """
    seconds = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScalingWarning)
        for seed in range(calls):
            fit = fit_parametric(isoflop_runs(noise=2e-3, seed=seed))
            seconds.append(_measure_call(partial(fit.optimal, 1e24))[0])
        random = np.random.default_rng(0)
        n, d = 10 ** random.uniform([[7], [9]], [[9], [11]], (2, num_rows))
        loss = CHINCHILLA.predict(n, d) * np.exp(3e-3 * random.standard_normal(num_rows))
        records = [dict(zip("NDL", row, strict=True)) for row in zip(n, d, loss, strict=True)]
        table_seconds, _ = _measure_call(lambda: fit_parametric(load_runs(records)))
    optimum_seconds = float(np.median(seconds))
    return [
        {"case": "answer", "what": "first optimum", "rows": 72, "time_s": optimum_seconds},
        {"case": "answer", "what": "read and fit", "rows": num_rows, "time_s": table_seconds},
    ]


def _measure_sweeps(device: str, quick: bool) -> list[Row]:
    sweep_learning_rate(seeds=1, steps=1, device=device)  # the first call imports torch
    rows: list[Row] = []
    small: dict[str, Any] = {"seeds": 4, "steps": 5} if quick else {}
    for task, optimizer in SETTINGS:
        start = time.perf_counter()
        sweep = sweep_learning_rate(task, optimizer, device=device, **small)
        seconds = time.perf_counter() - start
        error = float("nan")
        if (task, optimizer) == ("linear", "sgd"):
            exact = exact_rate(sweep.batch_sizes, SETTINGS[task, optimizer].dimension)
            error = float(np.abs(sweep.best_rates / exact - 1).max())
        row: Row = {"case": "sweep", "task": task, "optimizer": optimizer, "runs": sweep.runs}
        rows.append(row | {"time_s": seconds, "error_percent": 100 * error})
    return rows


def minimize_by_lbfgs(runs: Runs, starts: int, delta: float = 1e-3) -> float:
    """Return the lowest Huber objective that L-BFGS-B reaches, with exact gradients.

    The starts are spread evenly over the 4,500 starts of Hoffmann et al. 2022.
    """
    log_n = np.log(runs.parameters)
    log_d = np.log(runs.tokens)
    log_loss = np.log(runs.loss)
    amplitudes = np.arange(0, 30, 5.0)
    exponents = np.arange(0, 2.5, 0.5)
    offsets = np.arange(-1, 1.5, 0.5)
    grid = [*itertools.product(amplitudes, amplitudes, offsets, exponents, exponents)]

    def compute_value_and_gradient(theta: Array) -> tuple[float, Array]:
        a, b, e, alpha, beta = theta
        terms = np.stack([a - alpha * log_n, b - beta * log_d, np.full_like(log_n, e)])
        largest = terms.max(0)
        weights = np.exp(terms - largest)
        total = weights.sum(0)
        r = largest + np.log(total) - log_loss
        pull = weights / total * np.clip(r, -delta, delta)
        clipped = np.minimum(np.abs(r), delta)
        gradient = [*pull.sum(1), -(pull[0] @ log_n), -(pull[1] @ log_d)]
        return float((clipped * (np.abs(r) - 0.5 * clipped)).sum()), np.array(gradient)

    chosen = grid[:: max(1, len(grid) // starts)][:starts]
    ends = [
        minimize(compute_value_and_gradient, s, jac=True, method="L-BFGS-B").fun for s in chosen
    ]
    return float(min(ends))


def main(argv: Sequence[str] | None = None) -> None:
    """Print the rows of `bench`; also write them as JSON if `--json` is passed.

    If the variable SCALING_DATA is set, Chinchilla's runs in this folder are fitted as well.
    """
    folder = os.environ.get("SCALING_DATA")
    points = Path(folder) / "chinchilla_svg_extracted_data.csv" if folder else None
    parser = argparse.ArgumentParser(prog="python -m scaling.bench", description=__doc__)
    add = parser.add_argument
    add("--device", default="cpu", help="torch device of the sweeps")
    add("--quick", action="store_true", help="run for seconds instead of minutes")
    add("--json", type=Path, help="write the rows to this file")
    options = vars(parser.parse_args(argv))
    file = options.pop("json")
    rows = bench(**options, data=points)
    if file:
        file.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        print(", ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
