"""A ledger of the live tensors of a training step, by operator.

It adds the largest live tensors to an out-of-memory error. `fits` uses it on fake tensors.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from torch import OutOfMemoryError, Tensor

from accounting.breakdown import format_bytes
from accounting.memory.live import Allocation, LiveMemory, list_plain_tensors


class Ledger(LiveMemory):
    """A context manager around a training step that lists the live tensors.

    `table()` returns the list, and an out-of-memory error inside the context receives it as a note.
    A compiled module runs eagerly inside the context, so the list describes its eager step. Tensors
    of all devices count. Operators that another Python thread calls are not recorded. A tensor that
    existed before the context is not counted until an operator returns it or a view of it.
    Therefore pass weights and optimizer state to `hold`. `rounding` is the granularity of the
    allocator in bytes.
    """

    def __init__(self, *, rounding: int = 1) -> None:
        super().__init__(rounding=rounding)
        self.phase = "activations"

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, Exception) and _is_out_of_memory(error):
            size = format_bytes(self.live_bytes)
            error.add_note(f"live tensors when memory ran out, {size}:\n{self.table()}")

    def table(self, allocations: list[Allocation] | None = None, rows: int = 12) -> str:
        """Return the bytes by label, module and operator as text, the largest first.

        `allocations` defaults to the live tensors; pass `at_peak` for the tensors at the peak.
        A last line sums up the groups beyond the first `rows`.
        """
        sizes: Counter[tuple[str, str, str]] = Counter()
        for block in self._alive.values() if allocations is None else allocations:
            where = "/".join(block.module.split(".")[-2:])
            sizes[block.phase, where, block.operator] += block.nbytes
        listed = [
            f"{format_bytes(size):>10}  {label:<12} {module or '-'}  {operator}".rstrip()
            for (label, module, operator), size in sizes.most_common(rows)
        ]
        if len(sizes) > rows:
            remainder = sum(sizes.values()) - sum(size for _, size in sizes.most_common(rows))
            listed.append(f"{format_bytes(remainder):>10}  in {len(sizes) - rows} other groups")
        return "\n".join(listed)

    def hold(self, label: str, *tensors: Tensor) -> None:
        """Count existing tensors under a label, as in `hold("weights", *model.parameters())`."""
        if not isinstance(label, str) or not all(isinstance(t, Tensor) for t in tensors):
            received = ", ".join(type(argument).__name__ for argument in (label, *tensors))
            raise TypeError(f"expected a label and tensors, hold(label, *tensors), got {received}")
        phase = self.phase
        self.phase = label
        self.add(tensors, "")
        self.phase = phase

    def name_gradient(self, parameter: Tensor) -> None:
        """Change the label of a parameter's stored gradient to `gradients`."""
        for inner in list_plain_tensors(parameter.grad) if parameter.grad is not None else ():
            key = inner.untyped_storage()._cdata
            if key in self._alive:
                self._alive[key] = replace(self._alive[key], phase="gradients")


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)
    )
