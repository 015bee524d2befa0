"""Exchanges of a worker with its servers: the requests of a `Session`, sent over connections."""

import secrets
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TypeVar, cast

from paramserver.payload import Gradients
from paramserver.protocol.messages import Kind, Message
from paramserver.protocol.session import Request, Requests, Session
from paramserver.transport.connection import Connection

T = TypeVar("T")


class Exchange:
    """A worker's session with its servers. Requests to several servers are sent from threads.

    Args:
        rank: number of the worker.
        connections: a connection to each server.
        payload: the object that writes the data of pushes and processes the data of pulls.
        layouts: layout of each server's shard.
    """

    def __init__(
        self, rank: int, connections: Sequence[Connection], payload: Gradients, layouts: list[str]
    ) -> None:
        number = connections[0].session
        self.session = Session(rank, layouts, secrets.randbits(48) if number is None else number)
        self.payload = payload
        #: Bytes of gradients, or of changes of local steps, sent to the servers so far.
        self.bytes_pushed = 0
        #: Bytes of parameters received from the servers so far.
        self.bytes_pulled = 0
        self._connections = connections
        self._threads = ThreadPoolExecutor(len(connections)) if len(connections) > 1 else None
        self.run(self.session.join())

    def pull(self) -> None:
        """Receive the parameters of one version from all servers."""
        self.run(self.session.pull())

    def push(self) -> None:
        """Send the payload to all servers; either all servers accept it or none does."""
        self.run(self.session.prepare_push())
        self.run(self.session.push())
        self.payload.mark_accepted()

    def run(self, steps: Requests[T]) -> T:
        """Send the requests that a method of `session` yields; return the method's result."""
        answers: list[Message] | None = None
        while True:
            try:
                requests = next(steps) if answers is None else steps.send(answers)
            except StopIteration as end:
                return cast(T, end.value)
            answers = []
            for answer, pushed in self._request_all(requests):
                answers.append(answer)
                self.bytes_pushed += pushed
                self.bytes_pulled += answer.size

    def request(self, request: Request) -> tuple[Message, int]:
        """Send one request and return the answer and the number of payload bytes sent."""
        message = request.message
        pushed = 0
        write_chunks: Iterable[int] = ()
        if message.kind is Kind.STAGE:
            pushed, write_chunks = self.payload.write(request.server)
            message = replace(message, size=pushed)
        answer = self._connections[request.server].request(message, write_chunks)
        if answer.size:
            self.payload.read_answer(request.server, answer)
        return answer, pushed

    def _request_all(self, requests: list[Request]) -> list[tuple[Message, int]]:
        if not self._threads:
            return [self.request(request) for request in requests]
        futures = [self._threads.submit(self.request, request) for request in requests]
        # Wait for all requests before raising an error, so that none is in flight afterwards.
        wait(futures)
        return [future.result() for future in futures]
