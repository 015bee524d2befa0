"""Train for real: the fastest way for about a minute, until the model writes text.

Notable:
- a batch follows from (seed, step) alone and a checkpoint from zero fits any number of ranks, so
  that a curve goes on elsewhere as if nothing had happened; SIGTERM saves one, and ends the run;
- the mean loss of a step and whether any rank was told to stop travel in one small sum.
"""

from __future__ import annotations

import hashlib
import math
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zero
from torch import Tensor

from llmsys_suite.config import RunConfig, UsageError, restarts
from llmsys_suite.data import load_corpus
from llmsys_suite.measure.samples import LOCAL, PEER, SERVER, SINGLE
from llmsys_suite.model import Decoder
from llmsys_suite.ranks.rank import Run
from llmsys_suite.report.writing import MODEL, text, write
from llmsys_suite.stages.results import Learn
from llmsys_suite.variants import VARIANTS

#: Of the rate with which the variants are compared; reached after a share, then a cosine.
RATE, WARM = 2.0, 0.05
#: How often the held-out text is looked at, how many rows of it, and how often a checkpoint is.
LOOKS, HELDOUT_ROWS, SAVES = 8, 128, 4
#: Those whose optimizer each rank can steer, and whose state a checkpoint of zero holds.
LEARNERS = tuple(name for name in VARIANTS if name not in (SINGLE, SERVER, LOCAL, "torch FSDP2"))
CHECKPOINT = "checkpoint"
#: Steps of a training that neither --learn nor a checkpoint decides.
DEFAULT_STEPS = 500
PROMPT, LETTERS = 64, 240


def run(run: Run) -> Learn | None:
    """Train, from a checkpoint where there is one; losses, held-out losses, and two samples."""
    compared = run.results.get("train")
    name = fastest(compared.rows if compared else []) if run.rank == 0 else ""
    name = run.gather(name)[0] if run.world > 1 else SINGLE
    variant, config = VARIANTS[name](run, run.model), run.config
    before = sample(run, variant.weights())
    state = beginning(config, run.corpus.train)
    if (source := resumed(run)) is not None:
        state = zero.load_checkpoint(source, variant.model, variant.optimizer)
        require_same(state, config, run.corpus.train, source)
    total, begun_at = state["total"], state["step"]

    def save() -> None:
        path = run.out / CHECKPOINT
        zero.save_checkpoint(path, variant.model, variant.optimizer, extra=dict(state))

    if not state["heldout"]:
        state["heldout"].append((0, heldout_loss(run, variant.model)))
    with told_to_stop() as told:
        while state["step"] < total:
            step = state["step"]
            for group in variant.optimizer.param_groups:
                group["lr"] = RATE * state["learning_rate"] * schedule(step / total)
            tokens, targets = run.corpus.batch(
                rows=state["rows"], context=config.context, seed=state["seed"] + 1, step=step,
                rank=run.rank, world=run.world,
            )  # fmt: skip
            tokens, targets = tokens.to(run.device), targets.to(run.device)
            with run.recorder.step(stage="learn", variant=name, step=step, warmup=False) as kept:
                kept["loss"] = variant.step(tokens, targets)
            both = torch.tensor([kept["loss"], float(bool(told))], device=run.device)
            dist.all_reduce(both)
            state["losses"].append(float(both[0]) / run.world)
            state["step"] = step = step + 1
            if step == total or step % max(1, total // LOOKS) == 0:
                state["heldout"].append((step, heldout_loss(run, variant.model)))
                run.progress.update(step, total, f"steps, {state['heldout'][-1][1]:.3f} held out")
            if both[1] or step % max(1, total // SAVES) == 0:
                save()
            if both[1]:
                raise KeyboardInterrupt
    weights = variant.weights()
    after = sample(run, weights)
    variant.close()
    if run.folder is None:
        return None
    from safetensors.torch import save_file

    run.trained = decoder(run, weights)
    save_file(run.trained.state_dict(), run.folder.path / MODEL)
    tokens_seen = total * state["rows"] * config.context
    return Learn(name, begun_at, state["losses"], state["heldout"], tokens_seen, before, after)


def beginning(config: RunConfig, text: Tensor) -> dict[str, Any]:
    """Return the state of a training before its first step, as checkpoints store it."""
    return {
        "step": 0, "losses": [], "heldout": [], "total": config.learn or DEFAULT_STEPS,
        "rows": config.rows, "seed": config.seed, "context": config.context, "size": config.size,
        "learning_rate": config.learning_rate,
        "text": hashlib.sha256(text.numpy().tobytes()).hexdigest()[:12],
    }  # fmt: skip


def require_resumable(config: RunConfig, source: Path) -> None:
    """UsageError where this run cannot go on from that checkpoint; asked before anything else."""
    # What it was begun with needs no model, but zero reads in a group.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings(action="ignore"):  # that all weights are left over
            state = zero.load_checkpoint(source, torch.nn.Module(), strict=False)
    except ValueError as error:
        raise UsageError(str(error)) from None
    finally:
        dist.destroy_process_group()
    require_same(state, config, load_corpus(config.data).train, source)


def require_same(state: dict[str, Any], config: RunConfig, text: Tensor, source: Path) -> None:
    """Raise `UsageError` if the run would not continue the training that `source` was saved in.

    The checkpoint decides the number of steps, the rows and the seed, so that the learning rate
    and the batches continue as planned; an option that contradicts it is refused, not ignored.
    """
    asked = beginning(config, text)
    if lacks := asked.keys() - state.keys():
        raise UsageError(f"{source} was written by no stage `learn`: it lacks {min(lacks)}")
    if state["text"] != asked["text"]:
        raise UsageError(f"{source} was begun on another text; give that one with --data")
    if state["context"] != asked["context"]:
        raise UsageError(
            f"{source} was begun with rows of {state['context']} tokens, not {asked['context']}"
        )
    if state["size"] != asked["size"]:
        raise UsageError(
            f"{source} holds a model of size {state['size']}, not {asked['size']}; "
            f"pass --size {state['size']}"
        )
    if config.learn not in (None, state["total"]):
        raise UsageError(
            f"{source} was begun for {state['total']} steps, over which its learning rate falls; "
            f"leave out --learn {config.learn}"
        )
    if config.seed != state["seed"]:
        raise UsageError(
            f"{source} was begun with seed {state['seed']}, not {config.seed}; "
            f"pass --seed {state['seed']}"
        )
    if state["rows"] % config.world:
        raise UsageError(f"{state['rows']} rows do not split over {config.world} ranks")


def fastest(rows: list[dict[str, Any]]) -> str:
    """By the median ratio to torch's DDP in the same round."""
    found = {row["variant"]: row.get("ratio_p50", math.inf) for row in rows}
    return min((name for name in LEARNERS if name in found), key=found.__getitem__, default=PEER)


def resumed(run: Run) -> Path | None:
    """Return the checkpoint to continue from: that of --resume, or this run's after a restart."""
    own = run.out / CHECKPOINT
    return own if restarts() and own.exists() else run.config.resume


def schedule(progress: float) -> float:
    """Return the learning-rate factor: a linear warm-up, then half a cosine."""
    return min(1.0, progress / WARM + 1e-2) * (0.05 + 0.475 * (1 + math.cos(math.pi * progress)))


@torch.no_grad()
def heldout_loss(run: Run, model: torch.nn.Module) -> float:
    """Nats a byte over all ranks' equal shares of the held-out rows."""
    rows = run.corpus.heldout_batch(rows=HELDOUT_ROWS, context=run.config.context)
    tokens, targets = (x[run.rank :: run.world].to(run.device) for x in rows)
    loss = torch.nn.functional.cross_entropy(
        model(tokens).flatten(0, 1).float(), targets.flatten(), reduction="sum"
    )
    dist.all_reduce(loss)
    return float(loss) / rows[0].numel()


def decoder(run: Run, weights: dict[str, Tensor]) -> Decoder:
    """Return a model with these weights."""
    model = Decoder(run.model).to(run.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


@torch.no_grad()
def sample(run: Run, weights: dict[str, Tensor]) -> dict[str, str]:
    """Return the text that the model writes after a held-out prompt, on rank 0."""
    if run.rank:
        return {}
    model, prompt = decoder(run, weights), run.corpus.heldout[:PROMPT].tolist()
    return {"prompt": text(prompt), "written": text(write(model, prompt, LETTERS))}


@contextmanager
def told_to_stop() -> Iterator[list[int]]:
    """SIGTERM fills the list for as long as this lasts, in place of ending the process."""
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)
