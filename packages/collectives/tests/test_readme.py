"""The README's first example runs as it stands."""

import re
from pathlib import Path

import torch.distributed as dist
from worker_pool import run_ranks

README = Path(__file__).parent.parent / "README.md"


def use():
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.S)
    assert code is not None
    names = {}
    exec(code[1], names)
    assert (names["gradients"] == (dist.get_world_size() - 1) / 2).all()


def test_the_example_runs():
    run_ranks(use, 2)
