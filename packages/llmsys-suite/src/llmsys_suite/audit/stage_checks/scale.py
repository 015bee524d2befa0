"""Checks of `scale`: sizes and FLOPs by formula, one run repeated in float64, the fit by numpy."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import numpy as np

from llmsys_suite import results
from llmsys_suite.audit import reference
from llmsys_suite.audit.check import Check, Sources, compare_rows
from llmsys_suite.audit.inputs import get_float64_parameters, move_to_device
from llmsys_suite.audit.text import read_parts
from llmsys_suite.audit.tolerances import LOSS, compute_loss_tolerance
from llmsys_suite.config import RunConfig
from llmsys_suite.folder import RunFolder
from llmsys_suite.model import ModelConfig
from llmsys_suite.ranks.rank import Run
from llmsys_suite.stages import scale
from llmsys_suite.variants.initial_weights import build_seeded_model

#: Pairs of a budget in FLOPs, to be multiplied by `--steps`, and the model widths of its runs.
GRID = ((1.35e8, (4, 6, 10, 14)), (2.7e8, (4, 8, 12, 16)), (5.8e8, (6, 10, 14, 20)))
#: Number of seeds. The budgets of a seed are 1.1 times those of the previous seed.
SEEDS = 2
#: Number of windows of the held-out text on which the losses of the runs are measured.
HELDOUT_ROWS = 256


def check_records(folder: RunFolder, result: results.Scale) -> Iterator[Check]:
    """Check that the table has every run, its columns by formulas, and the fit by repeating it."""
    trained = [(row["compute_flops"], row["width"], row["seed"]) for row in result.runs]
    yield compare_rows("runs", _list_planned_runs(folder.config), trained)
    yield from _check_columns(result.runs)
    if result.law:
        yield from check_fit(result)
    missing = [] if result.law or result.warnings else ["no reason is reported"]
    yield Sources("scaling", "the runs").check_none("law that is missing", missing)


def _list_planned_runs(config: RunConfig) -> Iterator[tuple[float, int, int]]:
    """Return the budget in FLOPs, the width and the seed of each run that belongs to the stage."""
    for i in range(SEEDS):
        for budget, widths in GRID:
            for width in widths:
                yield config.steps * budget * 1.1**i, width, config.seed + i


def check_stage(run: Run, result: results.Scale) -> Iterator[Check]:
    """Train the shortest run of a random seed in float64, and compare its held-out loss."""
    # The stage cannot foresee a seed that is drawn now.
    seed = random.SystemRandom().choice([row["seed"] for row in result.runs])
    runs_of_seed = [row for row in result.runs if row["seed"] == seed]
    row = min(runs_of_seed, key=lambda row: row["steps"])
    loss = _train_again(run, row)
    float64 = Sources("reported", "float64, trained again")
    name = f"held-out loss of {row['steps']} steps"
    tolerance = compute_loss_tolerance(run.config, LOSS * math.sqrt(row["steps"]))
    yield float64.check_loss(name, loss, row["loss"], tolerance, f"seed {seed}")


def _check_columns(rows: results.Rows) -> Iterator[Check]:
    batch = scale.ROWS * scale.CONTEXT
    sizes = []
    tokens = []
    flops = []
    for row in rows:
        width = row["width"]
        parameters = 2 * (4 * width**2 + 3 * width * 3 * width + 2 * width) + width + 256 * width
        where = f"width {width}, {row['compute_flops']:.2g} FLOPs"
        sizes.append((parameters, row["parameters"], where))
        tokens.append((batch * row["steps"], row["tokens"], where))
        spent = 6 * row["parameters"] * row["tokens"] / row["compute_flops"]
        # The number of steps is rounded, so the FLOPs may differ from the budget by half a step.
        half_step = 0.5 / row["steps"] * spent + 1e-9
        flops.append((max(0.0, abs(spent - 1) - half_step), where))
    yield Sources("reported", "by hand").check_all_equal("parameters of every run", sizes)
    yield Sources("reported", "steps x rows x context").check_all_equal(
        "tokens of every run", tokens
    )
    yield Sources("6 N D", "its budget").check_distances("FLOPs of every run", flops, 0.0)


def check_fit(result: results.Scale) -> Iterator[Check]:
    """Compare the law and its extrapolation with fits by numpy."""
    factor, exponent = _fit_law(result.runs)
    extrapolated = result.extrapolated
    polynomials = Sources("scaling", "polynomials by numpy")
    yield polynomials.check_equal("exponent", exponent, result.law["exponent"], 1e-6)
    yield polynomials.check_equal("factor", factor, result.law["scale"], 1e-5)
    size = factor * extrapolated["compute_flops"] ** exponent
    yield polynomials.check_equal("extrapolated size", size, extrapolated["parameters"], 1e-5)
    budget = 3 * max(row["compute_flops"] for row in result.runs)
    budgets = Sources("scaling", "three times the largest budget")
    yield budgets.check_equal("extrapolated budget", budget, extrapolated["compute_flops"], 1e-9)


def _train_again(run: Run, row: results.Row) -> float:
    """Return the held-out loss of a run that is repeated in float64."""
    width = int(row["width"])
    steps = int(row["steps"])
    seed = int(row["seed"])
    heads = scale.HEADS
    shape = ModelConfig(
        d_model=width, d_ff=3 * width, num_layers=2, num_heads=heads, context=scale.CONTEXT
    )
    weights = get_float64_parameters(build_seeded_model(run, shape, seed))
    train, held_out = read_parts(run.config)
    peak = 6e-3 * (64 / width) ** 0.5
    optimizer = reference.AdamW(weights, peak, decay=0.0)
    for step in range(steps):
        cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
        optimizer.learning_rate = peak * min(1.0, (step + 1) / 10) * cosine
        batch = reference.draw_batch(train, scale.ROWS, scale.CONTEXT, seed, step)
        _, gradients = reference.compute_gradients(weights, *move_to_device(run, batch), heads)
        weights = optimizer.step(weights, gradients)
    heldout = reference.build_evenly_spaced_batch(held_out, HELDOUT_ROWS, scale.CONTEXT)
    return reference.compute_mean_loss(weights, *move_to_device(run, heldout), heads)


def _fit_law(rows: results.Rows) -> tuple[float, float]:
    """Return a and b of the size a * C^b that minimizes the loss at the budget C.

    For each budget, a parabola in log N is fitted to the best run and the runs closest in size. A
    line is fitted to the logarithms of the minima.
    """
    budgets: dict[float, list[tuple[float, float]]] = {}
    for row in rows:
        pair = (math.log(row["parameters"]), row["loss"])
        budgets.setdefault(row["compute_flops"], []).append(pair)
    minima = []
    for budget, runs in budgets.items():
        best = min(runs, key=lambda pair: pair[1])[0]
        close = sorted(runs, key=lambda pair: abs(pair[0] - best))[:4]
        sizes = [x for x, _ in close]
        a, b, _ = np.polyfit(sizes, [y for _, y in close], 2)
        if a > 0 and min(sizes) <= -b / (2 * a) <= max(sizes):
            minima.append((math.log(budget), -b / (2 * a)))
    exponent, height = np.polyfit([x for x, _ in minima], [y for _, y in minima], 1)
    return math.exp(height), float(exponent)
