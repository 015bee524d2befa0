"""The benchmark reports the ratios that the README states."""

import statistics
import time
import zlib
from functools import partial

import pytest
import torch
from figures import assert_at_least, assert_at_most
from paramserver import Asynchronous, run
from paramserver.bench import _time_pushes_and_pulls, _Vector, bench

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


def push_seconds(journal):
    result = run(
        _time_pushes_and_pulls,
        _Vector(80),
        partial(torch.optim.SGD, lr=0.0),
        Asynchronous(),
        args=(10,),
        workers=1,
        transport="zeromq",
        journal=journal,
    )
    return statistics.median(push for push, _ in result.values[0])


def record_seconds(path):
    """Return the median time of a checksum and an append of 80 MiB to a file."""
    data = torch.randn(80 * 2**18).view(torch.uint8).numpy().data
    times = []
    with path.open("wb", buffering=0) as file:
        for _ in range(10):
            start = time.perf_counter()
            zlib.crc32(data)
            file.write(data)
            times.append(time.perf_counter() - start)
    return statistics.median(times)


@pytest.mark.exhaustive
@pytest.mark.timing
def test_journaled_push_takes_as_long_as_a_push_and_an_append(tmp_path):
    pytest.importorskip("zmq", reason="the optional extra paramserver[zeromq] is missing")
    ratios, bounds = [], []
    for number in range(3):
        plain = push_seconds(None)
        journaled = push_seconds(tmp_path / f"journal-{number}")
        bare = record_seconds(tmp_path / "bare")
        ratios.append(journaled / plain)
        bounds.append(journaled / (plain + bare))
    ratio, bound = statistics.median(ratios), statistics.median(bounds)
    figure = f"paramserver: a journaled push ({ratio:.2f}x a push) over a push and a bare record"
    assert_at_most(figure, 1.2, bound)
