"""Local steps of a worker, and the exchanges of fragments between them (DiLoCo).

With overlap, a thread exchanges a fragment while the worker takes further steps. Before every
exchange the state can be saved in a checkpoint, from which a worker that was killed continues.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import nn

from paramserver.consistency import LocalSteps
from paramserver.local_steps.checkpoint import (
    check_checkpoint,
    get_file_version,
    get_random_states,
    read_checkpoint,
    set_random_states,
    write_checkpoint,
)
from paramserver.optimizers import OptimizerFactory, Updater, as_spec
from paramserver.parameters import get_local_part
from paramserver.payload import Changes
from paramserver.protocol.gradients import require_finite
from paramserver.transport.exchange import Exchange


class LocalTraining:
    """The local optimizer of a worker, its steps, and the exchange of fragments.

    The payload of `exchange` is a `Changes`. `layouts` contains the layout of each server's shard.
    """

    def __init__(
        self,
        policy: LocalSteps,
        factory: OptimizerFactory,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        exchange: Exchange,
        layouts: list[str],
        checkpoint: str | Path | None,
    ) -> None:
        assert isinstance(exchange.payload, Changes)
        self._policy = policy
        self._module = module
        self._parameters = parameters
        self._exchange = exchange
        self._payload = exchange.payload
        self._layouts = layouts
        self.updater = _build_updater(factory, parameters)
        self._settings = self.updater.format_settings()
        #: Local steps so far. An exchange is due at every multiple of the policy's interval.
        self._steps = 0
        #: Position in the data at local step 0. It may be negative if `_steps` counts a short
        #: interval of an earlier run as a whole interval.
        self._first_position = exchange.session.pushes * policy.interval
        #: The step at which each fragment was sent last.
        self._sent_at = [0] * policy.fragments
        #: Local step at which `pull` must receive an update; None if no update is pending.
        self._next_pull_step: int | None = 0
        self._thread = ThreadPoolExecutor(1) if policy.overlap else None
        self._in_flight: Future[None] | None = None
        self._checkpoint = Path(checkpoint) if checkpoint else None
        #: The version of the checkpoint that this worker read or wrote last.
        self._checkpoint_version: tuple[int, int] | None = None
        if self._checkpoint and self._checkpoint.exists():
            self._checkpoint_version = get_file_version(self._checkpoint)
            self._resume(read_checkpoint(self._checkpoint))

    @property
    def position(self) -> int:
        """Number of steps of this rank, including those before it rejoined."""
        return self._first_position + self._steps

    def pull(self) -> None:
        """Receive an update if one is due."""
        if self._next_pull_step is not None and self._steps >= self._next_pull_step:
            self._receive_update()

    def step(self) -> None:
        """Take a step of the local optimizer, then send a fragment if an exchange is due.

        Raises:
            ValueError: a gradient is not finite.
            RuntimeError: an update is due, and `pull` has not received it.
        """
        gradients = {
            name: get_local_part(parameter.grad)
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        }
        rank = self._exchange.session.worker
        require_finite(rank, gradients)
        if self._next_pull_step is not None and self._steps >= self._next_pull_step:
            raise RuntimeError(f"worker {rank} must pull before this step: an update is due")
        self.updater.step()
        self._steps += 1
        if self._steps % self._policy.interval == 0:
            self._send_fragment(self._policy.overlap)

    def finish(self) -> None:
        """Receive pending updates, and send each fragment that has changed since its last push."""
        if self._thread and self._steps and self._next_pull_step is not None:
            self._receive_update()
        while self._sent_at[self._get_next_fragment()] < self._steps:
            if self._next_pull_step is not None:
                self._receive_update()
            self._send_fragment()

    def wait(self) -> None:
        """Wait for the exchange in flight, if any; raise its error if it failed."""
        if self._in_flight:
            self._in_flight.result()
            self._in_flight = None

    def _get_next_fragment(self) -> int:
        return self._exchange.session.clock % self._policy.fragments

    def _send_fragment(self, overlap: int = 0) -> None:
        """Push the change of the next fragment; with `overlap`, push and pull in another thread."""
        fragment = self._get_next_fragment()
        self._payload.capture(fragment)
        if self._checkpoint:
            self._save(self._checkpoint)
        if overlap and self._thread:
            self._in_flight = self._thread.submit(self._push_and_pull)
        else:
            self._exchange.push()
        self._sent_at[fragment] = self._steps
        self._next_pull_step = self._steps + overlap

    def _push_and_pull(self) -> None:
        self._exchange.push()
        self._exchange.pull()

    def _receive_update(self) -> None:
        if self._in_flight:
            self.wait()
        else:
            self._exchange.pull()
        # With overlap, the module's current parameters keep weight `alpha`.
        self._payload.load(self._policy.alpha if self._policy.overlap else 0.0)
        self._next_pull_step = None

    def _save(self, path: Path) -> None:
        """Write a checkpoint of the state before the next push; see `_resume`.

        Raises:
            RuntimeError: another process has written the file since this worker did.
        """
        if get_file_version(path) not in (None, self._checkpoint_version):
            raise RuntimeError(
                f"expected the last checkpoint of this worker in {path}, got a file that another "
                "process wrote; pass a different file to each worker"
            )
        session = self._exchange.session
        state = {
            "worker": session.worker,
            "layouts": self._layouts,
            "settings": self._settings,
            "interval": self._policy.interval,
            "at": (session.clock, session.pushes, session.version),
            "steps": (self._steps, self._sent_at),
            "position": self.position,
            "module": self._module.state_dict(),
            "updater": self.updater.state_dict(),
            "payload": self._payload.state_dict(),
            "random": get_random_states(p.device for p in self._parameters.values()),
        }
        write_checkpoint(path, state)
        self._checkpoint_version = get_file_version(path)

    def _resume(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint, which was saved before a push.

        If the servers have not accepted the push, send it now; otherwise only carry its residuals
        over. If training has continued without this worker, the push is void. Then restore only
        the module, the local optimizer and the random states; the next pull loads the servers'
        parameters.

        Raises:
            ValueError: the checkpoint does not fit the job.
        """
        session = self._exchange.session
        check_checkpoint(
            self._checkpoint, state, self._policy, session, self._layouts, self._settings
        )
        clock, pushes, version = state["at"]
        accepted = session.pushes - pushes
        self._module.load_state_dict(state["module"])
        self.updater.load_state_dict(state["updater"])
        set_random_states(state["random"])
        if session.clock != clock + accepted:
            return
        self._payload.load_state_dict(state["payload"])
        self._steps, self._sent_at = state["steps"]
        self._first_position = state["position"] - self._steps
        session.version = version
        fragment = clock % self._policy.fragments
        if accepted:
            self._payload.capture(fragment)
            for server in range(len(self._layouts)):
                self._payload.write(server)
            self._payload.mark_accepted()
        else:
            self._send_fragment()
        self._sent_at[fragment] = self._steps
        # `finish` of an earlier run may have pushed in the middle of an interval. Count it as a
        # whole interval, so that the next exchange is due one interval after that push.
        added = session.pushes * self._policy.interval - self._steps
        self._steps += added
        self._first_position -= added
        self._sent_at = [step + added for step in self._sent_at]
        self._next_pull_step = self._steps + self._policy.overlap


def _build_updater(factory: OptimizerFactory, parameters: Mapping[str, nn.Parameter]) -> Updater:
    spec = as_spec(factory)
    is_local = any(hasattr(parameter, "to_local") for parameter in parameters.values())
    if spec.master_dtype or (spec.max_norm is not None and is_local):
        raise ValueError(
            "expected a local optimizer without master_dtype, and for sharded parameters without "
            "max_norm; use float32 parameters with torch.autocast, and clip the gradients before "
            "`push`"
        )
    spec.check_groups(parameters)
    return Updater(spec, list(parameters.values()), list(parameters), parameters)
