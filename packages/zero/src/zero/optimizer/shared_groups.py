"""Reducers that share a process group, such as those of two optimizers of one model.

The backward passes of different ranks may use the reducers in different orders or not at all.
Therefore, when the backward pass ends, the ranks first agree which reducers any rank has reached.
These reducers then launch their reductions in order of construction.
"""

from __future__ import annotations

import gc
from itertools import compress
from typing import Any
from weakref import WeakSet, ref

from zero.process_groups import Communicator

#: One entry per reducer of this rank, in any group.
_entries: WeakSet[GroupMember] = WeakSet()


class GroupMember:
    """The membership of a reducer in its process group, with a number that is unique in the group.

    Every rank must construct it, because the ranks agree on the number.
    """

    def __init__(self, reducer: Any, communicator: Communicator) -> None:
        self._reducer = ref(reducer)
        self.communicator = communicator
        if self._find_living_reducers():
            # Unreferenced reducers in reference cycles must not count as alive.
            gc.collect()
        numbers = communicator.gather_objects(list(self._find_living_reducers()))
        others = sorted({number for rank_numbers in numbers for number in rank_numbers})
        self._number = max(others, default=-1) + 1
        _entries.add(self)
        #: The numbers of the reducers of this group that exist on any rank; equal on all ranks.
        self.numbers: list[int] = []
        self._set_numbers([*others, self._number])

    def find_reached_reducers(self) -> list[Any]:
        """Return the reducers that any rank's backward pass has reached, in order of construction.

        Every rank must call this method. Raise RuntimeError if a rank has deleted such a reducer.
        """
        living = self._find_living_reducers()
        numbers = self.numbers
        is_reached = [n in living and living[n].in_backward for n in numbers]
        is_alive = [n in living for n in numbers]
        is_deleted = [n not in living for n in numbers]
        anywhere = self.communicator.launch_flag_reduction(is_reached, is_alive, is_deleted)()
        reached, alive, deleted = ([*compress(numbers, flags)] for flags in anywhere)
        self._set_numbers(alive)
        if any(number in deleted for number in reached):
            raise RuntimeError(
                "the backward pass reaches parameters of an optimizer that was deleted on some "
                "ranks: keep the optimizer on every rank, or call zero_grad() and delete it on "
                "every rank"
            )
        return [living[number] for number in reached]

    def _find_living_reducers(self) -> dict[int, Any]:
        """Return this rank's reducers of the group by number."""
        living = {}
        for entry in _entries:
            reducer = entry._reducer()
            if reducer is not None and entry.communicator.uses_same_group(self.communicator):
                living[entry._number] = reducer
        return living

    def _set_numbers(self, numbers: list[int]) -> None:
        for entry in _entries:
            if entry.communicator.uses_same_group(self.communicator):
                entry.numbers = numbers
