"""Gradients that one backward pass computes in several parts."""

from __future__ import annotations


class GradientParts:
    """The number of parts of each gradient, for models with `static_graph=True`.

    A reentrant checkpoint of a layer that is used twice computes its gradient in two parts, and
    autograd does not mark the last part. The first step that computes gradients therefore counts
    the parts, and launches its buckets at the end of the backward pass.
    """

    def __init__(self, num_gradients: int) -> None:
        self._counts = [0] * num_gradients
        self.start_step()

    def start_step(self) -> None:
        """Reset the number of remaining parts of each gradient."""
        self._remaining = list(self._counts)
        # Before a rank without inputs in `join()` computes gradients, it takes part in other steps.
        self._is_counting = not any(self._counts)

    def has_more(self, index: int) -> bool:
        """Record a part; return True if the step computes another part of the same gradient.

        Always returns True in the step that counts the parts.
        """
        if self._is_counting:
            self._counts[index] += 1
            return True
        self._remaining[index] -= 1
        return self._remaining[index] > 0
