"""A worker: it pulls parameters from the servers, and pushes gradients to them.

With several servers, requests to each server run in a thread per server. With overlapping local
steps, one more thread exchanges a fragment while the worker computes.
"""

import operator
import secrets
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from paramserver.checkpoint import (
    check_checkpoint,
    random_states,
    set_random_states,
    write_checkpoint,
)
from paramserver.consistency import Consistency, LocalSteps
from paramserver.optimizers import OptimizerFactory, Updater, spec_of
from paramserver.partition import local_part, partition, require_separate_memory
from paramserver.payload import Changes, Gradients
from paramserver.protocol.gradients import require_finite
from paramserver.protocol.messages import Message
from paramserver.protocol.replica import layout
from paramserver.protocol.session import Request, Session, Steps
from paramserver.server import Server
from paramserver.transport.connection import KINDS_WITH_GRADIENTS, Connection

T = TypeVar("T")


class Worker:
    """A worker that trains a module whose parameters are stored on servers.

    A step is: `pull`, a backward pass, `push`. As a context manager, the worker finishes at the end
    of the block unless it has left. If the block or `finish` raises, the worker reports the failure
    to the servers.

    Args:
        module: the module to train; its parameters that require a gradient are on the servers. With
            FSDP, each rank is a worker that trains its shard, with the ranks that have the same
            shard in the other FSDP groups.
        servers: a server in this process, several of them, or connections to them, in the order of
            `partition(parameters, len(servers))`.
        rank: number of this worker.
        local: the policy of the servers, if it is `LocalSteps` and `servers` are connections.
        optimizer: factory of the local optimizer, or an `OptimizerSpec`; `LocalSteps` require it.
        checkpoint: file that receives the state of local steps before every exchange: the module,
            the local optimizer and torch's random number generators of the CPU and of the module's
            GPUs. If the file exists, the worker continues exactly from it. With `LocalSteps` only.
    """

    def __init__(
        self,
        module: nn.Module,
        servers: Server | Sequence[Server | Connection],
        *,
        rank: int = 0,
        local: LocalSteps | None = None,
        optimizer: OptimizerFactory | None = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        rank = operator.index(rank)  # an integer of any library
        if isinstance(servers, Server):
            servers = [servers]
        if local is None and servers and isinstance(servers[0], Server):
            local = local_of(servers[0].consistency)
        if local and optimizer is None:
            raise ValueError("expected a local `optimizer` with LocalSteps, got None")
        if optimizer is not None and not local:
            raise ValueError(
                "expected LocalSteps with a local `optimizer`, which other policies would ignore; "
                "pass the optimizer to the server, or local=LocalSteps(...)"
            )
        if checkpoint and not local:
            raise ValueError(
                "expected LocalSteps with a checkpoint; pass None: with other policies the servers "
                "store all state"
            )
        self.module = module
        self.rank = rank
        self._parameters = trainable_parameters(module)
        self._shapes = {name: p.shape for name, p in self._parameters.items()}
        self._connections = [s.connect(rank) if isinstance(s, Server) else s for s in servers]
        shards = partition(self._parameters, len(servers))
        payload_type = partial(Changes, local) if local else Gradients
        self._payload: Gradients = payload_type(self._parameters, shards, self._connections)
        self._threads = ThreadPoolExecutor(len(servers)) if len(servers) > 1 else None
        #: Bytes of gradients sent to the servers so far.
        self.bytes_pushed = 0
        #: Bytes of parameters received from the servers so far.
        self.bytes_pulled = 0
        self._finished = False
        self._has_left = False
        self._local = local
        self._updater = self._local_updater(optimizer) if local and optimizer else None
        self._settings = self._updater.settings() if self._updater else {}
        #: Local steps taken so far.
        self._steps = 0
        #: The step at which each fragment was sent last.
        self._sent_at = [0] * (local.fragments if local else 1)
        #: Local step from which `pull` must receive an update; None if no update is outstanding.
        #: Without local steps it stays 0, so that every `pull` receives an update.
        self._next_pull_step: int | None = 0
        self._exchange_thread = ThreadPoolExecutor(1) if local and local.overlap else None
        self._exchange: Future[None] | None = None
        session_id = self._connections[0].session
        session_id = secrets.randbits(48) if session_id is None else session_id
        self._layouts = [layout(shard, local) for shard in shards]
        self._session = Session(rank, self._layouts, session_id)
        self._run_requests(self._session.join())
        #: Position at local step 0.
        self._first_position = self._position_of_pushes()
        self._checkpoint = Path(checkpoint) if checkpoint else None
        if self._checkpoint and self._checkpoint.exists():
            self._resume(torch.load(self._checkpoint, weights_only=True))

    @property
    def clock(self) -> int:
        """Logical time: the clock at which this worker joined plus its accepted pushes since then.

        The policy compares the clocks of workers.
        """
        return self._session.clock

    @property
    def pushes(self) -> int:
        """Number of accepted pushes of this rank, including those before it rejoined."""
        return self._session.pushes

    @property
    def position(self) -> int:
        """Number of steps that this rank has taken: its position in the data.

        When a rank rejoins, it has taken the steps that its accepted pushes cover. A last round
        that ended early counts as a whole round.
        """
        return self._first_position + self._steps if self._local else self.pushes

    @property
    def version(self) -> int:
        """Version of the parameters that this worker pulled last."""
        return self._session.version

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None and not self._has_left:
            try:
                self.finish()
            except BaseException as raised:
                self.abort(f"{type(raised).__name__}: {raised}")
                raise
        elif error is not None:
            self.abort(f"{type(error).__name__}: {error}")

    def pull(self) -> int:
        """Copy the servers' parameters into the module and return their version.

        The call waits as long as the policy requires. All servers send the same version. Between
        two exchanges of local steps the call does nothing.
        """
        self._require_active()
        if self._next_pull_step is not None and self._steps >= self._next_pull_step:
            self._receive_update()
        return self.version

    def push(self) -> None:
        """Send the gradients to the servers and set them to None; a missing gradient is zero.

        With `LocalSteps`, take a step of the local optimizer instead, and send the change of one
        fragment every `interval` steps.

        All servers accept the gradients, or none of them does.

        Raises:
            ValueError: a gradient is not finite, the module has a gradient for a parameter that is
                not on the servers, or a parameter that is on the servers is frozen now. No
                gradient is applied, the gradients stay in the module and the other workers are not
                affected.
        """
        self._require_active()
        self._require_stored_parameters()
        if self._local is None or self._updater is None:
            self._push()
            for parameter in self._parameters.values():
                parameter.grad = None
            return
        require_finite(self.rank, self._gradients())
        if self._next_pull_step is not None and self._steps >= self._next_pull_step:
            raise RuntimeError(f"worker {self.rank} must pull before each step: an update is due")
        self._updater.step()
        self._steps += 1
        if self._steps % self._local.interval == 0:
            self._send_fragment(self._local.overlap)

    def finish(self) -> int:
        """Push the remaining local changes, wait for all workers, and load the final parameters.

        The final parameters are copied into the module, and their version is returned. The wait
        for a slow worker has no time limit. If a worker stays silent for the server's
        `timeout`, the call raises an error (on_worker_loss="stop").
        """
        if self._finished:
            return self.version
        if self._exchange_thread and self._steps and self._next_pull_step is not None:
            self._receive_update()
        # Receive the exchange that is still in flight, and send every fragment that has changed
        # since it was sent last.
        while self._sent_at[self.clock % len(self._sent_at)] < self._steps:
            if self._next_pull_step is not None:
                self._receive_update()
            self._send_fragment()
        self._run_requests(self._session.finish())
        self._payload.load()
        self._finished = True
        return self.version

    def leave(self) -> None:
        """Stop pushing without waiting for other workers, which continue.

        If an exchange that overlaps local steps is in flight, the call waits for its end, and with
        it for the pushes of the other workers in that round. It raises the error of the exchange.
        """
        if self._exchange:
            self._exchange.result()
            self._exchange = None
        self._run_requests(self._session.leave())
        self._has_left = True

    def abort(self, reason: str) -> None:
        """Report to the servers that this worker has failed, so that no worker waits for it."""
        for connection in self._connections:
            connection.abort(reason)

    def _require_active(self) -> None:
        if self._finished or self._has_left:
            state = "finished" if self._finished else "left"
            raise RuntimeError(f"worker {self.rank} has {state}; it can neither pull nor push")

    def _gradients(self) -> dict[str, Tensor]:
        """Return this rank's part of each gradient, by the name of the parameter."""
        return {
            name: local_part(parameter.grad)
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        }

    def _require_stored_parameters(self) -> None:
        """Raise `ValueError` unless the trainable parameters are those on the servers.

        Trainable parameters without a gradient are not checked.
        """
        frozen = [name for name, p in self._parameters.items() if not p.requires_grad]
        if frozen:
            raise ValueError(
                f"expected parameters that require a gradient, as when worker {self.rank} was "
                f"created, got frozen {', '.join(frozen)}, which momentum or weight decay of the "
                "servers' optimizer would still change; freeze parameters before the servers and "
                "workers are created"
            )
        for name, parameter in self._parameters.items():
            if parameter.shape != self._shapes[name]:
                raise ValueError(
                    f"expected {name} to have the shape {tuple(self._shapes[name])} as when worker "
                    f"{self.rank} was created, got {tuple(parameter.shape)}; create the servers "
                    "and workers after such changes"
                )
        stored = {id(parameter) for parameter in self._parameters.values()}
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None and id(parameter) not in stored:
                raise ValueError(
                    f"expected gradients of the parameters that the module had when worker "
                    f"{self.rank} was created, got one of {name}, which was added, replaced or "
                    "unfrozen since; create the servers and workers after such changes, or set "
                    "its gradient to None if it is not trained here"
                )

    def _local_updater(self, factory: OptimizerFactory) -> Updater:
        parameters = self._parameters
        spec = spec_of(factory)
        is_local = any(hasattr(parameter, "to_local") for parameter in parameters.values())
        if spec.master_dtype or (spec.max_norm is not None and is_local):
            raise ValueError(
                "expected a local optimizer without master_dtype, and for sharded parameters "
                "without max_norm; use float32 parameters with torch.autocast, and clip the "
                "gradients before `push`"
            )
        spec.check_groups(parameters)
        shapes = [parameter.shape for parameter in parameters.values()]
        return Updater(spec, list(parameters.values()), list(parameters), shapes)

    def _run_requests(self, steps: Steps[T]) -> T:
        """Run a session generator and return its result.

        The requests that it yields are sent, and the answers are passed back to it.
        """
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

    def _request_all(self, requests: list[Request]) -> list[tuple[Message, int]]:
        if not self._threads:
            return [self._request(request) for request in requests]
        futures = [self._threads.submit(self._request, request) for request in requests]
        # Wait for all requests before raising an error, so that none is in flight afterwards.
        wait(futures)
        return [future.result() for future in futures]

    def _request(self, request: Request) -> tuple[Message, int]:
        """Send one request and return the answer and the number of payload bytes sent."""
        message = request.message
        connection = self._connections[request.server]
        pushed = 0
        written: Iterable[int] = ()
        if message.kind in KINDS_WITH_GRADIENTS:
            size, written = self._payload.write(request.server)
            message = replace(message, size=size)
            pushed = size
        answer = connection.request(message, written)
        if answer.size:
            self._payload.on_pulled(request.server, answer)
        return answer, pushed

    def _push(self) -> None:
        self._run_requests(self._session.prepare_push())
        self._run_requests(self._session.push())
        self._payload.on_accepted()

    def _send_fragment(self, overlap: int = 0) -> None:
        """Send the changes of the next fragment, in another thread if the exchange may overlap."""
        fragment = self.clock % len(self._sent_at)
        self._payload.capture(fragment)
        if self._checkpoint:
            self._save(self._checkpoint)
        if overlap and self._exchange_thread:
            self._exchange = self._exchange_thread.submit(self._push_and_pull)
        else:
            self._push()
        self._sent_at[fragment] = self._steps
        self._next_pull_step = self._steps + overlap

    def _save(self, path: Path) -> None:
        """Write the state before the next push; see `_resume`."""
        assert self._updater is not None
        assert isinstance(self._payload, Changes)
        session = self._session
        state = {
            "layouts": self._layouts,
            "settings": self._settings,
            "interval": self._local.interval if self._local else 1,
            "at": (session.clock, session.pushes, session.version),
            "steps": (self._steps, self._sent_at),
            "module": self.module.state_dict(),
            "updater": self._updater.state_dict(),
            "payload": self._payload.state_dict(),
            "random": random_states(p.device for p in self._parameters.values()),
        }
        write_checkpoint(path, state)

    def _resume(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint, which was saved before a push.

        If the servers have not accepted that push, it is sent now; otherwise only its residuals are
        carried over. If training has continued without this worker, the push is void, and the
        worker continues with its local optimizer from the parameters of the servers.
        """
        assert self._local is not None
        assert self._updater is not None
        assert isinstance(self._payload, Changes)
        session = self._session
        check_checkpoint(
            self._checkpoint, state, self._local, session, self._layouts, self._settings
        )
        clock, pushes, version = state["at"]
        accepted = session.pushes - pushes
        self.module.load_state_dict(state["module"])
        self._updater.load_state_dict(state["updater"])
        set_random_states(state["random"])
        if session.clock != clock + accepted:
            return
        self._payload.load_state_dict(state["payload"])
        self._steps, self._sent_at = state["steps"]
        session.version = version
        fragment = clock % len(self._sent_at)
        if accepted:
            self._payload.capture(fragment)
            for server in range(len(self._connections)):
                self._payload.write(server)
            self._payload.on_accepted()
        else:
            self._send_fragment()
        self._sent_at[fragment] = self._steps
        # The position exceeds the steps if the last round of a finished run was short.
        added = self._position_of_pushes() - self._steps
        self._steps += added
        self._sent_at = [step + added for step in self._sent_at]
        self._next_pull_step = self._steps + self._local.overlap
        self._first_position = 0

    def _position_of_pushes(self) -> int:
        return self.pushes * (self._local.interval if self._local else 1)

    def _push_and_pull(self) -> None:
        self._push()
        self._run_requests(self._session.pull())

    def _receive_update(self) -> None:
        if self._exchange:
            self._exchange.result()
            self._exchange = None
        else:
            self._run_requests(self._session.pull())
        # With overlap, the module's present parameters are blended in with weight `alpha`.
        self._payload.load(self._local.alpha if self._local and self._local.overlap else 0.0)
        self._next_pull_step = None if self._local else 0


def local_of(consistency: Consistency | None) -> LocalSteps | None:
    """Return the policy if it is `LocalSteps`, and None otherwise."""
    return consistency if isinstance(consistency, LocalSteps) else None


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are stored on servers: those that require a gradient, by name.

    Raises:
        ValueError: elements of these parameters share memory.
    """
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    require_separate_memory(parameters)
    return parameters
