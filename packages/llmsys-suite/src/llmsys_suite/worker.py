"""One rank of a run, from the first stage to the last: every rank executes this same program.

One group of processes serves all stages and all variants; starting a process costs more than most
of what is measured here.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import threading
import time
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from llmsys_suite.config import STAGES, RunConfig, restarts
from llmsys_suite.data import load_corpus, read_text
from llmsys_suite.environment import environment, forget_peak_memory, peak_memory_bytes
from llmsys_suite.folder import RunFolder
from llmsys_suite.launch import STORE
from llmsys_suite.measure.phases import Recorder
from llmsys_suite.rank import OtherRankFailed, Run
from llmsys_suite.report.progress import Progress
from llmsys_suite.stages.results import Failed

#: Stages that are wings of their own.
ELSEWHERE = {"audit": "llmsys_suite.audit.run", "report": "llmsys_suite.report.page"}
TIMEOUT = timedelta(minutes=5)


def main() -> int:
    """Entry of a process that `launch` started."""
    end_with_parent(os.getppid())
    return work(RunConfig.from_json(json.loads(sys.argv[1])))


def work(config: RunConfig) -> int:
    """Run all stages as this rank; 1 if a check failed or a stage raised."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    progress = Progress(enabled=rank == 0)
    try:
        run = begin(config, rank, world, progress)
        for stage in config.stages:
            with progress.stage(stage):
                try_stage(run, stage)
        if run.folder is not None:
            run.folder.finish()
        audit = run.results.get("audit")
        return 1 if run.failures or (audit is not None and not audit.passed) else 0
    except KeyboardInterrupt:
        return 1
    except Exception as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
        traceback.print_exc()
        return 1
    finally:
        progress.close()
        # A failed rank must not wait for peers that will never come: the process ends instead.
        if sys.exc_info()[0] is None and dist.is_initialized():
            dist.destroy_process_group()


def begin(config: RunConfig, rank: int, world: int, progress: Progress) -> Run:
    """Join the group; what every stage then works with."""
    make_autograds_threads()
    device = torch.device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    store = _store(rank, world)
    run = Run(
        config=config,
        rank=rank,
        world=world,
        device=device,
        corpus=load_corpus(config.data),
        recorder=Recorder(rank, device),
        progress=progress,
        folder=RunFolder.create(config, _facts(config)) if rank == 0 else None,
        # What an earlier attempt of torchrun's left in the store is not ours.
        store=dist.PrefixStore(f"llmsys {restarts()}", store),
    )
    make_group(run)
    return run


def make_autograds_threads() -> None:
    """Have autograd make them now: one for each device that there is.

    Later, once torch's FSDP2 has run an operator on pretended tensors, a CPU alone is taken for one
    with eight GPUs, and their threads can abort the process when it ends.
    """
    torch.ones(1, requires_grad=True).backward()


def make_group(run: Run) -> None:
    """The ranks' process group: another after each failure, since that broke the last."""
    dist.init_process_group(
        run.config.backend,
        store=dist.PrefixStore(f"group {run.failures}", run.store),
        rank=run.rank,
        world_size=run.world,
        timeout=TIMEOUT,
        device_id=run.device if run.device.type == "cuda" else None,
    )
    run.meet()  # who leaves it before the others have come breaks it for them


def _facts(config: RunConfig) -> dict[str, Any]:
    """The machine's, and the digest of the text."""
    text = read_text(config.data)
    digest = hashlib.sha256(text.train + b"\0" + text.heldout).hexdigest()
    return environment() | {"text": digest, "text_source": text.source}


def _store(rank: int, world: int) -> dist.Store:
    """The file that `launch` names, or what torchrun's environment does."""
    if STORE in os.environ:
        return dist.FileStore(os.environ[STORE], world)
    met: tuple[dist.Store, int, int] = next(rendezvous("env://", rank, world, timeout=TIMEOUT))
    return met[0]


def try_stage(run: Run, stage: str) -> None:
    """One stage; if it fails on any rank, say so in the folder and let the others go on."""
    broken = [needed for needed in STAGES[stage] if isinstance(run.results.get(needed), Failed)]
    broken = [] if stage == "audit" else broken
    try:
        if broken:
            run.results[stage] = Failed(f"it needs {broken[0]}, which failed")
        else:
            run_stage(run, stage)
            return
    except Exception as error:
        if not isinstance(error, OtherRankFailed):
            traceback.print_exc()
        run.results[stage] = Failed(run.fail(error))
        run.recorder.take()
        make_group(run)
    if run.folder is not None:
        print(f"{stage} failed: {run.results[stage].failed}", file=sys.stderr)
        run.folder.add_stage(stage, run.results[stage])


def run_stage(run: Run, stage: str) -> None:
    """One stage on this rank, and what it found into the results and the folder."""
    forget_peak_memory()
    run.witness(f"{stage} begins")
    begin = time.perf_counter()
    module = importlib.import_module(ELSEWHERE.get(stage, f"llmsys_suite.stages.{stage}"))
    result = module.run(run)
    run.seconds[stage] = time.perf_counter() - begin
    run.witness(f"{stage} ends")
    # What follows are collectives, which wait minutes only; a stage of one rank may take longer.
    run.meet()
    peak_mib = _peak_process_mib(run)
    run.results[stage] = result
    run.flush_samples()
    if run.folder is not None:
        run.folder.add_stage(stage, result, run.seconds[stage], peak_mib)


def _peak_process_mib(run: Run) -> float:
    """The most that any rank held during the stage."""
    peak = torch.tensor(peak_memory_bytes() / 2**20, device=run.device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return float(peak)


def end_with_parent(parent: int) -> None:
    """End this process when the one that started it is gone, however it went."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
