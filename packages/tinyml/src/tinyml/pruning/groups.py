"""Groups of units, such as channels and heads, that several layers share.

Note [Dependency groups]
A layer's outputs are read by other layers, possibly after normalization, pooling or a residual sum.
A unit must be removed from every tensor along this path:

    conv1.weight  (out, in, 3, 3)   writer, axis 0  --+
    conv1.bias    (out)             writer, axis 0    |
    bn1.weight    (channels)        passer, axis 0    +--> one Group with `size` units
    conv2.weight  (out, in, 3, 3)   writer, axis 0    |    (x = bn1(conv1(y)) + conv2(y))
    fc.weight     (out, in)         reader, axis 1  --+    (fc(x.mean((2, 3))))

A `Slice` is one line of this picture: a tensor, an axis, and the range of elements that contains
the units. Writers produce the units, passers transform each unit separately, and readers sum over
them. `units.Walk` visits the nodes of the exported graph and creates a group for the outputs of
each product. It merges the groups of values that an operator combines, as the sum above does.

A unit may be several elements wide: `width` is 64 for heads of 64 elements. Merging groups of
different sizes makes units coarser. In grouped-query attention, 8 query heads and 2 key-value heads
become 2 units, each with 4 query heads and 1 key-value head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, fx


@dataclass
class Slice:
    """The elements of the parameter or buffer `tensor` that contain units.

    Each unit has `width` elements along `axis`, and the first unit starts at element `start`.
    """

    tensor: str
    axis: int
    start: int
    width: int
    role: Literal["writer", "passer", "reader"]

    @property
    def layer(self) -> str:
        """Return the name of the module that owns the tensor."""
        return self.tensor.rpartition(".")[0]


@dataclass(eq=False)
class Group:
    """Units that several layers share and that are removed together (Note [Dependency groups])."""

    size: int
    slices: list[Slice] = field(default_factory=list)
    #: The operator or other reason that prevents removing these units; empty if there is none.
    blocked_by: str = ""
    #: The units from most to least important; see `tinyml.pruning.importance`.
    order: Tensor = field(default_factory=lambda: torch.empty(0))
    #: The importance of each unit; -1 for units that are always zero.
    scores: Tensor = field(default_factory=lambda: torch.empty(0))

    def list_layers(self, role: str) -> list[str]:
        """Return the names of the layers with a slice of this role, without duplicates."""
        return list(dict.fromkeys(s.layer for s in self.slices if s.role == role))

    @property
    def writers(self) -> list[str]:
        """Return the names of the layers that produce the units."""
        return self.list_layers("writer")

    def coarsen(self, size: int) -> None:
        """Merge neighboring units so that `size` units remain; `size` divides their number."""
        for piece in self.slices:
            piece.width *= self.size // size
        self.size = size


@dataclass(frozen=True)
class Units:
    """The units in dimension `dim` of a value of the graph.

    `parts` are the groups along this dimension, in order, each with its number of elements.
    """

    dim: int
    parts: tuple[tuple[Group, int], ...]


@dataclass(frozen=True)
class SizeUse:
    """A use of an attribute of a module as a size, or as something else.

    `node` describes the operation. `parts` are the groups whose units the size counts, each with
    its number of elements; without such groups, `parts` is empty.
    """

    node: str
    parts: tuple[tuple[Group, int], ...]


@dataclass(frozen=True)
class Product:
    """A product with a weight, which sums over dimension `dim` of the value of `source`."""

    node: fx.Node
    source: fx.Node
    dim: int
