"""Patches during generation, and removal of hooks."""

from collections.abc import Iterator

import pytest
import torch
from interp import (
    AttentionOnly,
    patch,
    record,
    record_patterns,
)
from torch import Tensor


@pytest.fixture
def model() -> AttentionOnly:
    torch.manual_seed(0)
    return AttentionOnly(vocabulary=11, context=9, d_model=8, layers=2, heads=2)


def hooks(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_closed_generators_and_nested_records_leave_no_hooks(model: AttentionOnly) -> None:
    tokens = torch.randint(11, (3, 9))

    def layers() -> Iterator[Tensor]:
        with (
            record(model, "blocks.*") as seen,
            patch(model, {"embed": torch.zeros_like}),
            record_patterns(model),
        ):
            model(tokens)
            yield from seen.values()

    generator = layers()
    assert next(generator).shape == (3, 9, 8)
    assert hooks(model) > 0
    generator.close()
    assert hooks(model) == 0
    expected = model(tokens)
    first, second = record(model, "blocks.0"), record(model, "blocks.*")
    single = first.__enter__()
    both = second.__enter__()
    model(tokens)
    first.__exit__(None, None, None)  # not in the order of entry
    model(tokens[:1])
    second.__exit__(None, None, None)
    assert single["blocks.0"].shape[0] == 3
    assert both["blocks.0"].shape[0] == 1
    assert hooks(model) == 0
    assert torch.equal(model(tokens), expected)
