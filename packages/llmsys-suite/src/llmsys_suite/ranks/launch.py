"""Start the ranks of a run on this machine, and end them all whatever happens.

Under torchrun the ranks are there already; here the command line itself is no rank, so that it can
outlive them: a killed worker or Ctrl-C leaves no process behind and the folder marked incomplete.
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

INTERRUPTED = 130
STORE = "LLMSYS_STORE"
# A pipe to the launcher, which stamps what comes out of it; and the file where the stamps are.
WITNESS = "LLMSYS_WITNESS"
STAMPS = "LLMSYS_STAMPS"
#: Time for the other ranks to end by themselves after one has failed.
FAILURE_SECONDS = 5.0
#: Time to save a checkpoint after an interrupt.
SAVING_SECONDS = 15.0


def launch(config: RunConfig, module: str = "llmsys_suite.ranks.worker") -> int:
    """Run `module` as every rank to its end; the exit status is 0 only if all ended well."""
    with tempfile.TemporaryDirectory() as rendezvous:
        ranks: list[subprocess.Popen[bytes]] = []
        previous = signal.signal(signal.SIGTERM, _as_interrupt)
        events, told = os.pipe()
        stamps = Path(rendezvous, "stamps")
        witness = threading.Thread(target=_stamp, args=(events, stamps), daemon=True)
        witness.start()
        try:
            for rank in range(config.world):
                ranks.append(_start(module, config, rank, Path(rendezvous), told))
            return _wait(ranks)
        except KeyboardInterrupt:
            print(f"interrupted; what was measured is in {config.out}", file=sys.stderr)
            return INTERRUPTED
        finally:
            _end(ranks)
            os.close(told)
            witness.join(5)
            signal.signal(signal.SIGTERM, previous)


def _start(
    module: str, config: RunConfig, rank: int, rendezvous: Path, told: int
) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(config.world),
        STORE: str(rendezvous / "store"),
        WITNESS: str(told),
        STAMPS: str(rendezvous / "stamps"),
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    # The profiler writes its own diary to stderr otherwise.
    environment.setdefault("KINETO_LOG_LEVEL", "99")
    # The address of a machine may not be its own to bind to; ranks of one machine need only this.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-m", module, json.dumps(config.to_json())]
    # A session of its own: the terminal's Ctrl-C reaches this process alone, which ends the ranks.
    return subprocess.Popen(command, env=environment, start_new_session=True, pass_fds=(told,))


def _stamp(events: int, stamps: Path) -> None:
    """Write down when each event came through the pipe, by this process's clock."""
    with open(events) as arriving, stamps.open("w") as file:
        for event in arriving:
            file.write(f"{time.monotonic()} {event}")
            file.flush()


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all ranks; return 1 soon after one of them has failed."""
    failed_at = None
    while any(rank.poll() is None for rank in ranks):
        codes = [rank.poll() for rank in ranks]
        if failed_at is None and any(codes):
            failed_at = time.monotonic()
            for number, code in enumerate(codes):
                if code is not None and code < 0:
                    name = signal.Signals(-code).name
                    print(f"rank {number} was killed by {name}", file=sys.stderr)
        # A rank that raised has reported it, and the others end by themselves; a rank that was
        # killed has not, and the others may wait for it.
        if failed_at is not None and time.monotonic() - failed_at > FAILURE_SECONDS:
            return 1
        time.sleep(0.05)
    return 1 if any(rank.returncode for rank in ranks) else 0


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """End the ranks that still run. One that learns saves a checkpoint on SIGTERM.

    After a failure no checkpoint can be saved, so the ranks are killed at once.
    """
    has_failed = any(rank.poll() for rank in ranks)
    for rank in ranks:
        if rank.poll() is None:
            (rank.kill if has_failed else rank.terminate)()
    for rank in ranks:
        try:
            rank.wait(SAVING_SECONDS)
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def _as_interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt
