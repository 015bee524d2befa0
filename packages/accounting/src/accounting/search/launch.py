"""Command lines that run a plan with torchtitan or Megatron-LM, from launch.toml."""

import re

from accounting.model.formulas import Table, tables, value
from accounting.model.shape import Shape
from accounting.plan import Plan, even

_PROGRAMS = tables("search/launch.toml")


def command_lines(
    model: Shape, plan: Plan, *, batch: int, seq: int, dtype: str = "bf16"
) -> dict[str, str]:
    """Return the command line for each program that can run a plan, keyed by program.

    The number of processes per node is the largest number up to eight that divides the devices.
    """
    processes_per_node = max(n for n in range(1, 9) if plan.devices % n == 0)
    sequences, experts = batch // plan.data, model.experts
    nodes = plan.devices // processes_per_node
    launcher = f"torchrun --nnodes {nodes} --nproc-per-node {processes_per_node}"
    layers = experts.layers if experts and experts.layers is not None else range(model.layers)
    chunks = plan.pipeline * plan.virtual_stages
    names: Table = {
        "m": model,
        "p": plan,
        "experts": experts,
        "batch": batch,
        "seq": seq,
        "dtype": dtype,
        "micro": sequences // plan.microbatches,
        "chunks": chunks,
        "even": even(model.layers, chunks),
        "ends": 0 < model.layers % chunks == chunks - 2,
        "schedule": {"gpipe": "GPipe", "1f1b": "1F1B"}.get(plan.schedule, "Interleaved1F1B"),
        "sparse": [int(layer in layers) for layer in range(model.layers)],
    }

    def filled(text: str) -> str:
        return re.sub(r"{(.+?)}", lambda match: str(value(match[1], names)), text)

    lines = {}
    for name, program in _PROGRAMS.items():
        if value(program["if"], names):
            options = [text for text, condition in program["options"] if value(condition, names)]
            words = [launcher, program["program"], *(filled(text) for text in options)]
            lines[name] = " ".join(words)
    return lines
