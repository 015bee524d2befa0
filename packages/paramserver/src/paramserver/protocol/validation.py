"""Validation of requests: the sender, the fields and the log, before anything changes."""

import hashlib

from paramserver.protocol.ledger import Ledger
from paramserver.protocol.log import Log
from paramserver.protocol.messages import OBSERVER, Kind, Message, PeerLost, check_request
from paramserver.protocol.replica import Replica

_KINDS_WITH_LOG = (Kind.FETCH, Kind.REPLAY, Kind.END)
_FIRST_SERVER_KINDS = (
    Kind.COMMIT, Kind.READ, Kind.SYNC, Kind.LEAVE, Kind.FINISH, Kind.NORMS,
)  # fmt: skip


def validate(
    worker: int,
    message: Message,
    session: int | None,
    *,
    replica: Replica,
    ledger: Ledger,
    elastic: bool,
) -> Log | None:
    """Validate a request and return the log that it contains, or None.

    `session` is the session number with which the sender joined, or None if the transport
    guarantees that the sender is `worker`.

    Raises:
        ValueError: the fields, the log or the sender are invalid.
        RuntimeError: this server has lost entries that the worker has seen, or cannot replay the
            log.
        PeerLost: the sender's session is outdated.
    """
    check_request(worker, message)
    kind = message.kind
    shard = replica.shard
    if kind in _FIRST_SERVER_KINDS and shard.number > 0:
        raise ValueError(
            f"expected server 0 to receive {kind!r}, got it at server {shard.number}; pass the "
            "addresses in the order of the servers"
        )
    if message.size > shard.buffer_bytes:
        raise ValueError(
            f"expected at most {shard.buffer_bytes} bytes, worker {worker} announced {message.size}"
        )
    if message.position > replica.position:
        raise RuntimeError(
            f"worker {worker} has seen {message.position} entries of the log, but this server has "
            f"{replica.position}: its journal was lost, or restored from an older copy; restart "
            "the worker. With several servers, restore the journals of all servers from copies of "
            "one time, or pass another folder"
        )
    log = None
    if kind in _KINDS_WITH_LOG:
        log = Log.from_text(message.text)
        ledger = _preview(log, replica, ledger)
    if kind is Kind.JOIN:
        _check_join(worker, message, replica)
        if worker not in ledger.members and not elastic:
            raise ValueError(
                f"expected a worker below {len(ledger.members)}, got worker {worker}; pass a "
                "smaller rank, or start the servers with more workers"
            )
    elif worker != OBSERVER:
        _check_sender(worker, message, session, ledger)
    return log


def _preview(log: Log, replica: Replica, ledger: Ledger) -> Ledger:
    """Return the ledger as it will be after this server has replayed `log`."""
    if replica.shard.number == 0:
        if log.stop > replica.position:
            raise ValueError(
                f"expected a log of at most {replica.position} entries, which this server has "
                f"created, got {log.stop}"
            )
        return ledger
    preview = ledger.copy()
    preview.replay(log)
    replica.check(log)
    return preview


def _check_join(worker: int, message: Message, replica: Replica) -> None:
    if message.number != replica.shard.number:
        raise ValueError(
            f"expected a request for server {replica.shard.number}, worker {worker} addressed "
            f"server {message.number}; pass the servers in the order of their shards"
        )
    layout, *settings_of_others = message.text.split("\n")
    if layout != replica.layout:
        raise ValueError(
            f"expected parameters of layout {replica.layout}, worker {worker} has layout "
            f"{layout}; build the same module (names, which torch.compile(module) changes, shapes, "
            "dtypes, requires_grad) and pass the same policy on every rank"
        )
    for settings in settings_of_others:
        if settings != replica.common_settings:
            raise ValueError(
                "expected servers with equal policies and optimizers, got "
                f"{replica.common_settings} on server 0 and {settings} on another server; start "
                "all servers with the same job"
            )


def _check_sender(worker: int, message: Message, session: int | None, ledger: Ledger) -> None:
    member = ledger.members.get(worker)
    if member is None or (session is not None and not member.sessions):
        if message.kind is Kind.HEARTBEAT:
            return  # the thread that sends it starts before the worker joins
        raise ValueError(f"worker {worker} is unknown: join first")
    outdated = f"this session of worker {worker} is outdated: the worker has rejoined"
    if session is not None and hash_session(session) != member.sessions[-1]:
        raise PeerLost(f"{outdated}, or another process uses its number")
    if message.kind in (Kind.HEARTBEAT, Kind.ABORT):
        return  # these requests belong to a session, not to an epoch
    if message.epoch < member.epoch:
        raise PeerLost(outdated)
    if message.epoch > member.epoch:
        raise ValueError(
            f"expected a request of worker {worker} in epoch {member.epoch}, got epoch "
            f"{message.epoch}; join first"
        )


def hash_session(session: int) -> int:
    """Return the hash that identifies a session in the log.

    Every worker can read the log, but only the worker that joined knows the session number.
    """
    return int.from_bytes(hashlib.blake2b(str(session).encode(), digest_size=6).digest(), "big")
