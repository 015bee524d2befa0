"""The state of one server's shard: parameters, optimizer, and staged gradients.

Only the log of the ledger changes the parameters. A server refuses non-finite gradients when
they are staged, before any server has applied them. The version of a read is copied only if an
update is applied before the read is fetched, and readers share the copy. A push that arrives twice
or late is recognized by its identity (worker, epoch, clock) and has no effect.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paramserver.consistency import Consistency, LocalSteps
from paramserver.optimizers import OptimizerFactory
from paramserver.parameters import get_local_part
from paramserver.partition import Shard
from paramserver.protocol.gradients import add_flat, compute_mean, flatten, require_finite
from paramserver.protocol.log import Accept, Join, Leave, Log, Norm, Push, Read, Write
from paramserver.protocol.pieces_optimizer import build_pieces_updater

EpochAndNumber = tuple[int, int]

#: Maximum length of settings in a message, because each parameter may have an optimizer group.
_MAX_SETTINGS = 2**12


class Replica:
    """The parameters of a shard at one position of the log.

    Args:
        shard: the part of the parameters that this server stores.
        parameters: all parameters of the model, by name; their values are copied.
        optimizer: factory of the optimizer. With `LocalSteps` the policy's `outer` is used instead.
        policy: the policy of the job.
        memory: buffer of `shard.buffer_bytes` bytes; None allocates one.
    """

    def __init__(
        self,
        shard: Shard,
        parameters: Mapping[str, Tensor],
        optimizer: OptimizerFactory,
        policy: Consistency | None = None,
        memory: Tensor | None = None,
    ) -> None:
        local = policy if isinstance(policy, LocalSteps) else None
        self.shard = shard
        self.layout = format_layout(shard, policy)
        #: Number of log entries that were replayed.
        self.position = 0
        #: Number of updates applied so far.
        self.version = 0
        #: Number of applied gradients by staleness, in versions.
        self.staleness: Counter[int] = Counter()
        self._fragments = shard.fragments(local.fragments if local else 1)
        if memory is None:
            memory = torch.zeros(shard.buffer_bytes, dtype=torch.uint8, device="cpu")
        self._buffer = memory.zero_()
        views = [f.shard.views(f.get_view(self._buffer)) for f in self._fragments]
        self._parameters = [nn.Parameter(view) for part in views for view in part]
        pieces = [piece for fragment in self._fragments for piece in fragment.shard.pieces]
        flat = {name: get_local_part(p.detach()).reshape(-1) for name, p in parameters.items()}
        shard.scatter(flat, self._buffer)
        factory = local.outer if local else optimizer
        self._updater = build_pieces_updater(
            factory,
            self._parameters,
            pieces,
            parameters,
            servers=shard.servers,
            fragments=len(self._fragments),
        )
        #: True if this server knows only a part of the norm that `max_norm` limits.
        self.uses_norms = self._updater.spec.max_norm is not None and shard.servers > 1
        #: Norm of the gradients here of the last update, if that update waits for a `Norm` entry.
        self.norm: float | None = None
        targets = iter(self._updater.targets)
        #: For each fragment, the tensors that receive the gradients.
        self._targets = [[next(targets) for _ in part] for part in views]
        rules = {"policy": _describe(policy)}
        self._settings = rules | self._updater.format_settings()
        #: The settings that must be equal on all servers of the job, as one line of text.
        self.common_settings = _shorten(json.dumps(rules | self._updater.format_common_settings()))
        self.compression = local.compression if local else None
        #: With compression, the parameters that readers have received. They differ from `_buffer`
        #: by a rounding error, which is added to the next change.
        self._published = self._buffer.clone() if self.compression else None
        #: Fragment of the last update, and the data that turn the previous version into this one.
        self._changed = 0
        self._change = self._buffer
        #: Gradients of each push that is not applied yet.
        self._staged: dict[Push, list[Tensor]] = {}
        #: Staged pushes that are accepted and not applied yet.
        self._accepted: set[Push] = set()
        #: Epoch and clock of each worker's next push.
        self.next_push: dict[int, EpochAndNumber] = {}
        #: Epoch and number of each worker's pending read, its version, and a copy of that version
        #: if it is not the newest any more.
        self._pending_reads: dict[int, tuple[EpochAndNumber, int, Tensor | None]] = {}
        #: For each worker that may still read this memory, a function that copies the parameters.
        self.copy_outs: dict[int, Callable[[], None]] = {}

    def unpack(self, push: Push, data: Tensor, *, is_known_finite: bool = False) -> list[Tensor]:
        """Return the gradients that the data of a push contain.

        Raises:
            ValueError: the data have a wrong size or encoding, or a gradient is not finite.
        """
        fragment = self._fragments[push[2] % len(self._fragments)]
        shard = fragment.shard
        size = fragment.stop - fragment.start
        if self.compression:
            numels = [piece.stop - piece.start for piece in shard.pieces]
            parts = self.compression.decode(data, sum(numels)).split(numels)
            pairs = zip(parts, shard.pieces, strict=True)
            gradients = [part.view(piece.view_shape) for part, piece in pairs]
        elif len(data) == size:
            gradients = shard.views(data)
        else:
            raise ValueError(f"expected {size} bytes, worker {push[0]} pushed {len(data)}")
        # The caller checks the bytes that it received, which are not the gradients if compressed.
        if self.compression or not is_known_finite:
            names = [piece.name for piece in shard.pieces]
            require_finite(push[0], dict(zip(names, gradients, strict=True)))
        return gradients

    def is_next(self, push: Push) -> bool:
        """Return True if `push` is the worker's next push, False if it is old or already accepted.

        Raises:
            RuntimeError: this server has not replayed the worker's earlier pushes. The worker has
                to forward the log before it pushes.
        """
        worker, epoch, clock = push
        expected = self.next_push.get(worker, (0, 0))
        if (epoch, clock) > expected:
            raise RuntimeError(
                f"expected push {expected} (epoch, clock) of worker {worker}, got "
                f"{(epoch, clock)}; pull first"
            )
        return (epoch, clock) == expected

    def stage(self, push: Push, gradients: list[Tensor]) -> None:
        """Store gradients until the log applies or discards them."""
        self._discard_staged(push[0])  # a worker has at most one push that is not accepted
        self._staged[push] = gradients

    def is_staged(self, push: Push) -> bool:
        """Return True if the gradients of the push are staged."""
        return push in self._staged

    def check(self, log: Log) -> None:
        """Raise `RuntimeError` unless this server can apply the new entries of `log`."""
        if log.start > self.position:
            raise RuntimeError(
                f"expected a log from entry {self.position} or earlier, got one from {log.start}"
            )
        for entry in log.select_from(self.position).entries:
            pushes: tuple[Push, ...] = ()
            if isinstance(entry, Accept):
                pushes = (entry.push,)
            elif isinstance(entry, Write):
                pushes = entry.pushes
            for push in pushes:
                if push not in self._staged:
                    raise RuntimeError(f"the log applies push {push}, which was not staged here")

    def replay(self, log: Log) -> None:
        """Apply the new entries of `log`; raise `RuntimeError` if this server cannot apply them."""
        self.check(log)
        for entry in log.select_from(self.position).entries:
            match entry:
                case Accept(push):
                    self._accepted.add(push)
                    self.next_push[push[0]] = push[1], push[2] + 1
                case Write(pushes, staleness):
                    gradients = [self._staged.pop(push) for push in pushes]
                    number = pushes[0][2] % len(self._fragments)
                    self._set_gradients(number, gradients)
                    if self.uses_norms:
                        self.norm = float(self._updater.compute_norm())
                    else:
                        self._update(number)
                    self._accepted.clear()
                    self.staleness.update(staleness)
                    for worker, epoch, clock in pushes:
                        following = (epoch, clock + 1)
                        self.next_push[worker] = max(
                            following, self.next_push.get(worker, following)
                        )
                case Norm(value):
                    self._update(0, value)
                    self.norm = None
                case Read(worker, epoch, number):
                    self._pending_reads[worker] = (epoch, number), self.version, None
                case Join(worker, epoch, clock):
                    self._discard_staged(worker)
                    self._pending_reads.pop(worker, None)
                    self.next_push[worker] = epoch, clock
                case Leave(worker):
                    self._discard_staged(worker)
                    self._pending_reads.pop(worker, None)
                    # Pushes of this epoch that arrive later are void.
                    epoch, _ = self.next_push.get(worker, (0, 0))
                    self.next_push[worker] = epoch + 1, 0
            # A Start entry only changes the ledger.
            self.position += 1

    def fetch(
        self, worker: int, read: EpochAndNumber, pulled_version: int
    ) -> tuple[int, Tensor, int] | None:
        """Return the version of a pending read of `worker`, its data, and their fragment.

        The data may be a view of this server's memory. If `pulled_version` is the previous version
        and no update has followed, they are the update of one fragment: its new values, or with
        compression its encoded change. Otherwise they are the whole shard, and the fragment is -1.
        Return None if the read is not pending, for example because it has been fetched already.
        """
        pending, version, preserved = self._pending_reads.get(worker, (None, 0, None))
        if pending != read:
            return None
        del self._pending_reads[worker]
        fragment = -1
        data = self.newest if preserved is None else preserved
        if 0 <= pulled_version == version - 1 and version == self.version:
            fragment = self._changed
            data = self._change
        return version, data, fragment

    @property
    def newest(self) -> Tensor:
        """The parameters that readers receive, including the rounding errors of compression."""
        return self._buffer if self._published is None else self._published

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of the state, without the pending reads."""
        staged = {
            push: [gradient.clone() for gradient in gradients]
            for push, gradients in self._staged.items()
        }
        gradients = [t.grad.clone() for t in self._targets[0] if t.grad is not None]
        return self._updater.state_dict() | {
            "layout": self.shard.digest(),
            "parameters": self._buffer.clone(),
            "version": self.version,
            "position": self.position,
            "terms": self._settings,
            "staleness": dict(self.staleness),
            "staged": staged,
            # The gradients of an update that waits for its norm.
            "gradients": gradients,
            "accepted": sorted(self._accepted),
            "next": dict(self.next_push),
            "published": None if self._published is None else self._published.clone(),
            # Without compression, the change is a view of the parameters.
            "changed": (self._changed, self._change if self.compression else None),
        }

    def load_snapshot(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `snapshot` returned.

        The snapshot contains no pending reads, so workers repeat them.

        Raises:
            ValueError: the snapshot is of another policy, optimizer or shard.
        """
        for name, saved in state["terms"].items():
            current = self._settings.get(name)
            if current not in (None, saved):
                raise ValueError(
                    f"expected a journal with {name} {current}, got one with {saved}; pass the "
                    "same setting, or another folder"
                )
        if state["layout"] != self.shard.digest():
            raise ValueError(
                f"expected the state of a shard with layout {self.shard.digest()}, which is server "
                f"{self.shard.number} of {self.shard.servers}, got layout {state['layout']}; pass "
                "the same parameters (names, shapes, dtypes) and `servers` as before, or "
                "another folder. `python -m paramserver convert MODULE:JOB OLD NEW` converts "
                "journals to another number of servers"
            )
        self._buffer.copy_(state["parameters"])
        self._updater.load_state_dict(state)
        self.version = state["version"]
        self.position = state["position"]
        self.staleness = Counter(state["staleness"])
        self._staged = dict(state["staged"])
        self.next_push = dict(state["next"])
        self._accepted = set(state["accepted"])
        if gradients := state.get("gradients"):  # missing in older journals
            self._set_gradients(0, [gradients])
            self.norm = float(self._updater.compute_norm())
        self._published = state["published"]
        self._changed, change = state["changed"]
        fragment = self._fragments[self._changed]
        self._change = fragment.get_view(self.newest) if change is None else change

    def _discard_staged(self, worker: int) -> None:
        """Discard the staged pushes of `worker` that are not accepted."""
        for push in [p for p in self._staged if p[0] == worker and p not in self._accepted]:
            del self._staged[push]

    def _preserve_pending_reads(self) -> None:
        """Copy the current parameters before an update, for workers that still read them."""
        while self.copy_outs:
            _, copy_out = self.copy_outs.popitem()
            copy_out()
        current = {
            worker: read
            for worker, (read, _, preserved) in self._pending_reads.items()
            if preserved is None
        }
        if current:
            preserved = self.newest.clone()
            for worker, read in current.items():
                self._pending_reads[worker] = (read, self.version, preserved)

    def _set_gradients(self, number: int, pushes: Sequence[list[Tensor]]) -> None:
        """Set the gradients of fragment `number` to the mean of the gradients of `pushes`."""
        for target, *gradients in zip(self._targets[number], *pushes, strict=True):
            target.grad = compute_mean(gradients, target.dtype)

    def _update(self, number: int, norm: float | None = None) -> None:
        """Update fragment `number` with its gradients; `norm` is the norm on all servers."""
        self._preserve_pending_reads()
        fragment = self._fragments[number]
        self._updater.step(norm)
        self.version += 1
        self._changed = number
        self._change = fragment.get_view(self.newest)
        if self.compression and self._published is not None:
            new = fragment.shard.views(fragment.get_view(self._buffer))
            published = fragment.shard.views(fragment.get_view(self._published))
            change = self.compression.encode(flatten(new) - flatten(published))
            numel = sum(view.numel() for view in new)
            add_flat(published, self.compression.decode(change, numel))
            self._change = change


def _describe(policy: Consistency | None) -> str:
    """Return the settings of a policy as a string that is equal in every process."""
    values = getattr(policy, "__dict__", {}).items()
    rules = [f"{key}={value}" for key, value in values if key != "outer"]
    return f"{type(policy).__name__}({', '.join(rules)})"


def _shorten(text: str) -> str:
    """Replace the end of a text that is too long for a message by the digest of the text."""
    if len(text) <= _MAX_SETTINGS:
        return text
    return f"{text[:_MAX_SETTINGS]}... (SHA-256 {hashlib.sha256(text.encode()).hexdigest()})"


def format_layout(shard: Shard, policy: Consistency | None) -> str:
    """Return a string that is equal in two processes only if their shards and payloads match."""
    if not isinstance(policy, LocalSteps):
        return f"{shard.digest()} (gradients)"
    return f"{shard.digest()} (changes of {_describe(policy)})"
