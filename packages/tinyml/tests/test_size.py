"""Sizes sum to their total, count shared tensors once, and see zeros."""

import pytest
import torch
from tinyml import IntegerModel, prune, quantize, size_of
from torch import nn


def test_bytes_sum_over_tensors():
    model = nn.Sequential(nn.Linear(10, 6), nn.BatchNorm1d(6))
    size = size_of(model)
    assert size.bytes == 4 * (60 + 6 + 4 * 6) + 8  # num_batches_tracked is an int64
    assert size.by_name["0.weight"] == 240
    assert size.parameters == 60 + 6 + 12
    assert str(size).endswith(f"{8 * size.bytes / size.parameters:.2f} bits per parameter")


def test_zeros_are_left_out_of_the_sparse_size():
    model = nn.Linear(64, 64, bias=False)
    pruned = prune(model, 0.75).model
    assert size_of(pruned).bytes == size_of(model).bytes == 64 * 64 * 4
    assert size_of(pruned).sparse_bytes == 64 * 64 // 8 + 64 * 64 // 4 * 4
    assert size_of(pruned).nonzero == 64 * 64 // 4
    assert size_of(model).sparse_bytes == 64 * 64 * 4


def test_multiplications_of_a_convolution_and_a_linear():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 36, 10))
    x = torch.randn(2, 3, 6, 6)
    assert size_of(model).macs is None
    assert size_of(model, x).macs == 2 * (8 * 36 * 27 + 8 * 36 * 10)
    assert size_of(quantize(model, 4), x).macs == size_of(model, x).macs


def test_multiplications_are_as_many_however_they_are_computed():
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 32), nn.Linear(32, 16)]
    model, inputs = nn.Sequential(*layers).eval(), torch.randn(4, 2, 6, 6)
    macs = 4 * (16 * 16 * 18 + 256 * 32 + 32 * 16)
    integer = IntegerModel(model, [inputs])
    for small in (model, quantize(model, 4), quantize(model, activations="dynamic"), integer):
        size = size_of(small, inputs)
        assert size.macs == macs
        assert size.parameters == sum(p.numel() for p in model.parameters())
        assert f"{macs:,}  multiplications" in str(size)


@pytest.mark.parametrize(
    ("layer", "shapes", "macs"),
    [
        (
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
            [(3, 5, 16)],
            3 * 5 * (4 * 16 * 16 + 2 * 16 * 32 + 2 * 5 * 16),
        ),
        (nn.LSTM(8, 6, num_layers=2), [(3, 2, 8)], 3 * 2 * 24 * (8 + 6 + 6 + 6)),
        (nn.GRU(8, 6, bidirectional=True), [(3, 2, 8)], 2 * 3 * 2 * 18 * (8 + 6)),
        (nn.Bilinear(3, 4, 5), [(2, 3), (2, 4)], 2 * 5 * 3 * 4),
        (nn.Linear(4, 1), [(4,)], 4),
        (nn.ConvTranspose2d(4, 8, 3), [(1, 4, 9, 9)], 9 * 9 * 4 * 8 * 9),
    ],
    ids=lambda value: type(value).__name__,
)
def test_multiplications_inside_fused_operators_are_counted(layer, shapes, macs):
    assert size_of(layer, *[torch.randn(shape) for shape in shapes]).macs == macs
