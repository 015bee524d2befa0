"""Benchmark of pushes and pulls, interleaved with equal transfers over torch's RPC.

`python -m paramserver.bench` prints the rows of `bench`. `python tests/paramserver_study.py` prints
the same rows and the measurements that need other packages.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from paramserver.consistency import Asynchronous
from paramserver.running.launch import run
from paramserver.worker import Worker

Row = dict[str, float | int | str]
#: Seconds of the push and of the pull, per round.
Times = list[tuple[float, float]]
Transport = Literal["shared_memory", "zeromq"]
TRANSPORTS: tuple[Transport, ...] = ("shared_memory", "zeromq")


def bench(*, device: str = "cpu", quick: bool = False) -> list[Row]:
    """Return one row per transport and one row for torch's RPC; see `measure_exchange_rows`.

    Args:
        device: "cpu"; servers and transports run on the CPU only.
        quick: exchange 8 MiB in 5 rounds instead of 80 MiB in 15 rounds, each in two runs.
    """
    if device != "cpu":
        raise ValueError(
            "expected device='cpu', because the servers and transports run on the CPU only, got "
            f"{device!r}"
        )
    if quick:
        return measure_exchange_rows(mebibytes=8, rounds=5)
    return measure_exchange_rows(mebibytes=80, rounds=15)


def measure_exchange_rows(mebibytes: int, rounds: int) -> list[Row]:
    """Time pushes and pulls of a model of `mebibytes` MiB between one worker and one server.

    Return one row per transport and one for RPC, with median times in milliseconds.
    `rpc_over_this_pN` is percentile N of RPC's time divided by the row's time, over the rounds.
    """
    times: dict[str, Times] = {name: [] for name in (*TRANSPORTS, "rpc")}
    for _ in range(2):  # interleaved, so that a slow minute affects all transports
        for transport in TRANSPORTS:
            times[transport] += measure_exchanges(mebibytes, rounds, transport=transport)[0]
        times["rpc"] += measure_rpc(mebibytes, rounds)
    rows: list[Row] = []
    for name, pairs in times.items():
        ratios = sorted(sum(r) / sum(p) for r, p in zip(times["rpc"], pairs, strict=True))
        row: Row = {"case": "exchange", "transport": name, "model_mib": mebibytes}
        rows.append(row | compute_median_times(pairs))
        for p in (50, 10, 90):
            rows[-1][f"rpc_over_this_p{p}"] = ratios[round(p / 100 * (len(ratios) - 1))]
    return rows


def measure_exchanges(
    mebibytes: int,
    rounds: int,
    *,
    transport: Transport = "shared_memory",
    workers: int = 1,
    servers: int = 1,
    journal: str | None = None,
) -> list[Times]:
    """Return each worker's push and pull times while all workers exchange the model."""
    result = run(
        _measure_pushes_and_pulls,
        _Vector(mebibytes),
        partial(torch.optim.SGD, lr=0.0),
        Asynchronous(),
        args=(rounds,),
        workers=workers,
        servers=servers,
        transport=transport,
        journal=journal,
    )
    return result.values


def compute_median_times(pairs: Times) -> Row:
    """Return the median times of a push and a pull in milliseconds."""
    push, pull = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {"push_ms": push * 1e3, "pull_ms": pull * 1e3}


class _Vector(nn.Module):
    def __init__(self, mebibytes: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(mebibytes * 2**18))


def _measure_pushes_and_pulls(worker: Worker, rounds: int) -> Times:
    vector = worker.module
    assert isinstance(vector, _Vector)
    gradient = torch.randn_like(vector.x)
    times = []
    worker.pull()
    for number in range(rounds + 1):
        vector.x.grad = gradient
        start = time.perf_counter()
        worker.push()
        middle = time.perf_counter()
        worker.pull()
        end = time.perf_counter()
        if number:  # skip the first round, which maps memory and connects
            times.append((middle - start, end - middle))
    return times


def measure_rpc(mebibytes: int, rounds: int) -> Times:
    """Return the times of the same pushes and pulls over torch.distributed.rpc (TensorPipe)."""
    with tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/times"
        arguments = f"{folder}/store", output, mebibytes, rounds
        torch.multiprocessing.spawn(_run_rpc_rank, args=arguments, nprocs=2)
        times: Times = [tuple(t) for t in json.loads(Path(output).read_text())]
        return times


_SERVER_PARAMETERS: list[Tensor] = []


def _push_over_rpc(gradient: Tensor) -> None:
    _SERVER_PARAMETERS[0].add_(gradient, alpha=0.0)


def _pull_over_rpc() -> Tensor:
    return _SERVER_PARAMETERS[0]


def _run_rpc_rank(rank: int, store: str, output: str, mebibytes: int, rounds: int) -> None:
    from torch.distributed import rpc

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _SERVER_PARAMETERS.append(torch.randn(mebibytes * 2**18))
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 1:
        times = []
        pulled = torch.empty_like(_SERVER_PARAMETERS[0])
        gradient = torch.randn_like(pulled)
        for number in range(rounds + 1):
            start = time.perf_counter()
            rpc.rpc_sync("rank0", _push_over_rpc, args=(gradient,))
            middle = time.perf_counter()
            pulled.copy_(rpc.rpc_sync("rank0", _pull_over_rpc))
            if number:
                times.append((middle - start, time.perf_counter() - middle))
        Path(output).write_text(json.dumps(times))
    rpc.shutdown()


def format_table(rows: list[Row]) -> str:
    """Return the rows as aligned text, one block per set of columns."""
    blocks = []
    for columns, group in itertools.groupby(rows, key=tuple):
        cells = [columns]
        for row in group:
            cells.append(tuple(f"{v:.4g}" if type(v) is float else f"{v}" for v in row.values()))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        blocks.append("\n".join("  ".join(map(str.rjust, line, widths)) for line in cells))
    return "\n\n".join(blocks)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the rows as a table; also write them as JSON if `--json` is passed."""
    parser = argparse.ArgumentParser(prog="python -m paramserver.bench", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="exchange less, in fewer rounds")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args(argv)
    rows = bench(device=arguments.device, quick=arguments.quick)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(format_table(rows))


if __name__ == "__main__":
    main()
