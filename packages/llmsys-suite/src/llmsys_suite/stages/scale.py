"""Small training runs and the scaling law fitted to them.

The ranks divide the runs. Each run trains on random windows of the text until its budget C = 6 N D
is spent; the budgets are proportional to `--steps`. D is the number of tokens, and N the number of
weights without the embedding.
"""

from __future__ import annotations

import math

import torch

from llmsys_suite.config import RunConfig
from llmsys_suite.model import ModelConfig
from llmsys_suite.ranks.rank import Run
from llmsys_suite.results import Scale
from llmsys_suite.variants.initial_weights import seeded

# Budgets in FLOPs, each multiplied by `--steps`, and the widths that are trained. The widths lie on
# both sides of the best one, because a valley whose minimum is at an edge cannot be fitted.
GRID = ((1.35e8, (4, 6, 10, 14)), (2.7e8, (4, 8, 12, 16)), (5.8e8, (6, 10, 14, 20)))
# Number of seeds, and the factor between the budgets of consecutive seeds. Separate budgets add
# valleys and degrees of freedom, which narrows the interval more than larger distances between
# budgets would in the same time.
SEEDS, APART = 2, 1.1
# The law is evaluated at BEYOND times the largest budget.
BEYOND = 3
ROWS, CONTEXT = 16, 64
# With one head, any even width is possible.
HEADS = 1
HELDOUT_ROWS = 256
#: The budget in FLOPs, the width and the seed of a run.
PlannedRun = tuple[float, int, int]


def run(run: Run) -> Scale | None:
    """Return the losses of all runs, their IsoFLOP fit and its extrapolation, on rank 0."""
    planned = runs_of_rank(planned_runs(run.config), run.rank, run.world)
    mine = [train_one(run, *arguments) for arguments in planned]
    gathered = run.gather(mine)
    rows = sorted(
        (row for part in gathered for row in part),
        key=lambda row: (row["compute_flops"], row["parameters"]),
    )
    if run.rank != 0:
        return None
    return fit(rows)


def planned_runs(config: RunConfig) -> list[PlannedRun]:
    """Return the planned runs of all ranks."""
    return [
        (config.steps * budget * APART**i, width, config.seed + i)
        for i in range(SEEDS)
        for budget, widths in GRID
        for width in widths
    ]


def runs_of_rank(planned: list[PlannedRun], rank: int, world: int) -> list[PlannedRun]:
    """Return the runs of a rank, chosen so that all ranks take about equally many steps.

    A step takes about equally long for all of these models.
    """

    def steps(run: PlannedRun) -> float:
        budget, width, _ = run
        return budget / (26 * width**2 + 261 * width)

    longest_first = sorted(planned, key=steps, reverse=True)
    # In every other group of runs the order of the ranks is reversed, so that no rank always gets
    # the longest run.
    return longest_first[rank :: 2 * world] + longest_first[2 * world - 1 - rank :: 2 * world]


def train_one(run: Run, budget: float, width: int, seed: int) -> dict[str, float]:
    """Train one width for one budget; return a row with its held-out loss in nats per byte."""
    config = ModelConfig(
        d_model=width, d_ff=3 * width, num_layers=2, num_heads=HEADS, context=CONTEXT
    )
    model = seeded(run, config, seed)
    parameters = sum(p.numel() for p in model.parameters()) - model.embedding.weight.numel()
    steps = max(1, round(budget / (6 * parameters * ROWS * CONTEXT)))
    rate = 6e-3 * (64 / width) ** 0.5
    # The models are so small that launching a kernel per weight and operation would take longer.
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 10) * _cosine(step / steps)
        batch = run.corpus.batch(rows=ROWS, context=CONTEXT, seed=seed, step=step)
        tokens, targets = (t.to(run.device) for t in batch)
        optimizer.zero_grad()
        with run.autocast():
            loss_in_training = model.loss(tokens, targets)
        loss_in_training.backward()
        optimizer.step()
    tokens, targets = (
        t.to(run.device) for t in run.corpus.heldout_batch(rows=HELDOUT_ROWS, context=CONTEXT)
    )
    with torch.no_grad(), run.in_float32():
        loss = float(model.loss(tokens, targets))
    return {
        "width": width,
        "seed": seed,
        "parameters": parameters,
        "tokens": steps * ROWS * CONTEXT,
        "compute_flops": budget,
        "steps": steps,
        "loss": loss,
    }


def _cosine(progress: float) -> float:
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


def fit(rows: list[dict[str, float]]) -> Scale:
    """Return the IsoFLOP fit of the runs and its warnings, or only the reason if there is none."""
    import warnings

    import scaling

    columns = ("parameters", "tokens", "compute_flops", "loss")
    table = {column.removesuffix("_flops"): [row[column] for row in rows] for column in columns}
    at = BEYOND * max(table["compute"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            runs = scaling.load_runs(table, units={"loss": 1})
            law = scaling.fit_isoflop(runs, nearest=4)
            if law.unidentified:
                return Scale(rows, [law.unidentified])
            optimum = law.optimal(at)
        except ValueError as error:
            return Scale(rows, [str(error)])
    assert optimum.intervals is not None
    ends = optimum.intervals["parameters"]
    size = {"parameters": optimum.parameters, "low": ends.low, "high": ends.high}
    return Scale(
        rows,
        [str(warning.message) for warning in caught],
        {"scale": law.scale, "exponent": law.exponent},
        {"compute_flops": at} | size,
    )
