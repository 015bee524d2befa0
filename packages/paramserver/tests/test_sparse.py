"""Sparse gradients are sent as dense ones and train like them."""

from functools import partial

import pytest
import torch
from paramserver import Server, Worker, partition
from torch import nn

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def build_embedding(*, sparse):
    torch.manual_seed(0)
    return nn.Embedding(20, 6, sparse=sparse, dtype=torch.float64)


@pytest.mark.parametrize("servers", [1, 3])  # the split is inside a row
def test_sparse_gradients_train_like_dense_ones(servers):
    start = dict(build_embedding(sparse=True).named_parameters())
    hosts = [Server(start, MOMENTUM, workers=2, shard=s) for s in partition(start, servers)]
    group = [Worker(build_embedding(sparse=True), hosts, rank=rank) for rank in range(2)]
    alone = build_embedding(sparse=False)
    optimizer = MOMENTUM(alone.parameters())
    for step in range(4):
        optimizer.zero_grad()
        for worker in group:
            worker.pull()
            rows = torch.tensor([step, 7, 7, 2 * worker.rank])
            worker.module(rows).square().sum().backward()
            (alone(rows).square().sum() / 2).backward()
        for worker in group:
            worker.push()
        optimizer.step()
    group[0].pull()
    torch.testing.assert_close(group[0].module.weight, alone.weight)
