"""What a stage works with: this rank's place among the ranks, the text, the folder, the results."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llmsys_suite.config import RunConfig
from llmsys_suite.data import Corpus
from llmsys_suite.folder import RunFolder
from llmsys_suite.launch import STAMPS, WITNESS
from llmsys_suite.measure.phases import Recorder
from llmsys_suite.model import ModelConfig
from llmsys_suite.report.progress import Progress


class OtherRankFailed(RuntimeError):
    """A stage ended on another rank, which says why."""


@dataclass
class Run:
    """What a stage works with; `folder` is there on rank 0 only."""

    config: RunConfig
    rank: int
    world: int
    device: torch.device
    corpus: Corpus
    recorder: Recorder
    progress: Progress
    folder: RunFolder | None = None
    #: What each stage handed on, see `stages.results`; None on ranks that had no part in it.
    results: dict[str, Any] = field(default_factory=dict)
    #: How long each stage took on this rank.
    seconds: dict[str, float] = field(default_factory=dict)
    # The model that `train` leaves to the stages that look into it.
    trained: torch.nn.Module | None = None
    store: Any = None
    #: How many stages have failed so far; each failure makes a new group.
    failures: int = 0
    _meetings: int = 0

    @property
    def model(self) -> ModelConfig:
        """The shape that this run trains."""
        return ModelConfig.named(self.config.size, context=self.config.context)

    def batch(
        self, step: int, *, rows: int | None = None, shared: bool = False, epochs: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Tokens and targets of a step on this device: all rows, or `shared` this rank's."""
        rank, world = (self.rank, self.world) if shared else (0, 1)
        pair = self.corpus.batch(
            rows=rows or self.config.rows, context=self.config.context, seed=self.config.seed,
            step=step, rank=rank, world=world, epochs=epochs,
        )  # fmt: skip
        return pair[0].to(self.device), pair[1].to(self.device)

    def barrier(self) -> None:
        """Wait for all ranks, as a collective does: for minutes at the most."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def meet(self) -> None:
        """Wait for all ranks for as long as it takes: one of them may have work for an hour.

        A collective ends with its timeout. Keys in the store have none; a rank that died is
        noticed by whoever started it, who ends the others.
        """
        self._meetings += 1
        if self.store is None or self.world == 1:
            return
        place = f"{self.failures} meeting {self._meetings}"
        self.store.set(f"{place} {self.rank}", "here")
        everyone = [f"{place} {rank}" for rank in range(self.world)]
        pause = 0.001
        while not self.store.check(everyone):
            if self.store.check([f"{self.failures} failed"]):
                raise OtherRankFailed(self.store.get(f"{self.failures} failed").decode())
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def fail(self, error: Exception) -> str:
        """Tell all ranks that this stage failed here; what the first that failed said."""
        said = f"rank {self.rank}: {type(error).__name__}: {error}"
        if self.store is not None and not isinstance(error, OtherRankFailed):
            self.store.compare_set(f"{self.failures} failed", "", said)
        # Closing the connections ends the collectives in which the others wait.
        dist.destroy_process_group()
        if self.store is not None:
            self.store.wait([f"{self.failures} failed"])
            said = self.store.get(f"{self.failures} failed").decode()
        self.failures, self._meetings = self.failures + 1, 0
        return said

    def gather(self, mine: Any) -> list[Any]:
        """Every rank's `mine`, on every rank, however long the slowest takes."""
        self.meet()
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, mine)
        return everyone

    def flush_samples(self) -> None:
        """Bring all ranks' samples to rank 0 and append them to the folder."""
        gathered: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(self.recorder.take(), gathered)
        if self.folder is not None and gathered is not None:
            self.folder.append_samples(sample for samples in gathered for sample in samples)

    def witness(self, event: str) -> None:
        """Tell the launcher, if there is one, that this happens now."""
        if WITNESS in os.environ:
            os.write(int(os.environ[WITNESS]), f"{self.rank} {event}\n".encode())

    def stamps(self) -> dict[tuple[int, str], float]:
        """(rank, event) -> when the launcher heard of it, by its clock; empty where it is none."""
        if STAMPS not in os.environ:
            return {}
        with open(os.environ[STAMPS]) as file:
            lines = [line.split(" ", 2) for line in file.read().splitlines()]
        return {(int(rank), event): float(at) for at, rank, event in lines}
