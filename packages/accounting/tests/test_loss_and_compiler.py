"""Tests that compare a loss in chunks and a compiled step with torch's live and saved tensors."""

from typing import Any

import pytest
import torch
from accounting import Plan, Transformer, Workload, peak_memory, step_time, training_memory
from accounting.memory.activations import activations, head_activations
from accounting.memory.live import make_state, training_step_memory
from reference import Model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SIZES: dict[str, Any] = {"layers": 3, "d_model": 64, "heads": 4, "d_ff": 160}
GELU: dict[str, Any] = {"gated_mlp": False, "activation": "gelu"}


@pytest.mark.parametrize(
    ("chunks", "more"), [(1, {}), (2, {"tied": True}), (4, GELU)], ids=["own head", "tied", "gelu"]
)
def test_chunked_loss_peaks_like_live_tensors(chunks: int, more: dict[str, Any]) -> None:
    chunked_loss_agrees(chunks, more)


@pytest.mark.exhaustive
@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("more", [{}, {"tied": True}, GELU], ids=["own head", "tied", "gelu"])
def test_every_chunked_loss_peaks_like_live_tensors(chunks: int, more: dict[str, Any]) -> None:
    chunked_loss_agrees(chunks, more)


def chunked_loss_agrees(chunks: int, more: dict[str, Any]) -> None:
    """Check that the predicted peak of a step with a loss in chunks is that of its tensors."""
    shape, (batch, seq) = Transformer(**SIZES, vocab_size=2048, **more), (8, 64)
    with FakeTensorMode():
        model, tokens = Model(shape), torch.zeros(batch, seq, dtype=torch.long)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        make_state(optimizer)

        def piece(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(model.head(hidden), targets, reduction="sum")

        def loss() -> torch.Tensor:
            hidden = model.embedding(tokens)
            for block in model.blocks:
                hidden = block(hidden)
            pieces = zip(
                model.norm(hidden).flatten(0, 1).chunk(chunks),
                tokens.flatten().chunk(chunks),
                strict=True,
            )
            if chunks == 1:
                return piece(*next(iter(pieces)))
            return sum(checkpoint(piece, *item, use_reentrant=False) for item in pieces)

        result = training_step_memory(model, loss, optimizer).peak_bytes
    about: dict[str, Any] = {"batch": batch, "seq": seq, "fused_norm": False}
    predicted = peak_memory(shape, foreach=False, loss_chunks=chunks, **about)
    assert predicted.total == pytest.approx(result, rel=0.01)


def saved_bytes(model: Model, tokens: torch.Tensor) -> int:
    """Return the bytes that the forward of a compiled step saves, without weights and inputs.

    The graph is partitioned as for Inductor.
    """

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    compiled = torch.compile(loss, backend="aot_eager_decomp_partition")
    expected = {t.untyped_storage().data_ptr() for t in (*model.parameters(), tokens)}
    result: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        result[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compiled()
    return sum(t.untyped_storage().nbytes() for key, t in result.items() if key not in expected)


@pytest.mark.parametrize(
    "more", [{}, pytest.param(GELU, marks=pytest.mark.exhaustive)], ids=["gated", "gelu"]
)
def test_compiled_activations_equal_partitioner_saves(more: dict[str, Any]) -> None:
    sizes = SIZES | {"layers": 1}
    shape, work = Transformer(**sizes, vocab_size=512, **more), Workload(batch=2, seq=32)
    torch._dynamo.reset()
    result = saved_bytes(Model(shape), torch.zeros(2, 32, dtype=torch.long))
    saved = activations(shape, None, work, compiled=True).total
    head = head_activations(shape, tokens=64, precision="fp32", compiled=True)
    later = ("token ids and targets", "gradient of the logits")
    assert result == saved + head.total - sum(head[part].total for part in later)


def test_chunks_and_compiler_save_memory_and_chunks_take_time() -> None:
    model = Transformer(layers=2, d_model=256, heads=4, vocab_size=50_000)
    run: dict[str, Any] = {"batch": 4, "seq": 1024, "precision": "mixed_bf16"}
    whole = training_memory(model, **run)
    part = training_memory(model, **run, loss_chunks=8)
    assert part["head and loss"].total < 0.2 * whole["head and loss"].total
    assert training_memory(model, **run, compiled=True).total < whole.total
    seconds = [
        float(step_time(model, Plan(), **run, loss_chunks=n, hardware="H100").total) for n in (1, 8)
    ]
    assert seconds[0] < seconds[1]
    with pytest.raises(ValueError, match="expected loss_chunks >= 1, got 0"):
        Workload(batch=1, seq=1, loss_chunks=0)
