"""Sparse gradients are sent as rows and train like dense gradients."""

import copy
import threading
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paramserver import Asynchronous, BulkSynchronous, Server, Worker, partition
from paramserver.sparse import pack, unpack
from torch import nn

SGD = partial(torch.optim.SGD, lr=0.05)


class Words(nn.Module):
    """An embedding, its projection, and an unused parameter."""

    def __init__(self, *, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(200, 6, sparse=sparse)
        self.head = nn.Linear(6, 2)
        self.unused = nn.Embedding(50, 3, sparse=sparse)

    def loss(self, step, worker):
        generator = torch.Generator().manual_seed(10 * step + worker)
        words = torch.randint(200, (5,), generator=generator)  # with repetitions
        return self.head(self.embed(words)).square().sum()


def alone(optimizer, steps, workers):
    module = Words(sparse=False).double()
    step_of = optimizer(module.parameters())
    for step in range(steps):
        step_of.zero_grad()
        (sum(module.loss(step, worker) for worker in range(workers)) / workers).backward()
        module.unused.weight.grad = torch.zeros_like(module.unused.weight)
        step_of.step()
    return module


def train(optimizer, servers, steps, workers, policy=None):
    start = Words(sparse=True).double()
    shards = partition(dict(start.named_parameters()), servers)
    hosts = [
        Server(dict(start.named_parameters()), optimizer, policy, workers=workers, shard=shard)
        for shard in shards
    ]
    group = [Worker(Words(sparse=True).double(), hosts, rank=rank) for rank in range(workers)]

    def work(worker):
        for step in range(steps):
            worker.pull()
            worker.module.loss(step, worker.rank).backward()
            worker.push()
        worker.finish()

    threads = [threading.Thread(target=work, args=(worker,)) for worker in group]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return group, hosts


@pytest.mark.parametrize("servers", [1, 3])  # the split is inside a row
@pytest.mark.parametrize(
    "optimizer",
    [
        SGD,
        partial(torch.optim.SGD, lr=0.1, fused=True),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.AdamW, lr=0.1),
        partial(torch.optim.Adagrad, lr=0.1),
    ],
    ids=["sgd", "fused", "momentum", "adamw", "adagrad"],
)
def test_sparse_pushes_train_like_dense_ones_in_fewer_bytes(optimizer, servers):
    group, hosts = train(optimizer, servers, steps=4, workers=2)
    expected = dict(alone(optimizer, 4, 2).named_parameters())
    for name, parameter in group[0].module.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-12, atol=1e-13)
    dense = sum(p.nbytes for p in expected.values())
    assert group[0].bytes_pushed < 4 * dense / 8
    recorded = sum(size * count for host in hosts for size, count in host.push_bytes.items())
    assert recorded == sum(worker.bytes_pushed for worker in group)


class Tables(nn.Module):
    """A module with zero parameters of these shapes."""

    def __init__(self, shapes):
        super().__init__()
        self.tables = nn.ParameterList(torch.zeros(shape).double() for shape in shapes)


def rows_of(shape, rows):
    """Return a sparse gradient of a table [n], [n, d], ... with these rows, perhaps twice."""
    values = torch.randint(-9, 9, (*shape[:0:-1], len(rows))).double()
    values = values.permute(*reversed(range(values.dim())))  # not contiguous
    indices = torch.tensor([rows], dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def added_up(gradients, shape):
    """Return the mean of gradients, computed element by element."""
    total = torch.zeros(shape).double()
    for gradient in gradients:
        for row, value in zip(gradient._indices()[0], gradient._values(), strict=True):
            total[row] += value / len(gradients)
    return total


@settings(max_examples=20)
@given(data=st.data(), servers=st.integers(1, 6), workers=st.integers(1, 3))
def test_rows_are_added_where_they_belong_wherever_tables_are_cut(data, servers, workers):
    shape = st.lists(st.integers(1, 6), max_size=2)
    shapes = [(data.draw(st.integers(1, 30)), *data.draw(shape)) for _ in range(2)]
    hosts = [
        Server(
            dict(Tables(shapes).named_parameters()),
            partial(torch.optim.SGD, lr=1.0),
            workers=workers,
            shard=shard,
        )
        for shard in partition(dict(Tables(shapes).named_parameters()), servers)
    ]
    group = [Worker(Tables(shapes), hosts, rank=rank) for rank in range(workers)]
    pushed = []
    for worker in group:
        worker.pull()
        pushed.append(
            [
                rows_of(shape, data.draw(st.lists(st.integers(0, shape[0] - 1), max_size=4)))
                for shape in shapes
            ]
        )
    for worker, gradients in zip(group, pushed, strict=True):
        for table, gradient in zip(worker.module.tables, gradients, strict=True):
            table.grad = gradient
        worker.push()
    group[0].pull()
    for i, table in enumerate(group[0].module.tables):
        expected = added_up([gradients[i] for gradients in pushed], table.shape)
        torch.testing.assert_close(table.detach(), -expected)


def test_sgd_keeps_gradients_sparse(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "to_dense", None)
    train(SGD, 2, steps=2, workers=2)
    train(SGD, 1, steps=2, workers=2, policy=Asynchronous(scale_by_staleness=True))


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("looked_up", [3, 29], ids=["a few rows", "so many that they go as dense"])
def test_sparse_adam_matches_one_process(looked_up, servers):
    make_adam = partial(torch.optim.SparseAdam, lr=0.1)
    reference = nn.Embedding(30, 5, sparse=True)
    start = dict(copy.deepcopy(reference).named_parameters())
    hosts = [
        Server(start, make_adam, BulkSynchronous(), workers=2, shard=shard)
        for shard in partition(start, servers)
    ]
    group = [Worker(copy.deepcopy(reference), hosts, rank=rank) for rank in range(2)]
    optimizer = make_adam(reference.parameters())
    for step in range(3):
        words = (torch.arange(looked_up) + 2 * step) % 30, torch.tensor([step, 7, step + 1])
        for worker, rows in zip(group, words, strict=True):
            worker.pull()
            worker.module(rows).square().sum().backward()
            worker.push()
        (sum(reference(rows).square().sum() for rows in words) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for worker in group:
        worker.pull()
        torch.testing.assert_close(worker.module.weight, reference.weight)


@given(rows=st.lists(st.integers(0, 19), max_size=8), servers=st.integers(1, 7))
def test_unpack_inverts_pack(rows, servers):
    dense = torch.zeros(20, 3)
    dense[rows] = torch.randn(len(rows), 3)
    parameters = {"a": torch.zeros(20, 3), "b": torch.zeros(7)}
    gradients = {"a": dense.to_sparse(1), "b": torch.arange(7.0)}
    whole = {"a": dense, "b": gradients["b"]}
    for shard in partition(parameters, servers):
        buffer = torch.zeros(shard.buffer_bytes, dtype=torch.uint8)
        if size := pack(shard, gradients, buffer):
            for piece, unpacked in zip(shard.pieces, unpack(shard, buffer[:size]), strict=True):
                expected = whole[piece.name].view(-1)[piece.start : piece.stop]
                assert torch.equal(unpacked.to_dense().view(-1), expected)


@given(data=st.binary(max_size=200))
def test_invalid_sparse_data_is_refused(data):
    (shard,) = partition({"a": torch.zeros(20, 3), "b": torch.zeros(7)}, 1)
    raw = torch.frombuffer(bytearray(data or b"0"), dtype=torch.uint8)
    with pytest.raises(ValueError, match="sparse gradients"):
        unpack(shard, raw)


def test_invalid_sparse_row_numbers_are_refused():
    (shard,) = partition({"a": torch.zeros(20, 3)}, 1)
    for rows in ([20], [-1], [3, 3], [4, 3]):
        raw = torch.cat(
            [torch.tensor([len(rows), *rows]).view(torch.uint8), torch.zeros(24).byte()]
        )
        with pytest.raises(ValueError, match="increasing row numbers of a"):
            unpack(shard, raw)


def test_dense_gradients_beside_sparse_ones_are_sent_as_values_of_the_parameter():
    module = nn.Module()
    module.table = nn.Embedding(50, 4, sparse=True)
    module.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    module.low = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    server = Server(dict(module.named_parameters()), partial(torch.optim.SGD, lr=1.0), workers=1)
    worker = Worker(module, server)
    worker.pull()
    module.table(torch.tensor([1, 2])).sum().backward()
    module.phase.grad = torch.full((3,), 1 + 2j, dtype=torch.complex64).conj()
    if hasattr(module.low, "grad_dtype"):
        module.low.grad_dtype = torch.float32
    module.low.grad = torch.ones(3, dtype=getattr(module.low, "grad_dtype", torch.bfloat16))
    worker.push()
    worker.pull()
    assert torch.equal(module.phase.detach(), torch.full((3,), -1 + 2j))
    assert torch.equal(module.low.detach(), -torch.ones(3, dtype=torch.bfloat16))
