"""Live memory of inference and training: peaks by context length, timelines, largest allocations.

`accounting` traces the model on the meta device, so that any size fits on any machine, as in
`llmsys run memory --size 2.7B`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from accounting import Ledger
from accounting.memory.live import LiveMemory, make_state, training_step_memory

from llmsys_suite.config import RunConfig
from llmsys_suite.model import Decoder, ModelConfig, plain_attention
from llmsys_suite.ranks.rank import Run
from llmsys_suite.results import Memory

ROWS = 4
#: Default vocabulary of `profile`, which the exercises in docs/answers.md specify.
VOCABULARY = 10_000
MIB = 2**20


def list_contexts(config: RunConfig) -> tuple[int, int, int]:
    """Return the context lengths whose peaks are counted: half, one and two times the run's.

    The timeline uses the run's own length.
    """
    return config.context // 2, config.context, 2 * config.context


def run(run: Run) -> Memory | None:
    """Return peaks and a timeline of the run's model; the ranks divide the context lengths."""
    config = run.config
    profiles_of_rank = {
        length: profile(config.size, length, config.vocabulary)
        for length in list_contexts(config)[run.rank :: run.world]
    }
    gathered = run.gather(profiles_of_rank)
    if run.rank != 0:
        return None
    profiles = {length: profile for part in gathered for length, profile in part.items()}
    return Memory(
        rows=ROWS,
        peaks=[profiles[length]["peaks"] for length in list_contexts(config)],
        training_timeline=profiles[config.context]["drawn"]["training_timeline"],
        largest=profiles[config.context]["drawn"]["largest"],
    )


def profile(size: str, context: int, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """Return peaks and timelines in MiB, and the largest allocations, of a size at one context."""
    config = ModelConfig.from_size(size, vocabulary=vocabulary, context=context)
    forward = trace_inference(config)
    step = trace_training(config)
    checkpointed = trace_training(replace(config, checkpoint=True))
    return {
        "peaks": {
            "context": context,
            "inference_peak_mib": forward.peak_bytes / MIB,
            "training_peak_mib": step.peak_bytes / MIB,
            "checkpointed_peak_mib": checkpointed.peak_bytes / MIB,
            "residual_stream_mib": ROWS * context * config.d_model * 4 / MIB,
        },
        "drawn": {
            "inference_timeline": thin_timeline(forward.timeline),
            "training_timeline": thin_timeline(step.timeline),
            "largest": Ledger().table(step.at_peak),
        },
    }


def trace_inference(config: ModelConfig) -> LiveMemory:
    """Return the live memory of a forward pass without gradients on `ROWS` rows."""
    with torch.device("meta"):
        model = Decoder(config, plain_attention)
        tokens = torch.zeros(ROWS, config.context, dtype=torch.long)
    memory = LiveMemory()
    memory.add([*model.parameters(), *model.buffers()], "parameter or buffer")
    memory.phase = "forward"
    with torch.no_grad(), memory:
        model(tokens)
    return memory


def trace_training(config: ModelConfig) -> LiveMemory:
    """Return the live memory of an AdamW step on `ROWS` rows; the optimizer state exists."""
    with torch.device("meta"):
        model = Decoder(config, plain_attention)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tokens = torch.zeros(ROWS, config.context, dtype=torch.long)
        make_state(optimizer)
        return training_step_memory(model, lambda: model.compute_loss(tokens, tokens), optimizer)


def thin_timeline(timeline: list[tuple[str, int]], points: int = 400) -> list[tuple[str, float]]:
    """Return the maximum, in MiB, of each of at most `points` intervals of a timeline in bytes."""
    stride = max(1, -(-len(timeline) // points))
    intervals = (timeline[i : i + stride] for i in range(0, len(timeline), stride))
    highest = (max(interval, key=lambda point: point[1]) for interval in intervals)
    return [(phase, live / MIB) for phase, live in highest]
