"""What a push and a pull cost, over each transport and beside torch's RPC.

Rows `exchange`: one worker, one server, a push and a pull of the whole model, in turns with its
peer, RPC. What needs more: tests/paramserver_study.py.
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
Times = list[tuple[float, float]]  # seconds of pushes and of pulls
Transport = Literal["shared_memory", "distributed", "zeromq"]
TRANSPORTS: tuple[Transport, ...] = ("shared_memory", "distributed", "zeromq")


def bench(*, device: str = "cpu", quick: bool = False) -> list[Row]:
    """All rows."""
    if device != "cpu":
        raise ValueError(f"device is {device!r}; servers and messages are on the CPU: device='cpu'")
    return _exchange(*((8, 5) if quick else (80, 15)))


def _exchange(mebibytes: int, rounds: int) -> list[Row]:
    """Each transport by `run`, RPC by itself, rounds in turns."""
    times: dict[str, Times] = {name: [] for name in (*TRANSPORTS, "rpc")}
    for _ in range(2):  # two blocks of each, A B C A B C, so that a slow minute hits all
        for transport in TRANSPORTS:
            times[transport] += _exchanges(mebibytes, rounds, transport=transport)[0]
        times["rpc"] += _time_rpc(mebibytes, rounds)
    rows: list[Row] = []
    for name, pairs in times.items():
        ratios = sorted(sum(r) / sum(p) for r, p in zip(times["rpc"], pairs, strict=True))
        row: Row = {"case": "exchange", "transport": name, "model_mib": mebibytes}
        rows.append(row | _medians(pairs))
        for p in (50, 10, 90):
            rows[-1][f"rpc_over_this_p{p}"] = ratios[round(p / 100 * (len(ratios) - 1))]
    return rows


def _exchanges(
    mebibytes: int, rounds: int, *, transport: Transport = "shared_memory", workers: int = 1,
    servers: int = 1) -> list[Times]:  # fmt: skip
    return run(
        _time_exchanges, _Vector(mebibytes), partial(torch.optim.SGD, lr=0.0), Asynchronous(),
        args=(rounds,), workers=workers, servers=servers, transport=transport).values  # fmt: skip


def _medians(pairs: Times) -> Row:
    push, pull = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {"push_ms": push * 1e3, "pull_ms": pull * 1e3}


class _Vector(nn.Module):
    def __init__(self, mebibytes: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(mebibytes * 2**18))


def _time_exchanges(worker: Worker, rounds: int) -> Times:
    vector = worker.module
    assert isinstance(vector, _Vector)
    gradient = torch.randn_like(vector.x)
    times = []
    for number in range(rounds + 1):
        vector.x.grad = gradient
        start = time.perf_counter()
        worker.push()
        middle = time.perf_counter()
        worker.pull()
        end = time.perf_counter()
        if number:  # the first one maps memory and connects
            times.append((middle - start, end - middle))
    return times


def _time_rpc(mebibytes: int, rounds: int) -> Times:
    """The same exchange with torch.distributed.rpc (TensorPipe)."""
    with tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/times"
        arguments = f"{folder}/store", output, mebibytes, rounds
        torch.multiprocessing.spawn(_rpc_rank, args=arguments, nprocs=2)
        times: Times = [tuple(t) for t in json.loads(Path(output).read_text())]
        return times


_SERVED: list[Tensor] = []


def _rpc_push(gradient: Tensor) -> None:
    _SERVED[0].add_(gradient, alpha=0.0)


def _rpc_pull() -> Tensor:
    return _SERVED[0]


def _rpc_rank(rank: int, store: str, output: str, mebibytes: int, rounds: int) -> None:
    from torch.distributed import rpc

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _SERVED.append(torch.randn(mebibytes * 2**18))
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 1:
        times = []
        mine, gradient = torch.empty_like(_SERVED[0]), torch.randn_like(_SERVED[0])
        for number in range(rounds + 1):
            start = time.perf_counter()
            rpc.rpc_sync("rank0", _rpc_push, args=(gradient,))
            middle = time.perf_counter()
            mine.copy_(rpc.rpc_sync("rank0", _rpc_pull))
            if number:
                times.append((middle - start, time.perf_counter() - middle))
        Path(output).write_text(json.dumps(times))
    rpc.shutdown()


def main(argv: Sequence[str] | None = None) -> None:
    """Print one table; write the rows as JSON if asked."""
    parser = argparse.ArgumentParser(prog="python -m paramserver.bench", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="seconds, not minutes")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args(argv)
    rows = bench(device=arguments.device, quick=arguments.quick)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


def table(rows: list[Row]) -> str:
    """Rows as aligned text, a block for each set of columns."""
    blocks = []
    for columns, group in itertools.groupby(rows, key=tuple):
        shown = ([f"{v:.4g}" if type(v) is float else f"{v}" for v in r.values()] for r in group)
        cells = [columns, *shown]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        blocks.append("\n".join("  ".join(map(str.rjust, line, widths)) for line in cells))
    return "\n\n".join(blocks)
