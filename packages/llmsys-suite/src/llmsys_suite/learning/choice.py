"""The variant that the stage `learn` trains."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from llmsys_suite.config import Layout
from llmsys_suite.measure.samples import PEER, SERVER, SINGLE
from llmsys_suite.ranks.rank import Run
from llmsys_suite.splits.split_model import SplitModel
from llmsys_suite.variants import VARIANTS
from llmsys_suite.variants.single import Variant

#: Variants on several ranks whose optimizer state `zero` can save.
LEARNERS = tuple(name for name in VARIANTS if name not in (SINGLE, SERVER, "torch FSDP2"))
#: Variants whose blocks can be compiled. FSDP is excluded, because its hooks free parameters.
COMPILED = tuple(name for name in LEARNERS if name != "fsdp")


def make_variant(run: Run) -> tuple[str, Variant]:
    """Return the name and the object of the variant that `learn` trains.

    It is the split model of the configuration, or the single process on one rank, or the fastest
    variant of `train` that can be saved. With `compile`, its blocks are compiled.
    """
    config = run.config
    model = replace(run.model, checkpoint=config.recompute)
    if config.tensor * config.pipeline > 1:
        layout = Layout(config.data_parallel, config.pipeline, config.tensor)
        variant: Variant = SplitModel(run, model, layout)
        name = "data x pipeline x tensor"
    else:
        # Only rank 0 has the result of `train`.
        result = run.results.get("train")
        rows = result.rows if result else []
        allowed = COMPILED if config.compile else LEARNERS
        name = choose_fastest(rows, allowed) if run.rank == 0 else ""
        name = run.gather(name)[0] if run.world > 1 else SINGLE
        variant = VARIANTS[name](run, model)
    variant.max_norm = config.clip
    if config.compile:
        for block in variant.list_blocks():
            block.compile()
    return name, variant


def choose_fastest(rows: list[dict[str, Any]], allowed: tuple[str, ...] = LEARNERS) -> str:
    """Return the allowed variant with the smallest median ratio, or torch DDP without rows."""
    ratios = {row["variant"]: row.get("ratio_p50", math.inf) for row in rows}
    return min((name for name in allowed if name in ratios), key=ratios.__getitem__, default=PEER)
