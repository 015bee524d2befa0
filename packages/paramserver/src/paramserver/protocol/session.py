"""The worker's side of the protocol, without sockets, threads or wall-clock time.

Each method of `Session` is a generator of requests. The caller sends them, waits for the answers
and repeats requests whose answers are lost.

A push has two phases (Gray, "Notes on Data Base Operating Systems", 1978, section 5.8.3.3): all
servers stage the gradients, then the first server commits them in one message. A pull has two
phases, too: the first server fixes a version, then all servers send it.
"""

import json
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import TypeVar

from paramserver.protocol.log import Log
from paramserver.protocol.messages import Kind, Message, build_pushed_twice_error

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """A message for one server."""

    server: int
    message: Message


#: A generator that yields requests to send at the same time, and receives their answers.
Requests = Generator[list[Request], list[Message], T]


class Session:
    """The state of one worker's session with the servers.

    Args:
        worker: number of the worker.
        layouts: layout of each server's shard.
        session_number: a number that is unique among the sessions of this worker. A server uses it
            to recognize a join that it receives twice.
    """

    def __init__(self, worker: int, layouts: list[str], session_number: int = 0) -> None:
        self.worker = worker
        self.epoch = 0
        self.clock = 0
        #: Number of accepted pushes of this worker in all epochs.
        self.pushes = 0
        #: Version that was pulled last; -1 before the first pull.
        self.version = -1
        self._layouts = layouts
        self._session_number = session_number
        #: Number of log entries that each server has replayed.
        self._positions = [0] * len(layouts)
        self._reads = 0
        #: True if the worker has pushed since its last pull.
        self._has_pushed = False

    def join(self) -> Requests[None]:
        """Join the training, and set epoch, clock and pushes from the first server's answer.

        Raises:
            ValueError: the servers store the parameters of another module.
            RuntimeError: the servers' journals do not match. No server has changed.
        """
        join = Message(Kind.JOIN, clock=self._session_number)
        first, *others = [
            Request(server, replace(join, number=server, text=layout))
            for server, layout in enumerate(self._layouts)
        ]
        answers = [Message(Kind.REREAD)]
        tried = -1
        while answers[0].kind is Kind.REREAD:
            # A JOIN does not change the other servers. It changes the first server only if no
            # other server has lost a part of the log.
            replies = (yield others) if others else []
            position = min((reply.position for reply in replies), default=0)
            if position == tried:
                raise RuntimeError(
                    f"the servers have replayed {[reply.position for reply in replies]} entries of "
                    f"the log, but server 0 has {answers[0].position}: a journal was lost, or "
                    "restored from an older copy. No server has changed; restore the "
                    "journals of all servers from copies of one time, or pass another folder"
                )
            tried = position
            # The first server compares the settings of the other servers with its own.
            text = "\n".join([self._layouts[0], *sorted({reply.text for reply in replies})])
            first = replace(first, message=replace(first.message, position=position, text=text))
            answers = [*(yield [first]), *replies]
        self.epoch = answers[0].epoch
        self.clock = answers[0].clock
        self.pushes = int(answers[0].text)
        self._positions = [answer.position for answer in answers]
        self._reads = 0
        self._has_pushed = False
        if self.epoch and len(self._layouts) > 1:
            # A server accepts pushes of an epoch only after it has replayed the join.
            yield from self._forward_log()

    def pull(self) -> Requests[int]:
        """Receive the parameters of one version from all servers and return the version."""
        answers = [Message(Kind.REREAD)]
        while any(answer.kind is Kind.REREAD for answer in answers):
            self._reads += 1
            answer = yield from self._request_of_first(Kind.READ)
            answers = yield self._build_log_requests(Kind.FETCH, Log.from_text(answer.text))
            self._positions = [answer.position for answer in answers]
        self._has_pushed = False
        return self._update_version(answers)

    def prepare_push(self) -> Requests[None]:
        """Forward the log, so that all servers have applied the worker's last push.

        Raises:
            RuntimeError: the last push waits for other workers; the worker has to pull first.
        """
        if self._has_pushed and (yield from self._forward_log()):
            raise build_pushed_twice_error(self.worker)

    def push(self) -> Requests[None]:
        """Push the gradients to all servers; either all servers accept them or none does."""
        yield [self._request(i, Kind.STAGE) for i in range(len(self._layouts))]
        yield from self._request_of_first(Kind.COMMIT)
        self.clock += 1
        self.pushes += 1
        self._has_pushed = True

    def finish(self) -> Requests[int]:
        """Stop pushing, wait for all workers, receive the final parameters; return the version."""
        while True:
            first = yield from self._request_of_first(Kind.FINISH)
            others = self._build_log_requests(Kind.END, Log.from_text(first.text))[1:]
            answers = [first, *((yield others) if others else [])]
            # Try again if a worker that joined in the meantime has created a later version.
            if all(answer.number <= first.number for answer in answers):
                return self._update_version(answers)

    def leave(self) -> Requests[None]:
        """Stop pushing without waiting for other workers."""
        yield from self._forward_log(Kind.LEAVE)

    def _forward_log(self, kind: Kind = Kind.SYNC) -> Requests[bool]:
        """Forward the first server's log; return True if this worker's last push is not applied."""
        answer = yield from self._request_of_first(kind)
        log = Log.from_text(answer.text)
        yield from self._replay(log)
        # The next request reports this position, so that the first server discards these entries.
        self._positions[0] = log.stop
        return bool(answer.number)

    def _replay(self, log: Log) -> Requests[list[Message]]:
        """Let all servers except the first replay `log`; return their answers."""
        others = self._build_log_requests(Kind.REPLAY, log)[1:]
        answers = (yield others) if others else []
        self._positions[1:] = [answer.position for answer in answers]
        return answers

    def _request_of_first(self, kind: Kind) -> Requests[Message]:
        """Send a request to the first server until no update waits for its norm.

        See Note [Norms of several servers] in `core`.
        """
        while True:
            (answer,) = yield [self._request(0, kind)]
            if answer.kind is not Kind.NORMS_REQUIRED:
                return answer
            replies = yield from self._replay(Log.from_text(answer.text))
            # A server without a norm has applied the update, so another worker has sent NORMS.
            if all(reply.text and reply.number == answer.number for reply in replies):
                norms = json.dumps([json.loads(reply.text) for reply in replies])
                request = self._request(0, Kind.NORMS)
                message = replace(request.message, number=answer.number, text=norms)
                yield [Request(0, message)]

    def _request(self, server: int, kind: Kind) -> Request:
        position = min(self._positions)
        message = Message(kind, self.epoch, self.clock, self._reads, position)
        return Request(server, replace(message, pulled_version=self.version))

    def _build_log_requests(self, kind: Kind, log: Log) -> list[Request]:
        if max(self._positions) > log.stop:
            raise RuntimeError(
                f"the servers have replayed {self._positions} entries of the log, but server 0 has "
                f"{log.stop}: a journal was restored from an older copy; "
                "recover all servers' journals together"
            )
        texts = [log.select_from(position).to_text() for position in self._positions]
        message = self._request(0, kind).message
        return [Request(i, replace(message, text=text)) for i, text in enumerate(texts)]

    def _update_version(self, answers: list[Message]) -> int:
        (self.version,) = {answer.number for answer in answers}
        return self.version
