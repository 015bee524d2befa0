"""Reducers that share a process group, as those of two optimizers of one model do.

Each rank may reach them in a different order or not at all. They therefore launch when backward
ends, in the order of their construction, and the ranks agree on those that any rank has reached.
"""

from __future__ import annotations

import gc
from itertools import compress
from typing import Protocol
from weakref import WeakSet, ref

from zero.process_groups import Communicator


class Reducer(Protocol):
    """A reducer of gradients."""

    #: True while a backward of this rank reaches the parameters.
    in_backward: bool

    def join_backward(self) -> None:
        """Take part in a backward, with zero gradients for parameters that it has not reached."""


#: The memberships of all reducers of this rank.
_entries: WeakSet[SharedGroup] = WeakSet()


class SharedGroup:
    """A reducer's membership among the reducers of its process group, under a unique number."""

    def __init__(self, reducer: Reducer, communicator: Communicator) -> None:
        self._reducer = ref(reducer)
        self.communicator = communicator
        if self._living():
            # Unreferenced reducers in reference cycles must not count as alive.
            gc.collect()
        numbers = communicator.gather_objects(list(self._living()))
        others = sorted({number for of_rank in numbers for number in of_rank})
        self._number = max(others, default=-1) + 1
        _entries.add(self)
        #: The numbers of the reducers of this group that exist on any rank; equal on all ranks.
        self.numbers: list[int] = []
        self._set_numbers([*others, self._number])

    def reached(self) -> list[Reducer]:
        """Return the reducers of the group that a backward of any rank has reached, in order."""
        living = self._living()
        numbers = self.numbers
        is_reached = [n in living and living[n].in_backward for n in numbers]
        is_alive = [n in living for n in numbers]
        is_deleted = [n not in living for n in numbers]
        anywhere = self.communicator.any_across_ranks(is_reached, is_alive, is_deleted)()
        reached, alive, deleted = ([*compress(numbers, flags)] for flags in anywhere)
        self._set_numbers(alive)
        if any(number in deleted for number in reached):
            raise RuntimeError(
                "backward reaches parameters of an optimizer that was deleted on some ranks: keep "
                "it on every rank, or zero_grad() and delete it on every rank"
            )
        return [living[number] for number in reached]

    def _living(self) -> dict[int, Reducer]:
        """Return this rank's reducers of the group by number."""
        living = {}
        for entry in _entries:
            reducer = entry._reducer()
            if reducer is not None and entry.communicator.uses_same_groups(self.communicator):
                living[entry._number] = reducer
        return living

    def _set_numbers(self, numbers: list[int]) -> None:
        for entry in _entries:
            if entry.communicator.uses_same_groups(self.communicator):
                entry.numbers = numbers
