"""What a push and a pull cost, over each transport and beside torch's RPC.

Rows `exchange`: one worker, one server, a push and a pull of the whole model, in turns with its
peer. Rows `consistency`: workers of unequal speed, and how long each kind of consistency makes them
wait. Rows `target`: four workers, one five times slower; the time until the loss is a tenth of what
it was. Rows `local steps`: DiLoCo beside bulk-synchronous training of one small language model on
the same tokens; the bytes, and the loss on held-out text.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paramserver.compression import Integers, TopK
from paramserver.consistency import (
    Asynchronous,
    BulkSynchronous,
    Consistency,
    LocalSteps,
    StaleSynchronous,
)
from paramserver.running.launch import run
from paramserver.transport.distributed import join
from paramserver.worker import Worker

Row = dict[str, float | int | str]


def bench(*, device: str = "cpu", quick: bool = False) -> list[Row]:
    """All rows. In a process group (RANK is set) only its ranks take part, and rank 0 has rows."""
    if device != "cpu":
        raise ValueError(f"device is {device!r}; servers and messages are on the CPU: device='cpu'")
    mebibytes, rounds = (8, 5) if quick else (80, 15)
    if "RANK" in os.environ:
        return _exchange_in_group(mebibytes, rounds)
    return [
        *_exchange(mebibytes, rounds),
        *_consistency(10 if quick else 40),
        *_target(quick),
        *_local_steps(100 if quick else 1000),
    ]


def _exchange(mebibytes: int, rounds: int) -> list[Row]:
    """shared_memory and distributed by `run`; torch RPC by itself, rounds in turns."""
    times: dict[str, list[tuple[float, float]]] = {
        "shared_memory": [],
        "distributed": [],
        "zeromq": [],
        "rpc": [],
    }
    for _ in range(2):  # two blocks of each, A B C A B C, so that a slow minute hits all
        for transport in ("shared_memory", "distributed", "zeromq"):
            times[transport] += run(
                _time_exchanges,
                _Vector(mebibytes),
                partial(torch.optim.SGD, lr=0.0),
                Asynchronous(),
                args=(rounds,),
                workers=1,
                transport=transport,
            ).values[0]
        times["rpc"] += _time_rpc(mebibytes, rounds)
    rows: list[Row] = []
    for transport, pairs in times.items():
        push, pull = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratios = [sum(r) / sum(p) for r, p in zip(times["rpc"], pairs, strict=True)]
        rows.append(
            {
                "case": "exchange",
                "transport": transport,
                "model_mib": mebibytes,
                "push_ms": push * 1e3,
                "pull_ms": pull * 1e3,
                "rpc_over_this_p50": statistics.median(ratios),
                "rpc_over_this_p10": _quantile(ratios, 0.1),
                "rpc_over_this_p90": _quantile(ratios, 0.9),
            }
        )
    return rows


class _Vector(nn.Module):
    def __init__(self, mebibytes: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(mebibytes * 2**18))


def _time_exchanges(worker: Worker, rounds: int) -> list[tuple[float, float]]:
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


def _exchange_in_group(mebibytes: int, rounds: int) -> list[Row]:
    """The other ranks push to and pull from a server on rank 0; rank 1 measures."""
    started_here = not dist.is_initialized()
    if started_here:
        dist.init_process_group("gloo")
    vector, times = _Vector(mebibytes), None
    optimizer = partial(torch.optim.SGD, lr=0.0)
    with join(vector, optimizer, Asynchronous(), timeout=240.0) as worker:
        if dist.get_rank() == 1:
            times = _time_exchanges(worker, rounds)
    shared: list[Any] = [times]
    dist.broadcast_object_list(shared, src=1)
    rank = dist.get_rank()
    if started_here:
        dist.destroy_process_group()
    if rank:
        return []
    push, pull = (statistics.median(column) for column in zip(*shared[0], strict=True))
    return [
        {
            "case": "exchange_in_group",
            "transport": "distributed",
            "model_mib": mebibytes,
            "push_ms": push * 1e3,
            "pull_ms": pull * 1e3,
            "push_gbps": 8 * mebibytes * 2**20 / push / 1e9,
            "pull_gbps": 8 * mebibytes * 2**20 / pull / 1e9,
        }
    ]


def _consistency(steps: int) -> list[Row]:
    kinds: tuple[Consistency, ...] = (
        BulkSynchronous(),
        StaleSynchronous(1),
        StaleSynchronous(4),
        Asynchronous(),
    )
    rows: list[Row] = []
    for kind in kinds:
        result = run(
            _uneven_steps,
            nn.Linear(16, 16),
            partial(torch.optim.SGD, lr=1e-3),
            kind,
            args=(steps,),
            workers=3,
        )
        gradients = sum(result.staleness.values())
        mean = sum(age * count for age, count in result.staleness.items()) / gradients
        rows.append(
            {
                "case": "consistency",
                "kind": repr(kind),
                "workers": 3,
                "waited_share": statistics.mean(result.values),
                "staleness_mean_versions": mean,
                "staleness_max_versions": max(result.staleness),
                "updates": result.versions[0],
            }
        )
    return rows


def _uneven_steps(worker: Worker, steps: int) -> float:
    """Steps of 2 ms, every third one 12 ms and at another time on each worker: the share waited."""
    waited = 0.0
    begin = time.perf_counter()
    for step in range(steps):
        start = time.perf_counter()
        worker.pull()
        waited += time.perf_counter() - start
        worker.module(torch.ones(1, 16)).sum().backward()
        time.sleep(0.012 if step % 3 == worker.rank else 0.002)
        worker.push()
    return waited / (time.perf_counter() - begin)


def _target(quick: bool) -> list[Row]:
    """Time to a target for the policies, with one of four workers five times slower."""
    kinds: tuple[Consistency, ...] = (BulkSynchronous(), StaleSynchronous(4), Asynchronous())
    rounds = 1 if quick else 5
    seconds: dict[str, list[float]] = {repr(kind): [] for kind in kinds}
    for _ in range(rounds):  # in turns, so that a slow minute hits all
        for kind in kinds:
            # What is applied once a step is the mean of four; what is applied four times is one.
            rate = 0.4 if kind.averages else 0.1
            result = run(
                _regress, _regression(), partial(torch.optim.SGD, lr=rate), kind, workers=4
            )
            seconds[repr(kind)].append(max(result.values))
    bulk = seconds[repr(kinds[0])]
    return [
        {
            "case": "target",
            "kind": name,
            "workers": 4,
            "seconds": statistics.median(times),
            "over_bulk_p50": statistics.median(t / b for t, b in zip(times, bulk, strict=True)),
        }
        for name, times in seconds.items()
    ]


def _regression() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(32, 1, bias=False)


def _regress(worker: Worker) -> float:
    """Seconds until a least-squares loss is a tenth of the first; worker 0 is five times slower."""
    generator = torch.Generator().manual_seed(worker.rank)
    truth = torch.linspace(-1, 1, 32)
    begin, first = time.perf_counter(), None
    for _ in range(400):
        worker.pull()
        weight = worker.module.get_parameter("weight").detach()
        error = float((weight - truth).square().mean())
        first = first or error
        if error < first / 10:
            break
        inputs = torch.randn(16, 32, generator=generator)
        (worker.module(inputs).squeeze(1) - inputs @ truth).square().mean().mul(0.5).backward()
        time.sleep(0.025 if worker.rank == 0 else 0.005)
        worker.push()
    return time.perf_counter() - begin


def _local_steps(steps: int) -> list[Row]:
    """Bytes and held-out loss of DiLoCo, beside bulk-synchronous training, at equal tokens."""
    adamw = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.01)
    kinds: list[tuple[str, Consistency]] = [
        ("every step", BulkSynchronous()),
        ("50 local steps", LocalSteps(50)),
        ("50 local steps, 8 bits", LocalSteps(50, compression=Integers(8))),
        ("50 local steps, 4 bits", LocalSteps(50, compression=Integers(4))),
        ("50 local steps, top 1 %", LocalSteps(50, compression=TopK(0.01))),
    ]
    rows: list[Row] = []
    for name, kind in kinds:
        result = run(_language, _Language(), adamw, kind, args=(steps,), workers=2)
        loss, pushed, pulled = result.values[0]
        rows.append(
            {
                "case": "local steps",
                "kind": name,
                "steps": steps,
                "held_out_loss": loss,
                "pushed_bytes": pushed,
                "pulled_bytes": pulled,
                "times_fewer_bytes": 0.0,
                "loss_over_every_step": 0.0,
            }
        )
    first = rows[0]
    for row in rows:
        fewer = _total(first) / _total(row)
        row["times_fewer_bytes"] = fewer
        row["loss_over_every_step"] = float(row["held_out_loss"]) / float(first["held_out_loss"])
    return rows


def _total(row: Row) -> int:
    return int(row["pushed_bytes"]) + int(row["pulled_bytes"])


class _Language(nn.Module):
    """Predicts a byte of this package's own source from the 16 before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(128, 32)
        self.layers = nn.Sequential(nn.Linear(16 * 32, 256), nn.GELU(), nn.Linear(256, 128))

    def forward(self, before: Tensor) -> Tensor:
        """[batch, 16] bytes -> [batch, 128] logits."""
        logits: Tensor = self.layers(self.embed(before).flatten(1))
        return logits


def _language(worker: Worker, steps: int) -> tuple[float, int, int]:
    """Loss on text that nobody trained on, and the bytes of pushes and of pulls while training."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    raw = b"".join(path.read_bytes() for path in files).decode().encode("ascii", "replace")
    text = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    windows = text.unfold(0, 17, 1)  # [places, 17]
    cut = len(windows) * 9 // 10
    generator = torch.Generator().manual_seed(worker.rank)
    for _ in range(steps):
        worker.pull()
        chosen = windows[torch.randint(0, cut - 17, (32,), generator=generator)]
        nn.functional.cross_entropy(worker.module(chosen[:, :16]), chosen[:, 16]).backward()
        worker.push()
    pushed, pulled = worker.bytes_pushed, worker.bytes_pulled
    worker.pull()
    with torch.no_grad():
        held_out = windows[cut::7]
        loss = nn.functional.cross_entropy(worker.module(held_out[:, :16]), held_out[:, 16])
    return float(loss), pushed, pulled


def _time_rpc(mebibytes: int, rounds: int) -> list[tuple[float, float]]:
    """The same exchange with torch.distributed.rpc (TensorPipe)."""
    with tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/times"
        torch.multiprocessing.spawn(
            _rpc_rank, args=(f"{folder}/store", output, mebibytes, rounds), nprocs=2
        )
        times: list[tuple[float, float]] = [tuple(t) for t in json.loads(Path(output).read_text())]
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
    rpc.init_rpc(
        f"rank{rank}",
        rank=rank,
        world_size=2,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}"),
    )
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


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))]


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
        cells = [columns, *(tuple(_cell(v) for v in row.values()) for row in group)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _cell(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
