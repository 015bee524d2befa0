"""Live memory over an inference and a training step, and its peaks.

Each block is identified by its operator and by the line of model.py that requested it. Blocks are
counted on the meta device, so that the run's model and the 2.7B model fit any machine, and with
fake tensors for mixed precision. On a GPU a snapshot for torch's viewer is stored as well.
"""

from __future__ import annotations

import linecache
import sys
from collections import defaultdict
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from accounting.memory.live import Allocation, LiveMemory, make_state
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from llmsys_suite.model import Decoder, ModelConfig, plain_attention
from llmsys_suite.ranks.rank import Run
from llmsys_suite.stages.results import Memory

ROWS = 4
#: Sizes besides that of the run, and the contexts of the coursework.
DRAWN_BESIDE = {"2.7B": (128, 256, 512)}
MIB = 2**20
#: The file whose innermost executed line labels a block.
MODEL = Decoder.forward.__code__.co_filename


def run(run: Run) -> Memory | None:
    """Return timelines and peaks of this run's size and of 2.7B; ranks share the contexts."""
    context = run.config.context
    wanted = {run.config.size: (context // 2, context, 2 * context)} | DRAWN_BESIDE
    cases = [(size, length) for size, lengths in wanted.items() for length in lengths]
    mine = {case: profile(*case) for case in cases[run.rank :: run.world]}
    gathered = run.gather(mine)
    if run.rank != 0:
        return None
    profiles = {key: profile for part in gathered for key, profile in part.items()}
    models = {
        size: {"rows": ROWS, "peaks": [profiles[size, length]["peaks"] for length in lengths]}
        | profiles[size, lengths[1]]["drawn"]
        for size, lengths in wanted.items()
    }
    size, lengths = list(wanted.items())[-1]
    mixed = [
        {
            "model": size,
            "context": lengths[1],
            "autocast": "bf16" if autocast else "off",
            "saved_for_backward_mib": saved_for_backward(size, lengths[1], autocast=autocast),
        }
        for autocast in (False, True)
    ]
    on_gpu = run.device.type == "cuda" and run.folder is not None
    return Memory(models, mixed, _snapshot(run) if on_gpu else "")


def profile(size: str, context: int) -> dict[str, Any]:
    """Return peaks, timelines and owners of one size at one context."""
    vocabulary = vocabulary_of(size)
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
            "largest": largest(step.at_peak),
            "saved": saved_by_line(step.saved),
        },
    }


def saved_for_backward(size: str, context: int, *, autocast: bool) -> float:
    """Return the live MiB at the start of the backward pass, in float32 or bf16 autocast.

    Fake tensors follow the rules of a GPU without one. Autocast saves a half-precision copy of each
    weight that a product has read, besides smaller activations.
    """
    config = ModelConfig.named(size, vocabulary=vocabulary_of(size), context=context)
    # The initialization reads values, which fake tensors do not have.
    with (
        FakeTensorMode(),
        torch.device("cuda"),
        mock.patch("torch.nn.init.trunc_normal_", lambda weight, **_: weight),
    ):
        model = Decoder(config, plain_attention)
        tokens = torch.zeros(ROWS, context, dtype=torch.long)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False, capturable=True)
        make_state(optimizer)
        memory = LinesOfMemory(model, optimizer)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_enabled("cuda", autocast)
        try:
            with memory:
                loss = model.loss(tokens, tokens)
                live_bytes = memory.live_bytes
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.clear_autocast_cache()
        del loss  # frees the graph and its saved tensors
    return live_bytes / MIB


def vocabulary_of(size: str) -> int:
    """Return 256 for the sizes that are trained on bytes, and 10,000 for the others."""
    return 256 if size in ("mini", "tiny") else 10_000


class LinesOfMemory(LiveMemory):
    """Live memory whose blocks are labeled with the operator and the line that requested them.

    Parameters, buffers and the optimizer state are counted from the start.
    """

    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__()
        #: Blocks that are alive at the start of the backward pass.
        self.saved: list[Allocation] = []
        self.add(model.parameters(), "parameter")
        self.add(model.buffers(), "buffer")
        if optimizer is not None:
            leaves = tree_leaves(optimizer.state_dict())
            self.add((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), "optimizer state")

    def record_saved(self) -> None:
        """Record the blocks that are alive now."""
        self.saved = list(self._alive.values())

    def _count(self, tensor: torch.Tensor, operator: str) -> None:
        frame = sys._getframe(1)
        while frame.f_code.co_filename != MODEL and frame.f_back is not None:
            frame = frame.f_back
        line = frame.f_lineno if frame.f_code.co_filename == MODEL else 0
        super()._count(tensor, f"{operator} {line}")


def inference(config: ModelConfig) -> LiveMemory:
    """Return the live bytes of one forward pass without gradients."""
    with torch.device("meta"):
        model = Decoder(config, plain_attention)
        tokens = torch.zeros(ROWS, config.context, dtype=torch.long)
    memory = LinesOfMemory(model)
    memory.phase = "forward"
    with torch.no_grad(), memory:
        model(tokens)
    return memory


def training(config: ModelConfig) -> LinesOfMemory:
    """Return the live bytes of the second AdamW step, in which the optimizer state exists."""
    with torch.device("meta"):
        model = Decoder(config, plain_attention)
        tokens = torch.zeros(ROWS, config.context, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    make_state(optimizer)
    memory = LinesOfMemory(model, optimizer)
    with memory:
        memory.phase = "forward"
        loss = model.loss(tokens, tokens)
        memory.record_saved()
        memory.phase = "backward"
        loss.backward()
        del loss
        memory.phase = "optimizer"
        optimizer.step()
        optimizer.zero_grad()
    return memory


def thin(timeline: list[tuple[str, int]], points: int = 400) -> list[tuple[str, float]]:
    """Return at most `points` of the timeline in MiB, each the maximum of an interval."""
    stride = max(1, -(-len(timeline) // points))
    stretches = (timeline[i : i + stride] for i in range(0, len(timeline), stride))
    highest = (max(stretch, key=lambda point: point[1]) for stretch in stretches)
    return [(phase, live / MIB) for phase, live in highest]


def largest(allocations: list[Allocation], count: int = 8) -> list[dict[str, Any]]:
    """Return the largest allocations at the peak.

    Blocks with the same operator, phase and module are added up.
    """
    totals: dict[tuple[str, str, str], list[int]] = {}
    for block in allocations:
        origin = (block.operator, block.phase or "before", block.module)
        totals.setdefault(origin, []).append(block.nbytes)
    order = sorted(totals.items(), key=lambda item: -sum(item[1]))[:count]
    return [
        {
            "operator": operator.rpartition(" ")[0],
            "line": source(operator),
            "made_in": phase,
            "module": module,
            "blocks": len(sizes),
            "largest_mib": max(sizes) / MIB,
            "total_mib": sum(sizes) / MIB,
        }
        for (operator, phase, module), sizes in order
    ]


def saved_by_line(saved: list[Allocation]) -> list[dict[str, Any]]:
    """Return the bytes saved for the backward pass, by the line that allocated them."""
    totals: dict[str, list[int]] = defaultdict(list)
    for block in saved:
        if block.phase == "forward":
            totals[source(block.operator)].append(block.nbytes)
    order = sorted(totals.items(), key=lambda item: -sum(item[1]))
    return [
        {"line": line, "blocks": len(sizes), "total_mib": sum(sizes) / MIB} for line, sizes in order
    ]


def source(operator: str) -> str:
    """Return the line of the model's file that `LinesOfMemory` appended to a name."""
    number = int(operator.rpartition(" ")[2])
    return f"{number}: {linecache.getline(MODEL, number).strip()}" if number else ""


def _snapshot(run: Run) -> str:
    assert run.folder is not None
    model = Decoder(run.model).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens, targets = run.batch(0, rows=ROWS)
    # Full stacks of every allocation take minutes to write; Python's are what a reader needs.
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    try:
        model.loss(tokens, targets).backward()
        optimizer.step()
        path = run.folder.path / "memory_snapshot.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return path.name
