"""The benchmark reports the ratios that the README states."""

import pytest
from paramserver.bench import bench


def test_a_device_that_servers_are_not_on_is_refused():
    with pytest.raises(ValueError, match=r"expected device 'cpu'.* got 'cuda'"):
        bench(device="cuda")


@pytest.mark.exhaustive
@pytest.mark.timing
def test_the_exchange_is_faster_than_rpc_by_what_is_claimed():
    ratios = {row["transport"]: row["rpc_over_this_p50"] for row in bench()}
    assert ratios["shared_memory"] >= 6  # over ZeroMQ: tests/test_paramserver_study.py
