"""Fingerprints of calls, which ranks compare before data moves.

Messages are only bytes, so ranks that make different calls would hang, abort or get a wrong result.
In shared memory the comparison uses a tick that is needed anyway, so it is always on. Between hosts
it costs ceil(log2 n) short messages per call, and is on inside `checked` only. Otherwise, ranks
that make different calls do not receive each other's messages (see Note [Tags of messages]), and
compare their calls when the wait ends.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from collectives.algorithms.point_to_point import PointToPoint
from collectives.errors import Mismatch

CALL_KINDS = (
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all",
    "barrier", "shared_empty", "reduce", "gather", "scatter",
)  # fmt: skip
# The collectives that run the steps of another collective.
STEPS = {"reduce": "all_reduce", "gather": "all_to_all", "scatter": "all_to_all"}
ALGORITHMS = ("auto", "shared_memory", "hierarchical", "ring", "tree", "gloo")
OPS = ("", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
DTYPES = tuple(sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str))
MAX_DIMS = 8
_LAYOUT = struct.Struct(f"<5h2iQ{MAX_DIMS}q")
BYTES = _LAYOUT.size


@dataclass(frozen=True)
class Call:
    """One collective call of a rank: everything that must be the same on all ranks."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    op: str = ""
    root: int = 0
    algorithm: str = "auto"
    #: The number of tensors that are coalesced into this call.
    coalesced: int = 1
    #: A digest of the shapes, if there are several or more than `MAX_DIMS` dimensions; otherwise 0.
    digest: int = 0

    @property
    def steps(self) -> str:
        """The collective whose steps this call runs, and whose measured costs apply."""
        return STEPS.get(self.kind, self.kind)

    @cached_property
    def packed(self) -> bytes:
        """The fingerprint of the call: `BYTES` bytes that the ranks compare.

        More than `MAX_DIMS` dimensions do not fit: such a call needs the `digest` of its shape.
        """
        dims = self.shape
        if len(dims) > MAX_DIMS:
            # The remaining dimensions are represented by their product.
            dims = (*dims[: MAX_DIMS - 1], torch.Size(dims[MAX_DIMS - 1 :]).numel())
        padding = [0] * (MAX_DIMS - len(dims))
        return _LAYOUT.pack(
            CALL_KINDS.index(self.kind),
            DTYPES.index(self.dtype),
            OPS.index(self.op),
            ALGORITHMS.index(self.algorithm),
            len(self.shape),
            self.root,
            self.coalesced,
            self.digest,
            *dims,
            *padding,
        )

    @staticmethod
    def unpack(raw: bytes) -> "Call":
        """Return the call of a fingerprint; the last of `MAX_DIMS` dimensions may be a product."""
        fields = _LAYOUT.unpack(raw)
        kind, dtype, op, algorithm, ndim, root, coalesced, digest, *dims = fields
        return Call(
            kind=CALL_KINDS[kind],
            shape=tuple(dims[:ndim]),
            dtype=DTYPES[dtype],
            op=OPS[op],
            root=root,
            algorithm=ALGORITHMS[algorithm],
            coalesced=coalesced,
            digest=digest,
        )

    def __str__(self) -> str:
        if self.kind == "barrier":
            return "barrier()"
        parts = [str(self.dtype)]
        # The shapes of an all-to-all may differ between ranks, so it often has none.
        if self.kind != "all_to_all" or self.shape:
            parts.insert(0, f"shape {self.shape}")
        if self.op:
            parts.append(self.op)
        if self.kind in ("broadcast", *STEPS):
            preposition = "to" if self.kind in ("reduce", "gather") else "from"
            parts.append(f"{preposition} rank {self.root}")
        if self.algorithm != "auto":
            parts.append(f"algorithm {self.algorithm}")
        if self.coalesced > 1:
            parts.append(f"{self.coalesced} coalesced tensors")
        if self.digest:
            parts.append(f"shapes with digest {self.digest:016x}")
        return f"{self.kind}({', '.join(parts)})"


@lru_cache(maxsize=1024)
def digest_shapes(shapes: tuple[tuple[object, ...], ...]) -> int:
    """Return a number that differs for different shapes, except with probability 2^-64."""
    text = repr(shapes).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def compare(packed: Sequence[bytes], ranks: Sequence[int]) -> None:
    """Raise the same Mismatch on every rank unless all fingerprints are equal.

    `ranks` are the ranks in the group, in the order of `packed`. The most frequent call is assumed
    to be correct; if several are equally frequent, the first of them.
    """
    if packed.count(packed[0]) == len(packed):
        return
    calls = [Call.unpack(raw) for raw in packed]
    expected = Counter(calls).most_common(1)[0][0]
    deviating = {rank: call for rank, call in zip(ranks, calls, strict=True) if call != expected}
    differences = "; ".join(f"rank {rank} called {call}" for rank, call in deviating.items())
    raise Mismatch(
        f"ranks disagree: {differences}; rank {ranks[calls.index(expected)]} called {expected}. "
        "All ranks must make the same calls in the same order",
        tuple(deviating),
    )


@dataclass(frozen=True)
class Lengths:
    """The numbers of elements that a rank sends to each rank, and receives from each rank."""

    sends: list[int]
    receives: list[int]


def compare_lengths(lengths: Mapping[int, Lengths], ranks: Sequence[int]) -> None:
    """Raise the same Mismatch on every rank unless each rank expects the lengths it receives.

    The keys of `lengths` are positions in `ranks`, which are the ranks in the group. Ranks whose
    lengths are unknown are omitted.
    """
    wrong = []
    for source in lengths:
        for target in lengths:
            if lengths[source].sends[target] != lengths[target].receives[source]:
                wrong.append((source, target))
    if not wrong:
        return
    differences = "; ".join(
        f"rank {ranks[source]} sends {lengths[source].sends[target]} elements to rank "
        f"{ranks[target]}, which expects {lengths[target].receives[source]}"
        for source, target in wrong
    )
    raise Mismatch(
        f"all_to_all cannot run: {differences}. output_split_sizes[i] on rank j must be "
        "input_split_sizes[j] on rank i",
        sorted({ranks[position] for pair in wrong for position in pair}),
    )


def gather_by_messages(point_to_point: PointToPoint, local: bytes) -> list[bytes]:
    """Return all ranks' bytes in rank order; all ranks must pass the same number of bytes.

    Step k sends the bytes of up to 2^k ranks, which this rank has collected so far, to rank - 2^k.
    """
    rank, world_size = point_to_point.rank, point_to_point.world_size
    # Row i belongs to rank + i.
    rows = torch.zeros(world_size, len(local), dtype=torch.uint8, device="cpu")
    rows[0] = torch.frombuffer(bytearray(local), dtype=torch.uint8)
    distance = 1
    while distance < world_size:
        num_rows = min(distance, world_size - distance)
        point_to_point.exchange(
            [((rank - distance) % world_size, rows[:num_rows].view(-1))],
            [((rank + distance) % world_size, rows[distance : distance + num_rows].view(-1))],
        )
        distance += num_rows
    return [row.numpy().tobytes() for row in rows.roll(rank, dims=0)]


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, such as "rank 1" or "ranks 0, 2"."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(str(rank) for rank in ranks)}"
