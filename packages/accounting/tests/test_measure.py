"""Tests of measured machines, whose products take the rate of the nearest shape."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accounting import HARDWARE, Plan, Transformer, step_time
from accounting.cli.main import main
from accounting.hardware import find
from accounting.time.measure import measured, rate

MODEL = Transformer(layers=2, d_model=64, heads=4, d_ff=256, vocab_size=512, gated_mlp=False)
RUN: dict[str, Any] = {"batch": 1, "seq": 256, "precision": "fp32"}


def test_measured_machine_is_read_as_hardware(tmp_path: Path) -> None:
    path = tmp_path / "this.toml"
    path.write_text(measured(dtypes=("fp32",), widths=(16, 32), seconds=1e-4))
    machine = find(str(path))
    assert len(machine.products["fp32"]) == 8
    best = max(item for *_, item in machine.products["fp32"])
    assert machine.peak("fp32") == pytest.approx(best, rel=0.01)
    assert machine.memory_bandwidth > 1e8
    assert step_time(MODEL, Plan(), hardware=str(path), **RUN).total > 0
    sizes = "layers=2,d_model=64,heads=4,vocab_size=512"
    assert main([sizes, "--hardware", str(path), "--precision", "fp32", "--seq", "64"]) == 0
    path.write_text("[x]\ny = 1\n")
    with pytest.raises(ValueError, match="to have one table with the fields"):
        find(str(path))


def test_product_takes_rate_of_nearest_measured_shape() -> None:
    # Everything is read at 1 GFLOP/s, but what is (256, 64, 256), the way up, at 2.
    table = [(256, 64, 64, 1e9), (256, 64, 256, 2e9), (256, 256, 64, 1e9), (256, 64, 512, 1e9)]
    machine = replace(HARDWARE["A100"], products={"fp32": table})
    result = step_time(MODEL, Plan(), hardware=machine, **RUN)["compute/matrices"].total
    rows = 3 * 2 * 256
    attention = 2 * 4 * 64 * 64
    up = 2 * 64 * 256
    down = 2 * 256 * 64
    head = 64 * 512
    assert result == pytest.approx(rows * (attention + up / 2 + down + head) / 1e9)


def test_the_nearest_shape_is_meant_in_logarithms() -> None:
    table = [(64, 64, 64, 1.0), (1024, 64, 64, 2.0)]
    assert rate(table, 250, 64, 64) == 1.0
    assert rate(table, 260, 64, 64) == 2.0
    for wrong in ({"device": "tpu"}, {"dtypes": ("fp3",)}, {"widths": (0,)}, {"seconds": 0}):
        with pytest.raises(ValueError, match=r"expected .*(device|dtypes|widths|seconds)"):
            measured(**wrong)  # type: ignore[arg-type]
