"""The benchmark reports the ratios that the README states."""

import pytest
from figures import assert_at_least
from paramserver.bench import bench

#: Time of torch RPC over ours for a push and a pull of 80 MiB, the weaker of two AMD EPYC. Another
#: one measured 5.8 and 1.8. Copies and update alone reach 5.7 here, and bare ZeroMQ frames 2.5.
EXPECTED = {"shared_memory": 4.8, "zeromq": 1.7}


def test_a_device_that_servers_are_not_on_is_refused():
    with pytest.raises(ValueError, match=r"expected device 'cpu'.* got 'cuda'"):
        bench(device="cuda")


@pytest.mark.exhaustive
@pytest.mark.timing
def test_exchange_is_as_much_faster_than_rpc_as_stated():
    ratios = {row["transport"]: row["rpc_over_this_p50"] for row in bench()}
    for transport, expected in EXPECTED.items():
        assert_at_least(f"paramserver: RPC over {transport}", expected, ratios[transport])
