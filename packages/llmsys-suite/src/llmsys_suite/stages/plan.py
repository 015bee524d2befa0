"""Predicted cost of the run: parameters, FLOPs, memory and bytes on the wire.

`predict` needs no torch and allocates nothing; it also decides whether a run fits. `run` adds the
time of a step, from models of one and three layers, and the measurements that the audit compares
with the predictions.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import accounting

from llmsys_suite.config import SIZES, RunConfig
from llmsys_suite.environment import available_memory_bytes
from llmsys_suite.measure.samples import VARIANT_NAMES
from llmsys_suite.results import Plan, Prediction

if TYPE_CHECKING:
    from llmsys_suite.ranks.rank import Run

# Python, torch and its libraries, per process.
PROCESS_BYTES = 700 * 2**20
# Seconds to measure the rate of a product, interleaved with the reference matmul.
PRODUCTS_SECONDS = 0.5
TURNS = 25
# Timed steps of the models with one and three layers.
STEPS_TIMED = 5


def transformer(config: RunConfig) -> accounting.Transformer:
    """Return the run's model as an `accounting` model description."""
    return SIZES[config.size].described(vocabulary=config.vocabulary)


def predict(config: RunConfig) -> Prediction:
    """Return the figures that follow from the configuration, without torch."""
    model = transformer(config)
    parameters = accounting.parameters(model)
    step = accounting.flops(model, seq=config.context, batch=config.rows, attention="full")
    causal = accounting.flops(model, seq=config.context, batch=config.rows)
    # The single process takes the most at once. On a CPU torch's RMSNorm is several operators and
    # its optimizers take one parameter at a time.
    on_gpu = config.device != "cpu"
    memory = accounting.peak_memory(
        model,
        batch=config.rows // config.parts,
        seq=config.context,
        precision="amp_bf16" if config.dtype == "bf16" else "fp32",
        fused_norm=on_gpu,
        foreach=on_gpu,
    )
    traffic = accounting.communication(
        model, accounting.Plan(data=config.world), weights="fp32", gradients="fp32"
    )
    static = 16 * int(parameters.total)
    transient = max(0, int(memory.total) - static)
    ranks_here = config.world if config.device == "cpu" else 1
    single_bytes = ranks_here * PROCESS_BYTES * (config.device == "cpu") + static + transient
    all_together = single_bytes + (len(VARIANT_NAMES) - 1) * static * ranks_here
    return Prediction(
        parameters=int(parameters.total),
        step_flops_full=int(step.total),
        step_flops_causal=int(causal.total),
        training_peak_bytes=int(memory.total),
        training_bytes_by_part={part.name: int(part.total) for part in memory.parts},
        gradient_bytes=int(traffic.payload.total) or 4 * int(parameters.total),
        ddp_wire_bytes_per_rank=int(traffic.wire.total),
        host_peak_bytes=single_bytes,
        all_variants_bytes=all_together,
        derivation=parameters.explain(),
    )


def run(run: Run) -> Plan:
    """Return the predictions, with measurements of the real model and of this machine."""
    from llmsys_suite.measure import reference_matmul

    predicted = predict(run.config)
    fit = predicted.all_variants_bytes < 0.8 * available_memory_bytes(run.device.type)
    peak, beside = _agreed_rates(run)
    first, further = layer_matmuls(run) if run.rank == 0 else (0.0, 0.0)
    matmuls = step_matmuls(first, further, run.model.num_layers)
    one_s = reference_matmul.flops(run.device) / beside
    return Plan(
        **vars(predicted),
        peak=peak,
        reference_flops_per_second=beside,
        variants_fit_together=_agreed(run, fit),
        layer_matmuls=first,
        step_matmuls=matmuls,
        step_ms=1e3 * matmuls * one_s,
        measured_peak_bytes=measured_peak_bytes(run) if run.rank == 0 else 0,
    )


def layer_matmuls(run: Run) -> list[float]:
    """Return a one-layer step and each further layer's time, in times of the reference matmul.

    Both are medians; the time of a further layer is half of what two more layers add.
    """
    from llmsys_suite.measure import reference_matmul
    from llmsys_suite.variants.shallow import Shallow

    tokens, targets = run.batch(0)
    models = Shallow(run, 1), Shallow(run, 3)
    cores: list[float] = []
    ones: list[float] = []
    further: list[float] = []
    for turn in range(1 + STEPS_TIMED):
        core = reference_matmul.core_seconds(run.device)
        first, three = (model.seconds(tokens, targets) for model in models)
        # The first round creates the optimizer state.
        if turn:
            cores.append(core)
            ones.append(first)
            further.append((three - first) / 2)
    return [statistics.median(times) / statistics.median(cores) for times in (ones, further)]


def step_matmuls(first: float, further: float, layers: int) -> float:
    """Return the time of a step: that of one layer, plus that of each further layer."""
    return first + (layers - 1) * further


def measured_peak_bytes(run: Run) -> int:
    """Return the peak bytes of a training step of the real model on this run's device.

    The second step of AdamW, whose state is there then: counted operator by operator on a CPU, by
    the allocator on a GPU.
    """
    import torch
    from accounting.memory.live import training_step_memory

    from llmsys_suite.model import Decoder

    config, device = run.config, run.device
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    model = Decoder(run.model).to(device)
    tokens, targets = run.batch(0, rows=config.rows // config.parts)
    optimizer = torch.optim.AdamW(model.parameters())

    def loss() -> torch.Tensor:
        with run.autocast():
            return model.loss(tokens, targets)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    return training_step_memory(model, loss, optimizer).peak_bytes


def matmul_flops_per_second(run: Run, seconds: float | None = None) -> float:
    """Return the best rate of a matrix product on this rank, with all ranks busy."""
    import torch

    from llmsys_suite.measure import reference_matmul

    n = 512 if run.device.type == "cpu" else 8192
    a, b = (torch.randn(n, n, device=run.device).to(run.compute_dtype) for _ in range(2))
    best, end = 0.0, time.perf_counter() + (seconds or PRODUCTS_SECONDS)
    while time.perf_counter() < end:
        begin = reference_matmul.clock(run.device)
        a @ b
        best = max(best, 2 * n**3 / (reference_matmul.clock(run.device) - begin))
    return best


def _agreed_rates(run: Run) -> list[float]:
    """Return the best rate of the product on any rank, and that of the reference matmul."""
    import torch
    import torch.distributed as dist

    from llmsys_suite.measure import reference_matmul

    run.barrier()
    best = torch.zeros(2, dtype=torch.float64, device=run.device)
    for _ in range(TURNS):
        product = matmul_flops_per_second(run, PRODUCTS_SECONDS / TURNS)
        beside = reference_matmul.flops(run.device) / reference_matmul.core_seconds(run.device)
        best = best.maximum(best.new_tensor([product, beside]))
    dist.all_reduce(best, dist.ReduceOp.MAX)
    rates: list[float] = best.tolist()
    return rates


def _agreed(run: Run, local: bool) -> bool:
    import torch
    import torch.distributed as dist

    everywhere = torch.tensor(int(local), device=run.device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    return bool(everywhere)
