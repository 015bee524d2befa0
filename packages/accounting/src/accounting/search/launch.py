"""The command lines that run a plan: torchtitan's and Megatron-LM's own options (launch.toml)."""

import re

from accounting.model.formulas import Table, tables, value
from accounting.model.shape import Shape
from accounting.plan import Plan, even

_PROGRAMS = tables("search/launch.toml")


def command_lines(
    model: Shape, plan: Plan, *, batch: int, seq: int, dtype: str = "bf16"
) -> dict[str, str]:
    """A line for each program that can do it, by its name; as many in each node, at most eight."""
    here = max(n for n in range(1, 9) if plan.devices % n == 0)
    each, experts = batch // plan.data, model.experts
    launcher = f"torchrun --nnodes {plan.devices // here} --nproc-per-node {here}"
    layers = experts.layers if experts and experts.layers is not None else range(model.layers)
    chunks = plan.pipeline * plan.virtual_stages
    names: Table = {
        **{"m": model, "p": plan, "experts": experts, "batch": batch, "seq": seq, "dtype": dtype},
        **{"micro": each // plan.microbatches, "chunks": chunks},
        **{"even": even(model.layers, chunks), "ends": 0 < model.layers % chunks == chunks - 2},
        "schedule": {"gpipe": "GPipe", "1f1b": "1F1B"}.get(plan.schedule, "Interleaved1F1B"),
        "sparse": [int(layer in layers) for layer in range(model.layers)],
    }

    def filled(text: str) -> str:
        return re.sub(r"{(.+?)}", lambda found: str(value(found[1], names)), text)

    return {
        name: " ".join(
            [launcher, about["program"]]
            + [filled(text) for text, there in about["options"] if value(there, names)]
        )
        for name, about in _PROGRAMS.items()
        if value(about["if"], names)
    }
