"""The kernels to compile for a GPU: their tiles and compile-time options.

The function `iter_exhaustive` returns all of them, and `sample` a part for ordinary tests.
"""

import itertools

from flashattn2.kernels import configs

# Architectures other than Ampere have separate tables in half precision.
ARCHITECTURES = {
    ("tma", True): (90,),
    ("tma", False): (90,),
    ("hopper", True): (90,),
    ("tma_100", True): (100,),
    ("pointers_100", True): (100,),
    ("pointers_86", True): (86, 89),
    ("pointers_120", True): (120,),
    ("pointers", True): (80,),
    ("pointers", False): (90, 80),
}
# Compile-time options of a launch; launches are causal by default.
LEFT = {"left": True}
SOFTCAP = {"softcap": True}
NOT_CAUSAL = {"right": False}
SPLITS = {"splits": 2}
PACKED = {"packed": True}
NARROW = {"narrow": True}
# Every combination of options.  A narrow head dim is combined with at most one other option.
OPTIONS = (
    *(
        left | softcap | right | packing
        for left, softcap, right, packing in itertools.product(
            ({}, LEFT), ({}, SOFTCAP), ({}, NOT_CAUSAL), ({}, SPLITS, PACKED)
        )
    ),
    *(NARROW | other for other in ({}, LEFT, SOFTCAP, NOT_CAUSAL, SPLITS, PACKED)),
)
KERNELS = ("forward", "dq", "dkdv")
# Head dim, architecture, options and kernels that ordinary tests compile, which takes seconds each.
# Without TF32, these tests compile `iter_sizes_of_one`.
SAMPLE = {
    ("tma", "half"): (64, 90, {}, KERNELS),
    ("hopper", "half"): (64, 90, PACKED, ("dkdv",)),
    ("pointers", "half"): (32, 80, LEFT | SOFTCAP, KERNELS),
    ("pointers", "tf32"): (32, 80, PACKED, ("dq",)),
    ("tma_100", "half"): (128, 100, {}, ("dkdv",)),
}


def iter_exhaustive():
    """Yield each tile with each of `OPTIONS`, on the architectures that it serves."""
    for key, tiles in configs.TILES.items():
        for block_d in tiles:
            for options in OPTIONS:
                if can_occur(key[0], block_d, options):
                    for tile in list_serving_tiles(key, block_d, options):
                        yield from iter_jobs(key, block_d, tile, options)


def sample():
    """Return the tiles of `SAMPLE`."""
    for path_and_kind, (block_d, arch, options, kernels) in SAMPLE.items():
        for kernel in kernels:
            key = *path_and_kind, kernel
            tile = list_serving_tiles(key, block_d, options)[-1]
            yield from (
                job for job in iter_jobs(key, block_d, tile, options) if job["arch"] == arch
            )


def iter_sizes_of_one():
    """Yield launches whose sizes are all 1, such as one head or one row, with small tiles.

    Triton compiles these sizes as constants.
    """
    for kernel in KERNELS:
        for job in iter_jobs(("pointers", "ieee", kernel), 16, (16, 16, 4, 1), PACKED):
            if job["arch"] == 90:
                yield {**job, "of_one": True}


def can_occur(path, block_d, options):
    """Return True if a path serves the options; packed sequences are not loaded by TMA."""
    if path in configs.TMA_PATHS and options.get("packed"):
        return False
    return block_d > 16 or not options.get("narrow")


def list_serving_tiles(key, block_d, options):
    """Return the tiles for these options; a launch planned with splits may have one part."""
    rich = bool(options.get("left") or options.get("softcap"))
    kinds = (True, rich)
    if options.get("packed"):
        kinds = (rich,)
    elif options.get("splits"):
        kinds = (True,)
    # In order, each once.
    tiles = dict.fromkeys(configs.find_sizes(key, block_d, kind) for kind in kinds)
    return [tile for tile in tiles if tile is not None]


def iter_jobs(key, block_d, tile, options):
    """Yield the jobs of `compile_kernels.py`, one per architecture."""
    path, kind, kernel = key
    options, half = dict(options), kind == "half"
    dim = block_d - 8 if options.pop("narrow", False) else block_d
    # The row sums have the tiles of dQ, and exist in this precision only.
    kernels = ("sums", "dq") if (kind, kernel) == ("ieee", "dq") else (kernel,)
    for kernel, arch in itertools.product(kernels, ARCHITECTURES[path, kind == "half"]):
        yield {
            "kernel": kernel,
            "tile": tile,
            "dim": dim,
            "arch": arch,
            "tma": path in configs.TMA_PATHS,
            "kind": kind,
            "precision": "ieee" if half else kind,
            "dtype": "bf16" if half else "fp32",
            **options,
        }
