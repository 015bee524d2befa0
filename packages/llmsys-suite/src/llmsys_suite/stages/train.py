"""Train the model in every way the packages offer, the ways taking turns at each step.

Taking turns is what makes the ratios hold on a machine that others use too: a slow second slows
every variant alike. Where they do not all fit in memory at once, they follow one another.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from llmsys_suite import variants
from llmsys_suite.folder import Sample
from llmsys_suite.model import ModelConfig
from llmsys_suite.phases import WHOLE_STEP
from llmsys_suite.variants import Variant

if TYPE_CHECKING:
    from llmsys_suite.worker import Run

PHASES = ("forward", "backward", "communication", "optimizer")
SINGLE = "single process"
PEER = "torch DDP"
VARIANTS: dict[str, type[Variant]] = {
    SINGLE: variants.Variant,
    PEER: variants.TorchDDP,
    "ddp naive": variants.Naive,
    "ddp flat": variants.Flat,
    "ddp overlapped": variants.Overlapped,
    "ddp bucketed": variants.Bucketed,
    "ddp shared memory": variants.SharedMemory,
    "zero 1": variants.ShardedState,
    "zero 2": variants.ShardedGradients,
    "fsdp": variants.FullySharded,
    "torch FSDP2": variants.TorchFSDP,
    "parameter server": variants.ParameterServer,
}


def run(run: Run) -> dict[str, Any]:
    """Train every variant; medians and ratios, losses, and the bytes each handed over."""
    plan = run.results["plan"]
    names = [name for name in VARIANTS if run.device.type == "cpu" or name != "ddp shared memory"]
    groups = [names] if plan["variants_fit_together"] else [[name] for name in names]
    handed: dict[str, float] = {}
    for group in groups:
        trained = {name: VARIANTS[name](run, model_config(run)) for name in group}
        handed |= _train(run, trained)
        if SINGLE in trained and run.rank == 0:
            run.trained = trained[SINGLE].model
        for variant in trained.values():
            variant.close()
    if run.folder is None:
        return {}
    if run.trained is not None:
        from safetensors.torch import save_file

        save_file(run.trained.state_dict(), run.folder.path / "model.safetensors")
    samples = [s for s in run.folder.samples() if s["stage"] == "train"]
    result = summarize(samples) | {"gradient_bytes": handed}
    for row in result["rows"]:
        ranks = 1 if VARIANTS[row["variant"]].alone else run.world
        row["mfu"] = utilisation(plan, row["step_ms"], ranks)
        steps_an_epoch = len(run.corpus.train) / (run.config.rows * run.config.context)
        row["epoch_s"] = row["step_ms"] / 1e3 * steps_an_epoch
    return result


def model_config(run: Run) -> ModelConfig:
    """The shape that this run trains."""
    return ModelConfig.named(run.config.size, context=run.config.context)


def _train(run: Run, trained: dict[str, Variant]) -> dict[str, float]:
    config, total = run.config, run.config.warmup + run.config.steps
    for step in range(total):
        for name, variant in trained.items():
            run.barrier()
            if variant.alone and run.rank != 0:
                continue
            rank, world = (0, 1) if variant.alone else (run.rank, run.world)
            tokens, targets = (
                t.to(run.device)
                for t in run.corpus.batch(
                    rows=config.rows,
                    context=config.context,
                    seed=config.seed,
                    step=step,
                    rank=rank,
                    world=world,
                )
            )
            warmup = step < config.warmup
            with run.recorder.step(stage="train", variant=name, step=step, warmup=warmup) as sample:
                sample["tokens"] = tokens.numel()
                sample["loss"] = variant.step(tokens, targets)
        run.flush_samples()
        run.progress.update(step + 1, total, "steps of every variant")
    counted = {name: variant.gradient_bytes(total) for name, variant in trained.items()}
    return {name: nbytes for name, nbytes in counted.items() if nbytes is not None}


def summarize(samples: list[Sample]) -> dict[str, Any]:
    """Per variant: step time of the slowest rank, its parts, its ratio to the peer, its losses."""
    whole = step_seconds(samples)
    losses = loss_curves(samples)
    rows = []
    for name, steps in whole.items():
        measured = [seconds for step, seconds in sorted(steps.items())]
        row: dict[str, Any] = {"variant": name, "step_ms": statistics.median(measured) * 1e3}
        row |= ratio_row(steps, whole.get(PEER, {}))
        shares = phase_shares(samples, name)
        row |= {f"{phase}_share": shares.get(phase, 0.0) for phase in PHASES}
        row["final_loss"] = losses[name][-1]
        rows.append(row)
    return {"rows": rows, "losses": losses}


def utilisation(plan: dict[str, Any], step_ms: float, ranks: int) -> float:
    """Useful (causal) FLOPs a second over what the ranks' matrix products reach at best."""
    return float(plan["step_flops_causal"] / (step_ms / 1e3) / (ranks * plan["peak"]))


def step_seconds(samples: list[Sample]) -> dict[str, dict[int, float]]:
    """Variant -> step -> seconds of its slowest rank, warm-up left out."""
    slowest: dict[str, dict[int, float]] = defaultdict(dict)
    for s in samples:
        if s["phase"] == WHOLE_STEP and not s["warmup"]:
            steps = slowest[s["variant"]]
            steps[s["step"]] = max(steps.get(s["step"], 0.0), s["seconds"])
    return dict(slowest)


def loss_curves(samples: list[Sample]) -> dict[str, list[float]]:
    """Variant -> the loss of each step over the global batch, warm-up steps included."""
    parts: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for s in samples:
        if s["phase"] == WHOLE_STEP:
            parts[s["variant"]][s["step"]].append(s["loss"])
    return {
        name: [statistics.mean(steps[step]) for step in sorted(steps)]
        for name, steps in parts.items()
    }


def ratio_row(steps: dict[int, float], peer: dict[int, float]) -> dict[str, float]:
    """Time over torch DDP's in the same round: median, p10 and p90 of the pairs."""
    ratios = sorted(steps[step] / peer[step] for step in steps if step in peer)
    if not ratios:
        return {}
    return {
        "ratio_p50": statistics.median(ratios),
        "ratio_p10": ratios[len(ratios) // 10],
        "ratio_p90": ratios[-1 - len(ratios) // 10],
    }


def phase_shares(samples: list[Sample], variant: str) -> dict[str, float]:
    """The share of the step that each phase takes, over all ranks and measured steps."""
    totals: dict[str, float] = defaultdict(float)
    for s in samples:
        if s["variant"] == variant and not s["warmup"]:
            totals[s["phase"]] += s["seconds"]
    whole = totals.pop(WHOLE_STEP)
    return {phase: seconds / whole for phase, seconds in totals.items()}
