"""Parameters of a ShardedOptimizer, as views of flat tensors of which each rank steps a shard."""

from __future__ import annotations

from torch import Tensor, nn

from zero.optimizer.gradient_buckets import Bucket, make_buckets
from zero.optimizer.gradient_reducer import GradientReducer
from zero.optimizer.optimizer_kinds import Split
from zero.parameter_checks import has_same_elements, is_trainable_dtype
from zero.partition import Piece, partition_by_element, partition_by_parameter
from zero.process_groups import Communicator


class FlatParameters:
    """Flat tensors of parameters, one per group, dtype and device, and this rank's shards."""

    def __init__(self, communicator: Communicator, bucket_bytes: int) -> None:
        self.communicator = communicator
        self.bucket_bytes = bucket_bytes
        #: Each parameter's view of a flat tensor.
        self.views: dict[nn.Parameter, Tensor] = {}
        #: For each of this rank's shards: its parameter, its elements, the inner optimizer's view,
        #: and its bucket.
        self.shards: list[tuple[nn.Parameter, Piece, nn.Parameter, Bucket]] = []
        self._buckets: list[Bucket] = []

    def add(
        self, parameters: list[nn.Parameter], split: Split, reducer: GradientReducer
    ) -> list[nn.Parameter]:
        """Turn parameters of one dtype and device into views of a flat tensor.

        Return this rank's shards. The parameters get rank 0's values, and `reducer` averages their
        gradients. Every rank must call this method.
        """
        numels = [parameter.numel() for parameter in parameters]
        make_partition = partition_by_element if split == "elements" else partition_by_parameter
        bucket_numel = self.bucket_bytes // parameters[0].element_size()
        partition = make_partition(numels, self.communicator.world, bucket_numel)
        flat = parameters[0].new_zeros(partition.numel)
        for parameter, offset in zip(parameters, partition.offsets, strict=True):
            view = flat[offset : offset + parameter.numel()].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            self.views[parameter] = view
        self.communicator.broadcast(flat, 0).wait()
        self.communicator.pop_bytes()
        buckets = make_buckets(partition, flat, parameters, self.communicator.rank)
        self._buckets += buckets
        is_trainable = is_trainable_dtype(flat.dtype)
        if is_trainable:
            reducer.add(buckets, partition)
        shards = []
        for bucket in buckets:
            for parameter, piece in bucket.shard_pieces:
                values = flat[piece.offset : piece.offset + piece.numel]
                if split == "parameters":
                    values = values.view(parameter.shape)
                shard = nn.Parameter(values, requires_grad=is_trainable)
                # Some optimizers read attributes that models set.
                shard.__dict__.update(vars(parameter))
                self.shards.append((parameter, piece, shard, bucket))
                shards.append(shard)
        return shards

    def restore_views(self) -> list[nn.Parameter]:
        """Copy `.data` into the flat tensors wherever the caller has replaced it.

        Return the affected parameters. Raise RuntimeError if a shape, dtype or device has changed.
        """
        flat_storages = {view.untyped_storage().data_ptr() for view in self.views.values()}
        replaced: list[tuple[nn.Parameter, Tensor]] = []
        for parameter, view in self.views.items():
            data = parameter.data
            is_at_view = data.data_ptr() == view.data_ptr() and data.stride() == view.stride()
            if is_at_view and has_same_elements(data, view):
                continue
            if (data.shape, data.dtype, data.device) != (view.shape, view.dtype, view.device):
                raise RuntimeError(
                    f"expected a parameter of {tuple(view.shape)} {view.dtype} on {view.device}, "
                    f"got {tuple(data.shape)} {data.dtype} on {data.device}: construct "
                    "ShardedOptimizer after the model has its final shapes, dtype and device"
                )
            if data.untyped_storage().data_ptr() in flat_storages:
                # The caller may have swapped or transposed parameters. Copying into one view would
                # then overwrite the values of another parameter.
                data = data.clone()
            replaced.append((parameter, data))
        for parameter, data in replaced:
            view = self.views[parameter]
            view.copy_(data)
            parameter.data = view
        return [parameter for parameter, _ in replaced]

    def restore_shards(self) -> None:
        """Copy `.data` of shards into the flat tensors wherever the optimizer has replaced it."""
        for _, piece, shard, bucket in self.shards:
            start = piece.offset - bucket.span.start
            values = bucket.data[start : start + piece.numel].view(shard.shape)
            if shard.data_ptr() != values.data_ptr():
                values.copy_(shard.detach())
                shard.data = values

    def gather(self) -> None:
        """Gather the stepped shards of all ranks into the parameters; every rank must call it."""
        works = []
        for bucket in self._buckets:
            owner = bucket.span.owner
            if owner is None:
                works.append(self.communicator.all_gather(bucket.data, bucket.shard))
            else:
                works.append(self.communicator.broadcast(bucket.data, owner))
        for work in works:
            work.wait()
