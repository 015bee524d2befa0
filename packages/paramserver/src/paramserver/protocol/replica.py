"""One server's shard: parameters, optimizer and staged gradients, changed only by the ledger's log.

Notable:
- a gradient that is not finite is refused when it is staged, before any server has applied it;
- what a read was promised is copied only if an update comes first; readers share that copy;
- a push is known by its name (worker, epoch, clock): one that comes twice or late is void.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paramserver import sparse
from paramserver.consistency import Consistency, LocalSteps, OptimizerFactory
from paramserver.partition import Shard, part
from paramserver.protocol.ledger import Accept, Join, Leave, Log, Push, Read, Write

EpochAndNumber = tuple[int, int]


class Replica:
    """The parameters of a shard at one position of the log."""

    def __init__(
        self, shard: Shard, parameters: Mapping[str, Tensor], optimizer: OptimizerFactory,
        policy: Consistency | None = None, memory: Tensor | None = None) -> None:  # fmt: skip
        local = policy if isinstance(policy, LocalSteps) else None
        self._scale_by_staleness = getattr(policy, "scale_by_staleness", False)
        self.shard = shard
        self.layout = layout(shard, policy)
        self.position = 0
        """Entries of the log that it has followed."""
        self.base_version = 0
        """The version before the log's first entry."""
        self.version = 0
        """Updates applied so far."""
        self.staleness: Counter[int] = Counter()
        """How many gradients were applied to parameters that many versions newer than they saw."""
        self.push_bytes: Counter[int] = Counter()
        """How many of the gradients that were applied came in so many bytes."""
        self._fragments = shard.fragments(local.fragments if local else 1)
        mine = torch.zeros(shard.buffer_bytes, dtype=torch.uint8) if memory is None else memory
        self._buffer = mine.zero_()
        # By fragment: what is pushed, and updated, at one time.
        views = [fragment.shard.views(fragment.of(self._buffer)) for fragment in self._fragments]
        self._by_fragment = [[nn.Parameter(view) for view in some] for some in views]
        self._parameters = [each for some in self._by_fragment for each in some]
        pieces = [piece for fragment in self._fragments for piece in fragment.shard.pieces]
        with torch.no_grad():
            for piece, mine in zip(pieces, self._parameters, strict=True):
                flat = part(parameters[piece.name].detach()).reshape(-1)
                mine.view(-1).copy_(flat[piece.start : piece.stop])
        make = local.outer if local else optimizer
        self._optimizer = make(self._parameters) if self._parameters else None
        self._terms = _terms(policy, self._optimizer)
        self.compression = local.compression if local else None
        for name in (p.name for p in shard.pieces if p.dtype.is_complex and self.compression):
            text = f"parameter {name} is complex, and {self.compression} is of real numbers"
            raise ValueError(f"{text}; give LocalSteps without compression")
        # With compression, readers hold `_buffer` plus a rounding error that is made good with the
        # next change: what they hold, and the last fragment of it that changed, and the change.
        self._published = self._buffer.clone() if self.compression else None
        self._changed, self._change = 0, self._buffer
        self._staged: dict[Push, tuple[list[Tensor], int]] = {}  # gradients; bytes that came
        self._accepted: set[Push] = set()  # staged pushes that an update to come will name
        self.next: dict[int, EpochAndNumber] = {}  # the least epoch and clock yet to be accepted
        # The epoch and number of the read that a worker was promised, the version, and its copy,
        # once it is not the newest any more.
        self._promised: dict[int, tuple[EpochAndNumber, int, Tensor | None]] = {}
        self.lent: dict[int, Callable[[], None]] = {}
        """By worker that may still read the parameters here, what to call before they change."""

    def unpack(self, push: Push, data: Tensor, *, finite: bool = False) -> list[Tensor]:
        """The gradients of a push. ValueError unless its bytes are of this shard, and finite."""
        fragment = self._fragments[push[2] % len(self._fragments)]
        shard, size = fragment.shard, fragment.stop - fragment.start
        if len(data) == size and data.dtype == torch.uint8:
            gradients = shard.views(data)
        elif len(data) > size or data.dtype != torch.uint8:
            text = f"worker {push[0]} pushed {data.numel()} elements of {data.dtype}"
            raise ValueError(f"{text}; fill a buffer of the shard: {size} of torch.uint8")
        elif self.compression:
            numel = [piece.stop - piece.start for piece in shard.pieces]
            parts = self.compression.decode(data, sum(numel)).split(numel)
            gradients = [part.view(p.viewed) for part, p in zip(parts, shard.pieces, strict=True)]
        else:
            gradients = sparse.unpack(shard, data)
        if finite:
            return gradients
        for piece, gradient in zip(shard.pieces, gradients, strict=True):
            values = gradient._values() if gradient.is_sparse else gradient
            # A sum is finite only if all its terms are; it may overflow, and is looked at again.
            if not values.sum().isfinite() and not values.isfinite().all():
                bad = int((~values.isfinite()).sum())
                text = f"worker {push[0]}'s gradient of {piece.name} is not finite in {bad} of "
                text += f"{values.numel()} elements; nothing was applied"
                raise ValueError(f"{text}: skip the batch or lower the learning rate")
        return gradients

    def wants(self, push: Push) -> bool:
        """Whether a push of this name is the worker's next; not if it is accepted, or void.

        RuntimeError if others have to come before it: whoever pushes it brings the log first.
        """
        worker, epoch, clock = push
        expected = self.next.get(worker, (0, 0))
        if (epoch, clock) > expected:
            text = f"worker {worker} pushes {(epoch, clock)} (epoch, clock)"
            raise RuntimeError(f"{text}, but this server has followed it to {expected}; pull first")
        return (epoch, clock) == expected

    def stage(self, push: Push, gradients: list[Tensor], nbytes: int) -> None:
        """Hold `gradients`, which came in `nbytes`, until the log says what becomes of them."""
        self._drop(push[0])  # a worker has one push under way
        self._staged[push] = gradients, nbytes

    def has(self, push: Push) -> bool:
        """Whether the gradients of a push are here."""
        return push in self._staged

    def check(self, log: Log) -> None:
        """Raise RuntimeError unless this server has what it needs to apply what is new in `log`."""
        if log.start > self.position:
            text = f"the log begins at entry {log.start}, this server has followed {self.position}"
            raise RuntimeError(text)
        for entry in log.after(self.position).entries:
            pushes: tuple[Push, ...] = ()
            if isinstance(entry, Accept):
                pushes = (entry.push,)
            elif isinstance(entry, Write):
                pushes = entry.pushes
            for push in pushes:
                if push not in self._staged:
                    raise RuntimeError(f"the log updates by {push}, whose gradients did not come")

    def follow(self, log: Log) -> None:
        """Apply what is new in `log`. RuntimeError if it cannot be followed; see `check`."""
        self.check(log)
        for entry in log.after(self.position).entries:
            match entry:
                case Accept(push):
                    self._accepted.add(push)
                    self.next[push[0]] = push[1], push[2] + 1
                case Write(pushes, staleness):
                    self._keep_promises()
                    gradients, nbytes = zip(*map(self._staged.pop, pushes), strict=True)
                    if self._scale_by_staleness and staleness[0]:
                        for gradient in gradients[0]:
                            gradient.div_(1 + staleness[0])
                    self._apply(pushes[0][2] % len(self._fragments), gradients)
                    self._accepted.clear()
                    self.push_bytes.update(nbytes)
                    self.staleness.update(staleness)
                    for worker, epoch, clock in pushes:
                        later = (epoch, clock + 1)
                        self.next[worker] = max(later, self.next.get(worker, later))
                case Read(worker, epoch, number):
                    self._promised[worker] = (epoch, number), self.version, None
                case Join(worker, epoch, clock):
                    self._drop(worker)
                    self.next[worker] = epoch, clock
                case Leave(worker):
                    self._drop(worker)
                    self._promised.pop(worker, None)
                    # Nothing more from this life of the worker, however late it arrives.
                    self.next[worker] = self.next.get(worker, (0, 0))[0] + 1, 0
            self.position += 1

    def fetch(self, worker: int, read: EpochAndNumber, have: int) -> tuple[int, Tensor, int] | None:
        """The version that was promised to the `read` of `worker`, and its bytes as they lie here.

        And of which fragment they are a change if the worker has the version before, else -1: all.
        None without such a promise: it was fetched before.
        """
        found, version, kept = self._promised.get(worker, (None, 0, None))
        if found != read:
            return None
        del self._promised[worker]
        fragment, data = -1, self.newest if kept is None else kept
        if have == version - 1 >= self.base_version and version == self.version:
            fragment, data = self._changed, self._change
        return version, data, fragment

    @property
    def newest(self) -> Tensor:
        """What readers get: the parameters, up to the rounding of what was sent of them."""
        return self._buffer if self._published is None else self._published

    def state_dict(self) -> dict[str, Any]:
        """A copy of the parameters, the optimizer's state and the version."""
        optimizer = copy.deepcopy(self._optimizer.state_dict()) if self._optimizer else {}
        state = {"layout": self.shard.digest(), "parameters": self._buffer.clone()}
        return state | {"optimizer": optimizer, "version": self.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin a log anew from `state`, which a server of the same shard saved."""
        if state["layout"] != self.shard.digest():
            text = f"the saved state is of shard {state['layout']}, mine is {self.shard.digest()}"
            raise ValueError(f"{text}; use the same parameters and number of servers")
        self._buffer.copy_(state["parameters"])
        if self._optimizer:
            self._optimizer.load_state_dict(state["optimizer"])
        self.version = self.base_version = state["version"]
        self.position = 0
        self._staged, self._accepted, self.next, self._promised = {}, set(), {}, {}
        self._published = self._buffer.clone() if self.compression else None
        self._changed, self._change = 0, self.newest

    def snapshot(self) -> dict[str, Any]:
        """What `state_dict` has, and where in the log that is, with the pushes under way."""
        raw = len(self._change) == len(self._fragments[self._changed].of(self._buffer))
        staged = {p: ([g.clone() for g in some], n) for p, (some, n) in self._staged.items()}
        # A change that was not compressed is a part of what readers get.
        published = None if self._published is None else self._published.clone()
        changed = self._changed, None if raw else self._change
        counts = {"staleness": dict(self.staleness), "push_bytes": dict(self.push_bytes)}
        at = {"position": self.position, "base_version": self.base_version, "terms": self._terms}
        pushes = {"staged": staged, "accepted": sorted(self._accepted), "next": dict(self.next)}
        readers = {"published": published, "changed": changed}
        return self.state_dict() | at | counts | pushes | readers

    def load_snapshot(self, state: Mapping[str, Any]) -> None:
        """Go on in the log where `snapshot` was made. Promises are void: readers ask again.

        ValueError where it was made under another policy or optimizer, or of another shard.
        """
        for what, theirs in state["terms"].items():
            if (mine := self._terms.get(what)) not in (None, theirs):
                text = f"the journal was written with {what} {theirs}, this server has {mine}"
                raise ValueError(f"{text}; give the same, or another folder")
        self.load_state_dict(state)
        self.position, self.base_version = state["position"], state["base_version"]
        self.staleness = Counter(state["staleness"])
        self._staged, self.next = dict(state["staged"]), dict(state["next"])
        self._accepted = set(state["accepted"])
        self.push_bytes = Counter(state["push_bytes"])
        self._published = state["published"]
        self._changed, change = state["changed"]
        fragment = self._fragments[self._changed]
        self._change = fragment.of(self.newest) if change is None else change

    def _drop(self, worker: int) -> None:
        """Forget what `worker` staged and nobody accepted."""
        for push in [p for p in self._staged if p[0] == worker and p not in self._accepted]:
            del self._staged[push]

    def _keep_promises(self) -> None:
        """Copy the parameters for those who were promised them as they still are, or read them."""
        while self.lent:
            self.lent.popitem()[1]()
        waiting = {w: read for w, (read, _, kept) in self._promised.items() if kept is None}
        if waiting:
            kept = self.newest.clone()
            self._promised |= {w: (read, self.version, kept) for w, read in waiting.items()}

    def _apply(self, number: int, pushes: Sequence[list[Tensor]]) -> None:
        fragment, gradients = self._fragments[number], zip(*pushes, strict=True)
        targets = zip(self._by_fragment[number], fragment.shard.pieces, gradients, strict=True)
        for parameter, piece, each in targets:
            mean = _mean(each, parameter.dtype)
            parameter.grad = sparse.taken_by(self._optimizer, mean, piece)
        if self._optimizer:
            self._optimizer.step()
            self._optimizer.zero_grad()  # the other fragments' momentum stays as it is
        self.version += 1
        self._changed, self._change = number, fragment.of(self.newest)
        if self.compression and self._published is not None:
            both = self._buffer, self.newest
            mine, theirs = (fragment.shard.views(fragment.of(b)) for b in both)
            change = self.compression.encode(flatten(mine) - flatten(theirs))
            add_flat(theirs, self.compression.decode(change, sum(view.numel() for view in mine)))
            if len(change) < len(self._change):  # a few elements may be better as they are
                self._change = change


def _terms(policy: Consistency | None, optimizer: torch.optim.Optimizer | None) -> dict[str, str]:
    """What a log can be followed with, in words that are the same in every process."""
    rules = [f"{k}={v}" for k, v in getattr(policy, "__dict__", {}).items() if not callable(v)]
    terms = {"policy": f"{type(policy).__name__}({', '.join(rules)})"}
    if optimizer:
        terms["optimizer"] = type(optimizer).__name__
        plain = bool, int, float, str, tuple, Tensor
        for i, group in enumerate(optimizer.param_groups):
            terms |= {f"group {i}'s {k}": str(x) for k, x in group.items() if type(x) in plain}
    return terms


def layout(shard: Shard, policy: Consistency | None) -> str:
    """A text that is equal for those whose shards, and what they send of them, are alike."""
    if isinstance(policy, LocalSteps):
        cut = f"{policy.fragments} {'whole ' * (shard.whole and policy.fragments > 1)}fragments"
        return f"{shard.digest()} (changes in {cut}, {policy.compression})"
    return f"{shard.digest()} (gradients)"


def flatten(views: Iterable[Tensor]) -> Tensor:
    """Their elements as one float32 vector."""
    return torch.cat([torch.empty(0), *(view.reshape(-1).float() for view in views)])


def add_flat(views: Iterable[Tensor], flat: Tensor) -> None:
    """Add a float32 vector to their elements."""
    start = 0
    for view in views:
        view.view(-1).add_(flat[start : start + view.numel()].to(view.dtype))
        start += view.numel()


def _mean(gradients: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Their mean, in `dtype`: of 16 bits it is summed in 32, and rounded once.

    Wider sums are made in the first one's memory: they take none of their own.
    """
    # In the order of the workers, the dense ones first: only they can take up the others.
    total, *others = sorted(gradients, key=lambda gradient: gradient.is_sparse)
    if others:
        total = total.to(wide := torch.promote_types(dtype, torch.float32))
        for other in others:
            total.add_(other.to(wide) if other.is_sparse else other)
        total.div_(len(gradients))
    # A row that came twice is one sum before it is rounded.
    return total.coalesce().to(dtype) if total.is_sparse else total.to(dtype)
