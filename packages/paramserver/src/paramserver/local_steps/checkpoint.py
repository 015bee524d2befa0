"""Checkpoint files, which a worker with local steps saves before every exchange.

A file contains a state as `torch.save` writes it, and a checksum, because `torch.load` does not
detect changed bytes of tensors.
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paramserver.consistency import LocalSteps
from paramserver.journal.files import compute_checksum, sync_folder
from paramserver.optimizers import save_state
from paramserver.protocol.session import Session

#: Size in bytes of the checksum at the end of a file.
_CHECKSUM_BYTES = 4


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Atomically replace the file at `path` with a checkpoint of `state`, and sync it to the disk.

    Raises:
        RuntimeError: the file cannot be written, such as on a full disk. The file at `path` has
            not changed.
        ValueError: `state` contains an object that `read_checkpoint` could not load.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        with unfinished.open("w+b") as file:
            save_state(state, file)
            size = file.seek(0, os.SEEK_END)
            file.write(compute_checksum(file, 0, size).to_bytes(_CHECKSUM_BYTES, "little"))
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError
        raise RuntimeError(
            f"cannot write the checkpoint {path}: {error}; free space on its disk, or make its "
            "folder writable, and start the worker again, which continues from the previous "
            "checkpoint"
        ) from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
    sync_folder(path.parent)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint file; raise `ValueError` if its checksum is wrong."""
    with path.open("rb") as file:
        size = max(0, file.seek(0, os.SEEK_END) - _CHECKSUM_BYTES)
        checksum = compute_checksum(file, 0, size).to_bytes(_CHECKSUM_BYTES, "little")
        if file.read() != checksum:
            raise ValueError(
                f"expected a checkpoint of a worker in {path}, got a file whose checksum is wrong; "
                "restore it from a copy, or remove it to continue without the state of the local "
                "optimizer"
            )
        file.seek(0)
        return dict(torch.load(file, weights_only=True))


def get_file_version(path: Path) -> tuple[int, int] | None:
    """Return the inode and the time of the last write of a file, or None if there is no file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def get_random_states(devices: Iterable[torch.device]) -> dict[str, Tensor]:
    """Return the states of torch's random number generators, by device: CPU and CUDA devices."""
    states = {"cpu": torch.get_rng_state()}
    for device in set(devices):
        if device.type == "cuda":
            states[str(device)] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """Restore the random number generators to states that `get_random_states` returned."""
    for device, state in states.items():
        if device == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)


def check_checkpoint(
    path: Path | None,
    state: Mapping[str, Any],
    policy: LocalSteps,
    session: Session,
    layouts: list[str],
    settings: Mapping[str, str],
) -> None:
    """Raise `ValueError` unless a worker can continue from the checkpoint `state`.

    The error names `path`. The other arguments describe the job that the worker has joined.
    """
    remedy = f"remove {path} to continue without the state of the local optimizer"
    _, pushes, _ = state["at"]
    is_of_layout = state["layouts"] == layouts or (policy.fragments == 1 and not policy.compression)
    is_of_worker = state["worker"] == session.worker and session.pushes - pushes in (0, 1)
    if not is_of_worker or state["interval"] != policy.interval or not is_of_layout:
        raise ValueError(
            f"expected a checkpoint of worker {session.worker} with {session.pushes} accepted "
            f"pushes, intervals of {policy.interval} steps and layouts {layouts}, got one of "
            f"worker {state['worker']} with {pushes}, {state['interval']} and {state['layouts']}; "
            f"pass another file, or {remedy}"
        )
    for name, saved in state["settings"].items():
        if settings.get(name) != saved:
            raise ValueError(
                f"expected a checkpoint with {name} {settings.get(name)} of the local optimizer, "
                f"got one with {saved}; pass the same setting, or {remedy}"
            )
