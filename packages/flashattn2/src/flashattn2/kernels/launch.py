"""Planning of a kernel launch: its tile, splits, loading method and arguments.

Planning never waits for the GPU.  The kernels themselves cut packed sequences into tiles: the grid
has the maximum number of tiles that the rows may need, and a program without a tile exits at once.

Note [Kernel arguments]
The kernels receive their scalars as plain tuples, in the order that the docstring of
`flashattn2.kernels.tiles` defines.  They receive their compile-time constants as a `Meta`.  Named
tuples as run-time arguments are untested on a GPU, so the tuples are plain.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flashattn2.kernels.configs import TMA_PATHS, TileConfig, choose_tile
from flashattn2.spec import AttentionSpec

#: Largest number of splits of a forward or backward pass.  Decoding has no such limit.
MAX_SPLITS = 16
#: Exclusive upper bound of row strides.  The kernels multiply a row index within a tile, at most
#: 255, by the row stride in int32.
MAX_ROW_STRIDE = 2**22


class Meta(NamedTuple):
    """The compile-time constants of a kernel, passed as its last argument.

    Inside a kernel the fields are plain numbers.  `tl.full` accepts them; `tl.zeros` of Triton 3.6
    does not.
    """

    #: Head dim of q and k.
    D: int
    #: D rounded up to a power of two.
    BLOCK_D: int
    #: Head dim of v.
    DV: int
    #: DV rounded up to a power of two.
    BLOCK_DV: int
    #: Rows of a query tile.
    BLOCK_M: int
    #: Rows of a key tile.
    BLOCK_N: int
    #: True if the band has a left bound; otherwise its value is not read.
    LEFT: bool
    #: True if the band has a right bound; otherwise its value is not read.
    RIGHT: bool
    #: True if the scores have a softcap.
    SOFTCAP: bool
    #: Number of programs among which the loop of each tile is split.
    SPLITS: int
    #: True for packed sequences.
    PACKED: bool = False
    #: True if tensors are passed as TMA descriptors.
    TMA: bool = False
    #: Precision of float32 products.
    PRECISION: str = "ieee"
    #: True for float32 products without matrix units: see `flashattn2.kernels.tiles`.
    EXACT: bool = False


class LaunchPlan(NamedTuple):
    """The launch parameters of one kernel."""

    tile: TileConfig
    meta: Meta

    def make_operands(self, *tensors: tuple[Tensor, int]) -> list[Any]:
        """Return the tensor of each `(tensor, rows)` or, with TMA, a descriptor of its tiles."""
        if not self.meta.TMA:
            return [tensor for tensor, _ in tensors]
        return [
            TensorDescriptor(
                x, list(x.shape), list(x.stride()), [1, 1, rows, next_power_of_2(x.shape[-1])]
            )
            for x, rows in tensors
        ]


def plan_launch(
    kernel: str,
    precision: str,
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *others: Tensor,
    packed: bool,
) -> LaunchPlan:
    """Return the launch parameters of `kernel`: "forward", "dq" or "dkdv".

    The `others` are further tensors that the kernel loads, such as the gradient of the output.
    """
    device = get_device(q.device)
    by_key = kernel == "dkdv"
    block_d = next_power_of_2(q.shape[-1])
    block_dv = next_power_of_2(v.shape[-1])
    paths = _list_paths(device, packed, (q, k, v, *others))
    heads = (k if by_key else q).shape[1]
    has_options = spec.left >= 0 or spec.softcap > 0
    # Splits need registers too: a split launch is planned a second time with the rich tile.
    for rich in (has_options, True):
        widest = max(block_d, block_dv)
        tile, tma = choose_tile(
            kernel, precision, q.element_size(), widest, paths, device.shared_bytes, rich
        )
        tiles = cdiv(q.shape[2], tile.block_m)
        loop_tiles = cdiv(k.shape[2], tile.block_n)
        if by_key:
            tiles, loop_tiles = loop_tiles, tiles
        splits = 1
        if not packed:
            splits = count_splits(tiles * q.shape[0] * heads, loop_tiles, device.processors)
        if splits == 1:
            break
    is_exact = q.dtype == torch.float32 and precision == "ieee"
    meta = Meta(
        q.shape[-1], block_d, v.shape[-1], block_dv, tile.block_m, tile.block_n,
        spec.left >= 0, spec.right >= 0, spec.softcap > 0,
        splits, packed, tma, precision, is_exact,
    )  # fmt: skip
    return LaunchPlan(tile, meta)


def _list_paths(device: "Device", packed: bool, tensors: tuple[Tensor, ...]) -> tuple[str, ...]:
    """Return the tables of tiles to search, in order of preference."""
    # TMA would read past the end of a packed sequence.
    if packed or not all(can_use_tma(x) for x in tensors):
        return tuple(path for path in device.paths if path not in TMA_PATHS)
    return device.paths


def count_splits(programs: int, loop_tiles: int, processors: int, most: int = MAX_SPLITS) -> int:
    """Return the number of splits, at most `most`, or 1 if the programs already fill the SMs.

    Without splits, each of `programs` programs loops over `loop_tiles` tiles.  The programs of all
    splits fit on the SMs, and on average a split has at least four tiles.
    """
    if programs >= processors:
        return 1
    return max(1, min(processors // programs, loop_tiles // 4, most))


def can_use_tma(x: Tensor) -> bool:
    """Return True if TMA supports the tensor: aligned to 16 bytes, contiguous rows, no stride 0."""
    *outer, last = x.stride()
    # If the greatest common divisor is a multiple of 16 bytes, so is every stride.
    is_aligned = 0 not in outer and math.gcd(*outer) * x.element_size() % 16 == 0
    return is_aligned and last == 1 and x.data_ptr() % 16 == 0


def make_rows_contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, copied if the last dimension has gaps or the row stride is too large."""
    return tuple(x if has_addressable_rows(x) else x.contiguous() for x in tensors)


def has_addressable_rows(x: Tensor) -> bool:
    """Return True if kernels can address the rows of `x`; batch and head may have any strides."""
    _, _, row, last = x.stride()
    return last == 1 and (row < MAX_ROW_STRIDE or x.shape[2] <= 1)


def make_empty_like(x: Tensor, dim: int | None = None) -> Tensor:
    """Return an uninitialized tensor with the layout of `x`, contiguous rows and head dim `dim`.

    If its row stride would be too large for the kernels, the tensor is contiguous instead.
    """
    if dim is not None and dim != x.shape[-1]:
        batch, heads, rows, _ = x.shape
        if x.stride(1) < x.stride(2) and heads * dim < MAX_ROW_STRIDE:
            return x.new_empty((batch, rows, heads, dim)).transpose(1, 2)
        return x.new_empty((batch, heads, rows, dim))
    result = torch.empty_like(x)
    return result if has_addressable_rows(result) else x.new_empty(x.shape)


def count_tiles(x: Tensor, cu: Tensor | None, block: int) -> int:
    """Return the number of tiles; for packed sequences, an upper bound: see `tiles.locate_tile`."""
    rows = x.shape[2]
    return cdiv(rows, block) if cu is None else rows // block + cu.shape[0] - 1


def compute_grid(tiles: int, heads: int, splits: int) -> tuple[int, int]:
    """Return the grid of a kernel.

    CUDA allows 2^31 - 1 programs on the first axis and 65,535 on the second and third axes.
    Neighboring programs are tiles of the same head, which read the same keys: see `locate_program`.
    """
    return tiles * heads, splits


def make_split_outputs(x: Tensor, splits: int) -> Tensor:
    """Return the tensor to write: `x` for one split, otherwise a float32 part per split."""
    if splits == 1:
        return x
    return x.new_empty((splits * x.shape[0], *x.shape[1:]), dtype=torch.float32)


def cdiv(number: int, divisor: int) -> int:
    """Return the quotient rounded up; `triton.cdiv` takes 4 us, and a launch makes many calls."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def get_strides(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    """Return the strides of batch, head and row; the last dimension is contiguous."""
    return tuple(x.stride()[:3] for x in tensors)


def make_sequence_bounds(cu_q: Tensor | None, cu_k: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Return both boundaries of packed sequences as contiguous tensors, or None."""
    return None if cu_q is None or cu_k is None else (cu_q.contiguous(), cu_k.contiguous())


def compute_score_factors(spec: AttentionSpec, exact: bool) -> tuple[float, float, float, int, int]:
    """Return `(scale, softcap_scale, score_scale, left, right)`: see `flashattn2.kernels.tiles`."""
    unit = 1.0 if exact else math.log2(math.e)
    softcap_scale, score_scale = 1.0, spec.scale * unit
    if spec.softcap:
        softcap_scale, score_scale = spec.scale / spec.softcap, spec.softcap * unit
    return spec.scale, softcap_scale, score_scale, spec.left, spec.right


@dataclass(frozen=True)
class Device:
    """The properties of a GPU that the choice of tiles depends on."""

    #: Shared memory per program in bytes.
    shared_bytes: int
    #: Number of streaming multiprocessors (SMs).
    processors: int
    #: The tables of tiles to search, in order of preference.
    paths: tuple[str, ...]


#: The tables of the GPUs with and without warpgroup products.
HOPPER = ("tma", "hopper", "pointers")
AMPERE = ("pointers",)


def list_paths_of_capability(major: int, minor: int) -> tuple[str, ...]:
    """Return the tables of tiles for a compute capability, in order of preference.

    Capability 12 has TMA but no warpgroup products: Hopper's tiles spill there, Ampere's do not.
    """
    if major >= 12:
        return ("pointers_120", *AMPERE)
    if major >= 10:
        return ("tma_100", "tma", "pointers_100", "hopper", "pointers")
    if major == 9:
        return HOPPER
    return ("pointers_86", *AMPERE) if minor in (6, 9) else AMPERE


@functools.cache
def get_device(device: torch.device) -> Device:
    """Return the properties of a GPU; the interpreter counts as one SM with TMA."""
    if device.type != "cuda":
        return Device(227 * 1024, 1, HOPPER)
    properties = torch.cuda.get_device_properties(device)
    return Device(
        properties.shared_memory_per_block_optin,
        properties.multi_processor_count,
        list_paths_of_capability(properties.major, properties.minor),
    )
