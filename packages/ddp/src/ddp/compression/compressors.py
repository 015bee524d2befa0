"""Reductions that send a compressed bucket: `Cast` to another dtype, and low-rank `PowerSGD`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ddp.bucket import Bucket
from ddp.communication import Collective, Compression, Uncompressed, tensor_bytes
from ddp.process_group import ReduceGroup


@dataclass(frozen=True)
class Cast(Compression):
    """Send gradients in `dtype`, and add them in the bucket's dtype if it is at least as wide.

    Each rank sends slice i of its gradients to rank i, which adds the slices unrounded and sends
    the rounded sum to all ranks. Each gradient is thus rounded twice, not once per rank, and as
    many bytes are sent as by an all-reduce in `dtype`. An all-reduce that the caller passed
    receives the rounded buffer instead, and adds in the precision that it chooses. A wider `dtype`
    is also used for the addition, in one all-reduce of the converted buffer.
    """

    dtype: torch.dtype

    def launch(self, bucket: Bucket, group: ReduceGroup) -> Collective:
        """Launch the all-to-all that sends the rounded slices."""
        buffer = bucket.buffer
        if self.dtype == buffer.dtype:
            return Uncompressed().launch(bucket, group)
        if group.custom_all_reduce or self.dtype.itemsize > buffer.element_size():
            return self._launch_all_reduce(bucket, group)
        slice_numel = -(-buffer.numel() // group.world_size)  # rounded up
        rounded = torch.zeros(
            slice_numel * group.world_size, dtype=self.dtype, device=buffer.device
        )
        rounded[: buffer.numel()] = buffer
        received = torch.empty_like(rounded)
        process_group = group.process_group
        work = dist.all_to_all_single(received, rounded, group=process_group, async_op=True)

        def store() -> None:
            buffer.copy_(rounded[: buffer.numel()])

        def add_and_gather() -> Collective:
            slices = received.view(group.world_size, slice_numel)
            total = slices.to(buffer.dtype).sum(0).to(self.dtype)
            gather = dist.all_gather_into_tensor(rounded, total, group=process_group, async_op=True)
            # The second half of an all-reduce: its bytes were counted by the first half.
            return Collective(gather, 0, 0, store)

        gradient_bytes = bucket.gradients.numel() * self.dtype.itemsize
        extra_bytes = tensor_bytes(rounded) - gradient_bytes
        return Collective(work, gradient_bytes, extra_bytes, add_and_gather, has_next=True)

    def _launch_all_reduce(self, bucket: Bucket, group: ReduceGroup) -> Collective:
        rounded = bucket.buffer.to(self.dtype)
        work = group.all_reduce(rounded, async_op=True)
        gradient_bytes = bucket.gradients.numel() * self.dtype.itemsize

        def store() -> None:
            bucket.buffer.copy_(rounded)

        return Collective(work, gradient_bytes, tensor_bytes(rounded) - gradient_bytes, store)


class PowerSGD(Compression):
    """Send each matrix as a product of two thin matrices (Vogels et al. 2019, Algorithm 1).

    The residual of earlier steps is added to a gradient M of shape (n, m). Then P = M Q is averaged
    and orthonormalized, and Q = M^T P is averaged. The product P Q^T replaces the gradient, and
    M - P Q^T is the residual that is carried over to the next step. This sends (n + m) `rank`
    numbers instead of n m. Vectors, and matrices for which that saves less than half, are sent
    uncompressed. The residuals take as much memory as a set of gradients.

    A residual belongs to a parameter, so several models can use one `PowerSGD`. A step in which no
    rank has a gradient keeps the residual. A gradient that is not finite resets it, because
    otherwise it would stay NaN. Copies and pickles of a `PowerSGD` have no residuals.
    """

    def __init__(self, rank: int = 4, *, seed: int = 0) -> None:
        if rank < 1:
            raise ValueError(f"expected rank >= 1, got rank={rank}")
        self.rank = rank
        self._seed = seed
        self._residuals = WeakTensorKeyDictionary()
        self._q = WeakTensorKeyDictionary()

    def __reduce__(self) -> Any:
        return partial(PowerSGD, self.rank, seed=self._seed), ()

    def __repr__(self) -> str:
        return f"PowerSGD(rank={self.rank}, seed={self._seed})"

    def launch(self, bucket: Bucket, group: ReduceGroup) -> Collective:
        """Launch the all-reduce of P and of all uncompressed gradients."""
        compressed = [s for s, view in enumerate(bucket.views) if self._should_compress(view)]
        uncompressed = [
            _as_real(view) for s, view in enumerate(bucket.views) if s not in compressed
        ]
        world_size = group.world_size
        matrices = {slot: self._add_residual(bucket, slot, world_size) for slot in compressed}
        ps = [matrices[slot] @ self._q[bucket.parameters[slot]] / world_size for slot in compressed]
        tensors = [*ps, *uncompressed, bucket.flags]
        first = _pack(tensors)
        work = group.all_reduce(first, async_op=True)
        extra_bytes = bucket.flags.numel() * first.element_size()

        def store_uncompressed() -> list[Tensor]:
            *summed, flags = _unpack(first, tensors)
            bucket.flags.copy_(flags)
            for view, result in zip(uncompressed, summed[len(ps) :], strict=True):
                view.copy_(result)
            return summed[: len(ps)]

        def launch_second() -> Collective | None:
            summed_ps = store_uncompressed()
            if not compressed:
                return None
            orthonormal = [torch.linalg.qr(p)[0] for p in summed_ps]
            return self._launch_second(bucket, group, matrices, orthonormal)

        gradient_bytes = tensor_bytes(first) - extra_bytes
        return Collective(
            work, gradient_bytes, extra_bytes, launch_second, has_next=bool(compressed)
        )

    def _launch_second(
        self, bucket: Bucket, group: ReduceGroup, matrices: dict[int, Tensor], ps: list[Tensor]
    ) -> Collective:
        qs = [
            matrix.T @ p / group.world_size for matrix, p in zip(matrices.values(), ps, strict=True)
        ]
        second = _pack(qs)
        work = group.all_reduce(second, async_op=True)

        def store() -> None:
            for slot, p, q in zip(matrices, ps, _unpack(second, qs), strict=True):
                parameter = bucket.parameters[slot]
                approximation = p @ q.T
                view = bucket.views[slot]
                view.copy_(approximation.view(view.shape))
                # The approximation is not assigned to a parameter without a gradient on any rank.
                matrices[slot].sub_(approximation * ~bucket.is_missing_everywhere(slot))
                # Tensors instead of a branch, which would make the host wait for a GPU.
                is_finite = q.isfinite().all()
                matrices[slot].masked_fill_(~is_finite, 0)
                self._q[parameter] = torch.where(is_finite, q, self._q[parameter])

        return Collective(work, tensor_bytes(second), 0, store)

    def _should_compress(self, view: Tensor) -> bool:
        if view.dim() < 2 or not view.numel() or view.is_complex():
            return False
        rows, columns = view.flatten(1).shape
        return 2 * self.rank * (rows + columns) <= rows * columns

    def _add_residual(self, bucket: Bucket, slot: int, world_size: int) -> Tensor:
        """Return this rank's gradient plus its residual, stored in the next residual's buffer."""
        parameter = bucket.parameters[slot]
        gradient = bucket.views[slot].flatten(1)
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        if parameter not in self._residuals:
            self._residuals[parameter] = torch.zeros_like(gradient, dtype=dtype)
            generator = torch.Generator().manual_seed(self._seed + bucket.indices[slot])
            q = torch.randn(gradient.shape[1], self.rank, generator=generator, dtype=dtype)
            self._q[parameter] = q
        # The model may have been moved or converted since the last step.
        for state in (self._residuals, self._q):
            state[parameter] = state[parameter].to(gradient.device, dtype)
        # The bucket contains this rank's gradient divided by the world size.
        residual: Tensor = self._residuals[parameter]
        return residual.add_(gradient, alpha=world_size)


def _pack(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unpack(packed: Tensor, like: list[Tensor]) -> list[Tensor]:
    pieces = torch.split(packed, [tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def _as_real(view: Tensor) -> Tensor:
    return torch.view_as_real(view) if view.is_complex() else view
