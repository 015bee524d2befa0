"""The quick start of the README runs unchanged."""

import os
import re
import socket
from pathlib import Path

from worker_pool import run_ranks

README = Path(__file__).parents[1] / "README.md"


def run_example(code: str, port: int) -> list[float]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    return [float(p.detach().sum()) for p in names["model"].parameters()]


def test_example_runs_and_leaves_equal_weights() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    first, second = run_ranks(run_example, 2, code, port, backend="")
    assert first == second
