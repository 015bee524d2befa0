"""The minimal implementation: textbook collectives, written with send and receive alone.

Each of n ranks has a tensor x of S bytes. An all-reduce stores the sum of these tensors on
every rank. Two algorithms compute it:

    ring   2(n-1) messages in sequence, 2(n-1)/n S bytes sent per rank     long tensors
    tree   2L messages in sequence, at most L S bytes sent per rank        short tensors

Here L is log2 n, rounded up. The ring is a reduce-scatter followed by an all-gather. After the
reduce-scatter, each rank owns one slice of the sum. The all-gather sends the slices around the same
ring and copies instead of adding. Slices may differ by one element: the number of ranks need not
divide the length of the tensor. The tree is a reduce to rank 0 followed by a broadcast. The other
files of this package make these loops fast, validate calls and handle failures.

Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, 2005.
Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, 2009.
"""

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


def exchange(send: Tensor, target: int, receive: Tensor, source: int, group: Group = None) -> None:
    """Send and receive at the same time, so that ranks do not deadlock; skip empty tensors."""
    sending = dist.isend(send, group=group, group_dst=target) if send.numel() else None
    receiving = dist.irecv(receive, group=group, group_src=source) if receive.numel() else None
    for work in (sending, receiving):
        if work is not None:
            work.wait()


def ring_reduce_scatter(x: Tensor, group: Group = None) -> Tensor:
    """Return this rank's slice of x, which now contains the sum; overwrite the other slices."""
    rank = dist.get_rank(group)
    n = dist.get_world_size(group)
    slices = x.tensor_split(n)
    right, left = (rank + 1) % n, (rank - 1) % n
    for step in range(1, n):
        # The sum that rank r will own starts at rank r+1 and visits all other ranks.
        outgoing = slices[(rank - step) % n]
        partial_sum = slices[(rank - step - 1) % n]
        received = torch.empty_like(partial_sum)
        exchange(outgoing, right, received, left, group)
        partial_sum += received
    return slices[rank]


def ring_all_gather(x: Tensor, group: Group = None) -> None:
    """Copy each slice of x from its owner: a step forwards the slice of the previous step."""
    rank = dist.get_rank(group)
    n = dist.get_world_size(group)
    slices = x.tensor_split(n)
    right, left = (rank + 1) % n, (rank - 1) % n
    for step in range(n - 1):
        exchange(slices[(rank - step) % n], right, slices[(rank - step - 1) % n], left, group)


def ring_all_reduce(x: Tensor, group: Group = None) -> None:
    """Replace x with the sum over all ranks; each link carries 2(n-1)/n S bytes, the optimum."""
    ring_reduce_scatter(x, group)
    ring_all_gather(x, group)


def tree_reduce(x: Tensor, group: Group = None) -> None:
    """Store the sum on rank 0; for d = 1, 2, 4, ..., rank r + d sends its partial sum to rank r."""
    rank = dist.get_rank(group)
    n = dist.get_world_size(group)
    empty = x[:0]  # The message in the other direction, which `exchange` omits.
    distance = 1
    while distance < n:
        if rank % (2 * distance) == distance:
            exchange(x, rank - distance, empty, rank - distance, group)
        elif rank % (2 * distance) == 0 and rank + distance < n:
            received = torch.empty_like(x)
            exchange(empty, rank + distance, received, rank + distance, group)
            x += received
        distance *= 2


def tree_broadcast(x: Tensor, group: Group = None) -> None:
    """Copy rank 0's x to every rank: each step doubles the number of ranks that have it."""
    rank = dist.get_rank(group)
    n = dist.get_world_size(group)
    empty = x[:0]
    distance = 1
    while distance < n:
        if rank < distance and rank + distance < n:
            exchange(x, rank + distance, empty, rank + distance, group)
        elif distance <= rank < 2 * distance:
            exchange(empty, rank - distance, x, rank - distance, group)
        distance *= 2


def tree_all_reduce(x: Tensor, group: Group = None) -> None:
    """Replace x with the sum over all ranks; for short tensors, the number of messages matters."""
    tree_reduce(x, group)
    tree_broadcast(x, group)
