"""How a bucket is summed over the ranks: as it is, in fewer bits, or as a low-rank product.

Each way is a generator that yields after every call it starts and is resumed when that call has
ended, so that a way of two calls overlaps with the backward pass as well as a way of one.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.bucket import Bucket
from ddp.collective import Link


@dataclass(frozen=True)
class Call:
    """A collective under way: what it carries for gradients, and for flags and padding."""

    handle: Any
    gradient_bytes: int
    extra_bytes: int
    last: bool = True


Exchange = Generator[Call, None, None]


class Compression(Protocol):
    """A way to leave in `bucket.buffer` its sum over the ranks."""

    def exchange(self, bucket: Bucket, link: Link) -> Exchange:
        """Yield each call that was started; resumed when it has ended."""


@dataclass(frozen=True)
class Uncompressed:
    """One all-reduce, where the gradients lie."""

    def exchange(self, bucket: Bucket, link: Link) -> Exchange:
        """Sum the buffer in place."""
        handle = link.all_reduce(bucket.buffer, async_op=True)
        yield Call(handle, _bytes(bucket.gradients), _bytes(bucket.flags))


@dataclass(frozen=True)
class Cast:
    """Send `dtype`, add in the bucket's own dtype: each gradient is rounded twice, not once a rank.

    Every rank sends slice i of its gradients to rank i, which adds them unrounded and returns the
    rounded sum to all: the bytes of an all-reduce in `dtype`. An all-reduce that was passed in is
    handed the rounded buffer instead, and adds in the precision that it chooses.
    """

    dtype: torch.dtype

    def exchange(self, bucket: Bucket, link: Link) -> Exchange:
        """Sum the buffer, rounding on the way out and on the way back."""
        buffer, width = bucket.buffer, self.dtype.itemsize
        if width >= buffer.element_size():
            yield from Uncompressed().exchange(bucket, link)
            return
        numel, gradient_bytes = buffer.numel(), bucket.gradients.numel() * width
        if link.given:
            wire = buffer.to(self.dtype)
            handle = link.all_reduce(wire, async_op=True)
            yield Call(handle, gradient_bytes, numel * width - gradient_bytes)
        else:
            share = -(-numel // link.world)
            wire = torch.zeros(share * link.world, dtype=self.dtype, device=buffer.device)
            wire[:numel] = buffer
            theirs = torch.empty_like(wire)
            handle = dist.all_to_all_single(theirs, wire, group=link.group, async_op=True)
            extra_bytes = wire.numel() * width - gradient_bytes
            yield Call(handle, gradient_bytes, extra_bytes, last=False)
            mine = theirs.view(link.world, share).to(buffer.dtype).sum(0).to(self.dtype)
            handle = dist.all_gather_into_tensor(wire, mine, group=link.group, async_op=True)
            # The second half of the same all-reduce: its array is counted once.
            yield Call(handle, 0, 0)
        buffer.copy_(wire[:numel])


class PowerSGD:
    """Send each matrix as a product of two thin ones (Vogels et al. 2019, Algorithm 1).

    A gradient M of shape (n, m), with what earlier steps left out added, becomes P = M Q averaged
    and orthonormalized, then Q = M^T P averaged; P Q^T is used, and M - P Q^T kept for the next
    step. (n + m) `rank` numbers travel for n m. Parameters for which that saves less than half, and
    vectors, travel whole. Costs one more set of gradients in memory, for what was left out.
    """

    def __init__(self, rank: int = 4, *, seed: int = 0) -> None:
        if rank < 1:
            raise ValueError(f"rank is {rank}; it must be at least 1")
        self.rank = rank
        self._seed = seed
        self._left_out: dict[int, Tensor] = {}
        self._q: dict[int, Tensor] = {}

    def __repr__(self) -> str:
        return f"PowerSGD(rank={self.rank}, seed={self._seed})"

    def exchange(self, bucket: Bucket, link: Link) -> Exchange:
        """Two all-reduces: P with all that travels whole, then Q."""
        thin = [slot for slot, view in enumerate(bucket.views) if self._pays(view)]
        whole = [_real(view) for slot, view in enumerate(bucket.views) if slot not in thin]
        targets = {slot: bucket.views[slot].flatten(1) for slot in thin}
        matrices = {slot: self._matrix(bucket, slot, link.world) for slot in thin}
        ps = [matrices[slot] @ self._q[bucket.indices[slot]] / link.world for slot in thin]

        first = _pack([*ps, *whole, bucket.flags])
        yield _sum(first, link, extra=bucket.flags.numel() * first.element_size(), last=not thin)
        *packed, flags = _unpack(first, [*ps, *whole, bucket.flags])
        bucket.flags.copy_(flags)
        for view, summed in zip(whole, packed[len(thin) :], strict=True):
            view.copy_(summed)
        if not thin:
            return
        ps = [torch.linalg.qr(summed)[0] for summed in packed[: len(thin)]]
        qs = [matrices[slot].T @ p / link.world for slot, p in zip(thin, ps, strict=True)]

        second = _pack(qs)
        yield _sum(second, link)
        for slot, p, q in zip(thin, ps, _unpack(second, qs), strict=True):
            self._q[bucket.indices[slot]] = q.clone()
            approximation = p @ q.T
            targets[slot].copy_(approximation)
            matrices[slot].sub_(approximation)

    def _pays(self, view: Tensor) -> bool:
        if view.dim() < 2 or not view.numel() or view.is_complex():
            return False
        rows, columns = view.flatten(1).shape
        return 2 * self.rank * (rows + columns) <= rows * columns

    def _matrix(self, bucket: Bucket, slot: int, world: int) -> Tensor:
        """This rank's own gradient plus what was left out; it becomes what is left out next."""
        index, gradient = bucket.indices[slot], bucket.views[slot].flatten(1)
        wide = torch.promote_types(gradient.dtype, torch.float32)
        if index not in self._left_out:
            self._left_out[index] = torch.zeros_like(gradient, dtype=wide)
            generator = torch.Generator().manual_seed(self._seed + index)
            q = torch.randn(gradient.shape[1], self.rank, generator=generator, dtype=wide)
            self._q[index] = q.to(gradient.device)
        # The bucket holds each rank's share of the mean.
        return self._left_out[index].add_(gradient, alpha=world)


def _sum(packed: Tensor, link: Link, *, extra: int = 0, last: bool = True) -> Call:
    return Call(link.all_reduce(packed, async_op=True), _bytes(packed) - extra, extra, last)


def _pack(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unpack(packed: Tensor, like: list[Tensor]) -> list[Tensor]:
    pieces = torch.split(packed, [tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def _real(view: Tensor) -> Tensor:
    return torch.view_as_real(view) if view.is_complex() else view


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
