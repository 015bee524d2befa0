"""A worker's side of the protocol, as pure as the server's.

Notable:
- each method is a generator: it yields requests that go out at the same time, and is sent their
  answers. Who drives it (a worker, a simulated network) waits, and sends again;
- with several servers a push has two phases (Gray, "Notes on Data Base Operating Systems", 1978,
  section 5.8.3.3): all hold the gradients, then the first accepts them, in one message. So has a
  pull: the first promises a version, then all send that one. With one server, one message does.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import TypeVar

from paramserver.protocol.ledger import Log
from paramserver.protocol.messages import Kind, Message, pushed_twice

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """A message for one server."""

    server: int
    message: Message


Steps = Generator[list[Request], list[Message], T]


class Session:
    """What `worker` knows of `len(layouts)` servers, whose shards have these layouts.

    `number` is one that no other session of this worker has: a server knows by it whether a join
    that it receives twice is one.
    """

    def __init__(self, worker: int, layouts: list[str], number: int = 0) -> None:
        self.worker = worker
        self.epoch = self.clock = 0
        self.pushes = 0
        """Gradients of this worker that were accepted, in all its lives."""
        self.version = -1
        """The version last pulled; -1 before the first."""
        self._layouts, self._number = layouts, number
        self._servers = range(len(layouts))
        self._positions = [0] * len(layouts)
        self._reads = 0
        self._pushed = False  # since the last pull

    def join(self) -> Steps[None]:
        """Take part. ValueError where the servers hold another module, or different versions."""
        join = Message(Kind.JOIN, clock=self._number)
        asked = enumerate(self._layouts)
        answers = yield [Request(i, replace(join, number=i, text=text)) for i, text in asked]
        versions = [answer.number for answer in answers]
        if len(set(versions)) > 1:
            text = "load states that were saved at one version"
            raise ValueError(f"the servers begin with versions {versions}; {text}")
        first = answers[0]
        self.epoch, self.clock, self.pushes = first.epoch, first.clock, int(first.text)
        self._positions = [answer.position for answer in answers]
        self._reads, self._pushed = 0, False
        if self.epoch and len(self._layouts) > 1:
            yield from self._bring_log()  # servers take a push only of an epoch that they know

    def pull(self) -> Steps[int]:
        """Have the parameters of one version sent by all; return it."""
        answers = [Message(Kind.AGAIN)]
        while any(answer.kind is Kind.AGAIN for answer in answers):
            self._reads += 1
            if len(self._layouts) == 1:
                answers = yield [self._request(0, Kind.PULL)]
            else:
                (answer,) = yield [self._request(0, Kind.READ)]
                answers = yield self._with_log(Kind.FETCH, Log.from_text(answer.text))
                self._positions = [answer.position for answer in answers]
        self._pushed = False
        return self._one_version(answers)

    def prepare_push(self) -> Steps[None]:
        """Before the last push's gradients are overwritten, all servers must have used them."""
        if self._pushed and (yield from self._bring_log()):
            raise pushed_twice(self.worker)

    def push(self) -> Steps[None]:
        """Hand gradients to all servers: all take them or none does."""
        if len(self._layouts) == 1:
            yield [self._request(0, Kind.PUSH)]
        else:
            yield [self._request(i, Kind.STAGE) for i in self._servers]
            yield [self._request(0, Kind.COMMIT)]
        self.clock += 1
        self.pushes += 1
        self._pushed = True

    def finish(self) -> Steps[int]:
        """Push no more; return the final version, whose parameters all send once nobody does."""
        while True:
            (first,) = yield [self._request(0, Kind.FINISH)]
            others = self._with_log(Kind.END, Log.from_text(first.text))[1:]
            answers = [first, *((yield others) if others else [])]
            # Who joined in between, and pushed, has made another version the last.
            if all(answer.number <= first.number for answer in answers):
                return self._one_version(answers)

    def leave(self) -> Steps[None]:
        """Push no more, and wait for nobody."""
        yield from self._bring_log(Kind.LEAVE)

    def _bring_log(self, kind: Kind = Kind.SYNC) -> Steps[bool]:
        """Bring what the first server knows to all; whether the last push waits for others."""
        (answer,) = yield [self._request(0, kind)]
        if others := self._with_log(Kind.FOLLOW, Log.from_text(answer.text))[1:]:
            answers = yield others
            self._positions[1:] = [answer.position for answer in answers]
        return bool(answer.number)

    def _request(self, server: int, kind: Kind) -> Request:
        position = min(self._positions)
        have = self.version
        message = Message(kind, self.epoch, self.clock, self._reads, position, have=have)
        return Request(server, message)

    def _with_log(self, kind: Kind, log: Log) -> list[Request]:
        if max(self._positions) > log.stop:
            text = f"servers have followed {self._positions} entries of the log, of which server 0 "
            text += f"has {log.stop}: a journal was taken back"
            raise RuntimeError(f"{text}; recover the journals of all servers together")
        texts = [log.after(position).to_text() for position in self._positions]
        message = self._request(0, kind).message
        return [Request(i, replace(message, text=text)) for i, text in enumerate(texts)]

    def _one_version(self, answers: list[Message]) -> int:
        versions = {answer.number for answer in answers}
        if len(versions) > 1:
            raise RuntimeError(f"the servers answered with versions {sorted(versions)}: a bug")
        (self.version,) = versions
        return self.version
