"""From tensors to a launch: tile, splits, TMA or pointers, and where each program works.

Notable: nothing here waits for the GPU.  Packed sequences are cut into tiles by the kernels, which
have as many places as the rows could need at most; a program whose place is left over ends at once.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashattn2.kernels.configs import Tile, choose
from flashattn2.spec import AttentionSpec

MAX_SPLITS = 16
# Kernels multiply a row number within a tile by the row stride in int32.  A tile has at most 256
# rows, so no product overflows below this bound.
MAX_ROW_STRIDE = 2**22
# What a fixed split size may ask for: each split has an output of its own, in float32.
MAX_FIXED_SPLITS = 1024


class Meta(NamedTuple):
    """What is compiled into a kernel, as its last argument.

    In a kernel these are plain numbers, which `tl.full` takes and triton 3.6's `tl.zeros` does not.
    """

    # Head dims of q and k, and of v, and each rounded up to a power of two.
    D: int
    BLOCK_D: int
    DV: int
    BLOCK_DV: int
    # Rows of a query tile and of a key tile.
    BLOCK_M: int
    BLOCK_N: int
    # Whether the band is bounded on a side: if not, the number that is given is not read.
    LEFT: bool
    RIGHT: bool
    SOFTCAP: bool
    # See `flashattn2.kernels.tiles`: `share` for SPLITS, `place`, `load_tile`, and the top.
    SPLITS: int
    PACKED: bool = False
    TMA: bool = False
    PRECISION: str = "ieee"
    EXACT: bool = False
    # Whether dQ is added in the kernel of dK and dV.
    ATOMIC: bool = False


@dataclass(frozen=True)
class Plan:
    """How one kernel will be launched."""

    tile: Tile
    block_d: int
    block_dv: int
    splits: int
    tma: bool
    precision: str
    split_size: int = 0

    @property
    def split_flag(self) -> int:
        """How the kernels divide a loop: see `flashattn2.kernels.tiles.share`."""
        return -self.split_size if self.split_size else self.splits

    def meta(
        self, q: Tensor, v: Tensor, spec: AttentionSpec, packed: bool, atomic: bool = False
    ) -> Meta:
        """What the kernel is compiled with for this input."""
        exact = q.dtype == torch.float32 and self.precision == "ieee"
        return Meta(
            q.shape[-1], self.block_d, v.shape[-1], self.block_dv,
            self.tile.block_m, self.tile.block_n,
            spec.left >= 0, spec.right >= 0, spec.softcap > 0,
            self.split_flag, packed, self.tma, self.precision, exact, atomic,
        )  # fmt: skip

    def operands(self, *tensors: tuple[Tensor, int]) -> list[Any]:
        """Each tensor as it is, or as a descriptor of ``block_d`` wide tiles of so many rows."""
        if not self.tma:
            return [tensor for tensor, _ in tensors]
        from triton.tools.tensor_descriptor import TensorDescriptor

        return [
            TensorDescriptor(
                x,
                list(x.shape),
                list(x.stride()),
                [1, 1, rows, power_of_two(x.shape[-1])],
            )
            for x, rows in tensors
        ]


def plan(
    kernel: str,
    precision: str,
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *others: Tensor,
    packed: bool,
    split_size: int = 0,
) -> Plan:
    """The launch of ``kernel`` ("forward", "dq", "dkdv" or "atomic")."""
    device = device_of(q.device)
    if not device.has_tf32:
        precision = "ieee"
    by_key = kernel in ("dkdv", "atomic")
    block_d, block_dv = (power_of_two(x.shape[-1]) for x in (q, v))
    width = q.element_size()
    paths = ["pointers"]
    if device.has_tma:
        paths = ["hopper", "pointers"]
        # What TMA reads past a sequence is set to zero in registers: by keys there are none left.
        if not (packed and by_key) and all(can_use_tma(x) for x in (q, k, v, *others)):
            paths.insert(0, "packed" if packed else "tma")
    heads = (k if by_key else q).shape[1]
    # Batches are to give the same bits: a forward pass is split at fixed keys, all else never.
    fixed = split_size if kernel == "forward" and not packed else 0
    options = spec.left >= 0 or spec.softcap > 0
    # Splitting costs registers too: what is split is planned again, with the tile for that.
    for rich in (options, True):
        tile, tma, products = choose(
            kernel,
            precision,
            width,
            max(block_d, block_dv),
            tuple(paths),
            device.shared_bytes,
            rich,
        )
        if not device.has_maxnreg:
            tile = replace(tile, registers=None)
        tiles, loop = cdiv(q.shape[2], tile.block_m), cdiv(k.shape[2], tile.block_n)
        if by_key:
            tiles, loop = loop, tiles
        splits = 1
        if fixed:
            fixed = cdiv(split_size, tile.block_n) * tile.block_n
            splits = cdiv(k.shape[2], fixed)
        elif not (packed or split_size):
            splits = split_count(tiles * q.shape[0] * heads, loop, device.processors)
        if splits == 1:
            break
    if fixed and splits > MAX_FIXED_SPLITS:
        raise ValueError(
            f"split_size {split_size} cuts {k.shape[2]} keys into {splits} splits, above "
            f"{MAX_FIXED_SPLITS}; give at least {cdiv(k.shape[2], MAX_FIXED_SPLITS)}"
        )
    return Plan(tile, block_d, block_dv, splits, tma, products, fixed)


def split_count(programs: int, loop: int, processors: int) -> int:
    """Splits that give every processor a program, each with at least four tiles to loop over."""
    if programs >= processors:
        return 1
    return max(1, min(processors // programs, loop // 4, MAX_SPLITS))


def can_use_tma(x: Tensor) -> bool:
    """TMA needs 16-byte strides and addresses, and dimensions that really differ in address."""
    aligned = all(s > 0 and s * x.element_size() % 16 == 0 for s in x.stride()[:-1])
    return aligned and x.stride(-1) == 1 and x.data_ptr() % 16 == 0


def rows_contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copy the tensors whose last dimension has gaps or whose row stride is too large."""
    return tuple(x if has_addressable_rows(x) else x.contiguous() for x in tensors)


def has_addressable_rows(x: Tensor) -> bool:
    """Return True if kernels can address the rows of ``x``; batch and head strides are free."""
    return x.stride(-1) == 1 and (x.shape[2] <= 1 or x.stride(2) < MAX_ROW_STRIDE)


def empty_like_layout(x: Tensor, dim: int | None = None) -> Tensor:
    """Room for a result in the layout of ``x``, of head dim ``dim``, which has no gaps."""
    if dim is not None and dim != x.shape[-1]:
        batch, heads, rows, _ = x.shape
        if x.stride(1) < x.stride(2) and heads * dim < MAX_ROW_STRIDE:
            return x.new_empty((batch, rows, heads, dim)).transpose(1, 2)
        return x.new_empty((batch, heads, rows, dim))
    room = torch.empty_like(x)
    return room if has_addressable_rows(room) else x.new_empty(x.shape)


def tiles_of(x: Tensor, cu: Tensor | None, block: int) -> int:
    """Tiles of these rows; for packed sequences at most: see `flashattn2.kernels.tiles.place`."""
    rows = x.shape[2]
    return cdiv(rows, block) if cu is None else rows // block + cu.shape[0] - 1


def grid(tiles: int, heads: int, splits: int) -> tuple[int, int]:
    """Programs of a kernel: CUDA takes 2^31 - 1 on the first axis, and 65,535 on the others.

    Neighbors are the tiles of one head: they read the same keys.  See `tiles.program`.
    """
    return tiles * heads, splits


def split_outputs(gradient: Tensor, splits: int) -> Tensor:
    """Where the splits write: the gradient itself, or a float32 copy for each."""
    if splits == 1:
        return gradient
    return gradient.new_empty(
        (splits * gradient.shape[0], *gradient.shape[1:]), dtype=torch.float32
    )


def cdiv(number: int, divisor: int) -> int:
    """The quotient rounded up; Triton's own takes 4 us a call, and a launch has many."""
    return -(-number // divisor)


def power_of_two(number: int) -> int:
    """The smallest that is no less."""
    return 1 << (number - 1).bit_length()


def strides(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    """Of batch, head and row: the last dimension has no gaps."""
    return tuple(x.stride()[:3] for x in tensors)


def sequence_bounds(cu_q: Tensor | None, cu_k: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Return both boundaries of packed sequences without gaps, or None."""
    return None if cu_q is None or cu_k is None else (cu_q.contiguous(), cu_k.contiguous())


def score_factors(spec: AttentionSpec, exact: bool) -> tuple[float, float, float, int, int]:
    """Scale, ``inner``, ``outer`` (see `flashattn2.kernels.tiles`), left and right."""
    unit = 1.0 if exact else math.log2(math.e)
    inner, outer = 1.0, spec.scale * unit
    if spec.softcap:
        inner, outer = spec.scale / spec.softcap, spec.softcap * unit
    return spec.scale, inner, outer, spec.left, spec.right


@dataclass(frozen=True)
class Device:
    """What the choice of tiles needs to know of a GPU."""

    name: str
    shared_bytes: int
    processors: int
    has_tma: bool
    has_tf32: bool = True
    has_maxnreg: bool = True


@functools.cache
def device_of(device: torch.device) -> Device:
    """A GPU's properties; the interpreter stands for one small processor with TMA.

    Triton for AMD knows neither TMA nor ``maxnreg``, nor TF32 but on one architecture.
    """
    if device.type != "cuda":
        return Device("interpreter", 227 * 1024, 1, True)
    properties = torch.cuda.get_device_properties(device)
    nvidia = torch.version.hip is None
    return Device(
        properties.name,
        properties.shared_memory_per_block_optin if nvidia else properties.shared_memory_per_block,
        properties.multi_processor_count,
        has_tma=nvidia and properties.major >= 9,
        has_tf32=nvidia,
        has_maxnreg=nvidia,
    )
