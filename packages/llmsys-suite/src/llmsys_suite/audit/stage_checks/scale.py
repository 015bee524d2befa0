"""Checks of `scale`: sizes and FLOPs by formula, one run repeated in float64, the fit by numpy."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import numpy as np

from llmsys_suite import results
from llmsys_suite.audit import reference
from llmsys_suite.audit.check import Check, Sources, same_rows
from llmsys_suite.audit.inputs import in_float64, on_device
from llmsys_suite.audit.text import read_parts
from llmsys_suite.audit.tolerances import LOSS, LOSS_SCALE, loss_tolerance
from llmsys_suite.folder import RunFolder
from llmsys_suite.model import ModelConfig
from llmsys_suite.ranks.rank import Run
from llmsys_suite.stages import scale
from llmsys_suite.variants.initial_weights import seeded


def recorded(folder: RunFolder, result: results.Scale) -> Iterator[Check]:
    """Check that no run is missing, the columns by formulas, and the fit by repeating it."""
    trained = [(row["compute_flops"], row["width"], row["seed"]) for row in result.runs]
    yield same_rows("runs", scale.planned_runs(folder.config), trained)
    yield from _columns(result.runs)
    if result.law:
        yield from fit_checks(result)
    missing = [] if result.law or result.warnings else ["no reason is reported"]
    yield Sources("scaling", "the runs").none("law that is missing", missing)


def checks(run: Run, result: results.Scale) -> Iterator[Check]:
    """Compare the held-out loss of one run with a run that is trained again in float64."""
    # The seed of the checked run is drawn only now, so that the stage cannot foresee it.
    seed = random.SystemRandom().choice([row["seed"] for row in result.runs])
    runs_of_seed = [row for row in result.runs if row["seed"] == seed]
    row = min(runs_of_seed, key=lambda row: row["steps"])
    loss = _trained_again(run, row)
    float64 = Sources("reported", "float64, trained again")
    name = f"held-out loss of {row['steps']} steps"
    tolerance = loss_tolerance(run.config, LOSS * math.sqrt(row["steps"]))
    yield float64.equal(name, loss, row["loss"], tolerance, f"seed {seed}", scale=LOSS_SCALE)


def _columns(rows: results.Rows) -> Iterator[Check]:
    batch = scale.ROWS * scale.CONTEXT
    sizes = []
    tokens = []
    flops = []
    for row in rows:
        width = row["width"]
        by_hand = 2 * (4 * width**2 + 3 * width * 3 * width + 2 * width) + width + 256 * width
        where = f"width {width}, {row['compute_flops']:.2g} FLOPs"
        sizes.append((by_hand, row["parameters"], where))
        tokens.append((batch * row["steps"], row["tokens"], where))
        spent = 6 * row["parameters"] * row["tokens"] / row["compute_flops"]
        # The number of steps is rounded, so the budget may be missed by half a step.
        room = 0.5 / row["steps"] * spent + 1e-9
        flops.append((max(0.0, abs(spent - 1) - room), where))
    yield Sources("reported", "by hand").all_equal("parameters of every run", sizes)
    yield Sources("reported", "steps x rows x context").all_equal("tokens of every run", tokens)
    yield Sources("6 N D", "its budget").all_near("FLOPs of every run", flops, 0.0)


def fit_checks(result: results.Scale) -> Iterator[Check]:
    """Compare the law and its extrapolation with fits by numpy."""
    factor, exponent = _law(result.runs)
    at = result.extrapolated
    numpys = Sources("scaling", "polynomials by numpy")
    yield numpys.equal("exponent", exponent, result.law["exponent"], 1e-6)
    yield numpys.equal("factor", factor, result.law["scale"], 1e-5)
    size = factor * at["compute_flops"] ** exponent
    yield numpys.equal("extrapolated size", size, at["parameters"], 1e-5)
    beyond = scale.BEYOND * max(row["compute_flops"] for row in result.runs)
    budgets = Sources("scaling", "the largest budget")
    yield budgets.equal("extrapolated budget", beyond, at["compute_flops"], 1e-9)


def _trained_again(run: Run, row: results.Row) -> float:
    width = int(row["width"])
    steps = int(row["steps"])
    seed = int(row["seed"])
    heads = scale.HEADS
    shape = ModelConfig(
        d_model=width, d_ff=3 * width, num_layers=2, num_heads=heads, context=scale.CONTEXT
    )
    weights = in_float64(seeded(run, shape, seed))
    train, held_out = read_parts(run.config)
    peak = 6e-3 * (64 / width) ** 0.5
    optimizer = reference.AdamW(weights, peak, decay=0.0)
    for step in range(steps):
        cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
        optimizer.learning_rate = peak * min(1.0, (step + 1) / 10) * cosine
        batch = reference.batch(train, scale.ROWS, scale.CONTEXT, seed, step)
        _, gradients = reference.gradients(weights, *on_device(run, batch), heads)
        weights = optimizer.step(weights, gradients)
    heldout = reference.spread(held_out, scale.HELDOUT_ROWS, scale.CONTEXT)
    return reference.mean_loss(weights, *on_device(run, heldout), heads)


def _law(rows: results.Rows) -> tuple[float, float]:
    """Return the factor and the exponent of the size that minimizes the loss, by budget.

    A parabola in log N is fitted around the best run of each budget, and a line through the minima.
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
