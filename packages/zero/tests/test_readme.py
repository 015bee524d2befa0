"""The README's example runs without changes."""

import os
import re
from pathlib import Path

from worker_pool import run_ranks

README = Path(__file__).parent.parent / "README.md"


def run_example(folder):
    import torch.distributed as dist

    os.chdir(folder)
    code = re.search(r"```python\n(import.*?)```", README.read_text(), re.S)[1]
    # The ranks of a test have a process group already, which the example creates and destroys.
    for line in ('dist.init_process_group("gloo")', "dist.destroy_process_group()"):
        assert line in code
        code = code.replace(line, "")
    names = {}
    exec(code, names)
    assert dist.is_initialized()
    return names["step"], len(names["sharded"].units)


def test_the_readmes_example_runs(tmp_path):
    assert run_ranks(run_example, 2, str(tmp_path)) == [(1, 2)] * 2
