"""Tile sizes for each kernel, loading method, precision and head dim, and their pruning.

The sizes are data: one file in `tables` per architecture, written by `tests/tune.py`.  The
exhaustive tests compile every tile with each option for the architectures that it serves.  They
reject a tile that spills more than a few bytes.  They also reject redundant products in half
precision up to head dim 128, and products outside the matrix units except in "ieee".  On a GPU with
less shared memory, a tile is pruned to fewer stages and then to fewer rows.
"""

import functools
import json
from dataclasses import dataclass, replace
from importlib.resources import files


@dataclass(frozen=True)
class TileConfig:
    """The tile sizes and compiler options of one kernel."""

    #: Rows of a query tile.
    block_m: int
    #: Rows of a key tile.
    block_n: int
    #: Warps per program.
    num_warps: int
    #: Stages of the pipeline of loads.
    num_stages: int
    #: Maximum number of registers per thread.  With None, ptxas limits many kernels to 80, 128 or
    #: 168 registers to fit more programs on an SM, and spills a few bytes to do so.
    registers: int | None = None

    @property
    def compiler_options(self) -> dict[str, int]:
        """The options that Triton accepts at launch."""
        options = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }
        if self.registers is not None:
            options["maxnreg"] = self.registers
        return options


Sizes = tuple[int, ...]
Key = tuple[str, str, str]

#: The loading methods that use TMA, on Hopper and on Blackwell.
TMA_PATHS = ("tma", "tma_100")


def _read_tables(which: str) -> dict[Key, dict[int, Sizes | None]]:
    """Return the tables "tiles" or "rich": a tile per head dim, by path, precision and kernel.

    A path is a loading method.  "tma" loads by TMA on Hopper.  "hopper" loads by pointers on
    Hopper: for packed sequences, for strides that TMA does not support and for head dims without a
    tile under "tma".  "pointers" is for GPUs without warpgroup products, and for all tiles that
    other tables do not have.  The paths "tma_100", "pointers_100", "pointers_86" and "pointers_120"
    have the tiles of compute capabilities 10, 8.6 and 8.9, and 12 that differ from these.  The
    precision "half" is bfloat16 and float16, and "ieee" is float32 without matrix units, which does
    not benefit from TMA.
    """
    table = {}
    for name in ("sm_120", "sm_100", "sm_90", "sm_86", "sm_80"):
        text = files("flashattn2.kernels").joinpath(f"tables/{name}.json").read_text()
        for entry, kinds in json.loads(text).items():
            path, precision, kernel = entry.split()
            if which in kinds:
                table[path, precision, kernel] = {
                    int(dim): None if tile is None else tuple(tile)
                    for dim, tile in kinds[which].items()
                }
    return table


#: The default tiles.  A warpgroup of four warps multiplies at least 64 rows.  Two warpgroups
#: therefore compute S and dP twice if the tile has fewer than 128 rows; the tests count the FLOPs.
TILES = _read_tables("tiles")
#: Tiles for calls that need more registers: for the third loop of a left window bound, the
#: derivative of a softcap, or the bounds of splits.  A head dim has an entry if the default tile
#: would spill many registers.  None means that the path has no such tile.
RICH = _read_tables("rich")


@functools.cache
def choose_tile(
    kernel: str,
    precision: str,
    element_bytes: int,
    block_d: int,
    paths: tuple[str, ...],
    shared_bytes: int,
    rich: bool = False,
) -> tuple[TileConfig, bool]:
    """Return the tile for a kernel, and True if the kernel loads by TMA.

    The `paths` are in order of preference; the last path, "pointers", has tiles for all head dims.
    """
    kind = "half" if element_bytes == 2 else precision
    for path in paths:
        sizes = find_sizes((path, kind, kernel), block_d, rich)
        if sizes is not None:
            tile = prune_tile(kernel, TileConfig(*sizes), element_bytes, block_d, shared_bytes)
            return tile, path in TMA_PATHS
    raise ValueError(f'no {kernel} tile for {kind}, dim {block_d} in {paths}; use backend="torch"')


def find_sizes(key: Key, block_d: int, rich: bool) -> Sizes | None:
    """Return the tile sizes for `block_d` or None; with `rich`, `RICH` takes precedence."""
    sizes: Sizes | None = TILES.get(key, {}).get(block_d)
    if rich:
        sizes = RICH.get(key, {}).get(block_d, sizes)
    return sizes


def prune_tile(
    kernel: str, tile: TileConfig, element_bytes: int, block_d: int, shared_bytes: int
) -> TileConfig:
    """Return `tile` with fewer stages, then with rows halved down to 16, to fit `shared_bytes`."""
    while count_shared_bytes(kernel, tile, element_bytes, block_d) > shared_bytes:
        if tile.num_stages > 1:
            tile = replace(tile, num_stages=tile.num_stages - 1)
        elif max(tile.block_m, tile.block_n) <= 16:
            break
        elif tile.block_m >= tile.block_n:
            tile = replace(tile, block_m=tile.block_m // 2)
        else:
            tile = replace(tile, block_n=tile.block_n // 2)
    return tile


def count_shared_bytes(kernel: str, tile: TileConfig, element_bytes: int, block_d: int) -> int:
    """Return the bytes of all tiles in shared memory, both resident and in the pipeline."""
    m, n = tile.block_m * block_d, tile.block_n * block_d
    resident, streamed = {
        "forward": (m, 2 * n),
        "dq": (2 * m, 2 * n),
        "dkdv": (2 * n, 2 * m),
    }[kernel]
    return (resident + tile.num_stages * streamed) * element_bytes
