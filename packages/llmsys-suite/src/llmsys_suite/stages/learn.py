"""A longer training run with the fastest variant, after which the model generates text.

- A batch depends only on (seed, step), and any number of ranks can load a checkpoint of `zero`.
  Training can therefore continue with another number of ranks.
- One small all-reduce per step sums the losses, and the number of ranks that received SIGTERM. If
  any rank received it, all ranks save a checkpoint and exit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import zero
from safetensors.torch import save_file

from llmsys_suite.learning.choice import make_variant
from llmsys_suite.learning.evaluation import compute_heldout_loss, sample
from llmsys_suite.learning.log import Log, open_log, trace_steps
from llmsys_suite.learning.state import (
    CHECKPOINT,
    PEAK_FACTOR,
    PROBE,
    build_initial_state,
    compute_rate_factor,
    draw_probed_step,
    find_checkpoint,
    is_due,
    require_finite,
    require_same,
)
from llmsys_suite.ranks.failure import collect_stop_requests
from llmsys_suite.ranks.rank import Run
from llmsys_suite.results import Learn
from llmsys_suite.text.data import compute_row_digests
from llmsys_suite.text.generation import MODEL
from llmsys_suite.variants.initial_weights import build_model_with
from llmsys_suite.variants.single import Variant

#: A training run of n steps is evaluated on the held-out text every n // EVALUATIONS steps, and
#: saves a checkpoint every n // SAVES steps (at least 1). Both also happen after the last step.
EVALUATIONS, SAVES = 5, 2


def run(run: Run) -> Learn | None:
    """Train from the start or a checkpoint; return losses and generated text on rank 0."""
    config = run.config
    name, variant = make_variant(run)
    text_digest = run.corpus.compute_digest()
    state = build_initial_state(config, text_digest)
    source = find_checkpoint(run)
    if source is not None:
        model, optimizer = variant.get_checkpoint_objects()
        state = zero.load_checkpoint(source, model, optimizer)
        require_same(state, config, text_digest, source)
        variant.restore(model, optimizer)
    begun_at = state["step"]
    probed_step = draw_probed_step(run, begun_at, state["total"])
    if not state["heldout"]:
        state["heldout"].append((0, compute_heldout_loss(run, variant.get_evaluated_model())))
    with (
        collect_stop_requests() as stop_requests,
        trace_steps(run) as recording,
        open_log(run) as log,
    ):
        for step, loss in state["heldout"]:
            log(step, {"heldout_loss": loss})
        while state["step"] < state["total"]:
            train_step(run, name, variant, state, probed_step, stop_requests, log)
            if recording is not None:
                recording.step()
    if begun_at == state["total"]:
        save(run, variant, state, CHECKPOINT)  # no step has saved a checkpoint in this run folder
    weights = variant.gather_weights()
    written = sample(run, weights)
    variant.close()
    if run.folder is None:
        return None
    run.trained = build_model_with(run, run.model, weights)
    save_file(run.trained.state_dict(), run.folder.path / MODEL)
    return Learn(
        variant=name,
        begun_at=begun_at,
        rows=state["rows"],
        learning_rate=state["learning_rate"],
        probed_step=probed_step,
        losses=state["losses"],
        heldout=state["heldout"],
        tokens=state["total"] * state["rows"] * config.context,
        written=written,
    )


def train_step(
    run: Run,
    name: str,
    variant: Variant,
    state: dict[str, Any],
    probed_step: int | None,
    stop_requests: list[int],
    log: Log,
) -> None:
    """Take one step; evaluate and save at intervals. After a SIGTERM, raise KeyboardInterrupt."""
    step, total = state["step"], state["total"]
    for group in variant.optimizer.param_groups:
        group["lr"] = PEAK_FACTOR * state["learning_rate"] * compute_rate_factor(step / total)
    tokens, targets = run.corpus.draw_batch(
        rows=state["rows"],
        context=run.config.context,
        seed=state["seed"] + 1,
        step=step,
        rank=variant.data_rank,
        world=variant.data_world,
    )
    digests = compute_row_digests(tokens, targets) if variant.reports_rows else []
    tokens, targets = tokens.to(run.device), targets.to(run.device)
    if step == probed_step:
        save(run, variant, state, f"{PROBE}/before")
    with run.recorder.step(stage="learn", variant=name, step=step, warmup=False) as record:
        record["loss"] = variant.step(tokens, targets)
    record["learning_rate"] = variant.optimizer.param_groups[0]["lr"]
    record["row_digests"] = digests
    if step == probed_step:
        save(run, variant, state, f"{PROBE}/after")
    sums = torch.tensor([record["loss"], float(bool(stop_requests))], device=run.device)
    dist.all_reduce(sums)
    state["losses"].append(float(sums[0]) / run.world)
    require_finite(state["losses"][-1], step)
    log(step, {"loss": state["losses"][-1], "learning_rate": record["learning_rate"]})
    state["step"] = step = step + 1
    if is_due(step, total, EVALUATIONS):
        state["heldout"].append((step, compute_heldout_loss(run, variant.get_evaluated_model())))
        log(step, {"heldout_loss": state["heldout"][-1][1]})
        run.progress.update(step, total, f"steps, {state['heldout'][-1][1]:.3f} held out")
    is_stopped = bool(sums[1])
    if is_stopped or is_due(step, total, SAVES):
        save(run, variant, state, CHECKPOINT)
    if is_stopped:
        run.flush_samples()
        raise KeyboardInterrupt


def save(run: Run, variant: Variant, state: dict[str, Any], name: str) -> None:
    """Save a checkpoint of the training as `name` in the run folder."""
    zero.save_checkpoint(run.out / name, *variant.get_checkpoint_objects(), extra=dict(state))
