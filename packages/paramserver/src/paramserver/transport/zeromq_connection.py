"""The worker's end of the transport over ZeroMQ, and the keys of a process; see `zeromq`."""

import json
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from paramserver.protocol.messages import Kind, Message, PeerLost, raise_failure
from paramserver.transport.chunks import ChunkReceiver, iter_chunk_bounds
from paramserver.transport.connection import Connection, import_zmq

#: Seconds between two HEARTBEATs of a worker.
_HEARTBEAT_SECONDS = 1.0
#: Seconds of silence after which a request or its answer is considered lost. With a short timeout,
#: the limit is half of the timeout, but longer than the interval between the server's WAITs.
_RETRY_SECONDS = 2.5
#: Maximum number of chunks that a socket queues for receiving.
MAX_CHUNKS = 4


@dataclass(frozen=True)
class Keys:
    """CURVE keys of one process, 40 characters each (`zmq.curve_keypair()`)."""

    public: str
    secret: str
    #: At a worker: public key of the server.
    server: str = ""
    #: At a server: public key of each rank that may join. Several ranks may have the same key.
    workers: Mapping[int, str] = field(default_factory=dict)


class ZeroMQConnection(Connection):
    """A worker's connection to the server at an address.

    Args:
        address: address of the server, such as "tcp://host:5550".
        worker: number of the worker.
        nbytes: size of the buffer of the server's shard in bytes.
        session: a random number that identifies this worker's session. A restarted worker passes
            another number.
        timeout: seconds during which the server may be silent. The worker does not notice a restart
            of the server that takes less time.
        keys: CURVE keys of the worker and the server; None does not encrypt.
    """

    def __init__(
        self,
        address: str,
        worker: int,
        nbytes: int,
        *,
        session: int,
        timeout: float = 60.0,
        keys: Keys | None = None,
    ) -> None:
        self._zmq = zmq = import_zmq()
        super().__init__(nbytes)
        self._address = address
        self._worker = worker
        self.session = session
        self._timeout = timeout
        self._request_number = 0
        self._sent = zmq.MessageTracker()
        self._context = zmq.Context()
        self._keys = keys
        self._socket = self._connect("requests", keys)
        self._heartbeat_socket = self._connect("heartbeats", keys)
        self._closed = threading.Event()
        self._heartbeat_thread = threading.Thread(target=self._send_heartbeats, daemon=True)
        self._heartbeat_thread.start()

    def request(self, message: Message, write_chunks: Iterable[int] = ()) -> Message:
        """Send a request, repeatedly if necessary, and return its answer.

        Raises:
            PeerLost: the server has been silent for `timeout` seconds.
        """
        self._request_number += 1
        start = time.monotonic()
        # Seconds without a message. A poll counts as at most its timeout: if this process was
        # suspended, it sends the request again before it gives up.
        silence = 0.0
        retry = min(_RETRY_SECONDS, max(1.25, self._timeout / 2))
        self._send(message, write_chunks)
        answer = Message(Kind.WAIT)
        receiver = ChunkReceiver(self.parameters)
        is_complete = False
        while not is_complete:
            poll_start = time.monotonic()
            if not self._socket.poll(int(retry * 1000)):
                silence += min(retry, time.monotonic() - poll_start)
                if silence > self._timeout:
                    raise self._build_lost_error(start)
                if self._sent.done:  # otherwise the request has not left this process yet
                    self._send(message)
                continue
            head, *data = self._socket.recv_multipart(copy=False)
            session, number, offset, *fields = json.loads(head.bytes)
            if (session, number) != (self.session, self._request_number):
                continue  # an answer to an earlier request that was sent twice
            silence = 0.0
            if not offset:
                answer = Message.from_fields(fields)
                raise_failure(f"the server at {self._address}", answer)
                receiver = ChunkReceiver(self.parameters[: answer.size])
            has_all_data = receiver.accept(offset, data[0].buffer if data else b"")
            is_complete = has_all_data and answer.kind is not Kind.WAIT
        return answer

    def _build_lost_error(self, start: float) -> PeerLost:
        # A server does not answer a client whose key it does not know.
        remedy = "check that it knows this key" if self._request_number == 1 else "restart it"
        return PeerLost(
            f"the server at {self._address} was silent for {self._timeout:g} s, "
            f"{time.monotonic() - start:.0f} s after the request; {remedy}"
        )

    def abort(self, reason: str) -> None:
        """Report the failure to the server, over a socket that no other thread uses."""
        if not self._closed.is_set():
            socket = self._connect("abort", self._keys)
            self._send(Message(Kind.ABORT, text=reason), (), socket)
            socket.close(linger=500)

    def close(self) -> None:
        """Close the sockets and stop sending HEARTBEATs."""
        if not self._closed.is_set():
            self._closed.set()
            self._socket.close(linger=500)
            self._heartbeat_thread.join()
            self._context.term()

    def _send(self, message: Message, write_chunks: Iterable[int] = (), socket: Any = None) -> None:
        written_bytes = 0
        chunks = iter(write_chunks)
        socket = socket or self._socket
        nbytes = message.size if message.kind is Kind.STAGE else 0
        data = self.gradients[:nbytes]
        for start, stop in iter_chunk_bounds(len(data)):
            while written_bytes < stop:  # the previous chunk is sent while this one is written
                written_bytes = next(chunks, stop)
            fields = () if start else message.to_fields()
            head = json.dumps(
                [self._worker, self.session, self._request_number, start, *fields]
            ).encode()
            # The frame shares the buffer's memory. If the buffer changes before a chunk is sent,
            # the server has answered the chunk's request and ignores the chunk.
            frames = [head, data[start:stop].numpy().data] if stop else [head]
            with suppress(self._zmq.Again):  # a server that refuses the key has disconnected
                flags = self._zmq.NOBLOCK
                self._sent = socket.send_multipart(frames, flags, copy=False, track=True)

    def _send_heartbeats(self) -> None:
        fields = Message(Kind.HEARTBEAT).to_fields()
        head = json.dumps([self._worker, self.session, 0, 0, *fields]).encode()
        while not self._closed.wait(_HEARTBEAT_SECONDS):
            with suppress(self._zmq.Again):  # the server is not connected now
                self._heartbeat_socket.send(head, self._zmq.NOBLOCK)
        self._heartbeat_socket.close(linger=0)

    def _connect(self, name: str, keys: Keys | None) -> Any:
        zmq = self._zmq
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"{self._worker}-{self.session}-{name}".encode())
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.SNDHWM, 4 if name == "heartbeats" else 0)
        socket.setsockopt(zmq.RCVHWM, MAX_CHUNKS)
        if keys:
            socket.curve_publickey = keys.public.encode()
            socket.curve_secretkey = keys.secret.encode()
            socket.curve_serverkey = keys.server.encode()
        socket.connect(self._address)
        return socket
