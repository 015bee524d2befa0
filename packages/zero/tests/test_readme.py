"""The README's example runs without changes, and prints what the README shows."""

import contextlib
import io
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
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, names)
    assert dist.is_initialized()
    return printed.getvalue(), len(names["sharded"].units)


def test_the_readmes_example_runs(tmp_path):
    output = re.search(r"^Output:\n\n```\n(.*?)```", README.read_text(), re.S | re.M)[1]
    assert run_ranks(run_example, 2, str(tmp_path)) == [(output, 2), ("", 2)]
