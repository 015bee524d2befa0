"""Train the model with every variant of the packages, interleaved step by step.

If the variants do not fit in memory together, they run one after another.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from torch import Tensor

from llmsys_suite.folder import Sample
from llmsys_suite.measure import clocks, network, others
from llmsys_suite.measure.samples import (
    CORE_WAIT,
    PROCESSOR,
    SINGLE,
    compute_loss_curves,
    compute_utilization,
    count_ranks,
    summarize,
)
from llmsys_suite.ranks.rank import Run
from llmsys_suite.results import Plan, Train
from llmsys_suite.text.data import compute_row_digests
from llmsys_suite.variants import VARIANTS, list_variants
from llmsys_suite.variants.final_weights import compare_final_weights
from llmsys_suite.variants.initial_weights import draw_initial_weights
from llmsys_suite.variants.single import Variant


def run(run: Run) -> Train | None:
    """Train every variant; on rank 0, return times, ratios, losses and a comparison of weights."""
    plan: Plan = run.results["plan"]
    names = list_variants(run.device)
    groups = [names] if plan.variants_fit_together else [[name] for name in names]
    times: dict[str, dict[str, float]] = {}
    finals: dict[str, Any] = {}
    start = draw_initial_weights(run)
    for group in groups:
        trained = {name: VARIANTS[name](run, run.model) for name in group}
        _train(run, trained)
        if SINGLE in trained and run.rank == 0:
            run.trained = trained[SINGLE].decoder
        for name, variant in trained.items():
            times[name] = variant.compute_communication_times(run.config.steps)
            finals[name] = compare_final_weights(run, start, variant)
            variant.close()
        # Free the memory of these variants for the next ones. Variants have reference cycles.
        del trained, variant
        gc.collect()
    if run.folder is None:
        return None
    samples = [s for s in run.folder.samples() if s["stage"] == "train"]
    rows = summarize(samples)
    for row in rows:
        ranks = count_ranks(row["variant"], run.world)
        row["mfu"] = compute_utilization(plan.step_flops_causal, plan.peak, row["step_ms"], ranks)
        row |= times[row["variant"]]
    return Train(rows, compute_loss_curves(samples), finals)


def _train(run: Run, trained: dict[str, Variant]) -> None:
    total = run.config.warmup + run.config.steps
    for step in range(total):
        for name, variant in trained.items():
            takes_part = run.rank == 0 or not variant.alone
            # Bytes of this step can arrive before this rank starts it or, at the parameter server,
            # after this rank has ended it. The counter therefore spans both barriers.
            received = count_received(run)
            run.barrier()
            batch = run.draw_batch(step, split=not variant.alone)
            sample = take_timed_step(run, name, variant, step, batch) if takes_part else {}
            run.barrier()
            if received:
                sample["received"] = received.count_bytes()
        run.flush_samples()
        run.progress.update(step + 1, total, "steps of every variant")


def take_timed_step(
    run: Run, name: str, variant: Variant, step: int, batch: tuple[Tensor, Tensor]
) -> Sample:
    """Take one step on this rank's rows; return its sample, with times of a second clock."""
    digests = compute_row_digests(*batch)
    is_warmup = step < run.config.warmup
    core_wait = clocks.read_core_wait_seconds()
    processor_time = time.process_time()
    start_time = time.time()
    with run.recorder.step(stage="train", variant=name, step=step, warmup=is_warmup) as sample:
        sample["loss"] = variant.step(*batch)
        sample["threads"] = torch.get_num_threads()
    sample |= {"began": start_time, "ended": time.time(), "row_digests": digests}
    sample[PROCESSOR] = time.process_time() - processor_time
    sample[CORE_WAIT] = clocks.read_core_wait_seconds() - core_wait
    sample |= others.read_busy_clocks(run.world)
    return sample


def count_received(run: Run) -> network.Received | None:
    """Return a new counter of received bytes, or None if the kernel or backend has no counts."""
    has_counts = network.is_available() and run.config.backend == "gloo"
    return network.Received() if has_counts else None
