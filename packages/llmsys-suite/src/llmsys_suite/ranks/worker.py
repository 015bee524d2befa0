"""One rank of a run, from the first stage to the last: every rank executes this same program.

One group of processes serves all stages and all variants, because starting a process takes longer
than most of the measurements.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from llmsys_suite.config import BYTES, RunConfig, UsageError, count_restarts
from llmsys_suite.environment import collect_environment, forget_peak_memory, read_peak_memory_bytes
from llmsys_suite.folder import RunFolder, claim_folder
from llmsys_suite.measure.phases import Recorder
from llmsys_suite.ranks.failure import FailureWatch, end_with_parent, report_failure
from llmsys_suite.ranks.launch import STORE
from llmsys_suite.ranks.rank import Progress, Run
from llmsys_suite.text.data import read_text
from llmsys_suite.text.tokens import load, write_tokens

#: The modules of stages that are implemented outside of `stages`.
MODULE_OF_STAGE = {"audit": "llmsys_suite.audit.run", "report": "llmsys_suite.report.page"}
TIMEOUT = timedelta(minutes=5)


def main() -> int:
    """Run as a rank that `launch` started; return the exit status."""
    end_with_parent(os.getppid())
    status, _ = run_rank(RunConfig.from_json(json.loads(sys.argv[1])))
    return status


def run_rank(config: RunConfig) -> tuple[int, Path]:
    """Run all stages as this rank; return the exit status and the run folder.

    The status is 1 on rank 0 if a check of the audit failed, and 0 otherwise.

    An exception in any stage ends the processes of all ranks with exit status 1: see
    Note [Failure of a rank]. They end without clean-up, because destructors of a process group can
    wait for ranks that have ended. A `UsageError` in `begin` is raised instead.
    """
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    progress = Progress(enabled=rank == 0)
    run: Run | None = None
    try:
        run = begin(config, rank, world, progress)
        watch = start_watch(run)
        for stage in run.config.stages:
            run.stage = stage
            with progress.stage(stage):
                run_stage(run, stage)
        if run.folder is not None:
            run.folder.finish()
    except KeyboardInterrupt:
        end_process()
    except Exception as error:
        if run is None and isinstance(error, UsageError):
            raise
        fail(rank, run, error)
    leave(run, watch)
    audit = run.results.get("audit")
    assert run.config.out is not None
    return (0 if audit is None or audit.passed else 1), run.config.out


def fail(rank: int, run: Run | None, error: Exception) -> NoReturn:
    """Report an exception of this rank to all ranks and end this process."""
    message = f"rank {rank}: {type(error).__name__}: {error}"
    first = message
    if run is not None and run.store is not None:
        # A store that is lost cannot pass on the message; its loss ends the other ranks.
        with suppress(Exception):
            first = report_failure(run.store, message)
    if run is not None and first != message:
        # This exception, such as a closed connection, follows from another rank's failure.
        _end_after_other(run, first)
    traceback.print_exc()
    _record_failure(run, message)
    print(f"llmsys: {message}", file=sys.stderr)
    end_process()


def _end_after_other(run: Run, message: str) -> NoReturn:
    """End this process because of a failure elsewhere, which `message` describes."""
    _record_failure(run, message)
    print(f"llmsys: rank {run.rank} ends: {message}", file=sys.stderr)
    end_process()


def _record_failure(run: Run | None, message: str) -> None:
    if run is not None and run.folder is not None:
        try:
            run.folder.fail(run.stage, message)
        except Exception as error:
            # The run folder may itself be the cause: it was deleted, or the disk is full.
            print(f"llmsys: the failure cannot be recorded: {error}", file=sys.stderr)


def end_process() -> NoReturn:
    """End this process with exit status 1, without clean-up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def start_watch(run: Run) -> FailureWatch | None:
    """Start a thread that watches the other ranks, and on rank 0 also the run folder."""
    if run.store is None:
        return None
    folder = run.out if run.folder is not None else None
    return FailureWatch(run.store, partial(_end_after_other, run), folder)


def leave(run: Run, watch: FailureWatch | None) -> None:
    """Leave the process group after the last stage; rank 0 waits until all ranks have left.

    Rank 0 may serve the store, so it must not end before the last use of the store.
    """
    run.wait_for_ranks()
    if watch is not None:
        watch.stop()
    dist.destroy_process_group()
    if run.store is None or run.world == 1:
        return
    run.store.set(f"left {run.rank}", "yes")
    if run.rank == 0:
        run.store.wait([f"left {rank}" for rank in range(run.world)], TIMEOUT)


def begin(config: RunConfig, rank: int, world: int, progress: Progress) -> Run:
    """Join the process group and return the state that every stage works with."""
    device = select_device(config)
    create_autograd_threads()
    torch.set_float32_matmul_precision("high" if config.dtype == "tf32" else "highest")
    store = _store(rank, world)
    config = agree_on_folder(config, rank, store)
    require_shared_folder(config, rank)
    text = read_text(config.data)
    digest = text.compute_digest()
    folder = None
    if rank == 0:
        assert config.out is not None
        folder = RunFolder(config.out)
        folder.restart()
        facts = collect_environment() | {"text": digest, "text_source": text.source}
        folder.write_json("env.json", facts)
    run = Run(
        config=config,
        rank=rank,
        world=world,
        device=device,
        corpus=text.to_corpus(),
        recorder=Recorder(rank, device),
        progress=progress,
        folder=folder,
        # A prefix per torchrun attempt keeps this attempt from reading keys of an earlier one.
        store=dist.PrefixStore(f"llmsys {count_restarts()}", store),
    )
    make_group(run)
    require_same_text(run, digest)
    if config.tokenizer != BYTES:
        if rank == 0:
            write_tokens(config, run.out)
        run.wait_for_ranks()
        run.corpus = load(run.out)
    return run


def select_device(config: RunConfig) -> torch.device:
    """Return the device of this rank; make it the current GPU, or set the number of CPU threads.

    This call must be the first use of CUDA. An earlier use would allocate memory on the first GPU.
    """
    if config.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return torch.device(config.device)


def agree_on_folder(config: RunConfig, rank: int, store: dist.Store) -> RunConfig:
    """Return `config` with the run folder, the same on every rank.

    Without torchrun, the folder is claimed before the ranks start. Under torchrun, rank 0 claims it
    here. After a restart, the ranks read the first attempt's folder from the store, which outlives
    the ranks.
    """
    if STORE in os.environ:
        return config
    while isinstance(store, dist.PrefixStore):
        # torchrun uses a separate prefix per attempt, which would hide the first attempt's key.
        store = store.underlying_store
    key = "llmsys folder"
    if rank == 0 and not (count_restarts() and store.check([key])):
        store.set(key, str(claim_folder(config).out))
    store.wait([key], TIMEOUT)
    return replace(config, out=Path(store.get(key).decode()))


def require_shared_folder(config: RunConfig, rank: int) -> None:
    """Raise UsageError if this rank needs files of the run folder and cannot see the folder."""
    is_shared = "learn" in config.stages or config.tokenizer != BYTES
    if is_shared and not os.path.exists(f"{config.out}/config.json"):
        raise UsageError(
            f"rank {rank} on {platform.node()} does not see the run folder {config.out} of rank 0: "
            "the stage learn and tokenizers need a file system that all hosts share; name a folder "
            "on one with --out"
        )


def create_autograd_threads() -> None:
    """Create the threads of autograd now, one per device.

    After torch's FSDP2 has run an operator on fake tensors, autograd would create threads for eight
    GPUs on a machine without any. These threads can abort the process when it ends.
    """
    torch.ones(1, requires_grad=True).backward()


def make_group(run: Run) -> None:
    """Create the process group of all ranks."""
    dist.init_process_group(
        run.config.backend,
        store=dist.PrefixStore("group", run.store) if run.store is not None else None,
        rank=run.rank,
        world_size=run.world,
        timeout=TIMEOUT,
        device_id=run.device if run.device.type == "cuda" else None,
    )
    # A rank that leaves before the other ranks have connected would break their connection setup.
    run.wait_for_ranks()


def require_same_text(run: Run, digest: str) -> None:
    """Raise UsageError unless all ranks read the same text; hosts may have different files."""
    hosts = run.gather((digest, platform.node()))
    for rank, (other, host) in enumerate(hosts):
        if other != hosts[0][0]:
            raise UsageError(
                f"rank {rank} on {host} reads another text than rank 0 on {hosts[0][1]}; pass a "
                "file that is the same on all hosts with --data"
            )


def _store(rank: int, world: int) -> dist.Store:
    """Return the file store of `launch`, or the store that torchrun's environment describes."""
    if STORE in os.environ:
        return dist.FileStore(os.environ[STORE], world)
    rendezvous_result = next(rendezvous("env://", rank, world, timeout=TIMEOUT))
    store: dist.Store = rendezvous_result[0]
    return store


def run_stage(run: Run, stage: str) -> None:
    """Run one stage and store its result; rank 0 also writes it to the run folder."""
    forget_peak_memory()
    start_time = time.perf_counter()
    module = importlib.import_module(MODULE_OF_STAGE.get(stage, f"llmsys_suite.stages.{stage}"))
    result = module.run(run)
    seconds = time.perf_counter() - start_time
    # Collectives time out after minutes, but a stage that runs on one rank may take longer.
    run.wait_for_ranks()
    peak = torch.tensor(read_peak_memory_bytes() / 2**20, device=run.device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    run.results[stage] = result
    run.flush_samples()
    if run.folder is not None:
        run.folder.add_stage(stage, result, seconds, float(peak))


if __name__ == "__main__":
    sys.exit(main())
