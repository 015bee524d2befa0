"""Live memory of inference and training steps: peaks by context, timelines, largest allocations.

`accounting` counts the blocks on the meta device, so that the run's model and the 2.7B model fit on
any machine. Mixed precision is counted with fake tensors. On a GPU a snapshot for torch's viewer is
stored as well.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from accounting import Ledger
from accounting.memory.live import LiveMemory, make_state, training_step_memory

from llmsys_suite.config import RunConfig
from llmsys_suite.measure.autocast_memory import saved_bytes
from llmsys_suite.model import Decoder, ModelConfig, plain_attention
from llmsys_suite.ranks.rank import Run
from llmsys_suite.results import Memory, Rows

ROWS = 4
#: Sizes besides that of the run, with the contexts and the vocabulary of the coursework.
DRAWN_BESIDE = {"2.7B": (128, 256, 512)}
VOCABULARY_BESIDE = 10_000
MIB = 2**20


def contexts(config: RunConfig) -> dict[str, tuple[int, ...]]:
    """Return the contexts of each drawn size; the run's size is always the run's model."""
    drawn: dict[str, tuple[int, ...]] = {}
    drawn[config.size] = (config.context // 2, config.context, 2 * config.context)
    return drawn | {size: some for size, some in DRAWN_BESIDE.items() if size != config.size}


def vocabulary_of(size: str, config: RunConfig) -> int:
    """Return the vocabulary of a drawn size."""
    return config.vocabulary if size == config.size else VOCABULARY_BESIDE


def run(run: Run) -> Memory | None:
    """Return timelines and peaks of this run's model and of 2.7B; ranks share the contexts."""
    wanted = contexts(run.config)
    cases = [(size, length) for size, lengths in wanted.items() for length in lengths]
    # Rank 0 has the shortest cases of two ranks, so it also counts mixed precision.
    mixed = _mixed(run.config) if run.rank == 0 else []
    mine = {
        (size, length): profile(size, length, vocabulary_of(size, run.config))
        for size, length in cases[run.rank :: run.world]
    }
    gathered = run.gather(mine)
    if run.rank != 0:
        return None
    profiles = {key: profile for part in gathered for key, profile in part.items()}
    models = {
        size: {"rows": ROWS, "peaks": [profiles[size, length]["peaks"] for length in lengths]}
        | profiles[size, lengths[1]]["drawn"]
        for size, lengths in wanted.items()
    }
    on_gpu = run.device.type == "cuda" and run.folder is not None
    return Memory(models, mixed, _snapshot(run) if on_gpu else "")


def _mixed(config: RunConfig) -> Rows:
    """Return the bytes that the last drawn size saves for the backward pass, in two precisions."""
    size, lengths = list(contexts(config).items())[-1]
    model = ModelConfig.named(size, vocabulary=vocabulary_of(size, config), context=lengths[1])
    return [
        {
            "model": size,
            "context": model.context,
            "autocast": name,
            "saved_for_backward_mib": saved_bytes(model, ROWS, autocast=name != "off") / MIB,
        }
        for name in ("off", "bf16")
    ]


def profile(size: str, context: int, vocabulary: int = VOCABULARY_BESIDE) -> dict[str, Any]:
    """Return peaks, timelines and the largest allocations of one size at one context."""
    config = ModelConfig.named(size, vocabulary=vocabulary, context=context)
    forward, step = inference(config), training(config)
    checkpointed = training(replace(config, checkpoint=True))
    return {
        "peaks": {
            "context": context,
            "inference_peak_mib": forward.peak_bytes / MIB,
            "training_peak_mib": step.peak_bytes / MIB,
            "checkpointed_peak_mib": checkpointed.peak_bytes / MIB,
            "residual_stream_mib": ROWS * context * config.d_model * 4 / MIB,
        },
        "drawn": {
            "inference_timeline": thin(forward.timeline),
            "training_timeline": thin(step.timeline),
            "largest": Ledger().table(step.at_peak),
        },
    }


def inference(config: ModelConfig) -> LiveMemory:
    """Return the live bytes of one forward pass without gradients."""
    with torch.device("meta"):
        model = Decoder(config, plain_attention)
        tokens = torch.zeros(ROWS, config.context, dtype=torch.long)
    memory = LiveMemory()
    memory.add([*model.parameters(), *model.buffers()], "parameter or buffer")
    memory.phase = "forward"
    with torch.no_grad(), memory:
        model(tokens)
    return memory


def training(config: ModelConfig) -> LiveMemory:
    """Return the live bytes of the second AdamW step, in which the optimizer state exists."""
    with torch.device("meta"):
        model = Decoder(config, plain_attention)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tokens = torch.zeros(ROWS, config.context, dtype=torch.long)
        make_state(optimizer)
        return training_step_memory(model, lambda: model.loss(tokens, tokens), optimizer)


def thin(timeline: list[tuple[str, int]], points: int = 400) -> list[tuple[str, float]]:
    """Return at most `points` of the timeline in MiB, each the maximum of an interval."""
    stride = max(1, -(-len(timeline) // points))
    intervals = (timeline[i : i + stride] for i in range(0, len(timeline), stride))
    highest = (max(interval, key=lambda point: point[1]) for interval in intervals)
    return [(phase, live / MIB) for phase, live in highest]


def _snapshot(run: Run) -> str:
    assert run.folder is not None
    model = Decoder(run.model).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens, targets = run.batch(0, rows=ROWS)
    # Stacks of C++ frames take minutes to write.
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    try:
        model.loss(tokens, targets).backward()
        optimizer.step()
        path = run.folder.path / "memory_snapshot.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return path.name
