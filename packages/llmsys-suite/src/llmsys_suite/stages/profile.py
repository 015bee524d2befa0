"""Times of a training step by phase, and its operators.

The protocol follows the coursework: forward, backward and optimizer in a fresh process after 0, 1,
2 and 5 warm-up steps, with mean and standard deviation over ten steps. Sizes that do not fit have a
row that says so. `llmsys step` extrapolates them and varies further options. One profiled step and
a roofline of its matrix products follow.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity, profile

from llmsys_suite.config import SIZES
from llmsys_suite.measure.interleaved import now
from llmsys_suite.ranks.rank import Run
from llmsys_suite.stages.results import Profile, Rows
from llmsys_suite.step import kernels, sweep
from llmsys_suite.step.case import Case
from llmsys_suite.step.training import Step

#: Sizes besides that of the run; a size that would take longer than SECONDS_A_SIZE is left out.
SIZES_TIMED = tuple(size for size in SIZES if size != "mini")
SECONDS_A_SIZE = 60.0


def run(run: Run) -> Profile | None:
    """Return the tables of the protocol and of the profile, on rank 0."""
    if run.rank != 0:
        return None
    step = Step(case_of(run))
    step.timed()
    products = roofline(step) if run.device.type == "cpu" else []
    return Profile(protocol(run), kernels.by_phase(step), products)


def case_of(run: Run) -> Case:
    """Return the case of one rank's rows."""
    config = run.config
    rows = config.rows // run.world
    return Case(size=config.size, context=config.context, rows=rows, device=run.device.type)


def protocol(run: Run) -> Rows:
    """Return a row per number of warm-up steps, for every size that fits."""
    names = dict.fromkeys((run.config.size, *SIZES_TIMED))
    cases = [replace(case_of(run), size=name) for name in names]
    return list(sweep.measure(cases, limit=SECONDS_A_SIZE, extrapolate=False))


def roofline(step: Step) -> Rows:
    """Return a row per shape of matrix product in a forward pass, with the roof above it.

    `flops_per_byte` is the arithmetic intensity if each matrix is read or written once, and
    `bytes_per_second` the bandwidth measured at the product's working-set size: a product whose
    matrices fit in a cache is not bounded by the bandwidth of main memory (Williams et al. 2009).
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as seen:
        step.forward()
    rows = []
    for event in seen.key_averages(group_by_input_shape=True):
        if event.key not in ("aten::mm", "aten::bmm") or not event.self_cpu_time_total:
            continue
        *batch, m, k = event.input_shapes[0]
        n = event.input_shapes[1][-1]
        products = math.prod(batch)
        nbytes = 4 * (m * k + k * n + m * n) * products
        flops = 2 * m * k * n * products
        seconds = event.self_cpu_time_total / 1e6 / event.count
        rows.append(
            {
                "operator": f"{event.key.removeprefix('aten::')} {m} x {k} x {n}",
                "calls": event.count,
                "flops_per_byte": flops / nbytes,
                "gflops": flops / seconds / 1e9,
                "working_set_bytes": nbytes,
                "bytes_per_second": bandwidth(nbytes, step.device),
            }
        )
    return rows


def bandwidth(nbytes: int, device: torch.device, tries: int = 30) -> float:
    """Return the best rate in bytes per second at which `nbytes` of memory are read or copied.

    A copy reads half of the bytes and writes the other half; a sum reads them all. The best of
    both and of all tries is the roof, because a product cannot move its bytes faster.
    """
    data = torch.randn(max(2, nbytes // 4), device=device)
    source, target = data[: len(data) // 2], data[len(data) // 2 : len(data) // 2 * 2]
    best = math.inf
    for _ in range(tries):
        start = now(device)
        target.copy_(source)
        middle = now(device)
        data.sum()
        best = min(best, middle - start, now(device) - middle)
    return data.nbytes / best
