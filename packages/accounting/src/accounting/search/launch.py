"""The command lines that run a plan: torchtitan's and Megatron-LM's own options (launch.toml)."""

import re

from accounting.model.formulas import Table, tables, value
from accounting.model.shape import Shape
from accounting.plan import Plan

_PROGRAMS = tables("search/launch.toml")


def command_lines(model: Shape, plan: Plan, *, batch: int, seq: int) -> dict[str, str]:
    """A line for each program that there is, by its name."""
    here, each = min(8, plan.devices), batch // plan.data
    launcher = f"torchrun --nnodes {-(-plan.devices // here)} --nproc-per-node {here}"
    names: Table = {
        **{"m": model, "p": plan, "experts": model.experts, "batch": batch, "seq": seq},
        **{"each": each, "micro": each // plan.microbatches},
    }

    def filled(text: str) -> str:
        return re.sub(r"{(.+?)}", lambda found: str(value(found[1], names)), text)

    return {
        name: " ".join(
            [launcher, about["program"]]
            + [filled(text) for text, there in about["options"] if value(there, names)]
        )
        for name, about in _PROGRAMS.items()
    }
