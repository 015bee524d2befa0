"""Compile kernels without a GPU, and report facts of the compiled code.

This is a script because a process that interprets kernels cannot compile them.  One process
compiles all kinds of kernels, because importing torch takes seconds.

The script reads a JSON object from standard input.  Its keys are functions of `PARTS`, and its
values are their arguments.  Each line that it writes is a JSON list of a key and a result.
"""

import json
import sys
import warnings

with warnings.catch_warnings():
    # The import has no warnings.  Torch warns without NumPy, which is a dependency.
    warnings.simplefilter("error", UserWarning)
    import flashattn2  # noqa: F401


def compile_tiles(jobs):
    """Yield facts of each tile: see `compile_kernels.py`."""
    from compile_kernels import compile_job

    yield from map(compile_job, jobs)


def compile_decoding(is_exhaustive):
    """Yield the architecture and name of each kernel without a table."""
    from compile_decoding import compile_every

    yield from compile_every(is_exhaustive)


def compile_gluon(jobs):
    """Yield facts of each Gluon kernel: see `compile_gluon.py`."""
    from compile_gluon import compile_job

    for job in jobs:
        yield from compile_job(job)


PARTS = {"tiles": compile_tiles, "decoding": compile_decoding, "gluon": compile_gluon}


if __name__ == "__main__":
    for part, argument in json.load(sys.stdin).items():
        for result in PARTS[part](argument):
            print(json.dumps([part, result]), flush=True)
