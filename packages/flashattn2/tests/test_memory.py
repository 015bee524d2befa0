"""Additional memory is linear in the sequence length."""

import functools

import pytest
import torch
from flashattn2 import attention_reference, flash_attention
from flashattn2.bench.measure import measure_peak_extra_bytes


def draw_inputs(seq):
    return [torch.randn(1, 1, seq, 64, requires_grad=True) for _ in "qkv"]


def build_gradient(function, **options):
    def run(q, k, v):
        torch.autograd.grad(function(q, k, v, is_causal=True, **options).sum(), (q, k, v))

    return run


def test_every_byte_is_counted_also_inside_kernels():
    def three_tensors():
        first = torch.empty(1_000_000, dtype=torch.uint8)
        second = torch.empty(500_000, dtype=torch.uint8)
        del first
        return torch.empty(250_000, dtype=torch.uint8), second

    assert measure_peak_extra_bytes(three_tensors) == 1_500_000
    x = torch.randn(100, 100)
    # The product and its softmax are in memory together.
    assert measure_peak_extra_bytes(lambda: (x @ x).softmax(-1)) == 2 * x.nbytes
    # Values and indices are 12 bytes per element; sorting allocates more within.
    assert measure_peak_extra_bytes(lambda: x.sort()) > 12 * x.numel()
    assert measure_peak_extra_bytes(lambda: None) == 0


@pytest.mark.parametrize(
    "run",
    [
        build_gradient(flash_attention, backend="torch"),
        build_gradient(flash_attention, backend="aten"),
    ],
    ids=["tiled", "aten"],
)
def test_twice_the_sequence_takes_at_most_twice_the_memory(run):
    # Both lengths are several tiles, so the memory of a tile is a part of both peaks.
    small, large = (
        measure_peak_extra_bytes(functools.partial(run, *draw_inputs(seq))) for seq in (768, 1536)
    )
    assert 0 < large <= 2 * small
    # The scores alone would take this many bytes in float32.
    assert large < 4 * 1536 * 1536


@pytest.mark.parametrize(
    ("seq", "factor"), [(2048, 10), pytest.param(4096, 20, marks=pytest.mark.exhaustive)]
)
def test_tiled_attention_uses_a_fraction_of_plain_memory(seq, factor):
    x = draw_inputs(seq)
    tiled = measure_peak_extra_bytes(lambda: build_gradient(flash_attention, backend="torch")(*x))
    plain = measure_peak_extra_bytes(lambda: build_gradient(attention_reference)(*x))
    assert factor * tiled <= plain
