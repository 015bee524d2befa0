"""Stages 1 and 2: every rank steps its own shard of the parameters and gathers the rest.

    backward:  reduce-scatter the gradients, bucket by bucket    S (n-1)/n sent a rank
    step:      the wrapped optimizer, on this rank's elements    1/n of the state and of the work
               all-gather the parameters                         S (n-1)/n sent a rank

`step()` uses gradients averaged over ranks: do not wrap the model in DDP as well.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from zero.faults import difference
from zero.fsdp.unit import home_of
from zero.host import to_host
from zero.optimizer.elementwise import Split, how_to_split
from zero.optimizer.reducer import Bucket, Reducer, make_buckets
from zero.optimizer.state import full_state, load_state, options_of, state_rows_of
from zero.partition import Piece, by_element, by_parameter
from zero.wire import Collective, Group, Wire

# The ShardedOptimizer of each parameter that has one.
_owners = WeakTensorKeyDictionary()


def _owner(parameter: Tensor) -> ShardedOptimizer | None:
    owner: ShardedOptimizer | None = _owners.get(parameter, lambda: None)()
    return owner


class ShardedOptimizer(torch.optim.Optimizer):
    """`optimizer_cls(params, **kwargs)` with its state, and its work, split over the ranks.

    Averages gradients itself, overlapped with backward. After backward `.grad` is an
    AveragedGradient: this rank's share of the average, which torch's GradScaler and clipping take
    as the whole. `shard_gradients=True` is ZeRO's stage 2: each gradient is freed once it is sent.

    elementwise: whether the optimizer treats every element by itself, so that tensors are cut
        anywhere and shards differ by at most one element. This is known for torch's optimizers. Of
        any other class each parameter is whole on one rank, after a trial has shown no dependence
        on other parameters. True: tensors are cut, after a trial of 50 steps has shown no
        difference. False: parameters are whole, without a trial.
    bucket_size_mb: how much one collective carries; what arrives is held beside it until then.
    cpu_offload: the state, and its step, are the host's, on copies of this rank's elements.
    reduce_scatter_tensor, all_gather_into_tensor, all_reduce: stand in for torch.distributed's.

    At construction parameters become views of one flat tensor for each group and dtype, and take
    rank 0's values. Source: Rajbhandari et al. 2020, ZeRO, section 5.
    """

    def __init__(
        self,
        params: Any,
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        group: Group = None,
        shard_gradients: bool = False,
        elementwise: bool | None = None,
        bucket_size_mb: float = 8.0,
        cpu_offload: bool = False,
        reduce_scatter_tensor: Collective | None = None,
        all_gather_into_tensor: Collective | None = None,
        all_reduce: Collective | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(params, Tensor):
            raise TypeError("params is one tensor: pass model.parameters() or parameter groups")
        given = list(params)
        if not given:
            raise ValueError("empty parameter list: pass model.parameters() or parameter groups")
        self.wire = Wire(
            group,
            reduce_scatter_tensor=reduce_scatter_tensor,
            all_gather_into_tensor=all_gather_into_tensor,
            all_reduce=all_reduce,
        )
        self._cls, self._options, self._elementwise = optimizer_cls, kwargs, elementwise
        self.cpu_offload = cpu_offload
        # How each group is split.
        self.splits: list[Split] = []
        self.bucket_bytes = int(bucket_size_mb * 2**20)
        self.reducer = Reducer(self.wire, release=shard_gradients)
        self._buckets: list[Bucket] = []
        self._pieces: list[tuple[nn.Parameter, Piece, nn.Parameter, Bucket]] = []
        self._mine: list[list[nn.Parameter]] = []
        # With cpu_offload, what the shards are copies of.
        self._device_values: list[Tensor] = []
        # Each parameter's place in a flat tensor.
        self._places: dict[nn.Parameter, Tensor] = {}
        self.inner: torch.optim.Optimizer
        # Some need keys of their own in each group.
        first = options_of(given[0]) if isinstance(given[0], dict) else {}
        one = nn.Parameter(torch.zeros(1, 1, device="cpu"))
        sample = optimizer_cls([{**first, "params": [one]}], **kwargs)
        # A function may have been passed instead of the class.
        self._kind = type(sample)
        super().__init__(given, sample.defaults)
        # Made with all groups at once, for optimizers that set up their state when they are made.
        groups = zip(self.param_groups, self._mine, strict=True)
        self.inner = optimizer_cls([{**options_of(g), "params": p} for g, p in groups], **kwargs)
        # Steps after which the ranks compare whether they keep any state.
        self._unsure = 2
        self.show_state(False)
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            outer.update(options_of(inner))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Shard one more group of parameters; every rank adds the same group."""
        given = param_group["params"]
        given = [given] if isinstance(given, Tensor) else list(given)
        param_group = {**param_group, "params": given}
        self._check_no_twins(given)
        self._check_nobodys(given)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self._check_ranks_agree(group["params"])
        split = self._how_to_split(group)
        self.splits.append(split)
        kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in group["params"]:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        mine = []
        for parameters in kinds.values():
            mine += self._shard(parameters, split)
        self._mine.append(mine)
        for parameter in group["params"]:
            _owners[parameter] = ref(self)
        if hasattr(self, "inner"):
            self.inner.add_param_group({**options_of(group), "params": mine})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Average the gradients, update this rank's shard, gather everybody's.

        `kwargs` are for the wrapped optimizer's own `step`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._adopt_moved()
        self._lend_gradients()
        shards = [shard for _, _, shard, _ in self._pieces]
        for shard, values in zip(shards, self._device_values, strict=False):
            # A caller may have changed parameters since.
            shard.copy_(values)
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(options_of(outer))
        self.inner.step(**kwargs)
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            outer.update(options_of(inner))
        for shard, values in zip(shards, self._device_values, strict=False):
            values.copy_(shard, non_blocking=True)
        self._gather()
        for shard in shards:
            shard.grad = None
        if self._unsure:
            self._unsure -= 1
            self.show_state(self.wire.any([bool(self.inner.state)])()[0])
        return loss

    def show_state(self, some: bool) -> None:
        """Let `state` be empty on all ranks or on none, as torch's tools ask; `some`: on none."""
        nobodys = {self.param_groups[0]["params"][0]: {}} if some else self.inner.state
        self.state = self.inner.state or nobodys  # type: ignore[assignment]

    def shards(self) -> list[tuple[nn.Parameter, Piece, nn.Parameter, Bucket]]:
        """What this rank holds: parameter, which elements of it, and the inner optimizer's view."""
        return list(self._pieces)

    def state_dict(self) -> dict[str, Any]:
        """The unsharded optimizer's, with DTensors for its tensors; every rank calls it."""
        return state_rows_of(self)

    def full_state_dict(self) -> dict[str, Any]:
        """The unsharded optimizer's state dictionary, on CPU; every rank calls it."""
        return full_state(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a `state_dict()`, a `full_state_dict()`, or an unsharded optimizer's."""
        load_state(self, state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, those already averaged among them."""
        super().zero_grad(set_to_none)
        if set_to_none:
            self.reducer.reset()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients pile up locally: for every backward of a step but the last."""
        before, self.reducer.enabled = self.reducer.enabled, False
        try:
            yield
        finally:
            self.reducer.enabled = before

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` of all groups, after averaging what was not yet."""
        self.reducer.finish()
        return nn.utils.clip_grad_norm_(list(self._places), max_norm)

    @property
    def split(self) -> Split:
        """How the first group is split."""
        return self.splits[0]

    def _how_to_split(self, group: dict[str, Any]) -> Split:
        device = next((p.device for p in group["params"] if not p.is_meta), None)
        shapes = [parameter.shape for parameter in group["params"]]
        return how_to_split(
            self._kind,
            self._options,
            device,
            elementwise=self._elementwise,
            group=options_of(group),
            shapes=shapes,
            make=self._cls,
        )

    def _shard(self, parameters: list[nn.Parameter], split: Split) -> list[nn.Parameter]:
        for parameter in parameters:
            if parameter.layout != torch.strided:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is {parameter.layout}: "
                    "sharding needs dense parameters"
                )
        numels = [parameter.numel() for parameter in parameters]
        cut = by_element if split == "elements" else by_parameter
        partition = cut(numels, self.wire.world, self.bucket_bytes // parameters[0].element_size())
        flat = parameters[0].new_zeros(partition.numel)
        for parameter, offset in zip(parameters, partition.offsets, strict=True):
            place = flat[offset : offset + parameter.numel()].view(parameter.shape)
            place.copy_(parameter.detach())
            parameter.data = place
            self._places[parameter] = place
        self.wire.broadcast_first(flat)
        self.wire.take()
        buckets = make_buckets(partition, flat, parameters, self.wire.rank)
        self._buckets += buckets
        trainable = flat.is_floating_point() or flat.is_complex()
        if trainable:
            self.reducer.add(buckets, partition)
        mine = []
        for bucket in buckets:
            for parameter, piece in bucket.own:
                values = flat[piece.offset : piece.offset + piece.numel]
                if split == "parameters":
                    values = values.view(parameter.shape)
                if self.cpu_offload:
                    self._device_values.append(values)
                kept = to_host(values) if self.cpu_offload else values
                shard = nn.Parameter(kept, requires_grad=trainable)
                self._pieces.append((parameter, piece, shard, bucket))
                mine.append(shard)
        return mine

    def _adopt_moved(self) -> None:
        """Bring back parameters that a caller gave other memory: `p.data = ...`."""
        for parameter, place in self._places.items():
            now = parameter.data
            if now.data_ptr() == place.data_ptr() and now.stride() == place.stride():
                continue
            if (now.shape, now.dtype, now.device) != (place.shape, place.dtype, place.device):
                raise RuntimeError(
                    f"a parameter is now {tuple(now.shape)} {now.dtype} on {now.device}; it was "
                    f"{tuple(place.shape)} {place.dtype} on {place.device} when ShardedOptimizer "
                    "was made: make it after the model has its final shapes, dtype and device"
                )
            place.copy_(now)
            parameter.data = place

    def _lend_gradients(self) -> None:
        used = self.reducer.finish()
        self._check_same_values()
        for parameter, piece, shard, bucket in self._pieces:
            shard.grad = None
            if parameter in used and bucket.gradient is not None:
                average = bucket.average_of(piece).view(shard.shape)
                shard.grad = to_host(average) if self.cpu_offload else average

    def _gather(self) -> None:
        works = []
        for bucket in self._buckets:
            owner = bucket.span.owner
            if owner is None:
                works.append(self.wire.all_gather(bucket.data, bucket.shard))
            else:
                works.append(self.wire.broadcast(bucket.data, owner))
        for work in works:
            work.wait()
        self.reducer.note_versions()

    def _check_same_values(self) -> None:
        """Raise if parameters that were written to in place since the last step differ by rank."""
        written = [p for p in self._places if p in self.reducer.written]
        if not written:
            return
        everyone = self.wire.objects([_checksum(parameter) for parameter in written])
        for index, parameter in enumerate(written):
            if len({sums[index] for sums in everyone}) > 1:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} was written to since the last "
                    "step and differs between ranks: make the same changes on every rank (a "
                    "forward that writes to its weight, as nn.Embedding(max_norm=...) does, writes "
                    "what its rank's batch needs)"
                )

    def _check_no_twins(self, given: list[Any]) -> None:
        seen = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        for index, entry in enumerate(given):
            name, parameter = entry if isinstance(entry, tuple) else (f"number {index}", entry)
            if parameter in seen:
                raise ValueError(
                    f"parameter {name}, of shape {tuple(parameter.shape)}, is in groups "
                    f"{seen[parameter]} and {len(self.param_groups)}: put each parameter in one "
                    "group, once"
                )
            seen[parameter] = len(self.param_groups)

    def _check_nobodys(self, given: list[Any]) -> None:
        for index, entry in enumerate(given):
            name, parameter = entry if isinstance(entry, tuple) else (f"number {index}", entry)
            home = home_of(parameter)
            if home is not None:
                raise ValueError(
                    f"parameter {home[1].name} is FSDP's shard already: pass fsdp.parameters() to "
                    f"{self._kind.__name__} itself, not to ShardedOptimizer"
                )
            if _owner(parameter) is not None:
                # What nobody uses any more may only wait to be collected.
                gc.collect()
            if _owner(parameter) not in (None, self):
                raise ValueError(
                    f"parameter {name}, of shape {tuple(parameter.shape)}, is another "
                    "ShardedOptimizer's already, which averages its gradient too: put each "
                    "parameter in one, or delete the other first"
                )

    def _check_ranks_agree(self, parameters: list[nn.Parameter]) -> None:
        mine = [(tuple(p.shape), str(p.dtype)) for p in parameters]
        problem = difference(self.wire.objects(mine))
        if problem:
            raise ValueError(problem)


def _checksum(parameter: Tensor) -> int:
    values = parameter.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(values.view(torch.uint8).numpy().tobytes())
