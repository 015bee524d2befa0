"""A worker, which pulls parameters from the servers and pushes gradients to them.

`Exchange` sends the worker's requests. With `LocalSteps`, `LocalTraining` takes the local steps and
decides when to exchange.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from paramserver.arguments import require_integer
from paramserver.consistency import LocalSteps, as_local_steps
from paramserver.local_steps.local_training import LocalTraining
from paramserver.optimizers import OptimizerFactory
from paramserver.parameters import get_trainable_parameters, require_unchanged
from paramserver.partition import partition
from paramserver.payload import Changes, Gradients
from paramserver.protocol.replica import format_layout
from paramserver.server import Server
from paramserver.transport.connection import Connection
from paramserver.transport.exchange import Exchange


class Worker:
    """A worker that trains a module whose parameters are stored on servers.

    A step consists of `pull`, a backward pass and `push`. As a context manager, the worker finishes
    at the end of the block unless it has left. If the block or `finish` raises, the worker reports
    the failure to the servers.

    Args:
        module: the module to train. Its parameters that require a gradient are on the servers. With
            FSDP, each rank is a worker that trains its shard. Ranks with the same shard in other
            FSDP groups train it together.
        servers: one or several servers in this process, or connections to servers, in the order of
            `partition(parameters, len(servers))`.
        rank: number of this worker, at least 0.
        local: the policy of the servers, if it is `LocalSteps` and `servers` are connections.
        optimizer: factory of the local optimizer, or an `OptimizerSpec`. It is required with
            `LocalSteps`, and must be None with any other policy.
        checkpoint: file that receives the state of local steps before every exchange: the module,
            the local optimizer and torch's random number generators of the CPU and of the module's
            GPUs. If the file exists, the worker continues exactly from it. With `LocalSteps` only.

    Raises:
        ValueError: the arguments do not fit the policy, the servers store other parameters, another
            worker of this process trains `module`, or the checkpoint is damaged or does not fit
            the job.
        TypeError: `rank` is not an integer, or `module` is not a module.
    """

    # Methods with this decorator leave inference mode. Otherwise servers in this process and the
    # local optimizer would create tensors that cannot be updated outside inference mode.
    @torch.inference_mode(False)
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
        rank = require_integer("rank", rank, 0)
        if isinstance(servers, Server):
            servers = [servers]
        if local is None and servers and isinstance(servers[0], Server):
            local = as_local_steps(servers[0].consistency)
        if local and optimizer is None:
            raise ValueError("expected a local `optimizer` with LocalSteps, got None; pass one")
        if optimizer is not None and not local:
            raise ValueError(
                f"expected optimizer=None without LocalSteps, got {optimizer!r}, which would have "
                "no effect; pass the optimizer to the server, or local=LocalSteps(...)"
            )
        if checkpoint and not local:
            raise ValueError(
                f"expected checkpoint=None without LocalSteps, got {str(checkpoint)!r}: the "
                "servers store all state"
            )
        self.module = module
        self.rank = rank
        self._parameters = get_trainable_parameters(module)
        self._shapes = {name: p.shape for name, p in self._parameters.items()}
        self._connections = [
            s.connect(rank, module) if isinstance(s, Server) else s for s in servers
        ]
        shards = partition(self._parameters, len(servers))
        layouts = [format_layout(shard, local) for shard in shards]
        payload_type = partial(Changes, local) if local else Gradients
        self._payload: Gradients = payload_type(self._parameters, shards, self._connections)
        self._has_finished = False
        self._has_left = False
        self._exchange = Exchange(rank, self._connections, self._payload, layouts)
        self._local: LocalTraining | None = None
        if local and optimizer:
            self._local = LocalTraining(
                local, optimizer, module, self._parameters, self._exchange, layouts, checkpoint
            )

    @property
    def clock(self) -> int:
        """Logical time: the clock at which this worker joined plus its accepted pushes since then.

        The policy compares the clocks of workers.
        """
        return self._exchange.session.clock

    @property
    def pushes(self) -> int:
        """Number of accepted pushes of this rank, including pushes before it rejoined."""
        return self._exchange.session.pushes

    @property
    def position(self) -> int:
        """Number of steps that this rank has taken: its position in the data.

        When a rank rejoins, only the steps covered by its accepted pushes count. Without a
        checkpoint, each push of local steps counts as a whole interval, even if it covers less.
        """
        return self._local.position if self._local else self.pushes

    @property
    def version(self) -> int:
        """Version of the parameters that this worker pulled last."""
        return self._exchange.session.version

    @property
    def bytes_pushed(self) -> int:
        """Bytes of gradients, or of changes of local steps, sent to the servers so far."""
        return self._exchange.bytes_pushed

    @property
    def bytes_pulled(self) -> int:
        """Bytes of parameters received from the servers so far."""
        return self._exchange.bytes_pulled

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

    @torch.inference_mode(False)
    def pull(self) -> int:
        """Copy the servers' parameters into the module and return their version.

        The call waits as long as the policy requires. All servers send the same version. With
        `LocalSteps`, the call copies nothing unless an update is due.

        Raises:
            RuntimeError: the worker has finished or left.
        """
        self._require_active()
        if self._local:
            self._local.pull()
        else:
            self._exchange.pull()
            self._payload.load()
        return self.version

    @torch.inference_mode(False)
    def push(self) -> None:
        """Push the gradients and set each `.grad` to None; a gradient that is None counts as zero.

        With `LocalSteps`, take a step of the local optimizer instead, and push the change of one
        fragment every `interval` steps.

        Either all servers accept the gradients or none does.

        Raises:
            ValueError: a gradient is not finite, or the module has a gradient for a parameter that
                is not on the servers. The same error is raised if a parameter that is on the
                servers has been frozen or reshaped. No gradient is applied, the gradients stay in
                the module and the other workers are not affected.
            RuntimeError: the worker has finished or left, or has to pull before it pushes.
        """
        self._require_active()
        require_unchanged(self.module, self._parameters, self._shapes, self.rank)
        if self._local:
            self._local.step()
            return
        if self.version < 0:
            raise RuntimeError(
                f"worker {self.rank} must pull before its first push: until then, its module may "
                "differ from the servers' parameters, for example after a restart"
            )
        self._exchange.push()
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.inference_mode(False)
    def finish(self) -> int:
        """Push the remaining local changes, wait for all workers, and load the final parameters.

        The final parameters are copied into the module, and their version is returned. Waiting for
        a slow worker has no time limit.

        Raises:
            TimeoutError: a worker has sent no request for the server's `timeout`, and the servers
                do not continue without lost workers.
        """
        if self._has_finished:
            return self.version
        if self._local:
            self._local.finish()
        self._exchange.run(self._exchange.session.finish())
        self._payload.load()
        self._has_finished = True
        return self.version

    @torch.inference_mode(False)
    def leave(self) -> None:
        """End this worker's part without waiting for the other workers, which continue.

        If an exchange that overlaps local steps is in flight, the call first waits for that
        exchange. The exchange ends after the other workers' pushes of the round. If the exchange
        fails, the call raises its error.
        """
        if self._local:
            self._local.wait()
        self._exchange.run(self._exchange.session.leave())
        self._has_left = True

    def abort(self, reason: str) -> None:
        """Report to the servers that this worker has failed, so that no worker waits for it."""
        for connection in self._connections:
            connection.abort(reason)

    def _require_active(self) -> None:
        if self._has_finished or self._has_left:
            state = "finished" if self._has_finished else "left"
            raise RuntimeError(
                f"worker {self.rank} has {state}; it can neither pull nor push: call `finish` and "
                "`leave` only after the last step"
            )
