"""The same training on Ray, where it is installed."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from paramserver import PeerLost, run
from paramserver_training import SGD, assert_equal_parameters, fail, model, train, train_alone

ray = pytest.importorskip("ray", reason="the optional extra paramserver[ray] is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


def kill_server_actor(worker):
    train(worker, 2)
    if worker.rank == 0:
        ray.kill(worker._connections[1]._actor)
    train(worker, 3)


@pytest.mark.exhaustive
def test_ray_equals_one_process_and_names_the_dead_worker():
    ray.init(
        include_dashboard=False,
        log_to_driver=False,
        num_cpus=5,
        runtime_env={"env_vars": {"PYTHONPATH": ":".join(sys.path)}},
    )
    try:
        result = run(train, model(), SGD, args=(5,), workers=2, servers=2, transport="ray")
        assert_equal_parameters(result.parameters, train_alone(5, 2, SGD))
        assert result.versions == [5, 5]
        with pytest.raises(ZeroDivisionError, match="seven"):
            run(fail, model(), SGD, args=(1, "raise"), workers=2, transport="ray")
        with pytest.raises((PeerLost, TimeoutError), match="worker 1"):
            run(fail, model(), SGD, args=(1, "die"), workers=2, transport="ray", timeout=5.0)
        with pytest.raises(PeerLost, match="server 1 is gone"):
            run(kill_server_actor, model(), SGD, workers=2, servers=2, transport="ray")
    finally:
        ray.shutdown()
