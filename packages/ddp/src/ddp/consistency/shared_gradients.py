"""A check, before a backward pass, that no two parameters share memory of `.grad`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import pairwise
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ddp.consistency.failure_attribution import FailureAttribution


def refuse_shared_gradients(
    parameters: Mapping[str, nn.Parameter], rank: int, failures: FailureAttribution
) -> None:
    """Raise `RuntimeError` if the `.grad` tensors of two parameters share memory.

    Autograd would accumulate both gradients there, and a bucket could be reduced before the second
    gradient has been added.
    """
    if _have_separate_ranges(parameters.values()):
        return
    for names, layouts in _find_overlapping_ranges(parameters):
        number = _find_repeated_element(layouts)
        if number is None:
            continue
        for other in range(number):
            if _find_repeated_element((layouts[other], layouts[number])) is not None:
                name, other_name = sorted([names[other], names[number]])
                reason = (
                    f"expected a separate .grad of each parameter, but {name!r} and {other_name!r} "
                    "share memory; set both to None, or clone one of them, before the backward pass"
                )
                failures.report_failure(reason)
                raise RuntimeError(f"rank {rank}: {reason}")


def _have_separate_ranges(parameters: Iterable[nn.Parameter]) -> bool:
    """Return True if no two gradients are in overlapping ranges of memory.

    This function runs before each backward pass, so it must be fast. Gradients next to each other
    are combined into one range, so that few ranges are sorted.
    """
    ranges: list[tuple[int, int]] = []
    start = end = 0
    strided = torch.strided
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or gradient.layout is not strided:
            continue
        address = gradient.data_ptr()
        if not address:
            continue  # The gradient has no elements.
        if gradient.is_contiguous():
            gradient_end = address + gradient.nbytes
        else:
            gradient_end = _Layout.from_tensor(gradient).end
        if gradient_end == start:
            start = address
        elif address == end:
            end = gradient_end
        else:
            ranges.append((start, end))
            start = address
            end = gradient_end
    ranges.append((start, end))
    ranges.sort()
    return all(left[1] <= right[0] for left, right in pairwise(ranges))


class _Layout(NamedTuple):
    """The memory layout of a tensor that is not empty."""

    address: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> _Layout:
        """Return the layout of `tensor`."""
        return cls(tensor.data_ptr(), tensor.itemsize, tuple(tensor.shape), tensor.stride())

    @property
    def end(self) -> int:
        """The address of the byte after the last element."""
        last = sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        return self.address + (last + 1) * self.itemsize


def _find_overlapping_ranges(
    parameters: Mapping[str, nn.Parameter],
) -> list[tuple[list[str], tuple[_Layout, ...]]]:
    """Return each group of gradients with overlapping ranges as names and layouts, by address."""
    gradients = []
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is not None and gradient.layout is torch.strided and gradient.numel():
            gradients.append((_Layout.from_tensor(gradient), name))
    gradients.sort()
    groups: list[list[tuple[_Layout, str]]] = []
    end = 0
    for layout, name in gradients:
        if layout.address >= end:
            groups.append([])
        groups[-1].append((layout, name))
        end = max(end, layout.end)
    return [
        ([name for _, name in group], tuple(layout for layout, _ in group))
        for group in groups
        if len(group) > 1
    ]


# Gradients that are columns of one matrix, for example, are in overlapping ranges but have no
# common element. With the cache, they are not compared again before each backward pass.
@lru_cache(maxsize=128)
def _find_repeated_element(layouts: tuple[_Layout, ...]) -> int | None:
    """Return the number of the first tensor that has memory of an earlier tensor.

    The tensors are in the order of their addresses. Returns None if there is no such tensor.
    """
    start = layouts[0].address
    # All elements start and end at multiples of this number of bytes after `start`.
    unit = gcd(*(x for layout in layouts for x in (layout.address - start, layout.itemsize)))
    num_units = (max(layout.end for layout in layouts) - start) // unit
    is_used = torch.zeros(num_units, dtype=torch.bool, device="cpu")
    for number, layout in enumerate(layouts):
        width = layout.itemsize // unit
        # The elements along a dimension with stride 0 have the same address.
        shape = [
            size if step else 1 for size, step in zip(layout.shape, layout.strides, strict=True)
        ]
        strides = [step * width for step in layout.strides]
        offset = (layout.address - start) // unit
        elements = is_used.as_strided((*shape, width), (*strides, 1), offset)
        if bool(elements.any()):
            return number
        elements.fill_(True)
    return None
