"""Tests that compare a compiled step with the tensors that torch saves."""

from typing import Any

import pytest
import torch
from accounting import Ledger, Plan, Transformer, Workload, fits, training_memory
from accounting.memory.activations import count_activation_bytes, count_head_activation_bytes
from reference import Model
from torch.nn import functional as F

SIZES: dict[str, Any] = {"layers": 3, "d_model": 64, "heads": 4, "d_ff": 160}
GELU: dict[str, Any] = {"gated_mlp": False, "activation": "gelu"}


def count_saved_bytes(model: Model, tokens: torch.Tensor) -> int:
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
    result = count_saved_bytes(Model(shape), torch.zeros(2, 32, dtype=torch.long))
    saved = count_activation_bytes(shape, None, work, compiled=True).total
    head = count_head_activation_bytes(shape, Plan(), Workload(batch=2, seq=32, compiled=True))
    later = ("token ids and targets", "gradient of the logits")
    assert result == saved + head.total - sum(head[part].total for part in later)


def test_compiled_step_needs_less_memory() -> None:
    model = Transformer(layers=2, d_model=256, heads=4, vocab_size=50_000)
    run: dict[str, Any] = {"batch": 4, "seq": 1024, "precision": "mixed_bf16"}
    assert training_memory(model, **run, compiled=True).total < training_memory(model, **run).total


def test_a_ledger_lists_the_eager_tensors_of_a_compiled_step() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = x.exp().sin()
        return x.sum()

    peaks = []
    for step in (chain, torch.compile(chain, backend="aot_eager_decomp_partition")):
        x = torch.ones(64, 1024, requires_grad=True)
        with Ledger() as ledger:
            step(x).backward()
        peaks.append(ledger.peak_bytes)
    assert peaks[0] == peaks[1]


def test_fits_refuses_compiled_modules() -> None:
    """Under a dispatch mode they run eagerly, so the peak would be that of the eager module."""
    inner = torch.nn.Linear(4, 4)
    inner.compile()
    for module in (torch.compile(torch.nn.Linear(4, 4)), torch.nn.Sequential(inner)):
        with pytest.raises(ValueError, match=r"expected a module without torch\.compile"):
            fits(module, torch.ones(2, 4))
