"""What is measured is measured."""

import pytest
from paramserver.bench import bench


def test_a_device_that_servers_are_not_on_is_refused():
    with pytest.raises(ValueError, match="device is 'cuda'"):
        bench(device="cuda")


@pytest.mark.exhaustive
@pytest.mark.timing
def test_the_exchange_is_faster_than_rpc_by_what_is_claimed():
    rows = {row["transport"]: row for row in bench()}
    assert rows["shared_memory"]["rpc_over_this_p50"] >= 6
    # Beside RPC as it goes between machines: on one host it shares memory.
    assert rows["zeromq"]["rpc_tcp_over_this_p50"] >= 3
