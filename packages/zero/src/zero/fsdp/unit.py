"""One sharded layer of stage 3: its parameters exist whole only while they are used.

Notable:
- the whole parameters keep one storage for good, which is emptied and refilled: what autograd saved
  of them in forward is valid again in backward, and nothing is copied after the all-gather;
- they have a version counter of their own, so refilling does not look like an in-place change.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types
from torch.utils.weak import WeakTensorKeyDictionary

from zero.direct import Work
from zero.gradients import AveragedGradient, ShardGradient, shard_gradient
from zero.host import to_device, to_host
from zero.partition import alias, by_element
from zero.wire import Wire


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """One parameter: `local` is this rank's elements `start` to `stop` of it, in a column."""

    name: str
    shape: torch.Size
    start: int
    stop: int
    local: nn.Parameter
    whole: nn.Parameter
    # Every module that has it, and under which attribute: more than one if it is tied.
    places: tuple[tuple[nn.Module, str], ...]


# Each shard's unit, and its number there: optimizers are known by the parameters that they hold.
_homes = WeakTensorKeyDictionary()


def home_of(parameter: Tensor) -> tuple[Unit, ShardedParameter] | None:
    """The unit of a shard; None for any other parameter."""
    unit, number = _homes.get(parameter, (lambda: None, 0))
    home = unit()
    return (home, home.parameters[number]) if home else None


# torch's own attribute.
GRAD: Any = Tensor.grad


class Shard(nn.Parameter):
    """This rank's elements of a parameter; whatever is put into its `.grad` acts as the whole's."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient's elements, a ShardGradient; autograd's own are made one here."""
        gradient = GRAD.__get__(self)
        if type(gradient) is Tensor:
            self.grad = gradient
            gradient = GRAD.__get__(self)
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        home = home_of(self)
        if home and not home[0].lent and isinstance(gradient, Tensor):
            place = home[1].start, home[1].stop, home[1].shape
            if type(gradient) is Tensor and gradient.shape == self.shape:
                gradient = shard_gradient(gradient, home[0].wire, place)
            elif isinstance(gradient, ShardGradient) and gradient.place != place:
                raise RuntimeError(
                    f"the gradient assigned to {home[1].name} is of other elements than this rank "
                    "holds of it: p.grad.full_tensor(), called by every rank, gathers that"
                )
            elif gradient.shape != self.shape:
                raise RuntimeError(
                    f"a gradient of shape {tuple(gradient.shape)} is assigned to {home[1].name}, "
                    f"of which this rank holds {tuple(self.shape)}: assign these elements, "
                    f"{place[0]} to {place[1]} of the whole"
                )
        GRAD.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        GRAD.__delete__(self)


# Optimizers take their fast ways for these classes of parameters.
if Shard not in _foreach_supported_types:
    _foreach_supported_types.append(Shard)


class Unit:
    """Parameters of one dtype that are gathered, used and freed together."""

    def __init__(
        self,
        wire: Wire,
        compute_dtype: torch.dtype | None,
        gradient_dtype: torch.dtype | None,
        cpu_offload: bool,
        named: Sequence[tuple[str, nn.Parameter, tuple[tuple[nn.Module, str], ...]]],
    ) -> None:
        self.wire = wire
        # Whether shards, and so what an optimizer keeps of them, are on the host.
        self.cpu_offload = cpu_offload
        first = named[0][1]
        # The same on every rank, and another than any other unit's.
        self.label = f"{named[0][0]} and {len(named) - 1} more" if named[1:] else named[0][0]
        dtype = compute_dtype if compute_dtype and first.dtype.is_floating_point else first.dtype
        # Whether autograd reads the parameters again: not for an embedding.
        self.read_in_backward = True
        self.gradient_dtype = gradient_dtype or dtype
        partition = by_element([p.numel() for _, p, _ in named], wire.world, 1 << 62)
        flat = first.new_zeros(partition.numel)
        for (_, parameter, _), offset in zip(named, partition.offsets, strict=True):
            flat[offset : offset + parameter.numel()] = parameter.detach().reshape(-1)
        wire.broadcast_first(flat)
        low, high = partition.spans[0].shard(wire.rank, wire.world) if partition.spans else (0, 0)
        self.shard = to_host(flat[low:high]) if cpu_offload else flat[low:high].clone()
        self.full = torch.empty_like(flat, dtype=dtype)
        self._nbytes = self.full.untyped_storage().nbytes()
        self._partition = partition
        mine = {piece.index: piece for piece in partition.pieces(low, high)}
        self.parameters = []
        for index, (name, parameter, places) in enumerate(named):
            offset = partition.offsets[index]
            whole = nn.Parameter(alias(self.full, offset, parameter.shape), parameter.requires_grad)
            piece = mine.get(index)
            start, stop = (piece.start, piece.stop) if piece else (0, 0)
            at = piece.offset - low if piece else 0
            values = in_column(self.shard[at : at + stop - start], parameter.dim())
            local = Shard(values, parameter.requires_grad)
            self.parameters.append(
                ShardedParameter(name, parameter.shape, start, stop, local, whole, places)
            )
        # Classes that the caller has declared element-wise.
        self.elementwise_optimizers: tuple[type[torch.optim.Optimizer], ...] = ()
        # Whether shards are whole for a while, for an optimizer that needs that.
        self.lent = False
        self._unsharded = False
        # The shard's version that was gathered: an optimizer step makes it stale.
        self._version = -1
        # The whole parameters' versions when they were gathered, and how often they were checked.
        self._whole_versions: list[int] = []
        self._checks = 0
        self._gathering: Work | None = None
        self._source: Tensor | None = None
        self._users = 0
        # Whether a module that reads it without owning it is in its backward.
        self.pinned = False
        self._reducing: tuple[Work, Tensor, Tensor] | None = None
        # Which parameters this rank's backward reached, and the averages of the others.
        self.used = [False] * len(self.parameters)
        self._undecided: dict[int, Tensor] = {}
        # What `.grad` is where a backward under no_sync() left a gradient that is not averaged yet.
        self._waiting: dict[int, AveragedGradient] = {}
        # Those gradients, where they travel in another dtype than they are computed in.
        self._piled: dict[int, Tensor] = {}
        self.full.untyped_storage().resize_(0)
        self.swap_in_local()
        self._register()

    def run_of(self, parameter: ShardedParameter, rank: int) -> tuple[int, int]:
        """The elements of a parameter that a rank holds."""
        index = self.parameters.index(parameter)
        pieces = (p for p in self._partition.shard_pieces(rank) if p.index == index)
        return next(((piece.start, piece.stop) for piece in pieces), (0, 0))

    def _register(self) -> None:
        for number, parameter in enumerate(self.parameters):
            _homes[parameter.local] = ref(self), number

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        """Return a copy with memory of its own, without gradients, as torch copies parameters."""
        if self._gathering is not None or self._reducing is not None:
            raise RuntimeError("FSDP cannot be copied while it runs: copy it between steps")
        copied: Unit = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(self.__dict__)
        copied.wire = copy.deepcopy(self.wire, memo)
        copied.shard = to_host(self.shard) if self.cpu_offload else self.shard.clone()
        copied.full = self.full.new_empty(self.full.shape)
        copied.full.untyped_storage().resize_(0)
        copied._unsharded, copied._version, copied._users = False, -1, 0
        copied._whole_versions = []
        copied._waiting, copied._piled = {}, {}
        copied.parameters, at = [], 0
        for old, offset in zip(self.parameters, self._partition.offsets, strict=True):
            values = copied.shard[at : at + old.stop - old.start]
            at += values.numel()
            local = Shard(in_column(values, len(old.shape)), old.local.requires_grad)
            whole = nn.Parameter(alias(copied.full, offset, old.shape), old.whole.requires_grad)
            memo[id(old.local)], memo[id(old.whole)] = local, whole
            copied.parameters.append(replace(old, local=local, whole=whole))
        copied._register()
        return copied

    def find_places(self, memo: dict[int, Any]) -> None:
        """After a copy of all units: point at the copied modules, which hold their parameters."""
        for index, old in enumerate(self.parameters):
            places = tuple((copy.deepcopy(module, memo), name) for module, name in old.places)
            self.parameters[index] = replace(old, places=places)

    def follow(self) -> None:
        """Take over what a caller did to the shards: froze them, gave them other memory."""
        at = 0
        for parameter in self.parameters:
            local, whole = parameter.local, parameter.whole
            if local.requires_grad != whole.requires_grad:
                whole.requires_grad_(local.requires_grad)
                whole.grad = None
            place = self.shard[at : at + parameter.stop - parameter.start].view_as(local)
            at += place.numel()
            now = local.data
            if now.data_ptr() == place.data_ptr() or not place.numel():
                continue
            if (now.shape, now.dtype, now.device) != (place.shape, place.dtype, place.device):
                raise RuntimeError(
                    f"the shard of {parameter.name} is now {tuple(now.shape)} {now.dtype} on "
                    f"{now.device}; it was {tuple(place.shape)} {place.dtype} on {place.device} "
                    "when FSDP was made: give the module its dtype and device before that"
                )
            place.copy_(now)
            local.data = place

    def expected_gradients(self) -> int:
        """How many of the parameters a backward may reach."""
        return sum(parameter.whole.requires_grad for parameter in self.parameters)

    @property
    def unsharded_bytes(self) -> int:
        """Bytes held now by whole parameters."""
        return self.full.untyped_storage().nbytes()

    def start_gather(self) -> None:
        """Begin to collect the whole parameters, unless they are there or coming."""
        if self._gathering is not None:
            return
        if self._unsharded and self._version == self.shard._version:
            return
        self._version = self.shard._version
        self.full.untyped_storage().resize_(self._nbytes)
        self._source = self._on_device(self.full)
        self._gathering = self.wire.all_gather(self.full, self._source, self.label)

    def gather(self) -> None:
        """Have the whole parameters."""
        self.start_gather()
        if self._gathering is not None:
            # Forgotten first: work that failed must not be waited for again.
            work, self._gathering = self._gathering, None
            work.wait()
            self._source = None
            self._unsharded = True
            self._whole_versions = [p.whole._version for p in self.parameters]

    def _on_device(self, like: Tensor) -> Tensor:
        return to_device(self.shard, like) if self.cpu_offload else self.shard.to(like.dtype)

    def expire(self) -> None:
        """Gather anew before the next use: a caller may have changed shards unseen (`.data`)."""
        self.pinned = False
        self.free()

    def free(self) -> None:
        """Give the whole parameters' memory back."""
        if self._gathering is not None:
            self.gather()
        if self._unsharded and not self._users and not self.pinned:
            self._check_versions()
            self.full.untyped_storage().resize_(0)
            self._unsharded = False

    def check_unchanged(self) -> None:
        """Raise if a forward has written to the whole parameters, which would be lost."""
        self._check_versions()
        self._checks += 1
        # Writes through `.data` leave no trace but the values. Each rank compares its own elements,
        # ever more seldom: in the checks numbered 1, 2, 4, 8, ...
        is_due = self._checks & (self._checks - 1) == 0
        if not (is_due and self._unsharded and self._version == self.shard._version):
            return
        first = self.wire.rank * self.shard.numel()
        mine = self.full[first : first + self.shard.numel()]
        expected = self._on_device(self.full)
        if not mine.is_meta and not torch.equal(bits(mine), bits(expected)):
            raise RuntimeError(self._written(self.label))

    def _check_versions(self) -> None:
        for parameter, version in zip(self.parameters, self._whole_versions, strict=False):
            if parameter.whole._version != version:
                # Said once: the backward of this step may still free the layer.
                self._whole_versions = []
                raise RuntimeError(self._written(parameter.name))

    def _written(self, name: str) -> str:
        return (
            f"rank {self.wire.rank}: forward or backward wrote to {name}, which is whole only "
            "while its layer runs, so the written values would be lost: change parameters between "
            "steps"
        )

    def forget(self) -> None:
        """Drop the gradients and the memory of a backward that was broken off."""
        self._whole_versions = []
        self._reducing, self._users, self.pinned = None, 0, False
        self._undecided.clear()
        self._piled.clear()
        self.used = [False] * len(self.parameters)
        for parameter in self.parameters:
            parameter.whole.grad = None
        self.swap_in_local()
        self.free()

    def swap_in_whole(self) -> None:
        """Let the modules see whole parameters."""
        self._users += 1
        for parameter in self.parameters:
            for module, attribute in parameter.places:
                module._parameters[attribute] = parameter.whole

    def swap_in_local(self) -> None:
        """Let the modules, and so an optimizer, see this rank's shards."""
        self._users = max(0, self._users - 1)
        if not self._users:
            for parameter in self.parameters:
                for module, attribute in parameter.places:
                    module._parameters[attribute] = parameter.local

    def has_gradient(self) -> bool:
        """Whether any of the whole parameters has a gradient to be reduced."""
        return bool(self._piled) or any(p.whole.grad is not None for p in self.parameters)

    def start_reduce(self) -> None:
        """Begin to sum the gradients over ranks; they are freed here."""
        self.finish_reduce()
        here = [p.whole.grad is not None or i in self._piled for i, p in enumerate(self.parameters)]
        self.used = [a or b for a, b in zip(self.used, here, strict=True)]
        buffer = self._gradient_buffer()
        if self.wire.sums_in_place:
            output = buffer.view(self.wire.world, -1)[self.wire.rank]
        else:
            output = buffer.new_empty(self.shard.shape)
        self._reducing = self.wire.reduce_scatter(output, buffer, self.label), output, buffer

    def _gradient_buffer(self) -> Tensor:
        """The gradients end to end; a lone one as it is."""
        only = self.parameters[0].whole
        if len(self.parameters) == 1 and only.grad is not None and not self._piled:
            gradient = only.grad.reshape(-1).to(self.gradient_dtype)
            if gradient.numel() == self.full.numel():
                only.grad = None
                return gradient
        buffer = self.full.new_empty(self.full.numel(), dtype=self.gradient_dtype)
        end = 0
        for index, parameter in enumerate(self.parameters):
            offset = self._partition.offsets[index]
            end = offset + prod(parameter.shape)
            part = buffer[offset:end]
            if parameter.whole.grad is None:
                part.zero_()
            else:
                part.copy_(parameter.whole.grad.reshape(-1))
                parameter.whole.grad = None
            if index in self._piled:
                part += self._piled.pop(index).reshape(-1)
        buffer[end:].zero_()
        return buffer

    def finish_reduce(self) -> None:
        """Add the averaged gradient to the shards' `.grad`."""
        if self._reducing is None:
            return
        work, output, _ = self._reducing
        self._reducing = None
        work.wait()
        average = output.to(self.shard.dtype)
        average /= self.wire.copies
        if self.cpu_offload:
            average = to_host(average)
        elif average is output and self.wire.sums_in_place:
            # So that the rest of the buffer may go.
            average = average.clone()
        at = 0
        for index, parameter in enumerate(self.parameters):
            part = average[at : at + parameter.stop - parameter.start]
            at += part.numel()
            if self.used[index]:
                self._give(index, part)
            else:
                self._undecided[index] = part

    def settle(self, used: Sequence[bool]) -> None:
        """Give gradients to the parameters that other ranks used, none to what nobody did."""
        for index, part in self._undecided.items():
            if used[index]:
                self._give(index, part)
        self._undecided.clear()
        self.used = [False] * len(self.parameters)

    def show_waiting(self) -> None:
        """Let `.grad` say that it is not averaged yet: whatever looks at it raises."""
        for index, parameter in enumerate(self.parameters):
            gradient = parameter.whole.grad
            if gradient is None:
                continue
            if gradient.dtype != self.gradient_dtype:
                gradient = gradient.to(self.gradient_dtype)
                piled = self._piled.get(index)
                self._piled[index] = gradient if piled is None else piled.add_(gradient)
                parameter.whole.grad = None
            if index not in self._waiting:
                local = parameter.local
                waiting = AveragedGradient(local, self, local.grad)
                waiting.local = local.detach()
                local.grad = self._waiting[index] = waiting

    def drop_what_was_dropped(self) -> None:
        """Give up what is not averaged yet where a caller has given `.grad` up."""
        for index, waiting in list(self._waiting.items()):
            if self.parameters[index].local.grad is not waiting:
                self.parameters[index].whole.grad = None
                self._piled.pop(index, None)
                del self._waiting[index]

    def fetch(self, gradient: AveragedGradient) -> list[tuple[int, int, Tensor]]:
        """Say what AveragedGradient asks of its source: nothing has arrived."""
        raise AssertionError("a gradient that waits is not read")

    def _give(self, index: int, part: Tensor) -> None:
        parameter = self.parameters[index]
        waiting = self._waiting.pop(index, None)
        if waiting is not None and parameter.local.grad is waiting:
            parameter.local.grad = waiting.key
        if parameter.local.requires_grad:
            place = parameter.start, parameter.stop, parameter.shape
            part = shard_gradient(part.view_as(parameter.local), self.wire, place)
            # Nor do these hooks see what goes to the whole parameter.
            for change in list((parameter.local._backward_hooks or {}).values()):
                changed = change(part)
                part = part if changed is None else changed
            if parameter.local.grad is None:
                parameter.local.grad = part
            else:
                parameter.local.grad += part
            # Autograd accumulates into the whole parameter only, so these are called here.
            hooks = parameter.local._post_accumulate_grad_hooks or {}
            for hook in list(hooks.values()):
                hook(parameter.local)

    @torch.no_grad()
    def full_parameters(self) -> dict[str, Tensor]:
        """Whole parameters in the master dtype; every rank calls it."""
        flat = self.full.new_empty(self.full.shape, dtype=self.shard.dtype)
        self.wire.all_gather(flat, self._on_device(flat)).wait()
        return {
            parameter.name: flat[offset : offset + prod(parameter.shape)].view(parameter.shape)
            for parameter, offset in zip(self.parameters, self._partition.offsets, strict=True)
        }


def bits(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory as bytes, which compare alike for NaN too."""
    return tensor.view(torch.uint8)


def in_column(values: Tensor, dim: int) -> Tensor:
    """Give a run of elements as many dimensions as the whole has: `p.dim() >= 2` finds matrices."""
    return values.view(values.numel(), *[1] * (dim - 1)) if dim > 1 else values
