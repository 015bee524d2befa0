"""The schedule and the training state of `learn`, and the checkpoints that a run may resume."""

from __future__ import annotations

import math
import random
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zero

from llmsys_suite.config import (
    BYTES,
    Layout,
    RunConfig,
    UsageError,
    compute_default_rows,
    count_restarts,
    get_size,
)
from llmsys_suite.ranks.rank import Run
from llmsys_suite.text.data import load_corpus

CHECKPOINT = "checkpoint"
#: Folder of the checkpoints before and after the step that the audit repeats.
PROBE = "probe"
#: Number of steps if neither --learn nor a checkpoint specifies it.
DEFAULT_STEPS = 400
#: The options that set those entries of the state that are not named like their option.
OPTIONS = {"text": "--data and --tokenizer", "total": "--learn"}
#: Peak learning rate of `learn` divided by the learning rate of `train`.
PEAK_FACTOR = 2.0
#: Fraction of the steps in which the learning rate grows linearly.
WARMUP_FRACTION = 0.05


def build_initial_state(config: RunConfig, text: str | None) -> dict[str, Any]:
    """Return the state of a training run before its first step; `text` is the corpus's digest."""
    return {
        "step": 0, "losses": [], "heldout": [], "total": config.learn or DEFAULT_STEPS,
        "rows": config.rows, "seed": config.seed, "context": config.context, "size": config.size,
        "learning_rate": config.learning_rate, "clip": config.clip, "text": text,
    }  # fmt: skip


def require_resumable(config: RunConfig, source: Path) -> None:
    """Raise UsageError if this run cannot continue from the checkpoint `source`."""
    # Loading the training state needs no model, but zero requires a process group.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings(action="ignore"):  # Loading warns about unused weights.
            state = zero.load_checkpoint(source, torch.nn.Module(), strict=False)
    except (ValueError, RuntimeError) as error:  # RuntimeError: the checkpoint is damaged
        raise UsageError(str(error)) from None
    finally:
        dist.destroy_process_group()
    # Tokens other than bytes do not exist before the run; the stage learn compares their digest.
    text = load_corpus(config.data).compute_digest() if config.tokenizer == BYTES else None
    require_same(state, config, text, source)


def require_same(state: dict[str, Any], config: RunConfig, text: str | None, source: Path) -> None:
    """Raise `UsageError` if the run's options contradict the training that saved `source`.

    The steps and the rows are not compared if they have their default, nor the text if it is None.
    """
    expected = build_initial_state(config, text)
    missing = expected.keys() - state.keys()
    if missing:
        raise UsageError(
            f"expected a checkpoint of the stage learn, got {source}, which has no {min(missing)}"
        )
    not_compared = {"step", "losses", "heldout"}
    if text is None:
        not_compared.add("text")
    if config.learn is None:
        not_compared.add("total")
    # The default depends on the number of ranks, so it may differ from the checkpoint's rows.
    if config.rows == compute_default_rows(config.preset, config.world):
        not_compared.add("rows")
    layout = Layout(config.data_parallel, config.pipeline, config.tensor)
    if reason := layout.explain_refusal(get_size(config.size), state["rows"]):
        raise UsageError(f"{source} cannot be continued: {reason}; split over other ranks")
    for name, value in expected.items():
        if name not in not_compared and state[name] != value:
            option = OPTIONS.get(name, name)
            entry = "text digest" if name == "text" else option
            raise UsageError(
                f"{source} has {entry} {state[name]}, got {value}; set the same {option}"
            )


def require_finite(loss: float, step: int) -> None:
    """Raise FloatingPointError, which ends the run, if the loss of a step is NaN or infinite."""
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"expected a finite loss, got {loss} at step {step} of learn; lower learning_rate in a "
            "--config file, or clip the gradient with --clip"
        )


def find_checkpoint(run: Run) -> Path | None:
    """Return this run's checkpoint after a restart by torchrun, or the one of --resume, or None."""
    saved = run.out / CHECKPOINT
    return saved if count_restarts() and saved.exists() else run.config.resume


def is_due(step: int, total: int, times: int) -> bool:
    """Return True after every `total // times` steps (at least 1) and after the last step."""
    return step == total or step % max(1, total // times) == 0


def compute_rate_factor(progress: float) -> float:
    """Return the fraction of the peak rate: a linear warm-up times half a cosine from 1 to 0.05."""
    warmup = min(1.0, progress / WARMUP_FRACTION + 1e-2)
    return warmup * (0.05 + 0.475 * (1 + math.cos(math.pi * progress)))


def draw_probed_step(run: Run, first: int, total: int) -> int | None:
    """Return a random step for the audit, equal on all ranks; None if no audit or step follows.

    The step `first` is drawn only if it is the only step, because a new optimizer has no state.
    """
    if "audit" not in run.config.stages or first >= total:
        return None
    step: int = run.gather(random.SystemRandom().randrange(min(first + 1, total - 1), total))[0]
    return step
