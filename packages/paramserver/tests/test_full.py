"""A full file system, which the test mounts, is named in an error or has no effect."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))  # processes that `run` starts import it by name

from paramserver import Asynchronous, Server, Worker, run
from paramserver.journal.disk_journal import DiskJournal
from paramserver_training import SGD, build_model, train
from test_journal import get_state

# A separate mount namespace, as root or in a user namespace.
UNSHARE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]


def mount(folder, size):
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=True)


def why_not():
    """Return the reason why no file system can be mounted, or an empty text."""
    if not shutil.which("unshare"):
        return "unshare is missing"
    command = [*UNSHARE, "mount", "-t", "tmpfs", "-o", "size=4k", "none", "/mnt"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


@pytest.mark.exhaustive
@pytest.mark.skipif(bool(why_not()), reason=f"nothing can be mounted here: {why_not()}")
@pytest.mark.parametrize("what", ["shm", "journal"])
def test_full_file_system_is_named_or_has_no_effect(tmp_path, what):
    command = [*UNSHARE, sys.executable, __file__, what, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{what} well\n"


def shm(folder):
    """Train with all transports while /dev/shm is full."""
    mount("/dev/shm", "4k")
    Path("/dev/shm/all").write_bytes(bytes(4096))
    for transport in ("shared_memory", "zeromq"):
        result = run(train, build_model(), SGD, args=(3,), workers=2, transport=transport)
        assert result.versions == [3]


def served(folder, **options):
    torch.manual_seed(0)
    module = nn.Linear(100, 100)
    adam = partial(torch.optim.Adam, lr=0.1)
    server = Server(dict(module.named_parameters()), adam, Asynchronous(), workers=1, elastic=True)
    journal = DiskJournal(folder, **options)
    journal.load(server.core)
    return server, journal


def push(server, count):
    """Push `count` times."""
    worker = Worker(nn.Linear(100, 100), server)
    for step in range(count):
        worker.pull()
        for parameter in worker.module.parameters():
            parameter.grad = torch.full_like(parameter, float(step))
        worker.push()
    return worker


def journal(folder):
    """Assert that a full disk refuses a push, and that training continues when there is room."""
    mount(folder, "300k")
    server, _ = served(folder)
    with pytest.raises(RuntimeError, match=rf"cannot write a journal in {folder}: .*No space l"):
        push(server, 20)
    assert 0 < server.version < 20
    subprocess.run(["mount", "-o", "remount,size=8m", folder], check=True)
    worker = push(server, 5)
    assert worker.pushes == server.version
    assert get_state(served(folder)[0]) == get_state(server)


if __name__ == "__main__":
    {"shm": shm, "journal": journal}[sys.argv[1]](sys.argv[2])
    print(sys.argv[1], "well")
