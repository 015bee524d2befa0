"""Checks of `learn`: its configuration, losses, schedule, batches and last checkpoint."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from llmsys_suite import results
from llmsys_suite.audit import reference
from llmsys_suite.audit.check import Check, Sources
from llmsys_suite.audit.inputs import get_float64_parameters, get_num_heads, move_to_device
from llmsys_suite.audit.stage_checks import probed_step
from llmsys_suite.audit.text import read_parts
from llmsys_suite.audit.tolerances import LOSS, REPLAYED_LOSS, compute_loss_tolerance
from llmsys_suite.config import count_restarts
from llmsys_suite.folder import RunFolder
from llmsys_suite.learning.state import CHECKPOINT, DEFAULT_STEPS
from llmsys_suite.measure.samples import SERVER, SINGLE
from llmsys_suite.ranks.rank import Run
from llmsys_suite.text.generation import MODEL
from llmsys_suite.variants.initial_weights import build_seeded_model

#: Number of windows of the held-out text on which `learn` measures its loss.
HELDOUT_ROWS = 64
#: Number of intervals between evaluations in a training run.
EVALUATIONS = 5
#: Variants of `train` that cannot save checkpoints, so that `learn` does not choose them.
NOT_SAVED = (SINGLE, SERVER, "torch FSDP2")


def check_records(folder: RunFolder, result: results.Learn) -> Iterator[Check]:
    """Check tokens, variant, losses and learning rates, and the checkpoint if it still exists."""
    yield from _check_evaluations(folder, result)
    yield from _check_samples(folder, result)
    if (folder.path / CHECKPOINT).exists():
        yield from _check_last_checkpoint(folder, result)


def check_stage(run: Run, result: results.Learn) -> Iterator[Check]:
    """Check the configuration, losses and rows of the training, and one random step."""
    yield from _check_configuration(run, result)
    yield from _check_losses(run, result)
    yield from _check_rows(run, result)
    if result.probed_step is not None:
        yield from probed_step.check_probed_step(run, result, result.probed_step)
    elif result.begun_at < len(result.losses):
        steps = Sources("reported", "a step drawn at random")
        yield steps.check_none("step that the audit repeats", ["there is none"])


def _check_configuration(run: Run, result: results.Learn) -> Iterator[Check]:
    """Compare steps, rows and learning rate with the configuration, unless the run was resumed."""
    config = run.config
    if config.resume is not None or count_restarts():
        return
    configured = Sources("reported", "the configuration")
    yield configured.check_equal("first step", 0, result.begun_at)
    yield configured.check_equal("rows", config.rows, result.rows)
    yield configured.check_equal("base learning rate", config.learning_rate, result.learning_rate)
    yield configured.check_equal("steps", config.learn or DEFAULT_STEPS, len(result.losses))


def _check_evaluations(folder: RunFolder, result: results.Learn) -> Iterator[Check]:
    """Compare tokens, and steps of held-out losses, with formulas, and the variant with `train`."""
    config = folder.config
    total = len(result.losses)
    tokens = total * result.rows * config.context
    yield Sources("reported", "the configuration").check_equal("tokens", tokens, result.tokens)
    evaluated = [step for step, _ in result.heldout]
    interval = max(1, total // EVALUATIONS)
    expected = [0, *(step for step in range(1, total) if step % interval == 0), total]
    intervals = Sources("evaluations", "the first step, the last and each interval")
    yield intervals.check_none(
        "steps of held-out losses", [] if evaluated == expected else [str(evaluated)]
    )
    train = folder.results.get("train")
    is_chosen_by_time = config.tensor * config.pipeline == 1 and config.world > 1
    if train and is_chosen_by_time:
        refused = (*NOT_SAVED, "fsdp") if config.compile else NOT_SAVED
        ratios = {
            row["variant"]: row["ratio_p50"]
            for row in train.rows
            if row["variant"] not in refused and "ratio_p50" in row
        }
        ratio = ratios.get(result.variant, math.nan)
        smallest = Sources("ratio to the peer", "the smallest of those that can learn")
        yield smallest.check_equal(
            "fastest variant", min(ratios.values()), ratio, where=result.variant
        )


def _check_losses(run: Run, result: results.Learn) -> Iterator[Check]:
    """Compare the last held-out loss, and the first loss of this run, with float64."""
    config = run.config
    heads = get_num_heads(run.config)
    allowed = compute_loss_tolerance(config, REPLAYED_LOSS)
    _, held_out = read_parts(config)
    rows = move_to_device(
        run, reference.build_evenly_spaced_batch(held_out, HELDOUT_ROWS, config.context)
    )
    stored = load_file(run.out / MODEL)
    weights = {name: w.to(run.device).double() for name, w in stored.items()}
    exact = reference.compute_mean_loss(weights, *rows, heads)
    file = Sources("reported", "the file's weights in float64")
    yield file.check_loss("held-out loss", exact, result.heldout[-1][1], allowed)
    if result.begun_at == 0:
        start = get_float64_parameters(build_seeded_model(run, run.model))
        float64 = Sources("reported", "float64")
        exact = reference.compute_mean_loss(
            start, *probed_step.draw_learn_batch(run, result, 0), heads
        )
        yield float64.check_loss("first loss", exact, result.losses[0], allowed)
        exact = reference.compute_mean_loss(start, *rows, heads)
        yield float64.check_loss(
            "held-out loss before training", exact, result.heldout[0][1], allowed
        )
    if config.resume is not None and not count_restarts():
        yield from _check_continuation(run, result, config.resume)


def _check_continuation(run: Run, result: results.Learn, source: Path) -> Iterator[Check]:
    """Compare the first step and the first two losses after a resume with the checkpoint."""
    checkpoint = probed_step.read_checkpoint(source)
    counts = {int(step) for step in checkpoint["step"].values()}
    optimizer = Sources("reported", "step counts in the checkpoint")
    yield optimizer.check_equal("first step", max(counts, default=0), result.begun_at)
    step = result.begun_at
    if step == len(result.losses):
        return
    loss, _, weights, _ = probed_step.repeat_step(run, result, checkpoint, step)
    allowed = compute_loss_tolerance(run.config, REPLAYED_LOSS)
    stored = Sources("reported", "the checkpoint's weights in float64")
    yield stored.check_loss("first loss after the checkpoint", loss, result.losses[step], allowed)
    if step + 1 < len(result.losses):
        # The second loss depends on the first step, which depends on the checkpoint's moments.
        batch = probed_step.draw_learn_batch(run, result, step + 1)
        loss = reference.compute_mean_loss(weights, *batch, get_num_heads(run.config))
        moments = Sources("reported", "the checkpoint's moments in float64")
        allowed = compute_loss_tolerance(run.config, LOSS)
        name = "second loss after the checkpoint"
        yield moments.check_loss(name, loss, result.losses[step + 1], allowed)


def _group_by_step(folder: RunFolder, result: results.Learn) -> dict[int, dict[int, Any]]:
    """Return {step: {rank: sample}} of the steps of this run."""
    by_step: dict[int, dict[int, Any]]
    by_step = {step: {} for step in range(result.begun_at, len(result.losses))}
    for s in folder.samples():
        if s["stage"] == "learn" and s["phase"] == "step":
            by_step[s["step"]][s["rank"]] = s
    return by_step


def _check_samples(folder: RunFolder, result: results.Learn) -> Iterator[Check]:
    """Compare each loss with the mean of the ranks' losses, and each rate with its formula."""
    total = len(result.losses)
    world = folder.config.world
    rates = []
    losses = []
    missing = []
    for step, ranks in _group_by_step(folder, result).items():
        expected = probed_step.compute_scheduled_rate(result.learning_rate, step, total)
        rates += [(expected, s["learning_rate"], f"step {step}") for s in ranks.values()]
        if set(ranks) != set(range(world)):
            missing.append(f"step {step}")
            continue
        mean = sum(s["loss"] for s in ranks.values()) / world
        losses.append((mean, result.losses[step], f"step {step}"))
    yield Sources("samples", "the number of losses").check_none("every step of every rank", missing)
    if result.begun_at == total:
        # The run was resumed from a checkpoint of the last step and took no step.
        return
    optimizer = Sources("read from the optimizer", "the schedule")
    yield optimizer.check_all_equal("learning rates", rates, 1e-9)
    ranks_mean = Sources("reported", "the ranks' mean")
    yield ranks_mean.check_all_equal("losses", losses, 1e-6)


def _check_rows(run: Run, result: results.Learn) -> Iterator[Check]:
    """Compare the rows of every step with the audit's sampler, and the text with the checkpoint."""
    foreign = []
    for step, ranks in _group_by_step(RunFolder(run.out), result).items():
        rows = [digest for rank in sorted(ranks) for digest in ranks[rank]["row_digests"]]
        if rows != reference.compute_row_digests(probed_step.draw_learn_batch(run, result, step)):
            foreign.append(f"step {step}")
    sampler = Sources("digests of their batches", "the audit's independent sampler")
    yield sampler.check_none("ranks' rows", foreign)
    train, _ = read_parts(run.config)
    text = probed_step.read_state(run.out / CHECKPOINT).get("text")
    files = Sources("digest in the checkpoint", "the files, read again")
    is_other = text != hashlib.sha256(train).hexdigest()[:12]
    yield files.check_none("text of the checkpoint", [str(text)] if is_other else [])


def _check_last_checkpoint(folder: RunFolder, result: results.Learn) -> Iterator[Check]:
    """Compare the last checkpoint with the results, the configuration and the model file."""
    total = len(result.losses)
    last = probed_step.read_checkpoint(folder.path / CHECKPOINT)
    stored = load_file(folder.path / MODEL)
    steps = {name: int(last["step"].get(name, 0)) for name in stored}
    counts = Sources("step counts in the checkpoint", f"{total} losses")
    wrong = [f"{n} steps of {name}" for name, n in steps.items() if n != total]
    yield counts.check_none("steps of the optimizer", wrong)
    saved = last["weight"]
    different = [n for n, w in stored.items() if n not in saved or not torch.equal(w, saved[n])]
    weights = Sources("each weight", "the checkpoint")
    yield weights.check_none("weights of the model file", different)
    config = folder.config
    expected = {
        "step": total,
        "total": total,
        "losses": result.losses,
        # A checkpoint has tuples, and JSON has lists.
        "heldout": [tuple(pair) for pair in result.heldout],
        "rows": result.rows,
        "learning_rate": result.learning_rate,
        "seed": config.seed,
        "context": config.context,
        "size": config.size,
        "clip": config.clip,
    }
    state = probed_step.read_state(folder.path / CHECKPOINT)
    wrong = [name for name, value in expected.items() if state.get(name) != value]
    continued = Sources("checkpoint", "the results and the configuration")
    yield continued.check_none("state from which a run continues", wrong)
