"""Tile sizes: one for each kernel, way of loading, precision and head dim, and how it is pruned.

Notable: every tile here is compiled for sm_90 and sm_80 by the tests, in the largest kernel that it
serves, which refuse one that spills registers or leaves the matrix units idle.  A GPU with less
shared memory gets the same tile with fewer stages, then with fewer rows.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tile:
    """Rows of a query tile and of a key tile, warps of a program, stages of the load pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# TMA exists from Hopper on; pointers serve everything else: older GPUs, packed sequences, strides
# that TMA cannot take, and a head dim that has no tile under "tma".  "half" is bfloat16 and
# float16, "ieee" float32 without matrix units, where TMA has nothing to give.
Tiles = dict[int, tuple[int, int, int, int]]
TILES: dict[tuple[str, str, str], Tiles] = {
    ("tma", "half", "forward"): {
        16: (128, 64, 4, 3),
        32: (128, 128, 8, 3),
        64: (128, 128, 8, 3),
        128: (128, 128, 8, 2),
        256: (128, 64, 8, 2),
    },
    ("tma", "half", "dq"): {
        16: (128, 64, 4, 3),
        32: (128, 64, 4, 3),
        64: (128, 64, 8, 3),
        128: (128, 64, 8, 2),
        256: (64, 32, 8, 2),
    },
    ("tma", "half", "dkdv"): {
        16: (64, 128, 8, 2),
        32: (64, 128, 8, 2),
        64: (64, 128, 8, 2),
        128: (32, 64, 8, 2),
    },
    ("tma", "half", "atomic"): {
        16: (64, 128, 8, 2),
        32: (64, 128, 8, 2),
        64: (64, 128, 8, 2),
        128: (16, 64, 8, 2),
    },
    ("pointers", "half", "forward"): {
        16: (128, 64, 4, 3),
        32: (128, 128, 8, 3),
        64: (128, 64, 8, 3),
        128: (64, 64, 8, 2),
        256: (64, 32, 8, 2),
    },
    ("pointers", "half", "dq"): {
        16: (128, 64, 4, 3),
        32: (128, 64, 4, 3),
        64: (128, 64, 8, 3),
        128: (64, 64, 8, 2),
        256: (64, 32, 8, 2),
    },
    ("pointers", "half", "dkdv"): {
        16: (32, 128, 8, 2),
        32: (32, 64, 4, 2),
        64: (32, 64, 8, 1),
        128: (16, 64, 8, 2),
        256: (16, 32, 8, 2),
    },
    ("pointers", "half", "atomic"): {
        16: (32, 128, 8, 2),
        32: (32, 128, 8, 2),
        64: (32, 64, 8, 2),
        128: (16, 64, 8, 2),
        256: (16, 16, 8, 1),
    },
    ("tma", "tf32", "forward"): {
        16: (64, 64, 4, 2),
        32: (64, 32, 4, 2),
        64: (128, 64, 8, 2),
        128: (128, 64, 8, 2),
        256: (64, 32, 8, 2),
    },
    ("tma", "tf32", "dq"): {
        16: (64, 64, 8, 2),
        32: (64, 32, 4, 2),
        64: (64, 64, 8, 2),
        128: (64, 64, 8, 2),
    },
    ("tma", "tf32", "dkdv"): {16: (32, 64, 8, 2), 32: (32, 64, 8, 2), 64: (32, 64, 8, 2)},
    ("pointers", "tf32", "forward"): {
        16: (64, 64, 4, 2),
        32: (64, 32, 4, 2),
        64: (32, 32, 8, 1),
        128: (64, 32, 8, 2),
        256: (32, 32, 8, 1),
    },
    ("pointers", "tf32", "dq"): {
        16: (64, 64, 4, 2),
        32: (64, 32, 4, 2),
        64: (64, 32, 8, 2),
        128: (64, 32, 8, 2),
        256: (32, 32, 8, 1),
    },
    ("pointers", "tf32", "dkdv"): {
        16: (32, 32, 8, 1),
        32: (16, 32, 8, 1),
        64: (16, 32, 8, 1),
        128: (16, 32, 8, 1),
        256: (16, 32, 8, 1),
    },
    ("tma", "tf32x3", "forward"): {16: (64, 64, 4, 2), 32: (64, 32, 4, 2), 64: (64, 32, 4, 2)},
    ("tma", "tf32x3", "dq"): {16: (64, 64, 8, 2), 32: (64, 32, 4, 2)},
    ("tma", "tf32x3", "dkdv"): {16: (32, 64, 8, 2)},
    ("pointers", "tf32x3", "forward"): {
        16: (64, 64, 4, 2),
        32: (64, 32, 4, 2),
        64: (32, 32, 8, 1),
        128: (16, 16, 8, 1),
    },
    ("pointers", "tf32x3", "dq"): {
        16: (64, 64, 4, 2),
        32: (32, 32, 8, 1),
        64: (32, 32, 8, 1),
        128: (16, 16, 8, 1),
    },
    ("pointers", "tf32x3", "dkdv"): {
        16: (32, 32, 8, 1),
        32: (16, 32, 8, 1),
        64: (16, 32, 8, 1),
        128: (16, 16, 8, 1),
    },
    ("pointers", "ieee", "forward"): {
        16: (64, 64, 4, 2),
        32: (64, 32, 4, 2),
        64: (32, 16, 8, 2),
        128: (32, 16, 8, 2),
        256: (16, 16, 4, 1),
    },
    ("pointers", "ieee", "dq"): {
        16: (64, 32, 4, 2),
        32: (64, 32, 4, 2),
        64: (32, 32, 8, 1),
        128: (32, 16, 8, 1),
        256: (16, 16, 4, 1),
    },
    ("pointers", "ieee", "dkdv"): {
        16: (16, 64, 4, 1),
        32: (32, 32, 8, 1),
        64: (32, 32, 8, 1),
        128: (32, 32, 8, 1),
        256: (16, 32, 8, 1),
    },
}


# A left window bound costs a third loop, a softcap its derivative, splits their bounds: where the
# first two together, or the last, need more registers than there are, a smaller tile serves them.
CROWDED: dict[tuple[str, str, str], Tiles] = {
    ("tma", "half", "dkdv"): {32: (32, 128, 8, 2), 64: (32, 128, 8, 2)},
    ("tma", "half", "atomic"): {32: (32, 128, 8, 2), 64: (32, 128, 8, 2)},
    ("pointers", "half", "forward"): {16: (64, 64, 4, 2)},
    ("pointers", "half", "dq"): {16: (64, 64, 4, 2), 32: (64, 64, 8, 2), 256: (32, 32, 8, 1)},
    ("pointers", "half", "dkdv"): {32: (32, 64, 8, 1)},
    ("pointers", "half", "atomic"): {32: (32, 64, 8, 1), 128: (16, 32, 8, 1)},
    ("tma", "tf32", "dq"): {128: (64, 32, 8, 2)},
    ("tma", "tf32", "dkdv"): {64: (16, 64, 8, 1)},
    ("pointers", "tf32", "forward"): {16: (64, 32, 4, 1)},
    ("pointers", "tf32", "dq"): {128: (32, 32, 8, 1)},
    ("pointers", "tf32", "dkdv"): {16: (16, 32, 8, 1), 64: (16, 32, 4, 1)},
    ("tma", "tf32x3", "dq"): {16: (64, 32, 8, 1)},
    ("tma", "tf32x3", "dkdv"): {16: (16, 64, 8, 1)},
}


def choose(
    kernel: str,
    precision: str,
    element_bytes: int,
    block_d: int,
    tma: bool,
    shared_bytes: int,
    crowded: bool = False,
) -> tuple[Tile, bool, str]:
    """The tile for a kernel, whether it loads by TMA, and the float32 precision it works in.

    ``crowded`` asks for a left window bound and a softcap at once, or splits.  Where a precision
    has no tile for so large a head dim, for lack of registers, it is ieee.
    """
    kind = "half" if element_bytes == 2 else precision
    if block_d not in TILES["pointers", kind, kernel]:
        kind = precision = "ieee"
    tma = tma and block_d in TILES.get(("tma", kind, kernel), {})
    key = ("tma" if tma else "pointers", kind, kernel)
    sizes = TILES[key][block_d]
    if crowded:
        sizes = CROWDED.get(key, {}).get(block_d, sizes)
    return prune(kernel, Tile(*sizes), element_bytes, block_d, shared_bytes), tma, precision


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
