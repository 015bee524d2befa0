"""Sizes sum to their total, count shared tensors once, and see zeros."""

from tinyml import prune, size_of
from torch import nn


def test_bytes_sum_over_tensors():
    model = nn.Sequential(nn.Linear(10, 6), nn.BatchNorm1d(6))
    size = size_of(model)
    assert size.bytes == 4 * (60 + 6 + 4 * 6) + 8  # num_batches_tracked is an int64
    assert size.by_name["0.weight"] == 240
    assert str(size).endswith(f"{size.bytes}  bytes, {size.sparse_bytes} without zeros")


def test_zeros_are_left_out_of_the_sparse_size():
    model = nn.Linear(64, 64, bias=False)
    pruned = prune(model, 0.75).model
    assert size_of(pruned).bytes == size_of(model).bytes == 64 * 64 * 4
    assert size_of(pruned).sparse_bytes == 64 * 64 // 8 + 64 * 64 // 4 * 4
    assert size_of(model).sparse_bytes == 64 * 64 * 4
