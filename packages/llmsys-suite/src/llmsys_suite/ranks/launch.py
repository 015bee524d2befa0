"""Start the ranks of a run on this machine, and make sure that all of them end.

Under torchrun the ranks already exist. Without torchrun, the command-line process only launches the
ranks and outlives them. After Ctrl-C, or if a rank was killed, no process remains, and the folder
stays marked incomplete.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from llmsys_suite.config import RunConfig
from llmsys_suite.environment import get_signal_name

INTERRUPTED = 130
STORE = "LLMSYS_STORE"
#: Grace period for the other ranks to exit after one has failed, in seconds.
FAILURE_SECONDS = 5.0
#: Maximum time for saving a checkpoint after an interrupt, in seconds.
SAVING_SECONDS = 15.0


def launch(config: RunConfig, module: str = "llmsys_suite.ranks.worker") -> int:
    """Run `module` in one process per rank; return the exit status of the run.

    The status is 0 if all processes succeed, 130 after Ctrl-C or SIGTERM, and 1 otherwise.
    """
    # Python lets only the main thread set signal handlers.
    handles_signals = threading.current_thread() is threading.main_thread()
    with tempfile.TemporaryDirectory() as rendezvous:
        ranks: list[subprocess.Popen[bytes]] = []
        if handles_signals:
            previous = signal.signal(signal.SIGTERM, _raise_interrupt)
        try:
            for rank in range(config.world):
                ranks.append(_start(module, config, rank, Path(rendezvous)))
            return _wait(ranks)
        except KeyboardInterrupt:
            print(f"interrupted; the measurements so far are in {config.out}", file=sys.stderr)
            return INTERRUPTED
        finally:
            _end(ranks)
            if handles_signals:
                signal.signal(signal.SIGTERM, previous)


def _start(module: str, config: RunConfig, rank: int, rendezvous: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(config.world),
        STORE: str(rendezvous / "store"),
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    # At lower levels the profiler writes its log to stderr.
    environment.setdefault("KINETO_LOG_LEVEL", "99")
    # Binding to the address of the host may fail; ranks of one machine need only the loopback.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-m", module, json.dumps(config.to_json())]
    # The ranks are in a separate session, so Ctrl-C reaches only this process, which ends them.
    return subprocess.Popen(command, env=environment, start_new_session=True)


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all ranks; return 0 if all succeed, or 1 about `FAILURE_SECONDS` after a failure."""
    failed_at = None
    while any(rank.poll() is None for rank in ranks):
        codes = [rank.poll() for rank in ranks]
        if failed_at is None and any(codes):
            failed_at = time.monotonic()
            for rank_number, code in enumerate(codes):
                if code is not None and code < 0:
                    name = get_signal_name(-code)
                    print(f"rank {rank_number} was killed by {name}", file=sys.stderr)
        # If a rank has raised an exception, it has reported the failure, and the other ranks end by
        # themselves. A killed rank reports nothing, and the other ranks may wait for it.
        if failed_at is not None and time.monotonic() - failed_at > FAILURE_SECONDS:
            return 1
        time.sleep(0.05)
    return 1 if any(rank.returncode for rank in ranks) else 0


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """End the ranks that are still running.

    In the stage `learn`, the ranks save a checkpoint first. After a failure no checkpoint can be
    saved, so the ranks are killed at once.
    """
    has_failed = any(rank.poll() for rank in ranks)
    for rank in ranks:
        if rank.poll() is None:
            if has_failed:
                rank.kill()
            else:
                rank.terminate()
    stop_time = time.monotonic() + SAVING_SECONDS
    for rank in ranks:
        try:
            rank.wait(max(0.0, stop_time - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def _raise_interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt
