"""Conversion of the journals of a job to another number of servers."""

import math
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paramserver.consistency import as_local_steps
from paramserver.journal.disk_journal import DiskJournal, restore
from paramserver.journal.files import JournalError, sync_folder
from paramserver.journal.recovery import list_journal_folders
from paramserver.partition import Piece
from paramserver.protocol.core import Core
from paramserver.protocol.log import Replayed
from paramserver.protocol.replica import Replica
from paramserver.running.job import Job

#: Values of whole parameters, by the name of the parameter and the name of the value.
Values = dict[str, dict[str, Any]]
_PARAMETER = "parameter"


def convert_journal(job: Job, source: str | Path, target: str | Path) -> None:
    """Convert the journals in `source` to `job.servers` servers, and write them to `target`.

    Training from `target` continues as from `source`, which does not change. Checkpoints of workers
    are copied.

    Args:
        job: the job with the new number of servers.
        source: folder of the journals of all servers, which must have stopped.
        target: folder of the new journals, which must not exist.

    Raises:
        ValueError: `source` has no journals, `target` exists, or the result of the training would
            depend on the number of servers.
        JournalError: a journal is damaged, or the journals do not match.
        RuntimeError: another process uses a journal.
    """
    source, target = Path(source), Path(target)
    policy = as_local_steps(job.consistency)
    if policy and (policy.fragments > 1 or policy.compression):
        raise ValueError(
            "expected a policy without fragments and compression, whose results depend on the "
            f"number of servers, got {policy}; continue with the former number"
        )
    if target.exists():
        raise ValueError(f"expected a new folder for the journals, got {target}, which exists")
    old = _restore_cores(job, source)
    new = [job.server(shard, elastic=True).core for shard in job.shards()]
    values = _assemble_values([core.replica for core in old])
    for core in new:
        core.ledger = old[0].ledger.copy()
        core.ledger.uses_norms = core.replica.uses_norms
        _set_values(core.replica, values)
        _set_history(core.replica, [core.replica for core in old], values)
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for number, core in enumerate(new):
        DiskJournal.start(unfinished / f"server-{number}", core).close()
    for checkpoint in source.glob("worker-*"):
        shutil.copy(checkpoint, unfinished)
    unfinished.rename(target)
    sync_folder(target.parent)


def _restore_cores(job: Job, source: Path) -> list[Core]:
    """Return the cores of the servers in `source`, all at the same position of the log."""
    folders = list_journal_folders(source)
    if not folders:
        raise ValueError(
            f"expected journals of servers in {source}, got none; pass the folder that `run` or "
            "`serve` received as its journal"
        )
    former = replace(job, servers=len(folders))
    cores = [former.server(shard, elastic=True).core for shard in former.shards()]
    for core, folder in zip(cores, folders, strict=True):
        restore(folder, core)
    first = cores[0]
    for core, folder in zip(cores, folders, strict=True):
        try:
            # The first server may be ahead of the other servers. They can replay its log, because
            # they have staged all committed pushes.
            core.restore(None, [Replayed(first.ledger.get_log_from(core.replica.position))])
        except (ValueError, RuntimeError) as error:
            raise JournalError(
                f"{folder} does not match {folders[0]}: {error}. Recover the journals of all "
                f"servers together by `python -m paramserver recover {source}`"
            ) from error
    if first.ledger.awaits_norm:
        first.ledger.add_norm(math.hypot(*(core.replica.norm or 0.0 for core in cores)))
        for core in cores:
            core.restore(None, [Replayed(first.ledger.get_log_from(core.replica.position))])
    return cores


def _assemble_values(replicas: Sequence[Replica]) -> Values:
    """Return the values of whole parameters by name.

    The values are the parameters, the state of the optimizer, and the gradients of pushes that are
    accepted but not applied yet.
    """
    values: Values = {}
    for replica in replicas:
        for index, (piece, target, state) in enumerate(_list_pieces_with_state(replica)):
            piece_values = {_PARAMETER: target.detach(), **state}
            for push in sorted(replica._accepted):
                piece_values[f"push {push}"] = replica._staged[push][index]
            for key, value in piece_values.items():
                _add_piece(values.setdefault(piece.name, {}), key, value, piece)
    return values


def _list_pieces_with_state(replica: Replica) -> list[tuple[Piece, Tensor, dict[str, Any]]]:
    """Return each piece, the tensor that the optimizer updates, and the tensor's state."""
    updater = replica._updater
    return [
        (piece, target, updater.optimizer.state.get(target, {}))
        for piece, target in zip(replica.shard.pieces, updater.targets, strict=True)
    ]


def _add_piece(whole: dict[str, Any], key: str, value: Any, piece: Piece) -> None:
    """Copy a value of a piece into the values of the whole parameter.

    Raises `ValueError` unless the value is elementwise, or a scalar that is equal for all pieces.
    """
    if isinstance(value, Tensor) and value.shape == piece.view_shape:
        numel = torch.Size(piece.shape).numel()
        flat = whole.setdefault(key, torch.empty(numel, dtype=value.dtype, device="cpu"))
        flat[piece.start : piece.stop] = value.reshape(-1)
        return
    is_scalar = not isinstance(value, Tensor) or value.numel() == 1
    if not is_scalar or not bool(whole.get(key, value) == value):
        raise ValueError(
            f"expected elementwise state of {piece.name}, got {key}; continue with the former "
            "number of servers"
        )
    whole[key] = value


def _select_piece(value: Any, piece: Piece) -> Any:
    """Return the elements of a parameter's value that belong to a piece, or a copy of a scalar."""
    if not isinstance(value, Tensor):
        return value
    if value.shape != (torch.Size(piece.shape).numel(),):
        return value.clone()
    return value[piece.start : piece.stop].clone().view(piece.view_shape)


@torch.no_grad()
def _set_values(replica: Replica, values: Values) -> None:
    """Set a replica's parameters and optimizer state to the values of whole parameters."""
    updater = replica._updater
    for piece, target, _ in _list_pieces_with_state(replica):
        parts = {key: _select_piece(value, piece) for key, value in values[piece.name].items()}
        target.copy_(parts.pop(_PARAMETER))
        state = {key: part for key, part in parts.items() if not key.startswith("push ")}
        if state:
            updater.optimizer.state[target] = state


def _set_history(replica: Replica, old: Sequence[Replica], values: Values) -> None:
    """Copy the log position, versions, group options, schedule and pushes of `old`."""
    first = old[0]
    updater = replica._updater
    # All servers have equal groups, so their options, such as the learning rate, are equal.
    state = updater.state_dict()
    former = first._updater.state_dict()
    former_groups = former["optimizer"]["param_groups"]
    for group, former_group in zip(state["optimizer"]["param_groups"], former_groups, strict=True):
        group.update(former_group | {"params": group["params"]})
    updater.load_state_dict(state | {"scheduler": former["scheduler"]})
    replica.position = first.position
    replica.version = first.version
    replica.staleness = Counter(first.staleness)
    replica.next_push = dict(first.next_push)
    replica._accepted = set(first._accepted)
    for push in replica._accepted:
        replica._staged[push] = [
            _select_piece(values[piece.name][f"push {push}"], piece)
            for piece in replica.shard.pieces
        ]
