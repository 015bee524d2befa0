"""The minimal implementation of bucketed data parallelism. `DDP` computes the same gradients.

1. Replicate: every rank starts with the weights of rank 0. The caller passes a different part of
   the batch to each rank.
2. Mark ready: autograd calls a hook when the gradient of a parameter is final.
3. Copy in: the hook copies the gradient into a bucket, next to other gradients. One large
   all-reduce is cheaper than many small ones.
4. Launch: a full bucket is summed over the ranks while autograd computes the remaining gradients.
5. Finish: after the backward pass, wait for the all-reduces that are still running.

Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
"""

import torch
import torch.distributed as dist
from torch import nn


class Bucket:
    """Parameters whose gradients are reduced together, in one flat buffer."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        sizes = [parameter.numel() for parameter in parameters]
        self.buffer = parameters[0].new_zeros(sum(sizes))
        #: One view per gradient, in the shape of its parameter.
        self.views = []
        for parameter, piece in zip(parameters, self.buffer.split(sizes), strict=True):
            self.views.append(piece.view_as(parameter))
        self.num_ready = 0
        self.work: dist.Work | None = None

    def copy_in(self, slot: int, scale: float) -> None:
        """Copy a scaled gradient into the buffer, and make `.grad` a view of the buffer."""
        parameter = self.parameters[slot]
        assert parameter.grad is not None
        torch.mul(parameter.grad, scale, out=self.views[slot])
        parameter.grad = self.views[slot]
        self.num_ready += 1


class PlainDDP(nn.Module):
    """A replica of a module. Call `finish_gradient_synchronization()` after each `backward()`."""

    def __init__(self, module: nn.Module, bucket_bytes: int = 25 * 2**20) -> None:
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), 0)
        self.buckets = self.assign_buckets(bucket_bytes)
        self.num_launched = 0
        for bucket in self.buckets:
            for slot, parameter in enumerate(bucket.parameters):
                # Autograd calls the hook when the gradient of the parameter is final.
                parameter.register_post_accumulate_grad_hook(
                    lambda _, bucket=bucket, slot=slot: self.mark_ready(bucket, slot)
                )

    def assign_buckets(self, bucket_bytes: int) -> list[Bucket]:
        """Fill buckets in reverse order of registration, the usual order of gradients."""
        groups: list[list[nn.Parameter]] = []
        free_bytes = 0
        for parameter in reversed([p for p in self.module.parameters() if p.requires_grad]):
            size = parameter.numel() * parameter.element_size()
            if not groups or size > free_bytes or parameter.dtype != groups[-1][0].dtype:
                groups.append([])
                free_bytes = bucket_bytes
            groups[-1].append(parameter)
            free_bytes -= size
        return [Bucket(group) for group in groups]

    def mark_ready(self, bucket: Bucket, slot: int) -> None:
        """Copy in the final gradient of a parameter, and launch the buckets that are now full."""
        # The sum over ranks of grad / world_size is the mean.
        bucket.copy_in(slot, 1 / dist.get_world_size())
        self.launch_ready_buckets()

    def launch_ready_buckets(self) -> None:
        """Launch full buckets in index order, so that ranks sum the same buckets."""
        while self.num_launched < len(self.buckets):
            bucket = self.buckets[self.num_launched]
            if bucket.num_ready < len(bucket.parameters):
                return
            self.launch_all_reduce(bucket)
            self.num_launched += 1

    def launch_all_reduce(self, bucket: Bucket) -> None:
        """Start summing a bucket over the ranks."""
        bucket.work = dist.all_reduce(bucket.buffer, async_op=True)

    def finish_gradient_synchronization(self) -> None:
        """Wait for every all-reduce; afterwards each `.grad` is the mean over the ranks."""
        for bucket in self.buckets:
            assert bucket.work is not None, "expected a gradient of every parameter"
            bucket.work.wait()
            bucket.work = None
            bucket.num_ready = 0
        self.num_launched = 0

    def forward(self, *inputs: object) -> object:
        """Call the module."""
        return self.module(*inputs)
