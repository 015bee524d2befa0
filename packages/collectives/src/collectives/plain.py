"""The textbook's collectives, written with send and receive alone: the whole idea in one file.

n ranks hold a tensor x of S bytes each, and every one is to end with the sum of all. Three ways:

    ring               2(n-1) messages, 2(n-1)/n S bytes sent a rank     long tensors
    halving-doubling   2 log n messages, the same bytes                  n a power of two
    tree               2 log n messages, up to 2 log n S bytes           short tensors

(Thakur, Rabenseifner and Gropp, 2005; Patarasuk and Yuan, 2009.) An all-reduce is a reduce-scatter,
after which each rank owns one slice of the sum, and an all-gather, which is the same film backwards
with copies in place of sums. Everything else in this package is these loops made fast, checked and
safe to fail.

Notable: slices may differ by one element, and nothing here assumes that n divides the tensor.
"""

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


def exchange(send: Tensor, to: int, receive: Tensor, source: int, group: Group = None) -> None:
    """Send one tensor and receive another at once: neither rank waits for the other to begin."""
    sent = dist.isend(send, group=group, group_dst=to) if send.numel() else None
    received = dist.irecv(receive, group=group, group_src=source) if receive.numel() else None
    for work in (sent, received):
        if work is not None:
            work.wait()


def ring_reduce_scatter(x: Tensor, group: Group = None) -> Tensor:
    """Leave the sum of slice r in rank r's x; the other slices of x are scratch afterwards."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    slices = x.tensor_split(n)
    right, left = (rank + 1) % n, (rank - 1) % n
    for step in range(1, n):
        # The sum that rank r will own starts at rank r+1 and comes around through all others.
        leaving, growing = slices[(rank - step) % n], slices[(rank - step - 1) % n]
        arrived = torch.empty_like(growing)
        exchange(leaving, right, arrived, left, group)
        growing += arrived
    return slices[rank]


def ring_all_gather(x: Tensor, group: Group = None) -> None:
    """Fill every slice of x with its owner's: at each step, pass on what came in the last one."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    slices = x.tensor_split(n)
    right, left = (rank + 1) % n, (rank - 1) % n
    for step in range(n - 1):
        exchange(slices[(rank - step) % n], right, slices[(rank - step - 1) % n], left, group)


def ring_all_reduce(x: Tensor, group: Group = None) -> None:
    """x = the sum of all ranks' x: every link carries 2(n-1)/n of it, the least there can be."""
    ring_reduce_scatter(x, group)
    ring_all_gather(x, group)


def halving_doubling_all_reduce(x: Tensor, group: Group = None) -> None:
    """The same bytes in log n steps: partners at distance n/2, n/4, ... trade halves of a range."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if n & (n - 1):
        raise ValueError(f"halving-doubling takes a power of two of ranks, not {n}")
    low, high = 0, x.numel()
    given: list[tuple[int, tuple[int, int]]] = []
    distance = n // 2
    while distance:
        partner, middle = rank ^ distance, (low + high) // 2
        keep, give = (low, middle), (middle, high)
        if rank & distance:
            keep, give = give, keep
        arrived = torch.empty_like(x[slice(*keep)])
        exchange(x[slice(*give)], partner, arrived, partner, group)
        x[slice(*keep)] += arrived
        given.append((partner, give))
        (low, high), distance = keep, distance // 2
    # Backwards: what was given away comes back as a finished sum.
    for partner, (first, last) in reversed(given):
        exchange(x[low:high], partner, x[first:last], partner, group)
        low, high = min(low, first), max(high, last)


def tree_reduce(x: Tensor, group: Group = None) -> None:
    """Leave the sum in rank 0: at distance 1, 2, 4, ... every second rank hands its sum down."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    nothing, distance = x[:0], 1
    while distance < n:
        if rank % (2 * distance) == distance:
            exchange(x, rank - distance, nothing, rank - distance, group)
        elif rank % (2 * distance) == 0 and rank + distance < n:
            arrived = torch.empty_like(x)
            exchange(nothing, rank + distance, arrived, rank + distance, group)
            x += arrived
        distance *= 2


def tree_broadcast(x: Tensor, group: Group = None) -> None:
    """Give every rank the x of rank 0: the ranks that have it double with each step."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    nothing, distance = x[:0], 1
    while distance < n:
        if rank < distance and rank + distance < n:
            exchange(x, rank + distance, nothing, rank + distance, group)
        elif distance <= rank < 2 * distance:
            exchange(nothing, rank - distance, x, rank - distance, group)
        distance *= 2


def tree_all_reduce(x: Tensor, group: Group = None) -> None:
    """x = the sum of all ranks' x in 2 log n messages: what counts where messages are short."""
    tree_reduce(x, group)
    tree_broadcast(x, group)
