"""The quick start of the README runs, and its text agrees with the output and the measurement."""

import os
import re
import socket
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import torch.distributed as dist
from collectives.choice.cost import COLLECTIVES
from worker_pool import run_ranks

README = (Path(__file__).parent.parent / "README.md").read_text()


def use(port):
    """Run the quick start on this rank; return the lines that it prints."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    code = re.search(r"```python\n(.*?)```", README, re.S)
    assert code is not None
    names = {}
    with redirect_stdout(StringIO()) as output:
        exec(code[1], names)
    assert (names["gradients"] == (dist.get_world_size() - 1) / 2).all()
    return output.getvalue().splitlines()


def test_quick_start_prints_the_lines_of_the_readme():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    expected = re.search(r"Each rank prints.*?```text\n(.*?)```", README, re.S)[1].splitlines()
    for lines in run_ranks(use, 2, port, backend=""):
        assert len(lines) == len(expected) + len(COLLECTIVES) - 1
        for printed, line in zip(lines, expected, strict=False):
            # A machine without a compiler prints the reason instead of "compiled".
            assert printed == line or line == "engine: compiled" != printed.split(" (")[0]


def test_measured_ratios_are_above_one_in_every_row():
    measured = README.split("<!-- measured -->")[1].split("<!-- /measured -->")[0]
    rows = [row.strip("| ").split(" | ") for row in measured.splitlines() if row.startswith("|")]
    column = rows[0].index("ratio p10")
    ratios = [float(row[column]) for row in rows[2:]]
    assert ratios
    assert min(ratios) > 1
