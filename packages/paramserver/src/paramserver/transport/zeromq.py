"""Servers and workers that find each other by address, come and go, and are killed. Extra `zeromq`.

Notable:
- one loop a server, no threads: it drives the protocol's core, which says what has to wait;
- a socket of ZeroMQ connects again by itself, and requests are numbered: what is not answered is
  sent again, to the same server or to the one that was started in its place;
- a frame of numbers and text, one of bytes that are used where they lie; nothing is unpickled;
- CURVE keys (`keys`) say who may come, and encrypt; without them only the loopback may be bound;
- a worker's thread sends a beat every second, also while it computes: it tells slow from dead.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paramserver.journal import DiskJournal
from paramserver.protocol.core import Core
from paramserver.protocol.messages import Kind, Message, PeerLost, failure, raise_failure
from paramserver.running.progress import Progress, progress_of
from paramserver.transport.connection import SENDS, used

_BEAT = _SIGN_OF_LIFE = 1.0  # seconds; the latter to a worker that is kept waiting
_RETRY = 2.5  # without a word: the request, or its answer, is lost


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
        journal: DiskJournal | None = None,
    ) -> None:  # fmt: skip
        zmq = _zmq()
        if keys is None and not address.startswith(("tcp://127.", "ipc://")):
            raise ValueError(
                f"{address} can be reached from other machines; give keys, or bind tcp://127.0.0.1"
            )
        self.core, self._journal = core, journal
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # A new connection with a worker's name is that worker, come back; the old one is dead.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, 500)
        # Who greets more slowly (in milliseconds) only takes up a place.
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, core.replica.shard.buffer_bytes + 2**20)
        self._guard = _guard(self._context, self._socket, keys) if keys else None
        self._socket.bind(address)
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._waiting: dict[int, _Waiting] = {}
        self._out = torch.zeros(core.replica.shard.buffer_bytes, dtype=torch.uint8)
        self._sent: Any = None  # whether what was in it has left
        self._stopped = threading.Event()

    def serve(self, tell: Callable[[Progress], object] | None = None) -> None:
        """Answer until `stop`; `tell` is called about every second with how far training is."""
        zmq, told = _zmq(), 0.0
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        while not self._stopped.is_set():
            changed = False
            for _ in range(64):  # then, who waits has a turn
                if not poller.poll(0 if changed else 100):
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
        try:
            name, head, *rest = frames
            worker, life, number, *fields = json.loads(head.bytes)
            message = Message.from_text(json.dumps(fields))
            assert type(worker) is type(life) is type(number) is int
            data = _tensor(rest[0]) if message.kind in SENDS else None
        except Exception:
            return False  # garbage: it is nobody's request, and nobody waits for its answer
        request = _Waiting(name.bytes, (life, number), message, data, time.monotonic())
        if message.kind is Kind.BEAT:
            self.core.handle(worker, message, None, None, time.monotonic())
            return False
        if message.kind is Kind.ABORT:
            self.core.lose(worker, message.text)
            return True
        old = self._waiting.get(worker)
        if old and old.number == request.number:
            old.name = request.name
            return False  # asked again: it is waiting already
        self._waiting[worker] = request
        self._attempt(worker)
        return True

    def _attempt(self, worker: int) -> bool:
        request = self._waiting.pop(worker)
        message, data = request.message, request.data
        if self._sent and not self._sent.done:  # the next answer cannot wait for a slow link
            self._out = torch.empty_like(self._out)
        self._sent = None
        expected = message.size or len(self._out)
        try:
            if data is not None and len(data) < expected:
                raise ValueError(f"worker {worker} sent {len(data)} bytes of {expected}")
            reply = self.core.handle(worker, message, data, self._out, time.monotonic())
        except Exception as error:  # of one worker's request: the others go on
            reply = failure(error)
        if reply is None:
            self._waiting[worker] = request
            return False
        self._send(request, reply)
        return True

    def _look(self, now: float) -> None:
        told = dict(self.core.check(now))
        while any(self._attempt(worker) for worker in list(self._waiting)):
            pass  # one answer may be what another request waits for
        for worker, request in list(self._waiting.items()):
            if worker in told:
                del self._waiting[worker]
                self._send(request, failure(told[worker]))
            elif now - request.said > _SIGN_OF_LIFE:
                request.said = now
                self._send(request, Message(Kind.WAIT))

    def _send(self, request: _Waiting, reply: Message) -> None:
        zmq = _zmq()
        head = json.dumps([*request.number, *reply.fields()]).encode()
        data = [used(self._out, reply).numpy().data] if reply.size else [b""]
        with suppress(zmq.ZMQError):  # if it is gone: when it comes back it asks again
            sent = self._socket.send_multipart(
                [request.name, head, *data], zmq.NOBLOCK, copy=False, track=True
            )
            self._sent = sent if reply.size else None


@dataclass
class _Waiting:
    name: bytes
    number: tuple[int, int]
    message: Message
    data: Tensor | None
    said: float


class ZeroMQConnection:
    """A worker's connection to the server at an address.

    `patience` is for how long nothing may come from there, in seconds: a server that is killed and
    started again within it is not noticed.
    """

    def __init__(
        self, address: str, worker: int, nbytes: int, *, life: int, patience: float = 60.0,
        keys: Keys | None = None,
    ) -> None:  # fmt: skip
        zmq = _zmq()
        self.parameters = torch.zeros(nbytes, dtype=torch.uint8)
        self.gradients = torch.zeros_like(self.parameters)
        self._address, self._worker, self._life = address, worker, life
        self._patience, self._number = patience, 0
        self._context, self._keys = zmq.Context(), keys
        self._socket, self._beats = (self._connect(kind, keys) for kind in ("asks", "beats"))
        self._closed = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()

    def ask(self, message: Message) -> Message:
        """Send a request, again and again if it must be, until it is answered."""
        self._number += 1
        start = heard = time.monotonic()
        self._send(message)
        while True:
            if not self._socket.poll(int(_RETRY * 1000)):
                if time.monotonic() - heard > self._patience:
                    raise PeerLost(
                        f"the server at {self._address} has said nothing for {self._patience:g} s, "
                        f"{time.monotonic() - start:.0f} s after it was asked; start it again"
                    )
                self._send(message, again=True)
                continue
            head, data = self._socket.recv_multipart(copy=False)
            life, number, *fields = json.loads(head.bytes)
            if (life, number) != (self._life, self._number):
                continue  # the answer to what was asked twice
            heard = time.monotonic()
            answer = Message.from_text(json.dumps(fields))
            if answer.kind is Kind.WAIT:
                continue
            raise_failure(f"the server at {self._address}", answer)
            if answer.size:
                used(self.parameters, answer).copy_(_tensor(data))
            return answer

    def abort(self, reason: str) -> None:
        """Tell the server why: by a socket of its own, as another thread may use the other."""
        if not self._closed.is_set():
            socket = self._connect("last words", self._keys)
            self._send(Message(Kind.ABORT, text=reason), socket)
            socket.close(linger=500)

    def close(self) -> None:
        """Say nothing any more."""
        if not self._closed.is_set():
            self._closed.set()
            self._socket.close(linger=500)
            self._beating.join()
            self._context.term()

    def _send(self, message: Message, socket: Any = None, *, again: bool = False) -> None:
        head = json.dumps([self._worker, self._life, self._number, *message.fields()]).encode()
        parts: list[bytes | memoryview] = [head]
        if message.kind in SENDS:
            data = used(self.gradients, message).numpy().data
            # Sent as they lie: by the answer they have left. What is sent again may leave later.
            parts.append(data.tobytes() if again else data)
        _offer(socket or self._socket, parts)

    def _beat(self) -> None:
        beat = Message(Kind.BEAT).fields()
        head = json.dumps([self._worker, self._life, 0, *beat]).encode()
        while not self._closed.wait(_BEAT):
            _offer(self._beats, [head])
        self._beats.close(linger=0)

    def _connect(self, name: str, keys: Keys | None) -> Any:
        zmq = _zmq()
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"{self._worker}-{self._life}-{name}".encode())
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.SNDHWM, 4)
        if keys:
            socket.curve_publickey = keys.public.encode()
            socket.curve_secretkey = keys.secret.encode()
            socket.curve_serverkey = keys.peers[0].encode()
        socket.connect(self._address)
        return socket


def _offer(socket: Any, parts: Sequence[bytes | memoryview]) -> None:
    """Send, unless the server is away and messages pile up: then there will be another time."""
    zmq = _zmq()
    with suppress(zmq.Again):
        socket.send_multipart(parts, zmq.NOBLOCK, copy=False)


def _tensor(frame: Any) -> Tensor:
    """The bytes of a frame: its own memory if that begins where a number may, else a copy."""
    data = (
        torch.frombuffer(frame.buffer, dtype=torch.uint8) if len(frame) else torch.empty(0).byte()
    )
    return data if data.data_ptr() % 8 == 0 else data.clone()


def _guard(context: Any, socket: Any, keys: Keys) -> Any:
    """Let those in whose keys are known, and nobody else."""
    from zmq.auth.thread import ThreadAuthenticator
    from zmq.utils import z85

    known = {key.encode() for key in keys.peers}

    class Known:
        def callback(self, domain: str, key: bytes) -> bool:
            return z85.encode(key) in known or key in known

    guard = ThreadAuthenticator(context)
    guard.start()
    guard.configure_curve_callback(domain="*", credentials_provider=Known())
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    socket.curve_server = True
    return guard


def _zmq() -> Any:
    try:
        import zmq
    except ImportError as error:
        raise RuntimeError("ZeroMQ is missing: pip install 'paramserver[zeromq]'") from error
    return zmq
