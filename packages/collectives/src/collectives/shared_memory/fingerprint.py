"""What a rank is about to do, compared across ranks before data moves.

Without it a mismatch is a hang, an abort or, worst, a wrong sum: messages are only bytes. In shared
memory the comparison rides on a tick that is needed anyway, so there it is always on. Between hosts
it costs ceil(log2 n) short messages a call, and is on inside `checked`. Outside, ranks that
disagree do not find each other's messages (see `point_to_point`), and compare when the wait ends.
"""

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from collectives.algorithms.point_to_point import PointToPoint
from collectives.errors import Mismatch

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all",
         "barrier", "shared_empty", "reduce", "gather", "scatter")  # fmt: skip
# Those that take another one's steps, and whose they are.
STEPS = {"reduce": "all_reduce", "gather": "all_to_all", "scatter": "all_to_all"}
ALGORITHMS = ("auto", "shared_memory", "hierarchical", "ring", "halving_doubling", "tree", "gloo")
OPS = ("", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
DTYPES = tuple(
    sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=lambda d: str(d))
)
MOST_DIMS = 8
_LAYOUT = struct.Struct(f"<6h2i{MOST_DIMS}q")
BYTES = _LAYOUT.size
# Where `Call.packed` says that there is a NaN.
NAN_AT = struct.calcsize("<4h")


@dataclass(frozen=True)
class Call:
    """One collective call as a rank sees it: everything that must be the same on all ranks."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    op: str = ""
    root: int = 0
    algorithm: str = "auto"
    has_nan: bool = False
    #: The number of calls in the coalesced call that this one is part of.
    coalesced: int = 1

    @property
    def steps(self) -> str:
        """The collective whose steps it takes, and whose prices are its own."""
        return STEPS.get(self.kind, self.kind)

    @cached_property
    def packed(self) -> bytes:
        """`BYTES` bytes that are equal exactly where the calls are."""
        dims = self.shape
        if len(dims) > MOST_DIMS:
            # The last dims are told by their product.
            dims = (*dims[: MOST_DIMS - 1], torch.Size(dims[MOST_DIMS - 1 :]).numel())
        return _LAYOUT.pack(
            KINDS.index(self.kind), DTYPES.index(self.dtype), OPS.index(self.op),
            ALGORITHMS.index(self.algorithm), self.has_nan, len(self.shape), self.root,
            self.coalesced, *dims, *(0,) * (MOST_DIMS - len(dims)),
        )  # fmt: skip

    @staticmethod
    def unpack(raw: bytes) -> "Call":
        """The call that `packed` tells."""
        kind, dtype, op, algorithm, has_nan, ndim, root, coalesced, *dims = _LAYOUT.unpack(raw)
        names = KINDS[kind], tuple(dims[:ndim]), DTYPES[dtype], OPS[op], root, ALGORITHMS[algorithm]
        return Call(*names, bool(has_nan), coalesced)

    def __str__(self) -> str:
        parts = [f"shape {self.shape}", str(self.dtype)]
        if self.op:
            parts.append(self.op)
        if self.kind in ("broadcast", *STEPS):
            way = "to" if self.kind in ("reduce", "gather") else "from"
            parts.append(f"{way} rank {self.root}")
        if self.algorithm != "auto":
            parts.append(f"algorithm {self.algorithm}")
        if self.coalesced > 1:
            parts.append(f"one of {self.coalesced} coalesced")
        return f"{self.kind}({', '.join(parts)})"


def compare(packed: Sequence[bytes], names: Sequence[int]) -> None:
    """Raise Mismatch, the same on every rank, unless all ranks packed the same sound call.

    `names` are the ranks' numbers, in the order of `packed`.
    """
    if packed.count(packed[0]) == len(packed) and not packed[0][NAN_AT]:
        return
    calls = [Call.unpack(raw) for raw in packed]
    with_nan = [rank for rank, call in zip(names, calls, strict=True) if call.has_nan]
    calls = [replace(call, has_nan=False) for call in calls]
    usual, times = Counter(calls).most_common(1)[0]
    if times == len(calls):
        raise Mismatch(f"{names_of(with_nan)} brought a NaN to {usual}", with_nan)
    odd = {rank: call for rank, call in zip(names, calls, strict=True) if call != usual}
    told = "; ".join(f"rank {rank} called {call}" for rank, call in odd.items())
    raise Mismatch(
        f"ranks disagree: {told}; rank {names[calls.index(usual)]} called {usual}. "
        "All ranks must make the same calls in the same order",
        tuple(odd),
    )


@dataclass(frozen=True)
class Lengths:
    """What a rank brings to an all-to-all, in elements: so much to each rank, and from each."""

    sends: list[int]
    receives: list[int]


def compare_lengths(lengths: Mapping[int, Lengths], names: Sequence[int]) -> None:
    """Raise Mismatch, the same on every rank, unless each rank expects what the others send it.

    The keys are places in `names`, the ranks' numbers; ranks that are not known are left out.
    """
    wrong = [
        (source, to)
        for source in lengths
        for to in lengths
        if lengths[source].sends[to] != lengths[to].receives[source]
    ]
    if wrong:
        told = "; ".join(
            f"rank {names[source]} sends {lengths[source].sends[to]} elements to rank {names[to]}, "
            f"which expects {lengths[to].receives[source]}"
            for source, to in wrong
        )
        raise Mismatch(
            f"all_to_all cannot be done: {told}. output_split_sizes[i] on rank j must be "
            "input_split_sizes[j] on rank i",
            sorted({names[place] for pair in wrong for place in pair}),
        )


def gather_by_messages(wire: PointToPoint, own: bytes) -> list[bytes]:
    """All ranks' bytes, as many from each: at step k a rank tells rank+2^k all it has heard."""
    rank, world = wire.rank, wire.world
    heard = torch.zeros(world, len(own), dtype=torch.uint8)
    heard[0] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    have = 1
    while have < world:
        more = min(have, world - have)
        wire.exchange(
            [((rank - have) % world, heard[:more].view(-1))],
            [((rank + have) % world, heard[have : have + more].view(-1))],
        )
        have += more
    # Row i is rank+i's.
    return [row.numpy().tobytes() for row in heard.roll(rank, dims=0)]


def has_nan(tensor: Tensor) -> bool:
    """Whether any element is a NaN."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    return bool(tensor.isnan().any())


def names_of(ranks: Sequence[int]) -> str:
    """Ranks in words."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
