"""Sizes sum to their total, count shared tensors once, and see zeros."""

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
