"""Benchmark of the speed of the calculators."""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from timeit import timeit
from typing import Any

from accounting.flops import flops
from accounting.kv_cache import kv_cache
from accounting.memory.training import training_memory
from accounting.model.transformer import Transformer
from accounting.parameters import parameters
from accounting.plan import Plan
from accounting.time.communication import communication
from accounting.time.step import step_time

Row = dict[str, float | int | str]

LLAMA3_8B = Transformer(
    layers=32, d_model=4096, heads=32, kv_heads=8, d_ff=14336, vocab_size=128256, name="llama3-8b"
)


def bench(*, device: str = "cpu", quick: bool = False) -> list[Row]:
    """Return a row per calculator with the median, p10 and p90 of its time in milliseconds.

    The calculators run on the CPU, so `device` has no effect.
    """
    repeats = 5 if quick else 50
    plan = Plan(data=8, tensor=8, zero=3, recompute="selective", sequence_parallel=True)
    run: dict[str, Any] = {"batch": 64, "seq": 8192}
    calls: dict[str, Callable[[], object]] = {
        "parameters": lambda: parameters(LLAMA3_8B).total,
        "flops": lambda: flops(LLAMA3_8B, **run).total,
        "training_memory": lambda: training_memory(LLAMA3_8B, plan, **run).total,
        "kv_cache": lambda: kv_cache(LLAMA3_8B, **run).total,
        "communication": lambda: communication(LLAMA3_8B, plan, **run).wire.total,
        "step_time": lambda: step_time(LLAMA3_8B, plan, hardware="H100", **run).total,
    }
    rows: list[Row] = []
    for name, call in calls.items():
        times = sorted(1e3 * timeit(call, number=1) for _ in range(repeats))
        p10, *_, p90 = statistics.quantiles(times, n=10)
        row: Row = {"case": "speed", "call": name, "time_ms": statistics.median(times)}
        rows.append(row | {"p10_ms": p10, "p90_ms": p90})
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Print the rows; also write them as JSON if `--json` is passed."""
    parser = argparse.ArgumentParser(prog="python -m accounting.bench", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="time 5 instead of 50 calls each")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args(argv)
    rows = bench(device=arguments.device, quick=arguments.quick)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        print(", ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
