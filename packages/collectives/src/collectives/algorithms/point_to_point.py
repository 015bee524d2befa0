"""Messages between the ranks of a group: the one layer under every algorithm that sends.

Notable:
- `exchange_reduce` receives in pieces and combines one while the next arrives, so an algorithm
  needs two pieces of extra memory, whatever the size of the tensor;
- messages are bytes: any dtype travels, also those that a backend does not know;
- a message's tag is made from the call it serves and its length. gloo delivers a message only to a
  receive with the same tag, so ranks that disagree wait for each other until the timeout; without
  that, a longer message than expected ends the process and one of another dtype is believed;
- NCCL must be told of sends and receives that happen together, so there they go as one batch.
"""

import time
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo

from collectives.algorithms.reduction import COMBINE, in_pieces
from collectives.errors import PeerError

PIECE_BYTES = 512 * 1024
# gloo takes tags of 31 bits. The odd factor (2^32 over the golden ratio) spreads lengths over them.
TAG_BITS, SPREAD = 0x7FFFFFFF, 0x9E3779B1

Message = tuple[int, Tensor]


class PointToPoint:
    """Sends and receives flat tensors between `ranks` of a process group.

    Here ranks are places in `ranks`; only errors speak of the group's. `direct` is the group's
    backend for CPU tensors, if known.
    """

    def __init__(self, group: Any, ranks: Sequence[int], rank: int, direct: Any = None) -> None:
        self._group, self._direct = group, direct or group
        self._ranks = ranks
        self.rank, self.world = rank, len(ranks)
        self._deadline = [float("inf"), float("inf")]
        self._subject = [0]
        self._peer: list[int | None] = [None]

    def among(self, places: Sequence[int]) -> "PointToPoint":
        """The same messages between some of the ranks, in another order."""
        ranks = [self._ranks[place] for place in places]
        part = PointToPoint(self._group, ranks, places.index(self.rank), self._direct)
        part._deadline, part._subject, part._peer = self._deadline, self._subject, self._peer
        return part

    @property
    def seconds_left(self) -> float:
        """How long a wait may last from now on."""
        return min(self._deadline[0] - time.monotonic(), 1e6)

    @property
    def waits_for(self) -> int | None:
        """The group's rank whose message is waited for now, by any thread; None if none is."""
        return self._peer[0]

    def ended(self) -> list[int]:
        """The group's ranks to which connections have ended, but not by this rank's own doing."""
        found = []
        others = self._ranks if isinstance(self._direct, ProcessGroupGloo) else []
        for peer in set(others) - {self._ranks[self.rank]}:
            try:
                self._direct.recv([torch.empty(1, dtype=torch.uint8)], peer, 0)
            except RuntimeError as error:
                # gloo's word for what follows a wait of this rank's that lasted too long.
                if "timeout" not in first_line(error):
                    found.append(peer)
        return found

    def finish_within(self, seconds: float) -> None:
        """From now on, raise PeerError where a wait lasts beyond so many seconds from now."""
        self._deadline[:] = time.monotonic() + seconds, seconds

    def renew(self) -> None:
        """Let that time begin anew: all ranks have shown that they are there."""
        self.finish_within(self._deadline[1])

    def speak_of(self, call: bytes) -> None:
        """From now on, meet only messages of ranks that speak of the same call."""
        self._subject[0] = zlib.crc32(call)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive at once; return when all is done. Empty tensors do not travel."""
        self._wait(self._start(sends, receives))

    def exchange_reduce(
        self, send: Message, receive: tuple[int, Tensor, Tensor], name: str
    ) -> None:
        """Send a tensor; combine what comes in with `own` into `out`: (source, own, out).

        `out` may share memory with `own` and with the tensor that is sent. Both ends must use this
        method, with an empty tensor where there is nothing to send or receive.
        """
        target, leaving = send
        source, own, out = receive
        if out.is_cuda or max(leaving.nbytes, out.nbytes) <= PIECE_BYTES:
            # Nothing to overlap, and the loop below costs as much as a short message does.
            arrived = torch.empty_like(out)
            self.exchange([(target, leaving)], [(source, arrived)])
            if out.numel():
                COMBINE[name](own, arrived, out=out)
            return
        outs = _pieces(out)
        scratch = [torch.empty_like(outs[0]) for _ in outs[:2]]
        sends = [(target, piece) for piece in _pieces(leaving)]
        started = self._start(sends, [(source, room) for room in scratch[:1]])
        coming, going = started[: len(scratch[:1])], started[len(scratch[:1]) :]
        for i, (own_piece, out_piece) in enumerate(zip(_pieces(own), outs, strict=True)):
            waiting, coming = coming, []
            if i + 1 < len(outs):
                room = scratch[(i + 1) % 2][: outs[i + 1].numel()]
                coming = self._start([], [(source, room)])
            self._wait(waiting)
            self._wait(going[i : i + 1])
            COMBINE[name](own_piece, scratch[i % 2][: out_piece.numel()], out=out_piece)
        self._wait(going[len(outs) :])

    def hang_up(self) -> None:
        """Close the connections, so that whoever waits at one of them finds out now."""
        hang_up(self._group, set(self._ranks) - {self._ranks[self.rank]})

    def _start(
        self, sends: Sequence[Message], receives: Sequence[Message]
    ) -> list[tuple[int, Any, Tensor]]:
        works: list[tuple[int, Any, Tensor]] = []
        batch = []
        for messages, operation in ((receives, "recv"), (sends, "send")):
            for place, tensor in messages:
                if not tensor.numel():
                    continue
                peer, raw = self._ranks[place], tensor.view(torch.uint8)
                if raw.is_cuda:
                    batch.append((operation, raw, peer))
                    continue
                try:
                    tag = (self._subject[0] ^ raw.numel() * SPREAD) & TAG_BITS
                    works.append((peer, getattr(self._direct, operation)([raw], peer, tag), raw))
                except RuntimeError as error:
                    raise PeerError(peer, first_line(error)) from error
        return works + self._start_batch(batch)

    def _start_batch(
        self, batch: Sequence[tuple[str, Tensor, int]]
    ) -> list[tuple[int, Any, Tensor]]:
        if not batch:
            return []
        group = self._group
        operations = [
            dist.P2POp(getattr(dist, f"i{name}"), raw, group=group, group_peer=peer)
            for name, raw, peer in batch
        ]
        works = dist.batch_isend_irecv(operations)
        return [(batch[0][2], work, batch[0][1]) for work in works]

    def _wait(self, works: Sequence[tuple[int, Any, Tensor]]) -> None:
        for peer, work, _ in works:
            self._peer[0] = peer
            left = max(1e-3, self.seconds_left)
            try:
                work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                raise PeerError(peer, first_line(error)) from error
            finally:
                self._peer[0] = None


def hang_up(group: Any, peers: Iterable[int]) -> None:
    """Close a group's connections: gloo closes all of them when one of its waits times out."""
    for peer in peers:
        with suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8)
            group.recv([nothing], peer, 0).wait(timedelta(milliseconds=1))


def _pieces(flat: Tensor) -> list[Tensor]:
    return in_pieces(flat, PIECE_BYTES // flat.element_size()) if flat.numel() else []


def first_line(error: Exception) -> str:
    """What an error says, without the trace of C++ that torch adds."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
