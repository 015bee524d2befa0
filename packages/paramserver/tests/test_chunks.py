"""Chunks of a message may be lost, late or slow without changing the result."""

import json
import select
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from paramserver import Asynchronous, Job
from paramserver.protocol.messages import Kind, Message
from paramserver.running.supervise import join_servers, open_server, read_final_state
from paramserver.transport import chunks, zeromq, zeromq_connection
from paramserver.transport.chunks import BufferPool, ChunkReceiver, iter_chunk_bounds
from test_zeromq import UNIT_SGD, Vector, count

zmq = pytest.importorskip("zmq", reason="the optional extra paramserver[zeromq] is not installed")


@given(st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=40))
def test_buffer_is_reused_after_its_last_view_is_freed(plan):
    buffers = BufferPool(64)
    views = []
    places = set()
    most = 0
    for drop in plan:
        if drop is None:
            taken = buffers.allocate()
            places.add(taken.data_ptr())
            views.append(taken[8:16].view(torch.float32))  # a view prevents the reuse, too
            views[-1].fill_(len(views))
            del taken
            most = max(most, len(views))
        elif views:
            views.pop(drop % len(views))
        assert len({view.data_ptr() for view in views}) == len(views)
    assert len(places) <= most


@given(st.integers(1, 100), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=8))
def test_lost_and_repeated_chunks_have_no_effect(nbytes, tries):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", 9)
        sent = torch.randint(256, (nbytes,), dtype=torch.uint8)
        receiver = ChunkReceiver(torch.zeros_like(sent))
        parts = [
            (start, sent[start:stop].numpy().data) for start, stop in iter_chunk_bounds(nbytes)
        ]
        for first, last in tries:
            for at, chunk in parts[first:last]:
                assert receiver.accept(at, chunk) == (receiver.received == nbytes)
            assert torch.equal(receiver.data[: receiver.received], sent[: receiver.received])
        assert [receiver.accept(at, chunk) for at, chunk in parts][-1]
        assert receiver.accept(nbytes, memoryview(b"more"))
        assert torch.equal(receiver.data, sent)


@pytest.fixture
def server(monkeypatch):
    """Return a job of 1.1 MB, which is sent in chunks of 16 KiB."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2**14)
    opened = open_server(make_job(), 0, "tcp://127.0.0.1:*", journal=None)
    thread = threading.Thread(target=opened.serve)
    thread.start()
    yield opened
    opened.stop()
    thread.join()
    opened.close()


def make_job():
    return Job(count, Vector(rows=45_000), UNIT_SGD, Asynchronous(), workers=0, timeout=20.0)


def test_push_with_a_lost_chunk_is_applied_once_when_it_is_repeated(server):
    shard = make_job().shards()[0]
    gradient = torch.zeros(shard.buffer_bytes, dtype=torch.uint8)
    shard.views(gradient)[0].fill_(-1.0)
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.connect(server.address)

    def send(number, message, without=()):
        for start, stop in iter_chunk_bounds(len(gradient) if message.kind is Kind.STAGE else 0):
            if start // 2**14 not in without:
                fields = message.to_fields() if start == 0 else ()
                head = json.dumps([0, 1, number, start, *fields]).encode()
                peer.send_multipart([head, gradient[start:stop].numpy().data] if stop else [head])

    def answer():
        while True:
            _, number, _, *fields = json.loads(peer.recv_multipart()[0])
            if fields and fields[0] != Kind.WAIT:
                return number, Message.from_fields(fields)

    layout = server.core.replica.layout
    send(1, Message(Kind.JOIN, clock=1, text=layout))
    assert answer()[1].epoch == 1
    push = Message(Kind.STAGE, epoch=1, size=len(gradient))
    send(2, push, without={7})
    send(2, push, without={3, 40})
    send(1, Message(Kind.READ), without={0})
    assert not peer.poll(300)
    send(2, push)
    assert answer() == (2, Message(Kind.OK))
    send(2, push)  # its answer is lost
    assert answer() == (2, Message(Kind.OK))
    send(3, Message(Kind.COMMIT, epoch=1))
    assert answer() == (3, Message(Kind.OK, number=1))
    send(4, Message(Kind.STAGE, epoch=1, clock=1, size=10**9))
    number, refusal = answer()
    assert (number, refusal.kind) == (4, Kind.FAILED)
    assert "worker 0 announced 1000000000" in refusal.text
    for rank in range(1, 50):  # unknown senders get no memory
        head = [rank, 1, 5, 0, *push.to_fields()]
        peer.send_multipart([json.dumps(head).encode(), b"a chunk"])
        assert f"worker {rank} is unknown: join first" in answer()[1].text
    assert len(server._buffers._free) <= 2
    peer.close(linger=0)
    context.term()
    assert read_final_state(make_job(), [server.address])[0].version == 1


class SlowLink:
    """A proxy that forwards data to a port at about 1 MB/s, and answers at full speed."""

    def __init__(self, port):
        self.forwarded = 0
        self._listening = socket.socket()
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**15)
        self._listening.bind(("127.0.0.1", 0))
        self._listening.listen()
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._port, self._stopped = port, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        other = {}
        while not self._stopped.is_set():
            for end in select.select([self._listening, *other], [], [], 0.05)[0]:
                if end is self._listening:
                    ours, _ = end.accept()
                    theirs = socket.create_connection(("127.0.0.1", self._port))
                    other[ours], other[theirs] = theirs, ours
                    continue
                if end not in other:
                    continue
                data = end.recv(2**14)
                if data:
                    other[end].sendall(data)
                else:
                    for closed in (other.pop(end), end):
                        other.pop(closed, None)
                        closed.close()
                if end in other and end.getsockname()[1] == self._listening.getsockname()[1]:
                    self.forwarded += len(data)
                    time.sleep(len(data) / 1e6)
        for end in other:
            end.close()
        self._listening.close()

    def close(self):
        self._stopped.set()
        self._thread.join()


def test_on_a_slow_link_nothing_is_sent_twice(server, monkeypatch):
    monkeypatch.setattr(zeromq_connection, "_RETRY_SECONDS", 0.3)
    monkeypatch.setattr(zeromq, "_KEEP_ALIVE_SECONDS", 0.1)
    link = SlowLink(int(server.address.rsplit(":", 1)[1]))
    with join_servers(make_job(), 0, [link.address]) as worker:
        worker.pull()
        before = link.forwarded
        start = time.monotonic()
        worker.module.x.grad = torch.full_like(worker.module.x, -1.0)
        worker.push()
        assert time.monotonic() - start > 0.6  # otherwise the link was not slow
        assert link.forwarded - before < 1.2 * worker.module.x.nbytes
        worker.leave()
        worker.finish = lambda: None
    link.close()
    assert server.core.replica.version == 1
