"""Workers in actors of Ray: an actor that is killed is replaced, and its rank continues."""

import os
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from paramserver import Asynchronous, Job
from paramserver.running.supervise import open_server, read_final_state
from test_zeromq import UNIT_SGD, Vector, count

pytestmark = pytest.mark.exhaustive
ray = pytest.importorskip("ray", reason="the peer Ray is not installed")

PUSHES = 100


class Actor:
    """An actor that trains as one rank of a job, as `python -m paramserver join` does."""

    def train(self, rank, address):
        from paramserver.__main__ import main

        return main(["join", "ray_job:job", "--address", address, "--rank", str(rank)])


JOB = f"""
from paramserver import Asynchronous, Job
from test_zeromq import UNIT_SGD, Vector, count
def job():
    return Job(count, Vector(), UNIT_SGD, Asynchronous(), args=({PUSHES}, 0.05), workers=0)
"""


def test_a_job_continues_with_a_new_actor_after_one_was_killed(tmp_path, monkeypatch):
    (tmp_path / "ray_job.py").write_text(JOB)
    paths = [str(tmp_path), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    job = Job(count, Vector(), UNIT_SGD, Asynchronous(), workers=0)
    server = open_server(job, 0, "tcp://127.0.0.1:*", journal=tmp_path / "state")
    thread = threading.Thread(target=server.serve)
    thread.start()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # otherwise Ray writes a key to the home folder
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}}
    ray.init(num_cpus=3, include_dashboard=False, runtime_env=environment)
    try:
        remote = ray.remote(num_cpus=1)(Actor)
        actors = [remote.remote() for _ in range(3)]
        tasks = [actor.train.remote(rank, server.address) for rank, actor in enumerate(actors)]
        members = server.core.ledger.members
        while 1 not in members or members[1].pushes < 5:
            finished, _ = ray.wait([tasks[1]], timeout=0.05)
            assert not finished
        ray.kill(actors[1])
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(tasks[1])
        assert members[1].pushes < PUSHES
        tasks[1] = remote.remote().train.remote(1, server.address)
        assert ray.get(tasks, timeout=120) == [0, 0, 0]
        (report,) = read_final_state(job, [server.address])
    finally:
        ray.shutdown()
        server.stop()
        thread.join()
        server.close()
    assert report.version == 3 * PUSHES
    assert members[1].epoch == 2
    assert set(memoryview(report.buffer).cast("d")[: 20 * 3]) == {float(PUSHES)}
