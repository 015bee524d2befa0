"""Computes gradients with parameters that it pulls, and pushes them.

Notable:
- of several servers each has a thread; with overlap there is one more, in which a fragment travels;
- a worker may be many ranks: the first one of its `site` speaks to the servers for all.
"""

import json
import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import Tensor, nn

from paramserver.consistency import Consistency, LocalSteps, OptimizerFactory
from paramserver.partition import partition
from paramserver.payload import Changes, Gradients
from paramserver.protocol.messages import Kind, Message
from paramserver.protocol.replica import layout
from paramserver.protocol.session import Request, Session, Steps
from paramserver.server import Server
from paramserver.transport.connection import SENDS, Connection

T = TypeVar("T")


class Worker:
    """A module whose parameters live on servers.

    `servers` is a server in this process, several of them, or connections to them, in the order of
    `partition(parameters, len(servers), whole=whole)`. As a context manager it finishes at the end,
    or tells the servers if the body raises. A step is: pull, a backward pass, push.

    With `LocalSteps`, `local` is that policy and `optimizer` the worker's own.

    With `site`, a process group, its ranks are one worker: all make one and call the same methods,
    with gradients that they have averaged; only the first one's `servers` are used. Under FSDP each
    rank is a worker by itself, with those that hold the same parameters at other sites.
    """

    def __init__(
        self, module: nn.Module, servers: Server | Sequence[Server | Connection], *,
        rank: int = 0, whole: bool = False, local: LocalSteps | None = None,
        optimizer: OptimizerFactory | None = None,
        site: dist.ProcessGroup | None = None) -> None:  # fmt: skip
        self._speaks, self._site = site is None or dist.get_rank(site) == 0, site
        servers = [servers] if isinstance(servers, Server) else servers if self._speaks else []
        if local is None and servers and isinstance(servers[0], Server):
            local = local_of(servers[0].consistency)
        if local and optimizer is None:
            raise ValueError("local steps need a worker's own `optimizer`: give one")
        self.module, self.rank = module, rank
        self._parameters = trainable(module)
        self._connections = [s.connect(rank) if isinstance(s, Server) else s for s in servers]
        shards = partition(self._parameters, len(servers), whole=whole) if servers else []
        give = partial(Changes, local) if local else Gradients
        self._payload: Gradients = give(self._parameters, shards, self._connections)
        self._threads = ThreadPoolExecutor(len(servers)) if len(servers) > 1 else None
        self.bytes_pushed = self.bytes_pulled = 0
        """Bytes of gradients and of parameters that went to and came from the servers."""
        self.loss = math.nan  # what `push` was told last
        self._finished = False
        self._local = local
        self._optimizer = optimizer(self._parameters.values()) if local and optimizer else None
        self._steps = 0  # of its own
        self._sent_at = [0] * (local.fragments if local else 1)  # steps when a fragment was sent
        self._due: int | None = 0  # steps from which the next pull waits; None: not in this round
        self._courier = ThreadPoolExecutor(1) if local and local.overlap else None
        self._travels: Future[None] | None = None
        number = getattr(self._connections[0], "session", None) if self._connections else None
        number = secrets.randbits(48) if number is None else number
        self._session = Session(rank, [layout(s, local) for s in shards], number)
        self._together(lambda: self._drive(self._session.join()))

    @property
    def clock(self) -> int:
        """Gradients pushed so far, by which the consistency compares workers."""
        return self._session.clock

    @property
    def pushes(self) -> int:
        """Gradients of this rank that were accepted, also before it joined again."""
        return self._session.pushes

    @property
    def position(self) -> int:
        """Steps of this rank that are in what was accepted, also before it joined again: where it
        is in its data. (A last round that is cut short counts as a whole one.)"""
        return self.pushes * (self._local.interval if self._local else 1)

    @property
    def version(self) -> int:
        """The version that this worker last pulled."""
        return self._session.version

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.finish()
        else:
            self.abort(f"{type(error).__name__}: {error}")

    def pull(self) -> int:
        """Copy the servers' parameters into the module, waiting as the consistency demands.

        Returns their version, which is the same at all servers. In the middle of a round of local
        steps it does nothing.
        """
        if self._due is not None and self._steps >= self._due:
            self._take()
        return self.version

    def push(self, loss: float | Tensor = math.nan) -> None:
        """Hand the gradients to the servers and set them to None; a missing gradient is zero.

        All servers take them or none does. ValueError if one is not finite: nothing is applied
        anywhere, the gradients stay where they are and the others notice nothing. The progress of a
        run shows `loss`.
        """
        self.loss = float(loss.detach() if isinstance(loss, Tensor) else loss)
        if self._local is None or self._optimizer is None:
            self._together(self._push)
            for parameter in self._parameters.values():
                parameter.grad = None
            return
        if self._due is not None and self._steps >= self._due:
            raise RuntimeError(f"worker {self.rank} has an update to take: pull before each step")
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1
        if self._steps % self._local.interval == 0:
            self._send(self._local.overlap)

    def finish(self) -> int:
        """Push no more, wait until all have finished and copy the final parameters into the module.

        Returns their version. However long the others take: only one that is silent ends the wait.
        """
        if self._finished:
            return self.version
        if self._courier and self._steps and self._due is not None:
            self._take()  # what still travels
        while self._sent_at[self.clock % len(self._sent_at)] < self._steps:
            if self._due is not None:
                self._take()
            self._send()  # what has changed of this fragment since it was sent
        self._together(lambda: self._drive(self._session.finish()))
        self._load()
        self._finished = True
        return self.version

    def leave(self) -> None:
        """Push no more, and wait for nobody: the others go on."""
        self._together(lambda: self._drive(self._session.leave()))

    def abort(self, reason: str) -> None:
        """Tell the servers that this worker is lost, so that nobody waits for it."""
        for connection in self._connections:
            connection.abort(reason)

    def _together(self, act: Callable[[], object]) -> None:
        """What the site's first rank does for all of it: what it raises, all raise."""
        if self._site is None:
            act()
            return
        session, told = self._session, list[Any]([None])
        if self._speaks:
            try:
                act()
                told = [(self.rank, session.clock, session.pushes, session.version)]
            except Exception as error:
                told = [error]
        dist.broadcast_object_list(told, group_src=0, group=self._site)
        if isinstance(told[0], Exception):
            raise told[0]
        self.rank, session.clock, session.pushes, session.version = told[0]

    def _drive(self, steps: Steps[T]) -> T:
        """Send the requests of a session to their servers, and the answers to the session."""
        if self._finished:
            raise RuntimeError(f"worker {self.rank} has finished; it can neither pull nor push")
        answers: list[Message] | None = None
        while True:
            try:
                requests = next(steps) if answers is None else steps.send(answers)
            except StopIteration as end:
                return cast(T, end.value)
            answers, pushed = zip(*self._ask_all(requests), strict=True)  # type: ignore[assignment]
            self.bytes_pushed += sum(pushed)
            self.bytes_pulled += sum(answer.size for answer in answers or ())

    def _ask_all(self, requests: list[Request]) -> list[tuple[Message, int]]:
        if not self._threads:
            return [self._ask(request) for request in requests]
        asked = [self._threads.submit(self._ask, request) for request in requests]
        wait(asked)  # what one server refuses must not be on its way to another any more
        return [each.result() for each in asked]

    def _ask(self, request: Request) -> tuple[Message, int]:
        """The answer, and the bytes that were pushed for it."""
        server, message = request.server, request.message
        connection, pushed = self._connections[server], 0
        written: Iterable[int] = ()
        if message.kind in SENDS:
            size, written = self._payload.write(server)
            message, pushed = replace(message, size=size), size or len(connection.gradients)
        if message.kind in (Kind.PUSH, Kind.COMMIT):
            message = replace(message, text=json.dumps([self.loss, self.bytes_pushed + pushed]))
        answer = connection.ask(message, written)
        if answer.size:
            self._payload.read(server, answer)
        return answer, pushed

    def _push(self) -> None:
        self._drive(self._session.prepare_push())
        self._drive(self._session.push())
        self._payload.accepted()

    def _send(self, overlap: int = 0) -> None:
        """Send a fragment of what local steps have changed, in another thread if it may overlap."""
        number = self.clock % len(self._sent_at)
        self._payload.take_down(number)
        if overlap and self._courier and self._speaks:
            self._travels = self._courier.submit(self._exchange)
        elif not overlap:
            self._together(self._push)
        self._sent_at[number] = self._steps
        self._due = self._steps + overlap

    def _exchange(self) -> None:
        self._push()
        self._drive(self._session.pull())

    def _take(self) -> None:
        self._together(self._receive)
        self._load(self._local.alpha if self._local and self._local.overlap else 0.0)
        self._due = None if self._local else 0

    def _receive(self) -> None:
        if self._travels:
            self._travels.result()
            self._travels = None
        else:
            self._drive(self._session.pull())

    def _load(self, alpha: float = 0.0) -> None:
        self._payload.load(alpha)
        if self._site is not None:
            for flat in self._payload.flat.values():
                dist.broadcast(flat, group_src=0, group=self._site)


def local_of(consistency: Consistency | None) -> LocalSteps | None:
    """The policy if it is one whose steps are the workers' own."""
    return consistency if isinstance(consistency, LocalSteps) else None


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that servers hold: those that require a gradient, each once, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}
