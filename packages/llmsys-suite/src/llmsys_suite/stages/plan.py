"""Predicted cost of the run: parameters, FLOPs, memory and bytes on the wire.

`predict` does not import torch or build the model, so that a run that does not fit in memory is
refused before it starts. `run` adds the measured rate of a matrix product and the measured peak
memory of a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import accounting

from llmsys_suite.config import RunConfig, count_ranks_on_this_host, get_size
from llmsys_suite.environment import read_available_memory_bytes
from llmsys_suite.measure.samples import VARIANT_NAMES
from llmsys_suite.results import Plan, Prediction

if TYPE_CHECKING:
    from llmsys_suite.ranks.rank import Run

#: Memory of Python, torch and its libraries per process.
PROCESS_BYTES = 700 * 2**20
#: Duration of the measurement of the rate of a matrix product, in seconds.
PRODUCTS_SECONDS = 0.5


def describe_model(config: RunConfig) -> accounting.Transformer:
    """Return the run's model as an `accounting` model description."""
    return get_size(config.size).to_transformer(vocabulary=config.vocabulary)


def predict(config: RunConfig) -> Prediction:
    """Return the predicted counts, bytes and FLOPs of the configuration, without torch."""
    model = describe_model(config)
    parameters = accounting.parameters(model)
    step = accounting.flops(model, seq=config.context, batch=config.rows, attention="full")
    causal = accounting.flops(model, seq=config.context, batch=config.rows)
    # On a CPU, torch's RMSNorm consists of several operators, and its optimizers update one
    # parameter at a time.
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
    # Weights, gradients and AdamW's two moments are float32.
    static = 16 * int(parameters.total)
    transient = max(0, int(memory.total) - static)
    # The ranks of a host share its memory, and in `train` and `learn` each has a whole model.
    host_ranks = 1 if on_gpu else count_ranks_on_this_host(config.world)
    models = host_ranks if "train" in config.stages else 1
    # The audit times three models at once, which need at least the memory of its float64 model.
    if "audit" in config.stages:
        models *= 3
    shared = transient + (0 if on_gpu else host_ranks * PROCESS_BYTES)
    # A single rank sends no gradients.
    gradient_bytes = int(traffic.payload.total) or 4 * int(parameters.total)
    return Prediction(
        parameters=int(parameters.total),
        step_flops_full=int(step.total),
        step_flops_causal=int(causal.total),
        training_peak_bytes=int(memory.total),
        training_bytes_by_part={part.name: int(part.total) for part in memory.parts},
        gradient_bytes=gradient_bytes,
        ddp_wire_bytes_per_rank=int(traffic.wire.total),
        host_peak_bytes=models * static + shared,
        all_variants_bytes=(1 + (len(VARIANT_NAMES) - 1) * host_ranks) * static + shared,
        derivation=parameters.explain(),
    )


def run(run: Run) -> Plan:
    """Return the predictions, and measurements of a real step and of this machine."""
    from llmsys_suite.measure.clocks import measure_product_rate

    predicted = predict(run.config)
    fits = predicted.all_variants_bytes < 0.8 * read_available_memory_bytes(run.device.type)
    run.barrier()
    rate = measure_product_rate(run.device, run.compute_dtype, PRODUCTS_SECONDS)
    return Plan(
        **vars(predicted),
        peak=max(run.gather(rate)),
        variants_fit_together=all(run.gather(fits)),
        measured_peak_bytes=measure_peak_bytes(run) if run.rank == 0 else 0,
    )


def measure_peak_bytes(run: Run) -> int:
    """Return the peak bytes of a training step of the real model on this run's device.

    The second step is measured, because AdamW creates its state in the first. The bytes are counted
    operator by operator on a CPU, and by the allocator on a GPU.
    """
    import torch
    from accounting.memory.live import training_step_memory

    from llmsys_suite.variants.initial_weights import build_seeded_model

    config, device = run.config, run.device
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    model = build_seeded_model(run, run.model)
    tokens, targets = run.draw_batch(0, rows=config.rows // config.parts)
    optimizer = torch.optim.AdamW(model.parameters())

    def loss() -> torch.Tensor:
        with run.autocast():
            return model.compute_loss(tokens, targets)

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
