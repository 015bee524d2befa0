"""Transport over ZeroMQ, for servers and workers that may be killed and restarted.

This module contains the server, and `zeromq_connection` the worker's end. Both require the `zeromq`
extra.

A server is one loop in one thread, which passes requests to the protocol's core. ZeroMQ reconnects
sockets, and requests are numbered: a worker sends an unanswered request again, to the same server
or to a server that has replaced it.

A message has two frames: a header of numbers and text in JSON, and one chunk of the data. The
server receives the next chunk while it copies the previous one. Few chunks are queued, so that a
slow link does not fill the memory. A request names a worker. If its sender has not joined as that
worker, the server drops the request or answers it with an error.

CURVE keys (`Keys`) authenticate and encrypt messages; without keys a server binds loopback
addresses only. A thread of each worker sends a HEARTBEAT every second, even while the worker
computes. This allows the server to distinguish a slow worker from a dead one.
"""

import errno
import json
import logging
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from paramserver.journal.disk_journal import DiskFullError, DiskJournal
from paramserver.protocol.core import Core
from paramserver.protocol.messages import LIMIT, OBSERVER, Kind, Message, build_failure
from paramserver.transport.chunks import CHUNK_BYTES, BufferPool, ChunkReceiver, iter_chunk_bounds
from paramserver.transport.connection import import_zmq
from paramserver.transport.zeromq_connection import MAX_CHUNKS, Keys

_LOG = logging.getLogger(__name__)
#: Seconds between two WAIT messages to a waiting worker.
_KEEP_ALIVE_SECONDS = 1.0
#: If an iteration of the loop starts more than this many seconds after the previous one, the
#: process was probably suspended. With a short timeout, the limit is half of the timeout, but at
#: least 0.25 s.
_SUSPENDED_SECONDS = 3.0
#: Seconds between two reports of a full disk.
_FULL_DISK_REPORT_SECONDS = 10.0


class ZeroMQServer:
    """A server that answers requests at an address until `stop` is called.

    Args:
        core: the protocol's state.
        address: address to bind, such as "tcp://127.0.0.1:5550"; port "*" chooses a free port.
        keys: CURVE keys of the server and its workers; None accepts any peer.
        journal: the journal of `core`; the server writes its snapshots.

    Raises:
        ValueError: `keys` is None, and the address is neither ipc:// nor a loopback address (an
            IPv4 address 127.x.x.x, or localhost).
        RuntimeError: the address cannot be bound.
    """

    def __init__(
        self,
        core: Core,
        address: str,
        *,
        keys: Keys | None = None,
        journal: DiskJournal | None = None,
    ) -> None:
        zmq = import_zmq()
        if keys is None and not re.match(r"ipc://|tcp://(localhost|127(\.\d+){3}):", address):
            raise ValueError(
                f"expected keys or a loopback address, got {address}; "
                "pass keys, or bind tcp://127.0.0.1:PORT"
            )
        self.core = core
        self._journal = journal
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # A new connection with a worker's routing id replaces the worker's dead connection.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, 500)
        # Milliseconds after which a connection without a complete handshake is closed.
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, CHUNK_BYTES + 2**20)
        self._socket.setsockopt(zmq.RCVHWM, MAX_CHUNKS)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # unlimited, so that no chunk is dropped
        self._authenticator = _authenticate(self._context, self._socket, keys) if keys else None
        self._keys = keys
        try:
            _require_unused(address)
            self._socket.bind(address)
        except (OSError, zmq.ZMQError) as error:
            self.close()
            raise RuntimeError(f"cannot listen at {address}: {error}") from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        #: For each worker, the request whose data are being received.
        self._incoming = dict[int, _Request]()
        #: For each worker, the complete request that waits for its answer.
        self._waiting = dict[int, _Request]()
        self._buffers = BufferPool(core.replica.shard.buffer_bytes)
        self._stopped = threading.Event()
        #: Time of the last report of a full disk.
        self._last_full_report = -math.inf

    def serve(self, report: Callable[[dict[int, str]], object] | None = None) -> None:
        """Answer requests until `stop` is called.

        About every second, `report` receives the reasons for the losses, keyed by worker.
        """
        last_report = 0.0
        last_check = time.monotonic()
        suspended = min(_SUSPENDED_SECONDS, max(0.25, self.core.waits.timeout / 2))
        while not self._stopped.is_set():
            changed = False
            for _ in range(64):  # waiting requests are retried at least after this many messages
                if not self._socket.poll(0 if changed else 100):
                    break
                changed = self._receive(self._socket.recv_multipart(copy=False)) or changed
            now = time.monotonic()
            if now - last_check > suspended:
                # The messages of the workers may not have been received yet.
                self.core.waits.reset_silence(self.core.ledger.members, now)
            last_check = now
            self._retry_waiting(now)
            if report and now - last_report > 1:
                last_report = now
                report(dict(self.core.lost))
            if self._journal and self._journal.is_snapshot_due():
                self._journal.snapshot(self.core)

    def stop(self) -> None:
        """Make `serve` return. Another thread or a signal handler may call this method."""
        self._stopped.set()

    def close(self) -> None:
        """Release the address and close the journal."""
        self._socket.close()
        if self._authenticator:
            self._authenticator.stop()
        if self._journal:
            self._journal.close()
        self._context.term()

    def _receive(self, frames: list[Any]) -> bool:
        """Process a message. Return True if waiting requests may be answerable now."""
        try:
            received = _Received.parse(frames, has_keys=self._keys is not None)
        except (ValueError, RecursionError) as error:
            # The message is not a request, so no worker waits for an answer.
            _LOG.debug("dropped a message of %r: %s", frames[0].bytes, error)
            return False
        if received.message is None:  # a later chunk of a request that was validated
            request = self._incoming.get(received.worker)
            if request is None or request.key != received.key or not self._is_authorized(received):
                return False
            return self._add_chunk(request, received)
        return self._receive_request(received, received.message)

    def _receive_request(self, received: "_Received", message: Message) -> bool:
        """Process the first chunk of a request; see `_receive` for the return value."""
        worker = received.worker
        now = time.monotonic()
        no_data = ChunkReceiver(torch.empty(0, dtype=torch.uint8, device="cpu"))
        request = _Request(received.name, received.key, message, no_data, now)
        try:
            self._check_sender(received, message)
            self.core.validate(worker, message, received.session)
            if message.kind is Kind.HEARTBEAT:
                self.core.handle(worker, message, None, now, session=received.session)
                return False
        except Exception as error:  # the error concerns this sender only
            _LOG.debug("refused a message of %r: %s", received.name, error)
            if message.kind not in (Kind.HEARTBEAT, Kind.ABORT):
                self._send(request, build_failure(error))
            return False
        if message.kind is Kind.ABORT:
            self.core.mark_lost(worker, message.text)
            return True
        known = self._waiting.get(worker) or self._incoming.get(worker)
        if known is None or known.key != received.key:
            if message.kind is Kind.STAGE:  # only members get memory for their data
                data = self._buffers.allocate()[: message.size]
                request.data = ChunkReceiver(data, self.core.replica.shard)
            self._waiting.pop(worker, None)
            self._incoming[worker] = known = request
        known.name = received.name
        if worker in self._waiting:
            return False  # this message repeats the waiting request
        return self._add_chunk(known, received)

    def _is_authorized(self, received: "_Received") -> bool:
        """Return True without keys, or if the sender is an observer or has the worker's key."""
        if self._keys is None or received.worker == OBSERVER:
            return True
        return self._keys.workers.get(received.worker) == received.sender_key

    def _check_sender(self, received: "_Received", message: Message) -> None:
        """Raise `ValueError` unless the sender's key and connection may send this request."""
        worker = received.worker
        if not self._is_authorized(received):
            raise ValueError(
                f"expected a request of a rank of this key, got one of worker {worker}; pass the "
                f"worker's own key, or start the server with --peer {worker}=FILE.public"
            )
        if message.kind is Kind.JOIN and message.clock != received.session:
            raise ValueError(
                f"expected the session of the connection, {received.session}, in a JOIN, got "
                f"{message.clock}"
            )

    def _add_chunk(self, request: "_Request", received: "_Received") -> bool:
        worker = received.worker
        if not request.data.accept(received.offset, received.chunk):
            # Prevent the worker from sending the request again on a slow link.
            self._keep_alive(request, time.monotonic())
            return False
        self._waiting[worker] = self._incoming.pop(worker)
        self._try_to_answer(worker)
        return True

    def _keep_alive(self, request: "_Request", now: float) -> None:
        if now - request.last_message > _KEEP_ALIVE_SECONDS:
            request.last_message = now
            self._send(request, Message(Kind.WAIT))

    def _try_to_answer(self, worker: int) -> bool:
        """Answer the waiting request of `worker`, if possible; return True if it was answered."""
        request = self._waiting.pop(worker)
        data = request.data
        now = time.monotonic()
        try:
            is_known_finite = bool(data.finite_check and data.finite_check.is_certain())
            reply = self.core.handle(
                worker,
                request.message,
                data.data,
                now,
                is_known_finite=is_known_finite,
                session=request.key[0],
            )
        except DiskFullError as error:
            reply = None  # retried by `_retry_waiting`
            if now - self._last_full_report > _FULL_DISK_REPORT_SECONDS:
                self._last_full_report = now
                _LOG.error("%s; all workers wait until there is room", error)
        except Exception as error:  # the worker receives it
            reply = build_failure(error)
        if reply is None:
            self._waiting[worker] = request
        else:
            self._send(request, reply)
        return reply is not None

    def _retry_waiting(self, now: float) -> None:
        """Answer the waiting requests that can be answered or have timed out."""
        timed_out = dict(self.core.check(now))
        while any(self._try_to_answer(worker) for worker in list(self._waiting)):
            pass  # an answer may make other requests answerable
        for worker, request in list(self._waiting.items()):
            if worker in timed_out:
                del self._waiting[worker]
                self._send(request, build_failure(timed_out[worker]))
            else:
                self._keep_alive(request, now)

    def _send(self, request: "_Request", reply: Message) -> None:
        out = self._buffers.allocate() if reply.size else None
        for start, stop in iter_chunk_bounds(reply.size):
            head = [*request.key, start, *(() if start else reply.to_fields())]
            frames: list[Any] = [request.name, json.dumps(head).encode()]
            if out is not None:
                # Copy, because the next request may change the data before they are sent.
                chunk = out[start:stop].copy_(self.core.answer_data[start:stop])
                frames.append(chunk.numpy().data)
            # If the connection is lost, ZeroMQ drops the answer; the worker repeats the request.
            self._socket.send_multipart(frames, copy=False)


@dataclass
class _Request:
    """A request of a worker, from its first chunk until it is answered."""

    #: Routing id of the sender.
    name: bytes
    #: Number of the worker's session, and number of the request in the session.
    key: tuple[int, int]
    message: Message
    data: ChunkReceiver
    #: Time of the last message to the worker.
    last_message: float


@dataclass(frozen=True)
class _Received:
    """A received message: a request, or a later chunk of it. Only `sender_key` is verified yet."""

    name: bytes
    worker: int
    session: int
    request_number: int
    #: Offset of the chunk in the data of the request in bytes.
    offset: int
    message: Message | None
    chunk: bytes | memoryview
    #: Public key of the sender, which was verified; empty if the server has no keys.
    sender_key: str

    @property
    def key(self) -> tuple[int, int]:
        """The session number and the request number, which identify a request."""
        return self.session, self.request_number

    @staticmethod
    def parse(frames: list[Any], *, has_keys: bool) -> "_Received":
        """Parse the frames of a message; raise `ValueError` if they are not a message."""
        if not 2 <= len(frames) <= 3:
            raise ValueError(f"expected 2 or 3 frames, got {len(frames)}")
        name, head, *rest = frames
        match json.loads(head.bytes):
            case [worker, session, number, offset, *fields]:
                numbers = session, number, offset
            case other:
                raise ValueError(f"expected the head of a message, got {str(other)[:80]}")
        if type(worker) is not int or not OBSERVER <= worker < 2**31:
            raise ValueError(f"expected a worker number, got {str(worker)[:80]}")
        if not all(type(n) is int and 0 <= n < LIMIT for n in numbers):
            raise ValueError(f"expected the numbers of a message, got {str(numbers)[:80]}")
        message = None if offset else Message.from_fields(fields)
        chunk = rest[0].buffer if rest else b""
        # The authenticator stores the key as the user of the connection.
        sender_key = head.get("User-Id") if has_keys else ""
        return _Received(name.bytes, worker, session, number, offset, message, chunk, sender_key)


def _require_unused(address: str) -> None:
    """Raise `OSError` if a server listens at an ipc:// address, which ZeroMQ would take over."""
    if not address.startswith("ipc://"):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a server that is suspended may not accept
        if probe.connect_ex(address[6:]) not in (errno.ENOENT, errno.ECONNREFUSED):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _authenticate(context: Any, server: Any, keys: Keys) -> Any:
    """Accept connections of peers with known keys only; return the authenticator."""
    from zmq.auth.thread import ThreadAuthenticator
    from zmq.utils import z85

    peers = {key.encode() for key in keys.workers.values()}
    provider = SimpleNamespace(callback=lambda _, key: key in peers or z85.encode(key) in peers)
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=provider)
    server.curve_publickey = keys.public.encode()
    server.curve_secretkey = keys.secret.encode()
    server.curve_server = True
    return authenticator
