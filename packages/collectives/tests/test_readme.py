"""The quick start of the README runs."""

import os
import re
import socket
from pathlib import Path

import torch.distributed as dist
from worker_pool import run_ranks

README = Path(__file__).parent.parent / "README.md"


def use(port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.S)
    assert code is not None
    names = {}
    exec(code[1], names)
    assert (names["gradients"] == (dist.get_world_size() - 1) / 2).all()


def test_quick_start_runs():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run_ranks(use, 2, port, backend="")
