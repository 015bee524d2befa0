"""Train the model in every way the packages offer, the ways taking turns at each step.

Taking turns is what makes the ratios hold on a machine that others use too: a slow second slows
every variant alike. Where they do not all fit in memory at once, they follow one another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmsys_suite import variants
from llmsys_suite.model import ModelConfig
from llmsys_suite.samples import PEER, summarize, utilisation
from llmsys_suite.variants import Variant

if TYPE_CHECKING:
    from llmsys_suite.worker import Run

SINGLE = "single process"
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
