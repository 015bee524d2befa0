"""Measurements of time and memory: `python -m flashattn2.bench` and the function `bench`.

`cases.py` defines the shapes of each case and the functions that it compares, and `rounds.py` times
them in interleaved rounds.  `measure.py` measures one run, and `report.py` is the command.
"""

from flashattn2.bench.cases import bench

__all__ = ["bench"]
