"""Checkpoint files, which a worker with local steps saves before every exchange."""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paramserver.consistency import LocalSteps
from paramserver.journal.files import sync_folder
from paramserver.optimizers import save_state
from paramserver.protocol.session import Session


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
    """Return the state in a checkpoint file; raise `ValueError` if it is not a checkpoint."""
    try:
        state = torch.load(path, weights_only=True)
        if "position" in state:
            return dict(state)
        reason = "it has other content"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    raise ValueError(
        f"expected a checkpoint of a worker in {path}: {reason}; restore it from a copy, or remove "
        "it to continue without the state of the local optimizer"
    )


def random_states(devices: Iterable[torch.device]) -> dict[str, Tensor]:
    """Return the states of torch's random number generators, by device: CPU and CUDA devices."""
    states = {"cpu": torch.get_rng_state()}
    for device in set(devices):
        if device.type == "cuda":
            states[str(device)] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """Restore the random number generators to states that `random_states` returned."""
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
    is_of_push = session.pushes - pushes in (0, 1)
    if not is_of_push or state["interval"] != policy.interval or not is_of_layout:
        raise ValueError(
            f"expected a checkpoint of worker {session.worker} with {session.pushes} accepted "
            f"pushes, intervals of {policy.interval} steps and layouts {layouts}, got one with "
            f"{pushes}, {state['interval']} and {state['layouts']}; {remedy}"
        )
    for name, saved in state["settings"].items():
        if settings.get(name) != saved:
            raise ValueError(
                f"expected a checkpoint with {name} {settings.get(name)} of the local optimizer, "
                f"got one with {saved}; pass the same setting, or {remedy}"
            )
