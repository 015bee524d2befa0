"""The whole idea of this package on one page, to be read first. It trains; `DDP` equals it.

    replicate     every rank has the same weights, and its own part of the batch
    hook          autograd calls us for each parameter, when its gradient is final
    bucket        gradients are copied side by side, because one long message beats many short ones
    all-reduce    a bucket that is full is summed over the ranks while autograd goes on
    wait          at the end of the backward pass, for what is still under way

Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
"""

import torch
import torch.distributed as dist
from torch import nn


class Bucket:
    """Parameters whose gradients travel together, in one flat tensor."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        numel = sum(parameter.numel() for parameter in parameters)
        self.flat = torch.zeros(numel, dtype=parameters[0].dtype)
        # Each gradient has its place: summing the flat tensor sums them all, where they lie.
        pieces = self.flat.split([parameter.numel() for parameter in parameters])
        self.places = [
            piece.view_as(parameter) for piece, parameter in zip(pieces, parameters, strict=True)
        ]
        self.ready = 0
        self.work: dist.Work | None = None


class PlainDDP(nn.Module):
    """Wrap `module`; after `backward()` call `finish_gradient_synchronization()`."""

    def __init__(self, module: nn.Module, bucket_bytes: int = 25 * 2**20) -> None:
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), 0)
        self.buckets = self.assign(bucket_bytes)
        self.next_to_send = 0
        for bucket in self.buckets:
            for parameter, place in zip(bucket.parameters, bucket.places, strict=True):
                parameter.register_post_accumulate_grad_hook(self.make_hook(bucket, place))

    def assign(self, bucket_bytes: int) -> list[Bucket]:
        """Fill buckets in the order in which gradients become ready: the last layer's first."""
        runs: list[list[nn.Parameter]] = []
        room = 0
        for parameter in reversed([p for p in self.module.parameters() if p.requires_grad]):
            size = parameter.numel() * parameter.element_size()
            if not runs or size > room or parameter.dtype != runs[-1][0].dtype:
                runs.append([])
                room = bucket_bytes
            runs[-1].append(parameter)
            room -= size
        return [Bucket(run) for run in runs]

    def make_hook(self, bucket: Bucket, place: torch.Tensor):  # type: ignore[no-untyped-def]
        """What autograd calls when this parameter's gradient is final."""

        def gradient_is_final(parameter: torch.Tensor) -> None:
            # The sum over ranks of g / world is the mean; from here on `.grad` is in the bucket.
            assert parameter.grad is not None
            torch.mul(parameter.grad, 1 / dist.get_world_size(), out=place)
            parameter.grad = place
            bucket.ready += 1
            self.send_what_is_full()

        return gradient_is_final

    def send_what_is_full(self) -> None:
        """Start the sums in one order, the same on every rank, or they would be mixed up."""
        while self.next_to_send < len(self.buckets):
            bucket = self.buckets[self.next_to_send]
            if bucket.ready < len(bucket.parameters):
                return
            bucket.work = dist.all_reduce(bucket.flat, async_op=True)
            self.next_to_send += 1

    def finish_gradient_synchronization(self) -> None:
        """Wait for every sum; the earlier ones have long ended behind the backward pass."""
        for bucket in self.buckets:
            assert bucket.work is not None, "every parameter needs a gradient"
            bucket.work.wait()
            bucket.ready, bucket.work = 0, None
        self.next_to_send = 0

    def forward(self, *inputs: object) -> object:
        """Call the module."""
        return self.module(*inputs)
