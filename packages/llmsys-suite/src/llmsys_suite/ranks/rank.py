"""The state of one rank that all stages share, and the progress that it prints."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llmsys_suite.config import RunConfig
from llmsys_suite.folder import RunFolder
from llmsys_suite.measure.phases import Recorder
from llmsys_suite.model import ModelConfig
from llmsys_suite.text.data import Corpus


class Progress:
    """Output of the current stage and its progress on stderr, enabled on rank 0 only."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Print the name of a stage, and its duration if the `with` block ends without an error."""
        start_time = time.perf_counter()
        self._print(f"{name} ...")
        yield
        self._print(f"{name} done in {time.perf_counter() - start_time:.1f} s")

    def update(self, done: int, total: int, note: str = "") -> None:
        """Print `done` of `total` steps after the first step and after each tenth of the steps."""
        if done == 1 or 10 * done // total > 10 * (done - 1) // total:
            self._print(f"  {done}/{total} {note}")

    def _print(self, line: str) -> None:
        if self._enabled:
            print(line, file=sys.stderr, flush=True)


@dataclass
class Run:
    """The state of one rank that all stages share. Only rank 0 has a `folder`."""

    config: RunConfig
    rank: int
    world: int
    device: torch.device
    corpus: Corpus
    recorder: Recorder
    progress: Progress
    folder: RunFolder | None = None
    #: The result of each finished stage (see `results.py`), or None on ranks without a result.
    results: dict[str, Any] = field(default_factory=dict)
    #: The trained model on rank 0: the model of `learn`, or before it the model of `train`.
    trained: torch.nn.Module | None = None
    #: The trained model compressed by each method, which the audit examines.
    compressed: dict[str, torch.nn.Module] = field(default_factory=dict)
    #: The rendezvous store of this run; None if the object is built without one, as in tests.
    store: dist.Store | None = None
    #: The current stage, which is recorded with a failure.
    stage: str = ""
    _num_barriers: int = 0

    @property
    def out(self) -> Path:
        """The path of the run folder, which all ranks know; only rank 0 has `folder`."""
        assert self.config.out is not None
        return self.config.out

    @property
    def model(self) -> ModelConfig:
        """The shape of the model that this run trains."""
        config = self.config
        return ModelConfig.from_size(
            config.size, vocabulary=config.vocabulary, context=config.context
        )

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products."""
        return torch.bfloat16 if self.config.dtype == "bf16" else torch.float32

    def autocast(self) -> torch.autocast:
        """Return the autocast context of a forward pass, which is disabled unless dtype is bf16."""
        enabled = self.config.dtype == "bf16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled)

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Compute in float32 in the block, for results that must not depend on the run's dtype."""
        config = self.config
        precision = torch.get_float32_matmul_precision()
        self.config = replace(config, dtype="fp32")
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            self.config = config
            torch.set_float32_matmul_precision(precision)

    def draw_batch(
        self, step: int, *, rows: int | None = None, split: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return tokens and targets of a step: all rows, or only this rank's if `split`."""
        rank, world = (self.rank, self.world) if split else (0, 1)
        pair = self.corpus.draw_batch(
            rows=rows or self.config.rows,
            context=self.config.context,
            seed=self.config.seed,
            step=step,
            rank=rank,
            world=world,
        )
        return pair[0].to(self.device), pair[1].to(self.device)

    def barrier(self) -> None:
        """Synchronize the GPU and wait for all ranks with a collective, which has a timeout."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def wait_for_ranks(self) -> None:
        """Wait until every rank has called this method, without a time limit.

        A collective fails after its timeout, but a stage that works on one rank only may take an
        hour. A rank that fails meanwhile ends this process: see Note [Failure of a rank].
        """
        self._num_barriers += 1
        if self.store is None or self.world == 1:
            return
        self.store.set(f"barrier {self._num_barriers} {self.rank}", "reached")
        keys = [f"barrier {self._num_barriers} {rank}" for rank in range(self.world)]
        pause = 0.001
        while not self.store.check(keys):
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def gather(self, value: Any) -> list[Any]:
        """Return the `value` of each rank, in the order of ranks, without a time limit."""
        self.wait_for_ranks()
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def flush_samples(self) -> None:
        """Gather all samples on rank 0 and append them to the folder."""
        gathered: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(self.recorder.take(), gathered)
        if self.folder is not None and gathered is not None:
            self.folder.append_samples(sample for samples in gathered for sample in samples)
