"""The benchmark prints its rows, which contain the ratios that the README states."""

import json
import runpy
import sys

import paramserver.bench
import pytest
from figures import assert_at_least
from paramserver.bench import bench

#: Time of torch RPC over ours for a push and a pull of 80 MiB, on the slower of two AMD EPYC CPUs.
#: The faster CPU measured 5.8 and 1.8. On the slower one, copies and the update alone reach 5.7,
#: and bare ZeroMQ frames reach 2.5.
EXPECTED = {"shared_memory": 4.8, "zeromq": 1.7}


def test_a_device_that_servers_are_not_on_is_refused():
    with pytest.raises(ValueError, match=r"expected device='cpu'.* got 'cuda'"):
        bench(device="cuda")


def test_command_prints_the_rows_and_writes_them(tmp_path, monkeypatch, capsys):
    def measure_exchange_rows(mebibytes, rounds):
        return [{"transport": "zeromq", "model_mib": mebibytes, "rounds": rounds}]

    monkeypatch.setattr(paramserver.bench, "measure_exchange_rows", measure_exchange_rows)
    file = tmp_path / "rows.json"
    paramserver.bench.main(["--quick", "--json", str(file)])
    printed = capsys.readouterr().out.split()
    assert printed == ["transport", "model_mib", "rounds", "zeromq", "8", "5"]
    assert json.loads(file.read_text()) == measure_exchange_rows(8, 5)


@pytest.mark.filterwarnings("ignore:.*paramserver.bench.* found in sys.modules")
def test_module_is_a_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("paramserver.bench", run_name="__main__")
    assert "python -m paramserver.bench" in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.timing
def test_exchange_is_as_much_faster_than_rpc_as_stated():
    ratios = {row["transport"]: row["rpc_over_this_p50"] for row in bench()}
    for transport, expected in EXPECTED.items():
        assert_at_least(f"paramserver: RPC over {transport}", expected, ratios[transport])
