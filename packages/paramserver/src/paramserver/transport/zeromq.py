"""Servers and workers that find each other by address, come and go, and are killed. Extra `zeromq`.

Notable:
- one loop a server, no threads: it drives the protocol's core, which says what has to wait;
- a socket of ZeroMQ connects again by itself, and requests are numbered: what is not answered is
  sent again, to the same server or to the one that was started in its place;
- a frame of numbers and text, one of a piece of the data; nothing is unpickled. While a piece is
  copied the next one is on its way; few wait to be used, so that a slow link fills no memory;
- a request is dropped, or answered with an error, unless its sender joined as the worker that it
  names; before that nothing of it is used;
- CURVE keys (`keys`) say who may come, and encrypt; without them only the loopback may be bound;
- a worker's thread sends a beat every second, also while it computes: it tells slow from dead.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from paramserver.journal import DiskJournal
from paramserver.protocol.core import Core
from paramserver.protocol.messages import (
    LIMIT,
    OBSERVER,
    Kind,
    Message,
    PeerLost,
    failure,
    raise_failure,
)
from paramserver.running.progress import Progress, progress_of
from paramserver.transport.connection import SENDS, Connection, extra
from paramserver.transport.pieces import PIECE, Arrival, Buffers, cuts

_LOG = logging.getLogger(__name__)
_BEAT = _SIGN_OF_LIFE = 1.0  # seconds; the latter to a worker that is kept waiting
_RETRY = 2.5  # without a word: the request, or its answer, is lost
_PIECES = 4  # that may wait to be used


@dataclass(frozen=True)
class Keys:
    """CURVE keys (40 characters each, `zmq.curve_keypair()`): one's own, and the other side's.

    A server's `peers` are the public keys of those who may come, a worker's has the server's alone.
    """

    public: str
    secret: str
    peers: tuple[str, ...]


class ZeroMQServer:
    """Serves one core at an address, until `stop`."""

    def __init__(
        self, core: Core, address: str, *, keys: Keys | None = None,
        journal: DiskJournal | None = None) -> None:  # fmt: skip
        zmq = extra("zmq", "zeromq")
        if keys is None and not address.startswith(("tcp://127.", "ipc://")):
            text = f"{address} can be reached from other machines"
            raise ValueError(f"{text}; give keys, or bind tcp://127.0.0.1")
        self.core, self._journal = core, journal
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # A new connection with a worker's name is that worker, come back; the old one is dead.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, 500)
        # Who greets more slowly (in milliseconds) only takes up a place.
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, PIECE + 2**20)
        self._socket.setsockopt(zmq.RCVHWM, _PIECES)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # pieces lie in `_buffers`, nothing is dropped
        self._guard = _guard(self._context, self._socket, keys) if keys else None
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise RuntimeError(f"no server can listen at {address}: {error}") from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._coming, self._waiting = dict[int, _Request](), dict[int, _Request]()
        self._buffers = Buffers(core.replica.shard.buffer_bytes)
        # By worker, who joined last: its routing id, its life and its session. They are the same
        # number where a worker of this package sends; the log keeps it when this server dies.
        self._joined = dict[int, tuple[bytes, int, int]]()
        self._stopped = threading.Event()

    def serve(self, tell: Callable[[Progress], object] | None = None) -> None:
        """Answer until `stop`; `tell` is called about every second with how far training is."""
        told = 0.0
        while not self._stopped.is_set():
            changed = False
            for _ in range(64):  # then, who waits has a turn
                if not self._socket.poll(0 if changed else 100):
                    break
                changed = self._receive(self._socket.recv_multipart(copy=False)) or changed
            now = time.monotonic()
            self._look(now)
            if tell and now - told > 1:
                told = now
                tell(progress_of(self.core))
            if self._journal and self._journal.is_long():
                self._journal.snapshot(self.core)

    def stop(self) -> None:
        """Let `serve` return; may be called from another thread."""
        self._stopped.set()

    def close(self) -> None:
        """Let go of the address."""
        self._socket.close()
        if self._guard:
            self._guard.stop()
        if self._journal:
            self._journal.close()
        self._context.term()

    def _receive(self, frames: list[Any]) -> bool:
        """Take a message. Return True if others may be able to go on."""
        try:
            received = _Received.of(frames)
        except (ValueError, RecursionError) as error:
            # It is nobody's request, and nobody waits for its answer.
            _LOG.debug("dropped a message of %r: %s", frames[0].bytes, error)
            return False
        worker, message, now = received.worker, received.message, time.monotonic()
        key = received.life, received.number
        if message is None:  # a later piece; its request was checked
            request = self._coming.get(worker)
            return bool(request and request.number == key and self._take(request, received))
        request = _Request(received.name, key, message, Arrival(torch.empty(0)), now)
        try:
            request.session = self._session(received, message)
            size = self._size(worker, message)
            self.core.validate(worker, message, request.session)
            if message.kind is Kind.BEAT:
                self.core.handle(worker, message, None, now, session=request.session)
                return False
        except Exception as error:  # of one sender: the workers' requests stay as they are
            _LOG.debug("refused a message of %r: %s", received.name, error)
            if message.kind not in (Kind.BEAT, Kind.ABORT):
                self._send(request, failure(error))
            return False
        if message.kind is Kind.ABORT:
            self.core.lose(worker, message.text)
            return True
        known = self._waiting.get(worker) or self._coming.get(worker)
        if known is None or known.number != key:
            if size:
                request.data = Arrival(self._buffers.take()[:size], self.core.replica.shard)
            self._waiting.pop(worker, None)
            self._coming[worker] = known = request
        known.name = received.name
        if worker in self._waiting:
            return False  # asked again: it is waiting already
        return self._take(known, received)

    def _session(self, received: "_Received", message: Message) -> int:
        """The session in which something was sent. PeerLost for another worker's sender."""
        worker = received.worker
        if message.kind is not Kind.JOIN:
            _, life, session = self._joined.get(worker, (b"", -1, -1))
            return session if life == received.life else received.life
        for other, (name, _, _) in self._joined.items():
            if name == received.name and other != worker and other in self.core.ledger.active:
                raise PeerLost(f"this sender has joined as worker {other}, and is not {worker}")
        return message.clock

    def _size(self, worker: int, message: Message) -> int:
        """The bytes of a push that are to come. There is memory for those who have joined."""
        if message.kind not in SENDS:
            return 0
        size, joined = message.size or self._buffers.nbytes, worker in self.core.ledger.members
        if not joined or not 0 < size <= self._buffers.nbytes:
            raise ValueError(f"worker {worker} ({joined=}) pushed {size} bytes")
        return size

    def _take(self, request: "_Request", received: "_Received") -> bool:
        worker = received.worker
        if not request.data.take(received.at, received.piece):
            # On a slow link nothing has to be sent again.
            self._still_well(request, time.monotonic())
            return False
        self._waiting[worker] = self._coming.pop(worker)
        self._attempt(worker)
        return True

    def _still_well(self, request: "_Request", now: float) -> None:
        if now - request.said > _SIGN_OF_LIFE:
            request.said = now
            self._send(request, Message(Kind.WAIT))

    def _attempt(self, worker: int) -> bool:
        request = self._waiting.pop(worker)
        try:
            data, now = request.data, time.monotonic()
            finite = bool(data.finite and data.finite.surely())
            reply = self.core.handle(
                worker, request.message, data.data, now, finite=finite, session=request.session
            )
            if request.message.kind is Kind.JOIN:
                self._joined[worker] = request.name, request.number[0], request.session
        except Exception as error:  # of one worker's request: the others go on
            reply = failure(error)
        if reply is None:
            self._waiting[worker] = request
        else:
            self._send(request, reply)
        return reply is not None

    def _look(self, now: float) -> None:
        told = dict(self.core.check(now))
        while any(self._attempt(worker) for worker in list(self._waiting)):
            pass  # one answer may be what another request waits for
        for worker, request in list(self._waiting.items()):
            if worker in told:
                del self._waiting[worker]
                self._send(request, failure(told[worker]))
            else:
                self._still_well(request, now)

    def _send(self, request: "_Request", reply: Message) -> None:
        out = self._buffers.take() if reply.size else None
        for start, stop in cuts(reply.size):
            head = [*request.number, start, *(() if start else reply.fields())]
            frames: list[Any] = [request.name, json.dumps(head).encode()]
            if out is not None:  # the next request may change what is given
                frames.append(out[start:stop].copy_(self.core.given[start:stop]).numpy().data)
            self._socket.send_multipart(frames, copy=False)  # if it is gone it will ask again


@dataclass
class _Request:
    name: bytes
    number: tuple[int, int]
    message: Message
    data: Arrival
    said: float
    session: int = -1


@dataclass(frozen=True)
class _Received:
    """What arrived: who sent it, by its own account, and a request or a later piece of one."""

    name: bytes
    worker: int
    life: int
    number: int
    at: int
    message: Message | None
    piece: bytes | memoryview

    @staticmethod
    def of(frames: list[Any]) -> "_Received":
        """What these frames contain. ValueError for anything that is not of this form."""
        if not 2 <= len(frames) <= 3:
            raise ValueError(f"expected 2 or 3 frames, got {len(frames)}")
        name, head, *rest = frames
        match json.loads(head.bytes):
            case [worker, life, number, at, *fields]:
                numbers = life, number, at
            case other:
                raise ValueError(f"{str(other)[:80]} is no head of a message")
        if type(worker) is not int or not OBSERVER <= worker < 2**31:
            raise ValueError(f"{str(worker)[:80]} is no number of a worker")
        if not all(type(n) is int and 0 <= n < LIMIT for n in numbers):
            raise ValueError(f"{str(numbers)[:80]} are not numbers of a message")
        message = None if at else Message.from_fields(fields)
        piece = rest[0].buffer if rest else b""
        return _Received(name.bytes, worker, life, number, at, message, piece)


class ZeroMQConnection(Connection):
    """A worker's connection to the server at an address.

    `patience` is for how long nothing may come from there, in seconds: a server that is killed and
    started again within it is not noticed.
    """

    def __init__(
        self, address: str, worker: int, nbytes: int, *, life: int, patience: float = 60.0,
        keys: Keys | None = None) -> None:  # fmt: skip
        self._zmq = zmq = extra("zmq", "zeromq")
        super().__init__(nbytes)
        self._address, self._worker, self._life = address, worker, life
        self.session = life
        self._patience, self._number, self._sent = patience, 0, zmq.MessageTracker()
        self._context, self._keys = zmq.Context(), keys
        self._socket, self._beats = (self._connect(kind, keys) for kind in ("asks", "beats"))
        self._closed = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()

    def ask(self, message: Message, written: Iterable[int] = ()) -> Message:
        """Send a request, again and again if it must be, until it is answered."""
        self._number += 1
        start = heard = time.monotonic()
        self._send(message, written)
        answer, coming, done = Message(Kind.WAIT), Arrival(self.parameters), False
        while not done:
            if not self._socket.poll(int(_RETRY * 1000)):
                if time.monotonic() - heard > self._patience:
                    # A key that it does not know is not answered.
                    remedy = ("start it again", "is this key known?")[self._number == 1]
                    text = f"the server at {self._address} has said nothing for {self._patience:g}"
                    since = f"{time.monotonic() - start:.0f} s after it was asked"
                    raise PeerLost(f"{text} s, {since}; {remedy}")
                if self._sent.done:  # else it has yet to leave
                    self._send(message)
                continue
            head, *data = self._socket.recv_multipart(copy=False)
            life, number, at, *fields = json.loads(head.bytes)
            if (life, number) != (self._life, self._number):
                continue  # the answer to what was asked twice
            heard = time.monotonic()
            if not at:
                answer = Message.from_fields(fields)
                raise_failure(f"the server at {self._address}", answer)
                coming = Arrival(self.parameters[: answer.size])
            whole = coming.take(at, data[0].buffer if data else b"")
            done = whole and answer.kind is not Kind.WAIT
        return answer

    def abort(self, reason: str) -> None:
        """Tell the server why: by a socket of its own, as another thread may use the other."""
        if not self._closed.is_set():
            socket = self._connect("last words", self._keys)
            self._send(Message(Kind.ABORT, text=reason), (), socket)
            socket.close(linger=500)

    def close(self) -> None:
        """Say nothing any more."""
        if not self._closed.is_set():
            self._closed.set()
            self._socket.close(linger=500)
            self._beating.join()
            self._context.term()

    def _send(self, message: Message, written: Iterable[int] = (), socket: Any = None) -> None:
        there, written = 0, iter(written)
        socket, flags = socket or self._socket, self._zmq.NOBLOCK
        data = self.gradients[: (message.size or None) if message.kind in SENDS else 0]
        for start, stop in cuts(len(data)):
            while there < stop:  # while one piece is written the last one travels
                there = next(written, stop)
            fields = () if start else message.fields()
            head = json.dumps([self._worker, self._life, self._number, start, *fields]).encode()
            # As they lie: what leaves after they have changed is of a number that is void.
            frames = [head, data[start:stop].numpy().data] if stop else [head]
            with suppress(self._zmq.Again):  # whoever refuses this key has hung up
                self._sent = socket.send_multipart(frames, flags, copy=False, track=True)

    def _beat(self) -> None:
        beat = Message(Kind.BEAT).fields()
        head = json.dumps([self._worker, self._life, 0, 0, *beat]).encode()
        while not self._closed.wait(_BEAT):
            with suppress(self._zmq.Again):  # the server is away: there will be another time
                self._beats.send(head, self._zmq.NOBLOCK)
        self._beats.close(linger=0)

    def _connect(self, name: str, keys: Keys | None) -> Any:
        zmq, socket = self._zmq, self._context.socket(self._zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"{self._worker}-{self._life}-{name}".encode())
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.SNDHWM, 4 if name == "beats" else 0)
        socket.setsockopt(zmq.RCVHWM, _PIECES)
        if keys:
            socket.curve_publickey = keys.public.encode()
            socket.curve_secretkey = keys.secret.encode()
            socket.curve_serverkey = keys.peers[0].encode()
        socket.connect(self._address)
        return socket


def _guard(context: Any, socket: Any, keys: Keys) -> Any:
    """Let those in whose keys are known, and nobody else."""
    from zmq.auth.thread import ThreadAuthenticator
    from zmq.utils import z85

    peers = {key.encode() for key in keys.peers}
    known = SimpleNamespace(callback=lambda _, key: key in peers or z85.encode(key) in peers)
    guard = ThreadAuthenticator(context)
    guard.start()
    guard.configure_curve_callback(domain="*", credentials_provider=known)
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    socket.curve_server = True
    return guard
