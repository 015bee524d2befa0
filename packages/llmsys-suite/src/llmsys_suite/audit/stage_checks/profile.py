"""Checks of `profile`: operators against another profiled step, FLOPs by torch's counter."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from llmsys_suite import results
from llmsys_suite.audit.check import Check, Sources, same_rows
from llmsys_suite.audit.flops import count_flops
from llmsys_suite.model import Decoder, plain_attention
from llmsys_suite.ranks.rank import Run
from llmsys_suite.stages import profile as stage
from llmsys_suite.step.case import PHASES
from llmsys_suite.step.training import Step
from llmsys_suite.variants.initial_weights import initial_weights


def checks(run: Run, result: results.Profile) -> Iterator[Check]:
    """Compare the operators of each phase, and the FLOPs of the profiled step."""
    yield same_rows("phases", PHASES, [row["phase"] for row in result.operators])
    for row in result.operators:
        # The timer includes the profiler and, on a busy machine, long gaps between operators.
        timer = row["timer_ms"]
        low = 0.01 * timer if run.device.type == "cpu" else 0.0
        yield Sources("profiler", "a timer around it").between(
            f"{row['phase']}: operators' total", timer, row["total_ms"], low, 1.05 * timer + 0.5
        )
    yield from _operators(run, result.operators)
    config = run.config
    flops = count_flops(
        initial_weights(run), config.rows // run.world, config.context, run.model.num_heads
    )
    counter = Sources("profile", "torch's counter")
    yield counter.equal("FLOPs of the profiled step", flops.executed, _step_flops(run))
    first = result.operators[0]
    yield counter.equal(
        "FLOPs of attention's products", flops.attention_forward, first["attention_product_flops"]
    )
    scores = flops.attention_forward / (4 * run.model.d_model // run.model.num_heads)
    five = Sources("profile", "five per score")
    yield five.equal("FLOPs of softmax", 5 * scores, first["softmax_flops"])


def _step_flops(run: Run) -> int:
    """Count the FLOPs of a step as the stage profiles it, so that no part of it is left out."""
    step = Step(stage.case_of(run))
    with FlopCounterMode(display=False) as counter:
        step.timed()
    return counter.get_total_flops()


def _operators(run: Run, rows: results.Rows) -> Iterator[Check]:
    """Compare the number of calls of each reported operator with the audit's own step."""
    calls = _calls_by_phase(run)
    pairs = []
    for row in rows:
        counted = calls[row["phase"]]
        reported = [(operator["operator"], operator["calls"]) for operator in row["top"]]
        reported.append((row["top_operator"].removeprefix("aten::"), row["top_calls"]))
        for name, number in reported:
            pairs.append((counted.get(name, 0), number, f"{row['phase']}: {name}"))
    own = Sources("profile", "the audit's own step")
    yield own.all_equal("calls of the operators", pairs)


def _calls_by_phase(run: Run) -> dict[str, dict[str, int]]:
    """Profile the second step of AdamW and return the calls of each operator by phase."""
    model = Decoder(run.model, plain_attention).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters())
    shape = run.config.rows // run.world, run.config.context
    tokens = torch.zeros(shape, dtype=torch.long, device=run.device)

    loss = torch.zeros(())

    def forward() -> None:
        nonlocal loss
        with run.autocast():
            loss = model.loss(tokens, tokens)

    def backward() -> None:
        loss.backward()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    phases = dict(zip(PHASES, (forward, backward, step), strict=True))
    for phase in phases.values():
        phase()
    calls = {}
    for name, phase in phases.items():
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
            phase()
        events = seen.key_averages()
        calls[name] = {event.key.removeprefix("aten::"): event.count for event in events}
    return calls
