"""Small training runs and the scaling law fitted to them.

The ranks divide the runs. Each run trains on random windows of the text until its budget of
C = 6 N D FLOPs is spent. D is the number of tokens, and N the number of weights without the
embedding. The budgets are proportional to `--steps`.
"""

from __future__ import annotations

import math

import torch

from llmsys_suite.config import RunConfig
from llmsys_suite.model import ModelConfig
from llmsys_suite.ranks.rank import Run
from llmsys_suite.results import Scale
from llmsys_suite.variants.initial_weights import build_seeded_model

#: Pairs of a budget in FLOPs, to be multiplied by `--steps`, and its model widths. Some widths are
#: below and some above the best width: with the best run at an edge, an optimum is unreliable.
GRID = ((1.35e8, (4, 6, 10, 14)), (2.7e8, (4, 8, 12, 16)), (5.8e8, (6, 10, 14, 20)))
SEEDS = 2
#: Factor between the budgets of consecutive seeds. More budgets give the fit more loss curves. For
#: equal total time, this narrows the interval of the fit more than budgets that are further apart.
SEED_BUDGET_FACTOR = 1.1
#: The law is evaluated at this multiple of the largest budget.
EXTRAPOLATION_FACTOR = 3
ROWS = 16
CONTEXT = 64
#: With one head, any even width is possible.
HEADS = 1
HELDOUT_ROWS = 256
#: The budget in FLOPs, the width and the seed of a run.
PlannedRun = tuple[float, int, int]


def run(run: Run) -> Scale | None:
    """Train all planned runs; return their losses and the extrapolated fit on rank 0."""
    planned = select_runs(plan_runs(run.config), run.rank, run.world)
    gathered = run.gather([train_one(run, *arguments) for arguments in planned])
    if run.rank != 0:
        return None
    rows = [row for rank_rows in gathered for row in rank_rows]
    return fit_law(sorted(rows, key=lambda row: (row["compute_flops"], row["parameters"])))


def plan_runs(config: RunConfig) -> list[PlannedRun]:
    """Return the planned runs of all ranks."""
    return [
        (config.steps * budget * SEED_BUDGET_FACTOR**i, width, config.seed + i)
        for i in range(SEEDS)
        for budget, widths in GRID
        for width in widths
    ]


def select_runs(planned: list[PlannedRun], rank: int, world: int) -> list[PlannedRun]:
    """Return the runs of a rank, chosen so that all ranks take about equally many steps.

    A step takes about equally long for all of these models.
    """

    def relative_steps(run: PlannedRun) -> float:
        budget, width, _ = run
        parameters = 26 * width**2 + 261 * width  # without the embedding
        return budget / parameters

    longest_first = sorted(planned, key=relative_steps, reverse=True)
    # Every other group of `world` runs is distributed in the reverse order of ranks, so that no
    # rank always gets the longest run.
    return longest_first[rank :: 2 * world] + longest_first[2 * world - 1 - rank :: 2 * world]


def train_one(run: Run, budget: float, width: int, seed: int) -> dict[str, float]:
    """Train a model of one width on one budget; return a row with its held-out loss."""
    config = ModelConfig(
        d_model=width, d_ff=3 * width, num_layers=2, num_heads=HEADS, context=CONTEXT
    )
    model = build_seeded_model(run, config, seed)
    parameters = sum(p.numel() for p in model.parameters()) - model.embedding.weight.numel()
    steps = max(1, round(budget / (6 * parameters * ROWS * CONTEXT)))
    peak_rate = 6e-3 * (64 / width) ** 0.5
    # The models are so small that one kernel per weight and operation would take longer.
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_rate, weight_decay=0.0, fused=True)
    for step in range(steps):
        for group in optimizer.param_groups:
            warmup = min(1.0, (step + 1) / 10)
            group["lr"] = peak_rate * warmup * _compute_cosine_factor(step / steps)
        batch = run.corpus.draw_batch(rows=ROWS, context=CONTEXT, seed=seed, step=step)
        tokens, targets = (t.to(run.device) for t in batch)
        optimizer.zero_grad()
        with run.autocast():
            training_loss = model.compute_loss(tokens, targets)
        training_loss.backward()
        optimizer.step()
    batch = run.corpus.build_heldout_batch(rows=HELDOUT_ROWS, context=CONTEXT)
    tokens, targets = (t.to(run.device) for t in batch)
    with torch.no_grad(), run.in_float32():
        loss = float(model.compute_loss(tokens, targets))
    return {
        "width": width,
        "seed": seed,
        "parameters": parameters,
        "tokens": steps * ROWS * CONTEXT,
        "compute_flops": budget,
        "steps": steps,
        "loss": loss,
    }


def _compute_cosine_factor(progress: float) -> float:
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


def fit_law(rows: list[dict[str, float]]) -> Scale:
    """Return the IsoFLOP fit of the runs and its warnings, or only the reason why it failed."""
    import warnings

    import scaling

    columns = ("parameters", "tokens", "compute_flops", "loss")
    table = {column.removesuffix("_flops"): [row[column] for row in rows] for column in columns}
    budget = EXTRAPOLATION_FACTOR * max(table["compute"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            runs = scaling.load_runs(table, units={"loss": 1})
            law = scaling.fit_isoflop(runs, nearest=4)
            if law.unidentified:
                return Scale(rows, [law.unidentified])
            optimum = law.optimal(budget)
        except ValueError as error:
            return Scale(rows, [str(error)])
    assert optimum.intervals is not None
    interval = optimum.intervals["parameters"]
    extrapolated = {"compute_flops": budget, "parameters": optimum.parameters}
    return Scale(
        rows,
        [str(warning.message) for warning in caught],
        law={"scale": law.scale, "exponent": law.exponent},
        extrapolated=extrapolated | {"low": interval.low, "high": interval.high},
    )
