"""Tile sizes: one for each kernel, way of loading, precision and head dim, and how it is pruned.

Notable: the sizes are data, a file of `tables` for each architecture.  The tests compile every tile
for sm_90 and sm_80 with each option that it may meet, and refuse one that does work twice, spills
more than a few bytes or leaves the matrix units idle.  A GPU with less shared memory gets the same
tile with fewer stages, then with fewer rows.
"""

import json
from dataclasses import dataclass, replace
from importlib.resources import files


@dataclass(frozen=True)
class Tile:
    """Rows of a query tile and of a key tile, warps of a program, stages of the load pipeline.

    ``registers`` are those that a thread may use, where ptxas is not to choose.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    registers: int | None = None

    @property
    def compiler_options(self) -> dict[str, int]:
        """As Triton takes them."""
        options = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }
        if self.registers is not None:
            options["maxnreg"] = self.registers
        return options


# What a thread may use at most.  Left to itself, ptxas stops many kernels at 80, 128 or 168 so that
# more programs fit, and spills a few bytes for it: see `sizes`.
ALL_REGISTERS = 255
# Paths by descriptors; packed sequences take theirs only where the tables have it.
BY_TMA = ("tma", "packed")

Sizes = tuple[int, ...]
Key = tuple[str, str, str]


def _table(which: str) -> dict[Key, dict[int, Sizes | None]]:
    """All that `tables` hold of ``which``: a tile for each head dim, by path, precision, kernel.

    A path is a way of loading: "tma", on Hopper, and "packed", the same for packed sequences, where
    a GPU found it faster; "hopper", by pointers there (other packed sequences, strides that TMA
    cannot take, a head dim that has no tile under "tma"); "pointers" for all else.
    "half" is bfloat16 and float16, "ieee" float32 without matrix units, where TMA has nothing to
    give.
    """
    table = {}
    for name in ("sm_90", "sm_80"):
        text = files("flashattn2.kernels").joinpath(f"tables/{name}.json").read_text()
        for entry, kinds in json.loads(text).items():
            path, precision, kernel = entry.split()
            if which in kinds:
                table[path, precision, kernel] = {
                    int(dim): tile and tuple(tile) for dim, tile in kinds[which].items()
                }
    return table


# A warpgroup of four warps multiplies 64 rows at least.  With eight warps, a first product of fewer
# than 128 rows would be computed twice, once by each of both warpgroups: the tests count it.
TILES = _table("tiles")
# What serves a left window bound (a third loop), a softcap (its derivative) or splits (bounds)
# where the tile above would spill much with them.  None says that TMA has none: pointers serve.
RICH = _table("rich")


def choose(
    kernel: str,
    precision: str,
    element_bytes: int,
    block_d: int,
    paths: tuple[str, ...],
    shared_bytes: int,
    rich: bool = False,
) -> tuple[Tile, bool, str]:
    """The tile for a kernel, whether it loads by TMA, and the float32 precision it works in.

    ``paths`` are tables in order of preference, of which the last, "pointers", has every head dim.
    Where a precision has no tile for so large a one, for lack of registers, it is ieee.
    """
    kind = "half" if element_bytes == 2 else precision
    if block_d not in TILES["pointers", kind, kernel]:
        kind = precision = "ieee"
    for path in paths:
        found = sizes((path, kind, kernel), block_d, rich)
        if found is not None:
            tile = prune(kernel, Tile(*found), element_bytes, block_d, shared_bytes)
            return tile, path in BY_TMA, precision
    raise ValueError(f"no table of {paths} has a tile for head dim {block_d}")


def sizes(key: Key, block_d: int, rich: bool) -> Sizes | None:
    """The tile of a table, where it has one; ``rich`` with a left bound, a softcap or splits."""
    found: Sizes | None = TILES.get(key, {}).get(block_d)
    if rich:
        found = RICH.get(key, {}).get(block_d, found)
    return found and complete(key, found)


def complete(key: Key, sizes: Sizes) -> Sizes:
    """With all registers in the tables where several tiles would spill otherwise."""
    path, kind, _ = key
    return (*sizes, ALL_REGISTERS) if path == "pointers" and kind != "half" else sizes


def has_atomic(element_bytes: int) -> bool:
    """Whether dQ may be added by atomics: in half precision."""
    return element_bytes == 2


def prune(kernel: str, tile: Tile, element_bytes: int, block_d: int, shared_bytes: int) -> Tile:
    """Fewer stages, then half the rows, until the buffers fit; 16 rows are the fewest there are."""
    while buffers(kernel, tile, element_bytes, block_d) > shared_bytes:
        if tile.num_stages > 1:
            tile = replace(tile, num_stages=tile.num_stages - 1)
        elif max(tile.block_m, tile.block_n) > 16:
            larger = "block_m" if tile.block_m >= tile.block_n else "block_n"
            tile = replace(tile, **{larger: getattr(tile, larger) // 2})
        else:
            break
    return tile


def buffers(kernel: str, tile: Tile, element_bytes: int, block_d: int) -> int:
    """Bytes of the tiles held in shared memory: those that stay and those in the pipeline."""
    m, n = tile.block_m * block_d, tile.block_n * block_d
    resident, streamed = {
        "forward": (m, 2 * n),
        "dq": (2 * m, 2 * n),
        "dkdv": (2 * n, 2 * m),
        "atomic": (2 * n, 2 * m),
    }[kernel]
    return (resident + tile.num_stages * streamed) * element_bytes
