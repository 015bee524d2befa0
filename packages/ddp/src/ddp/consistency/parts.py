"""Gradients that are made in several parts, where every step computes the same.

A reentrant checkpoint of a layer that is used twice makes two parts of its gradient, one after the
other, and nothing tells the first from the last: so the first step counts them, and sends at its
end.
"""

from __future__ import annotations


class Parts:
    """How many parts each of `count` gradients has."""

    def __init__(self, count: int) -> None:
        self._of, self._to_come = [0] * count, [0] * count
        self._steps = 0

    def begin(self) -> None:
        """A step begins."""
        self._to_come = list(self._of)
        self._steps += 1

    def more_to_come(self, index: int) -> bool:
        """Note a part; whether others follow it in this step."""
        if self._steps == 1:
            self._of[index] += 1
            return True
        self._to_come[index] -= 1
        return self._to_come[index] > 0
