"""Parameters are read in place, and gradients are checked while they are written."""

import os
import struct
import time
from functools import partial

import pytest
import torch
from paramserver import Asynchronous, Server, Worker, payload
from paramserver.partition import partition
from paramserver.protocol.messages import Kind, Message, PeerLost
from paramserver.running.serving import serve
from paramserver.transport.chunks import CHUNK_BYTES
from paramserver.transport.connection import RemoteConnection
from paramserver.transport.shared_memory import create_channel_pairs
from torch import nn

ELEMENTS = 3 * CHUNK_BYTES // 4 + 5  # more than three chunks of float32


class Vector(nn.Module):
    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(ELEMENTS))


@pytest.fixture
def group():
    """Return a server and two workers that read its parameters in place."""
    parameters = dict(Vector().named_parameters())
    nbytes = partition(parameters, 1)[0].buffer_bytes
    ends = create_channel_pairs(["worker 0", "worker 1"], "server", nbytes)
    server = Server(
        parameters,
        partial(torch.optim.SGD, lr=1.0),
        Asynchronous(),
        workers=2,
        timeout=20.0,
        allow_missing=True,
        memory=ends[0][1].server_memory,
    )
    threads = serve(server, {w: pair[1] for w, pair in enumerate(ends)})
    workers = [
        Worker(Vector(), [RemoteConnection(pair[0], 20.0)], rank=w) for w, pair in enumerate(ends)
    ]
    yield server, workers
    for worker in workers:
        worker.abort("the end")
    for thread in threads:
        thread.join(10)


def push(worker, value):
    if worker.version < 0:
        worker.pull()
    worker.module.x.grad = torch.full((ELEMENTS,), value)
    worker.push()


def test_late_answer_is_not_used_for_the_next_request():
    ((worker_end, server_end),) = create_channel_pairs(["worker 0"], "server 0", 64)
    connection = RemoteConnection(worker_end, 0.05)
    with pytest.raises(TimeoutError, match="server 0 did not answer"):
        connection.request(Message(Kind.SYNC))
    server_end.send(Message(Kind.OK, number=1))
    with pytest.raises(PeerLost, match="an earlier request to server 0 failed before it was"):
        connection.request(Message(Kind.SYNC))


def test_server_that_dies_while_it_sends_an_answer_is_named():
    ((worker_end, server_end),) = create_channel_pairs(["worker 0"], "server 0", 64)
    os.write(server_end._pipe.fileno(), struct.pack("!i", 100) + b"a part of 100 bytes")
    server_end.close()
    with pytest.raises(PeerLost, match="server 0 is gone: its process has ended"):
        RemoteConnection(worker_end, 20.0).request(Message(Kind.SYNC))


@pytest.mark.parametrize("updates", range(3))
def test_read_during_updates_is_of_one_version(group, monkeypatch, updates):
    server, (reader, writer) = group
    push(writer, -1.0)
    copied = []

    def interrupted(shard, flat, buffer):
        copied.append(buffer.data_ptr())
        mine, theirs = reader.module.x.detach(), buffer.view(torch.float32)[:ELEMENTS]
        mine[:1000] = theirs[:1000]
        for _ in range(updates if len(copied) == 1 else 0):
            push(writer, -1.0)
        mine[1000:] = theirs[1000:]

    monkeypatch.setattr(payload, "_copy", interrupted)
    assert reader.pull() == 1
    assert torch.equal(reader.module.x, torch.ones(ELEMENTS))
    home = server.core.replica._buffer.data_ptr()
    assert home == server.core.answer_data.data_ptr()
    assert len(copied) == (2 if updates else 1)
    assert reader.pull() == 1 + updates
    assert torch.equal(reader.module.x, torch.full((ELEMENTS,), 1.0 + updates))


def test_update_copies_only_for_workers_that_still_read(group):
    server, (reader, writer) = group
    arena = reader._connections[0].parameters
    reader.pull()
    push(writer, -1.0)
    assert not arena.any()  # no copy was made for it
    reader._exchange.run(
        reader._exchange.session.pull()
    )  # version 1 is reserved for it, and it does not read it
    push(writer, -1.0)
    push(writer, -1.0)
    assert writer.pull() == server.version == 3
    assert torch.equal(writer.module.x, torch.full((ELEMENTS,), 3.0))
    assert torch.equal(arena.view(torch.float32)[:ELEMENTS], torch.ones(ELEMENTS))


@pytest.mark.parametrize(
    "at", [0, CHUNK_BYTES // 4 - 1, CHUNK_BYTES // 4, CHUNK_BYTES // 2 + 7, ELEMENTS - 1]
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_element_in_any_chunk_is_refused_before_anything_is_applied(group, at, bad):
    _, (first, second) = group
    first.pull()
    first.module.x.grad = torch.ones(ELEMENTS)
    first.module.x.grad[at] = bad
    with pytest.raises(ValueError, match="x is not finite in 1 of"):
        first.push()
    assert second.pull() == 0
    assert not second.module.x.any()
    first.module.x.grad[at] = 1.0
    first.push()
    assert second.pull() == 1
    assert torch.equal(second.module.x, -torch.ones(ELEMENTS))


def test_finite_gradients_with_an_overflowing_sum_are_accepted(group):
    _, (first, second) = group
    push(first, 3e38)
    second.pull()
    assert torch.equal(second.module.x, torch.full((ELEMENTS,), -3e38))


def test_worker_that_fails_while_writing_is_named_and_nothing_is_applied(group, monkeypatch):
    server, (fails, second) = group

    def half_written(*_):
        yield CHUNK_BYTES
        raise MemoryError("no room for a gradient")

    monkeypatch.setattr(fails._payload, "_write_pieces", half_written)
    with pytest.raises(MemoryError), fails:
        push(fails, 1.0)
    until = time.monotonic() + 10
    while not server.core.lost and time.monotonic() < until:
        time.sleep(0.01)
    assert "MemoryError: no room" in server.core.lost[0]
    assert second.pull() == 0
    push(second, 1.0)
    assert server.version == 1
