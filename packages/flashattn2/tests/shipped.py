"""Every kernel that is compiled for a GPU: which tiles, with which options compiled in.

One list serves both tests: `exhaustive` is all of it, `sample` what ordinary tests have time for.
"""

import itertools

from flashattn2.kernels import configs

# What a launch compiles in; causal where it does not say otherwise.
LEFT, SOFTCAP, NOT_CAUSAL = {"left": True}, {"softcap": True}, {"right": False}
SPLITS, PACKED, NARROW = {"splits": 2}, {"packed": True}, {"narrow": True}
# Every combination; but a narrow head dim, which masks a little more, only beside one other.
OPTIONS = (
    *(
        left | softcap | right | place
        for left, softcap, right, place in itertools.product(
            ({}, LEFT), ({}, SOFTCAP), ({}, NOT_CAUSAL), ({}, SPLITS, PACKED)
        )
    ),
    *(NARROW | other for other in ({}, LEFT, SOFTCAP, NOT_CAUSAL, SPLITS, PACKED)),
)
# Head dim, architecture and options that ordinary tests compile, with all kernels of each kind.
SAMPLE = {
    ("tma", "half"): (64, 90, {}),
    ("pointers", "half"): (128, 80, LEFT | SOFTCAP),
    ("tma", "tf32"): (64, 90, LEFT | SOFTCAP),
    ("pointers", "tf32"): (64, 80, PACKED),
    ("tma", "tf32x3"): (16, 90, {}),
    ("pointers", "tf32x3"): (64, 80, {}),
    ("pointers", "ieee"): (64, 90, {}),
}


def exhaustive():
    """Each tile with each of `OPTIONS` that it may meet, on the architectures that it serves."""
    for key, tiles in configs.TILES.items():
        for block_d in tiles:
            for options in OPTIONS:
                if can_occur(key[0], block_d, options):
                    for tile in serving(key, block_d, options):
                        yield from jobs(key, block_d, tile, options)


def sample():
    """The same for the head dims and options of `SAMPLE`."""
    for key in configs.TILES:
        block_d, arch, options = SAMPLE[key[:2]]
        tile = serving(key, block_d, options)[-1]
        yield from (job for job in jobs(key, block_d, tile, options) if job["arch"] == arch)


def can_occur(path, block_d, options):
    """TMA does not load packed sequences; the narrowest head dim is 16."""
    if path == "tma" and options.get("packed"):
        return False
    return block_d > 16 or not options.get("narrow")


def serving(key, block_d, options):
    """The tiles for these options; what was planned to be split may end as one part."""
    burden = options.get("left", 0) + options.get("softcap", 0)
    burdens = (burden + configs.SPLIT_BURDEN, burden)
    if options.get("packed"):
        burdens = burdens[1:]
    elif options.get("splits"):
        burdens = burdens[:1]
    # In order, each once.
    tiles = dict.fromkeys(configs.sizes(key, block_d, b) for b in burdens)
    return [tile for tile in tiles if tile is not None]


def jobs(key, block_d, tile, options):
    """As `compile_kernels.py` takes them, one for each architecture."""
    path, kind, kernel = key
    options, half = dict(options), kind == "half"
    dim = block_d - 8 if options.pop("narrow", False) else block_d
    # The sums over rows go with dQ: the same tiles, no precision but this.
    kernels = ("sums", "dq") if (kind, kernel) == ("ieee", "dq") else (kernel,)
    for kernel, arch in itertools.product(kernels, (90,) if path == "tma" else (90, 80)):
        yield {
            "kernel": kernel, "tile": tile, "dim": dim, "arch": arch, "tma": path == "tma",
            "kind": kind, "precision": "ieee" if half else kind,
            "dtype": "bf16" if half else "fp32", **options,
        }  # fmt: skip
