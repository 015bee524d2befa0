"""The description of a job that all of its processes share, and the result of a run."""

import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paramserver.arguments import require_integer, require_timeout
from paramserver.consistency import Consistency, as_local_steps
from paramserver.optimizers import OptimizerFactory
from paramserver.parameters import get_trainable_parameters
from paramserver.partition import Shard, partition
from paramserver.protocol.messages import PeerLost
from paramserver.server import Server
from paramserver.worker import Worker


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    #: Return value of `train` per worker; None for a lost worker.
    values: list[Any]
    #: Final parameters, keyed by their names in the module.
    parameters: dict[str, Tensor]
    #: Number of updates that each server has applied.
    versions: list[int]
    #: Number of applied gradients, keyed by their staleness in versions.
    staleness: Counter[int]
    #: Reason for the loss of each lost worker; empty unless `allow_missing` is True.
    lost: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """The description of a job, equal in all of its processes; see `run` for the fields.

    Raises `TypeError` or `ValueError`, with the name of the field, for an invalid value. The module
    is checked when servers or workers are created.
    """

    train: Callable[..., Any]
    module: nn.Module
    optimizer: OptimizerFactory
    consistency: Consistency | None = None
    args: tuple[Any, ...] = ()
    workers: int = 2
    servers: int = 1
    timeout: float = 60.0
    allow_missing: bool = False
    fsync: bool = False

    def __post_init__(self) -> None:
        if not callable(self.train):
            raise TypeError(f"expected train to be a function of a worker, got {self.train!r}")
        require_integer("workers", self.workers, 0)
        require_integer("servers", self.servers, 1)
        object.__setattr__(self, "timeout", require_timeout(self.timeout))

    def pack(self) -> bytes:
        """Return the job as bytes for another process.

        Unlike `pickle.dumps`, `torch.save` preserves shared memory, such as the memory of a
        parameter and a buffer that is a view of it.
        """
        file = io.BytesIO()
        torch.save(self, file)
        return file.getvalue()

    @staticmethod
    def unpack(packed: bytes) -> "Job":
        """Return the job from the bytes that `pack` returned."""
        job = torch.load(io.BytesIO(packed), weights_only=False)
        assert isinstance(job, Job)
        return job

    def shards(self) -> list[Shard]:
        """Return the shard of each server."""
        return partition(get_trainable_parameters(self.module), self.servers)

    def server(
        self, shard: Shard, *, elastic: bool = False, memory: Tensor | None = None
    ) -> Server:
        """Return a new server of one shard."""
        return Server(
            get_trainable_parameters(self.module),
            self.optimizer,
            self.consistency,
            workers=self.workers,
            shard=shard,
            timeout=self.timeout,
            allow_missing=self.allow_missing,
            elastic=elastic,
            memory=memory,
        )

    def worker(
        self, rank: int, connections: Sequence[Any], checkpoint: str | Path | None = None
    ) -> Worker:
        """Return a new worker that has joined the servers behind `connections`."""
        local = as_local_steps(self.consistency)
        return Worker(
            self.module,
            connections,
            rank=rank,
            local=local,
            optimizer=self.optimizer if local else None,
            checkpoint=checkpoint,
        )


@dataclass(frozen=True)
class Outcome:
    """The outcome of one process: a value, an exception, or an exit code."""

    name: str
    value: Any = None
    error: BaseException | None = None
    exit_code: int | None = None

    @property
    def failed(self) -> bool:
        """True if the process ended without a value."""
        return self.error is not None or self.exit_code is not None


@dataclass(frozen=True)
class ServerReport:
    """The final state of a server, in a form that is fast to pickle."""

    #: The parameters of the server's shard, as the bytes of its buffer.
    buffer: bytes
    version: int
    staleness: Counter[int]


def assemble_result(job: Job, shards: list[Shard], outcomes: Mapping[str, Outcome]) -> Result:
    """Return the result of a run from the outcomes of its processes.

    A run fails if a server or all workers fail, and, unless `job.allow_missing` is True, if any
    worker fails.

    Raises:
        PeerLost: the run failed because a process died, or every error is a `PeerLost`.
        Exception: the run failed otherwise; this is the first error that is not a `PeerLost`.
    """
    no_outcome = Outcome("")
    servers = [outcomes.get(f"server {i}", no_outcome) for i in range(job.servers)]
    workers = [outcomes.get(f"worker {i}", no_outcome) for i in range(job.workers)]
    failed = [outcome for outcome in (*servers, *workers) if outcome.failed]
    dead = [outcome for outcome in failed if outcome.error is None]
    lost = {w: _describe_failure(outcome) for w, outcome in enumerate(workers) if outcome.failed}
    needs_all = not job.allow_missing or len(lost) == len(workers)
    if failed and (needs_all or any(outcome.failed for outcome in servers)):
        if dead:
            raise PeerLost(_describe_failure(dead[0]))
        causes = [o for o in failed if not isinstance(o.error, PeerLost)] or failed
        assert causes[0].error is not None
        raise causes[0].error
    reports: list[ServerReport] = [outcome.value for outcome in servers]
    trained = get_trainable_parameters(job.module)
    parameters = {
        name: torch.empty(p.shape, dtype=p.dtype, device="cpu") for name, p in trained.items()
    }
    for shard, server in zip(shards, reports, strict=True):
        buffer = torch.frombuffer(bytearray(server.buffer), dtype=torch.uint8)
        shard.gather(buffer, {name: tensor.view(-1) for name, tensor in parameters.items()})
    return Result(
        [outcome.value for outcome in workers],
        parameters,
        [server.version for server in reports],
        reports[0].staleness,  # every server applies every gradient
        lost,
    )


def _describe_failure(outcome: Outcome) -> str:
    if outcome.error is None:
        return f"{outcome.name} died with exit code {outcome.exit_code}"
    return f"{outcome.name}: {type(outcome.error).__name__}: {outcome.error}"
