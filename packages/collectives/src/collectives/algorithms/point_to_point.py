"""Point-to-point messages between the ranks of a group, used by all message-based algorithms."""

import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo

from collectives.algorithms.reduction import COMBINE, split_into_pieces
from collectives.errors import PeerError

# Note [Tags of messages]
# ~~~~~~~~~~~~~~~~~~~~~~~
# gloo delivers a message only to a receive with the same tag. A message's tag is computed from the
# call that it belongs to and from its length. Therefore ranks that make different calls wait for
# each other until the timeout. Without tags, a message that is longer than expected would abort the
# process, and a message of another dtype would be accepted.

PIECE_BYTES = 512 * 1024
# gloo's tags have 31 bits.
TAG_BITS = 0x7FFFFFFF
# The tag of receives that only test or close a connection. Users' tags are small numbers, so no
# message has this tag. If such a receive accepted a longer message, the process would abort.
UNUSED_TAG = TAG_BITS
# An odd number close to 2^32 divided by the golden ratio, which spreads lengths over the tags.
TAG_FACTOR = 0x9E3779B1
# The largest time limit that is passed to gloo, in seconds: a deadline may be infinite.
MAX_SECONDS = 1e6

Message = tuple[int, Tensor]
# A message in transit: the peer's rank in the group, the work handle and the buffer.
Started = tuple[int, Any, Tensor]


class PointToPoint:
    """Messages of flat tensors between some ranks of a process group.

    Methods identify a rank by its position in `ranks`. Errors report ranks of the group. All
    messages are sent as bytes, so any dtype can be sent.

    Args:
        ranks: the group's ranks, in the order in which this object numbers them.
        rank: this rank's position in `ranks`.
        backend: the group's backend for CPU tensors, if known.
    """

    def __init__(self, group: Any, ranks: Sequence[int], rank: int, backend: Any = None) -> None:
        self.rank = rank
        self.world_size = len(ranks)
        self._group = group
        self._backend = backend or group
        self._ranks = ranks
        self._state = _State()

    def make_subgroup(self, positions: Sequence[int]) -> "PointToPoint":
        """Return an object for messages between the ranks at `positions`, numbered in that order.

        The new object and this one share the deadline, the tag and the peer that is waited for.
        """
        ranks = [self._ranks[position] for position in positions]
        part = PointToPoint(self._group, ranks, positions.index(self.rank), self._backend)
        part._state = self._state
        return part

    @property
    def seconds_left(self) -> float:
        """The time until the deadline in seconds, at most `MAX_SECONDS`."""
        return min(self._state.deadline - time.monotonic(), MAX_SECONDS)

    @property
    def waits_for(self) -> int | None:
        """The peer (a rank of the group) whose message a thread waits for, or None."""
        return self._state.peer

    def find_disconnected_peers(self) -> list[int]:
        """Return the ranks of the group whose connections were closed, but not by this rank."""
        if not isinstance(self._backend, ProcessGroupGloo):
            return []
        # torch's type stubs do not declare this method.
        receive: Any = self._backend.recv  # type: ignore[attr-defined]
        peers = []
        for peer in set(self._ranks) - {self._ranks[self.rank]}:
            try:
                receive([_make_unused_buffer()], peer, UNUSED_TAG)
            except RuntimeError as error:
                # gloo closes this rank's connections when one of its waits times out.
                if "timeout" not in get_first_line(error):
                    peers.append(peer)
        return peers

    def finish_within(self, seconds: float) -> None:
        """Set the deadline after which waits raise PeerError, in seconds from now."""
        self._state.deadline = time.monotonic() + seconds
        self._state.seconds = seconds

    def restart_deadline(self) -> None:
        """Set the deadline again, because all ranks have just responded."""
        self.finish_within(self._state.seconds)

    def tag_by(self, packed: bytes) -> None:
        """Tag the following messages as belonging to this call: see Note [Tags of messages]."""
        self._state.tag = zlib.crc32(packed)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive at the same time; return when all messages have been transferred.

        Empty tensors are not sent.
        """
        self._wait(self._start(sends, receives))

    def exchange_reduce(self, send: Message, receive: tuple[int, Tensor, Tensor], op: str) -> None:
        """Send a tensor, receive another one, and combine the received one with `local` into `out`.

        A piece is combined while the next piece is transferred. This needs at most two pieces of
        extra memory, independent of the tensor's size. `out` may share memory with `local` and with
        the sent tensor. The target and the source must call this method too, because both split the
        message into the same pieces. Pass an empty tensor to send or receive nothing.

        Args:
            send: the target and the tensor.
            receive: the source, `local` and `out`.
        """
        target, outgoing = send
        source, local, out = receive
        if max(outgoing.nbytes, out.nbytes) <= PIECE_BYTES:
            # There is nothing to overlap, and the loop below costs as much as a short message.
            received = torch.empty_like(out)
            self.exchange([(target, outgoing)], [(source, received)])
            if out.numel():
                COMBINE[op](local, received, out=out)
            return
        outs = _split_message(out)
        # One buffer is combined while the other buffer is received.
        buffers = [torch.empty_like(outs[0]) for _ in outs[:2]]
        receiving = self._start([], [(source, buffer) for buffer in buffers[:1]])
        sending = self._start([(target, piece) for piece in _split_message(outgoing)], [])
        for i, (local_piece, out_piece) in enumerate(zip(_split_message(local), outs, strict=True)):
            current = receiving
            receiving = []
            if i + 1 < len(outs):
                buffer = buffers[(i + 1) % 2][: outs[i + 1].numel()]
                receiving = self._start([], [(source, buffer)])
            self._wait(current)
            # `out` may be the tensor that is being sent, so wait until this piece has been sent.
            self._wait(sending[i : i + 1])
            COMBINE[op](local_piece, buffers[i % 2][: out_piece.numel()], out=out_piece)
        self._wait(sending[len(outs) :])

    def close_connections(self) -> None:
        """Close the connections, so that ranks that wait for this one fail at once."""
        close_peers(self._group, set(self._ranks) - {self._ranks[self.rank]})

    def _start(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[Started]:
        started: list[Started] = []
        for start, messages in ((self._backend.recv, receives), (self._backend.send, sends)):
            for position, tensor in messages:
                if tensor.numel():
                    raw = tensor.view(torch.uint8)
                    peer = self._ranks[position]
                    started.append((peer, self._start_message(start, raw, peer), raw))
        return started

    def _start_message(self, start: Callable[..., Any], raw: Tensor, peer: int) -> Any:
        tag = (self._state.tag ^ raw.numel() * TAG_FACTOR) & TAG_BITS
        try:
            return start([raw], peer, tag)
        except RuntimeError as error:
            raise PeerError(peer, get_first_line(error)) from error

    def _wait(self, started: Sequence[Started]) -> None:
        for peer, work, _ in started:
            self._state.peer = peer
            seconds = max(1e-3, self.seconds_left)
            try:
                work.wait(timedelta(seconds=seconds))
            except RuntimeError as error:
                raise PeerError(peer, get_first_line(error)) from error
            finally:
                self._state.peer = None


@dataclass
class _State:
    """The state that a `PointToPoint` shares with its subgroups."""

    #: The time at which waits fail, a value of time.monotonic.
    deadline: float = float("inf")
    #: The seconds from which the deadline was computed.
    seconds: float = float("inf")
    #: The part of the tag that depends on the call.
    tag: int = 0
    #: The peer (a rank of the group) whose message a thread waits for.
    peer: int | None = None


def close_peers(group: Any, peers: Iterable[int]) -> None:
    """Close a group's connections to `peers`: gloo closes them when one of its waits times out."""
    for peer in peers:
        with suppress(RuntimeError):
            group.recv([_make_unused_buffer()], peer, UNUSED_TAG).wait(timedelta(milliseconds=1))


def _make_unused_buffer() -> Tensor:
    """Return the buffer of a receive that only tests or closes a connection."""
    return torch.empty(1, dtype=torch.uint8, device="cpu")


def _split_message(flat: Tensor) -> list[Tensor]:
    """Return views of at most `PIECE_BYTES` each, or [] if the tensor is empty."""
    return split_into_pieces(flat, PIECE_BYTES // flat.element_size()) if flat.numel() else []


def get_first_line(error: Exception) -> str:
    """Return an error's message without torch's C++ stack trace, or its type if it is empty."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
