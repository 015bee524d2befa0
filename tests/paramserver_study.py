"""All measurements of paramserver, and their plots: the rows of its bench and those of this file.

    python tests/paramserver_study.py --plot docs/results/paramserver

- `exchange`: the bench's rows.
- `bound`: exchanges, interleaved with transfers that bound their speed. One transfer copies in and
  out of shared memory and updates. The others send the same bytes there and back over bare ZeroMQ
  frames and over a Unix socket. They use allocated memory and compute nothing.
- `journal`: a push with and without a journal, an append of the same bytes to a file, and the
  time in which the disk stores them (`--journal` measures only these rows).
- `size`, `workers`, `servers`: a push and a pull of the whole model over shared memory, with one of
  the three varied.
- `target`: four workers, one of them five times slower. The time until the loss is a tenth of its
  first value, as the first and as the last worker observes it. The slow worker observes it once per
  long step only.
- `loss`: DiLoCo and data-parallel training of the suite's decoder on the suite's text, at equal
  tokens: bytes that a worker exchanges, and the loss on held-out text.
- `link`: two hosts joined by a link of a given rate, and the fraction of a worker's time in which
  it computes. Both methods see the same rows of text in the same order.
- `equal_loss`: the same with equal numbers of steps, and the loss on held-out text at their end
  (`--equal-loss` measures only these rows).
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
import zlib
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from emulated_hosts import emulated_hosts, explain_refusal, run_everywhere
from llmsys_suite.model import Decoder, ModelConfig
from llmsys_suite.text.data import Corpus, load_corpus
from paramserver import (
    Asynchronous,
    BulkSynchronous,
    Integers,
    LocalSteps,
    StaleSynchronous,
    join,
    run,
)
from paramserver.bench import (
    bench,
    compute_median_times,
    format_table,
    measure_exchanges,
    measure_rpc,
)
from torch import nn

CONTEXT = 128
#: Rows per worker and step.
ROWS = 4
WORKERS = 2
LOCAL_STEPS = 50
POLICIES = {
    "DiLoCo": LocalSteps(LOCAL_STEPS),
    "DiLoCo, 8 bits": LocalSteps(LOCAL_STEPS, compression=Integers(8)),
    "DiLoCo, 4 bits": LocalSteps(LOCAL_STEPS, compression=Integers(4)),
    "DiLoCo, 4 bits, 5 fragments, overlap 5": LocalSteps(
        LOCAL_STEPS, compression=Integers(4), fragments=5, overlap=5
    ),
}

#: Policies that are measured over a link: without compression, and with the smallest payload.
LINKED = ("DiLoCo", "DiLoCo, 4 bits, 5 fragments, overlap 5")


class TimedAdamW(torch.optim.AdamW):
    """AdamW that measures the time of its steps."""

    seconds = 0.0

    def step(self, closure=None):
        start = time.perf_counter()
        super().step(closure)
        TimedAdamW.seconds += time.perf_counter() - start


def compute_rate(step: int, steps: int) -> float:
    """Return the learning-rate factor: warm-up, then a cosine to a tenth (DiLoCo paper)."""
    warm = min(1.0, (step + 1) / max(1, steps // 20))
    return warm * (0.55 + 0.45 * float(torch.cos(torch.tensor(torch.pi * step / steps))))


def build_decoder(size: str) -> Decoder:
    torch.manual_seed(0)
    return Decoder(ModelConfig.from_size(size, context=CONTEXT))


def batch(corpus: Corpus, step: int, worker: int) -> tuple[torch.Tensor, torch.Tensor]:
    return corpus.draw_batch(
        rows=ROWS * WORKERS, context=CONTEXT, seed=0, step=step, rank=worker, world=WORKERS
    )


def compute_held_out_loss(model: Decoder, corpus: Corpus) -> float:
    with torch.no_grad():
        return float(model.compute_loss(*corpus.build_heldout_batch(rows=64, context=CONTEXT)))


def train(worker, steps: int) -> tuple[float, float, int]:
    """Train one worker; return seconds of computation, seconds in total, and bytes exchanged."""
    torch.set_num_threads(1)
    corpus = load_corpus()
    exchange_seconds = 0.0
    optimizer = worker._local.updater.optimizer
    base = optimizer.param_groups[0]["lr"]
    begin = None
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = base * compute_rate(step, steps)
        start = time.perf_counter()
        worker.pull()
        pulled = time.perf_counter()
        if begin is None:
            begin = start = pulled  # the first pull receives the whole model
        tokens, targets = batch(corpus, step, worker.rank)
        worker.module.compute_loss(tokens, targets).backward()
        computed = time.perf_counter()
        worker.push()
        exchange_seconds += pulled - start + time.perf_counter() - computed
    total = time.perf_counter() - begin
    # `push` includes the step of the local optimizer.
    compute_seconds = total - exchange_seconds + TimedAdamW.seconds
    return compute_seconds, total, worker.bytes_pushed + worker.bytes_pulled


def draw_global_batch(corpus: Corpus, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batches of all workers at a step, concatenated."""
    return tuple(
        map(torch.cat, zip(*(batch(corpus, step, w) for w in range(WORKERS)), strict=True))
    )


def count_data_parallel_bytes(model: Decoder, steps: int) -> int:
    """Return the bytes that a worker of a ring all-reduce sends and receives in `steps` steps."""
    return sum(p.nbytes for p in model.parameters()) * 2 * 2 * (WORKERS - 1) // WORKERS * steps


def _measure_scale(case: str, mebibytes: int, workers: int, servers: int, *, rounds: int) -> dict:
    """Return the row of the slowest worker, if all exchange at the same time."""
    times = measure_exchanges(mebibytes, rounds, workers=workers, servers=servers)
    row = {"case": case, "model_mib": mebibytes, "workers": workers, "servers": servers}
    return row | compute_median_times(max(times, key=lambda pairs: sum(map(sum, pairs))))


def measure_bound(mebibytes: int, rounds: int) -> list[dict]:
    """Return rows of exchanges, RPC and bare transfers of the same bytes, interleaved."""
    measured = {
        "shared_memory": lambda: measure_exchanges(mebibytes, rounds, transport="shared_memory")[0],
        "copies": lambda: _time_copies(mebibytes, rounds),
        "zeromq": lambda: measure_exchanges(mebibytes, rounds, transport="zeromq")[0],
        "bare zeromq": lambda: _time_peer(_ZeroMQPeer, mebibytes, rounds),
        "socket": lambda: _time_peer(_SocketPeer, mebibytes, rounds),
        "rpc": lambda: measure_rpc(mebibytes, rounds),
    }
    times: dict = {name: [] for name in measured}
    for _ in range(2):
        for name, measure in measured.items():
            times[name] += measure()
    rows = []
    for name, pairs in times.items():
        row = {"case": "bound", "transport": name, "model_mib": mebibytes} | compute_median_times(
            pairs
        )
        row["rpc_over_this_p50"] = compute_median_ratio(times["rpc"], pairs)
        rows.append(row)
    return rows


def measure_journal(mebibytes: int, rounds: int) -> list[dict]:
    """Return rows of pushes without and with a journal, of an append and of the disk, interleaved.

    `over_parts` is the time of a push with a journal over that of a push and an append.
    `disk_over_push` is the time in which the disk stores the bytes of a push, over that of a push.
    A journal that the page cache does not hold cannot have a lower `over_push`.
    """
    rows = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            plain = _time_push(mebibytes, None)
            journaled = _time_push(mebibytes, f"{folder}/journal")
            append, disk = _time_append(mebibytes, Path(folder) / "bare")
        row = {"case": "journal", "model_mib": mebibytes, "push_ms": 1e3 * plain}
        row |= {"journaled_push_ms": 1e3 * journaled, "append_ms": 1e3 * append}
        row |= {"disk_ms": 1e3 * disk, "disk_mib_per_s": mebibytes / disk}
        row |= {"over_push": journaled / plain, "over_parts": journaled / (plain + append)}
        rows.append(row | {"disk_over_push": disk / plain})
    return rows


def _time_push(mebibytes: int, journal: str | None) -> float:
    """Return the median time of a push over ZeroMQ."""
    pairs = measure_exchanges(mebibytes, 10, transport="zeromq", journal=journal)[0]
    return statistics.median(push for push, _ in pairs)


def _time_append(mebibytes: int, path: Path) -> tuple[float, float]:
    """Return the median time of a checksum and an append of the bytes, and that of the disk.

    The time of the disk is the mean time of the appends without checksums, up to the end of a
    final `fsync`.
    """
    data = torch.randn(mebibytes * 2**18).view(torch.uint8).numpy().data
    times = []
    disk_seconds = 0.0
    with path.open("wb", buffering=0) as file:
        for _ in range(10):
            start = time.perf_counter()
            zlib.crc32(data)
            middle = time.perf_counter()
            file.write(data)
            stop = time.perf_counter()
            times.append(stop - start)
            disk_seconds += stop - middle
        start = time.perf_counter()
        os.fsync(file.fileno())
        disk_seconds += time.perf_counter() - start
    return statistics.median(times), disk_seconds / len(times)


def compute_median_ratio(times: list, reference: list) -> float:
    """Return the median of the pairwise ratios of `times` to `reference`."""
    pairs = zip(times, reference, strict=True)
    return statistics.median(sum(a) / sum(b) for a, b in pairs)


def _time_copies(mebibytes: int, rounds: int) -> list:
    """Time a copy into shared memory with an update from it, and a copy out of it."""
    worker_memory, shared, server_memory = (torch.randn(mebibytes * 2**18) for _ in range(3))
    times = []
    for number in range(rounds + 1):
        start = time.perf_counter()
        shared.copy_(worker_memory)
        server_memory.add_(shared, alpha=-0.0)
        middle = time.perf_counter()
        worker_memory.copy_(server_memory)
        if number:
            times.append((middle - start, time.perf_counter() - middle))
    return times


def _time_peer(connect, mebibytes: int, rounds: int) -> list:
    """Time transfers to a process that stores the data, and of the same size back."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("forkserver")
        address = f"{folder}/peer"
        data = bytearray(mebibytes * 2**20)
        times = []
        echo = context.Process(target=_echo, args=(connect, address, len(data), rounds))
        echo.start()
        peer = connect(address, listens=True)
        for number in range(rounds + 1):
            start = time.perf_counter()
            peer.send(memoryview(data))
            peer.receive(memoryview(data)[:1])
            middle = time.perf_counter()
            peer.receive(memoryview(data))
            if number:
                times.append((middle - start, time.perf_counter() - middle))
        echo.join()
        peer.close()
    return times


def _echo(connect, address: str, nbytes: int, rounds: int) -> None:
    peer, data = connect(address, listens=False), memoryview(bytearray(nbytes))
    for _ in range(rounds + 1):
        peer.receive(data)
        peer.send(data[:1])
        peer.send(data)
    peer.close()


class _SocketPeer:
    """A Unix socket."""

    def __init__(self, address: str, listens: bool) -> None:
        stream = socket.socket(socket.AF_UNIX)
        if listens:
            stream.bind(address)
            stream.listen()
            self.stream = stream.accept()[0]
            stream.close()
            return
        while stream.connect_ex(address):
            time.sleep(0.01)
        self.stream = stream

    def send(self, data: memoryview) -> None:
        self.stream.sendall(data)

    def receive(self, data: memoryview) -> None:
        while data:
            count = self.stream.recv_into(data)
            if not count:
                raise ConnectionResetError("the other end of the socket is gone")
            data = data[count:]

    def close(self) -> None:
        self.stream.close()


class _ZeroMQPeer:
    """ZeroMQ frames of one MiB, sent without a copy, as this package sends them."""

    def __init__(self, address: str, listens: bool) -> None:
        import zmq

        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 4)
        (self.socket.bind if listens else self.socket.connect)(f"ipc://{address}")

    def send(self, data: memoryview) -> None:
        for start in range(0, len(data), 2**20):
            self.socket.send(data[start : start + 2**20], copy=False)

    def receive(self, data: memoryview) -> None:
        while data:
            piece = self.socket.recv(copy=False).buffer
            data[: len(piece)] = piece
            data = data[len(piece) :]

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def _measure_time_to_target(quick: bool) -> list[dict]:
    """Return the time to a target per policy, with one of four workers five times slower."""
    kinds: tuple = (BulkSynchronous(), StaleSynchronous(4), Asynchronous())
    rounds = 1 if quick else 5
    seconds: dict[str, list[tuple[float, float]]] = {repr(kind): [] for kind in kinds}
    for _ in range(rounds):  # interleaved, so that a slow minute affects all
        for kind in kinds:
            # A policy that averages applies one mean per step, the others four gradients.
            rate = 0.4 if kind.averages else 0.1
            result = run(
                _time_regression,
                _build_regression(),
                partial(torch.optim.SGD, lr=rate),
                kind,
                workers=4,
            )
            seconds[repr(kind)].append((min(result.values), max(result.values)))
    bulk = seconds[repr(kinds[0])]
    return [
        {
            "case": "target",
            "kind": name,
            "workers": 4,
            "seconds": statistics.median(first for first, _ in times),
            "over_bulk_p50": statistics.median(
                first / b for (first, _), (b, _) in zip(times, bulk, strict=True)
            ),
            "last_over_bulk_p50": statistics.median(
                last / b for (_, last), (_, b) in zip(times, bulk, strict=True)
            ),
        }
        for name, times in seconds.items()
    ]


def _build_regression() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(32, 1, bias=False)


def _time_regression(worker) -> float:
    """Return the seconds until the loss is a tenth of the first; worker 0 is five times slower."""
    generator = torch.Generator().manual_seed(worker.rank)
    truth = torch.linspace(-1, 1, 32)
    begin, first = time.perf_counter(), None
    for _ in range(400):
        worker.pull()
        weight = worker.module.get_parameter("weight").detach()
        error = float((weight - truth).square().mean())
        first = first or error
        if error < first / 10:
            return time.perf_counter() - begin
        inputs = torch.randn(16, 32, generator=generator)
        (worker.module(inputs).squeeze(1) - inputs @ truth).square().mean().mul(0.5).backward()
        time.sleep(0.025 if worker.rank == 0 else 0.005)
        worker.push()
    raise RuntimeError(f"expected a loss below {first / 10:.3g} within 400 steps, got {error:.3g}")


def measure_losses(size: str, steps: int, lr: float) -> list[dict[str, object]]:
    """Return held-out loss and bytes of each method; data-parallel runs as one equal process."""
    torch.set_num_threads(1)
    corpus = load_corpus()
    model = build_decoder(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * compute_rate(step, steps)
        optimizer.zero_grad()
        model.compute_loss(*draw_global_batch(corpus, step)).backward()
        optimizer.step()
    base_loss = compute_held_out_loss(model, corpus)
    base_bytes = count_data_parallel_bytes(model, steps)
    results = [("data-parallel", base_loss, base_bytes)]
    for name, policy in POLICIES.items():
        make = partial(TimedAdamW, lr=lr)
        result = run(train, build_decoder(size), make, policy, args=(steps,), workers=WORKERS)
        model.load_state_dict(result.parameters)
        results.append((name, compute_held_out_loss(model, corpus), result.values[0][2]))
        print(*results[-1], file=sys.stderr)
    return [
        {
            "case": "loss",
            "kind": name,
            "size": size,
            "workers": WORKERS,
            "steps": steps,
            "tokens": steps * ROWS * WORKERS * CONTEXT,
            "held_out_loss": loss,
            "loss_over_data_parallel": loss / base_loss,
            "worker_bytes": nbytes,
            "times_fewer_bytes": base_bytes / nbytes,
        }
        for name, loss, nbytes in results
    ]


def train_rank(kind: str, size: str, steps: int, lr: float) -> tuple[float, float, float]:
    """Train as a rank of a process group.

    Return the seconds of computation, the seconds in total, and the loss on held-out text.
    """
    dist.init_process_group("gloo")
    model = build_decoder(size)
    corpus = load_corpus()
    if kind != "data-parallel":
        # Each host serves half of the model, so that no worker is slowed down by serving more.
        make, hosts = partial(TimedAdamW, lr=lr), range(WORKERS)
        with join(model, make, POLICIES[kind], servers=hosts, timeout=240) as worker:
            compute_seconds, total, _ = train(worker, steps)
        return compute_seconds, total, compute_held_out_loss(model, corpus)
    torch.set_num_threads(1)
    wrapped = nn.parallel.DistributedDataParallel(model)

    def seconds_of(steps_to_take: int) -> float:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        start = time.perf_counter()
        for number in range(steps_to_take):
            optimizer.param_groups[0]["lr"] = lr * compute_rate(number, steps)
            tokens, targets = batch(corpus, number, dist.get_rank())
            logits = wrapped(tokens).flatten(0, 1)
            nn.functional.cross_entropy(logits, targets.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - start

    initial = copy.deepcopy(model.state_dict())
    with wrapped.no_sync():  # the time of steps without communication
        compute_seconds = seconds_of(10) / 10 * steps
    model.load_state_dict(initial)
    return compute_seconds, seconds_of(steps), compute_held_out_loss(model, corpus)


def measure_link(steps_of: dict[str, int], size: str, lr: float, rate: str) -> list[dict]:
    """Return the fraction of time that a worker computes, for two hosts on one link.

    `steps_of` contains the number of steps per kind: "data-parallel", or a key of `POLICIES`.
    """
    rows: list[dict] = []
    for kind, count in steps_of.items():
        with tempfile.TemporaryDirectory() as folder, emulated_hosts(WORKERS, rate) as hosts:
            command = [sys.executable, __file__, "--rank-of", kind, "--json", f"{folder}/rows"]
            command += ["--size", size, "--steps", str(count), "--lr", str(lr)]
            if any(run_everywhere(hosts, command, dict(os.environ), seconds=1800)):
                raise RuntimeError(f"a rank of {kind} failed")
            sent = max(host.sent_bytes() for host in hosts)
            results = [json.loads(Path(f"{folder}/rows-{w}").read_text()) for w in range(WORKERS)]
        rows.append(
            {
                "case": "link",
                "kind": kind,
                "size": size,
                "rate": rate,
                "steps": count,
                "computing_share": min(computed / total for computed, total, _ in results),
                "step_ms": max(total for _, total, _ in results) / count * 1e3,
                "sent_bytes_per_step": sent / count,
                "held_out_loss": results[0][2],
            }
        )
        print(rows[-1], file=sys.stderr)
    return rows


def measure_equal_loss(size: str, steps: int, lr: float, rate: str) -> list[dict]:
    """Return the sent bytes and the loss of data-parallel training and DiLoCo on one link."""
    rows = measure_link(dict.fromkeys(("data-parallel", LINKED[-1]), steps), size, lr, rate)
    return [
        {
            "case": "equal_loss",
            "kind": row["kind"],
            "size": size,
            "rate": rate,
            "steps": steps,
            "held_out_loss": row["held_out_loss"],
            "loss_over_data_parallel": row["held_out_loss"] / rows[0]["held_out_loss"],
            "sent_bytes": row["sent_bytes_per_step"] * steps,
            "times_fewer_bytes": rows[0]["sent_bytes_per_step"] / row["sent_bytes_per_step"],
        }
        for row in rows
    ]


def plot(rows: list[dict[str, object]], path: str) -> None:
    """Draw PATH-exchange.png, PATH-target.png and PATH-diloco.png."""
    import matplotlib.pyplot as plt

    def of(case):
        return [row for row in rows if row["case"] == case]

    def save(figure, name):
        figure.tight_layout()
        figure.savefig(f"{path}-{name}.png", metadata={"Software": None})

    figure, scales = plt.subplots(1, 3, figsize=(11, 3))
    cases = (("size", "model_mib"), ("workers",) * 2, ("servers",) * 2)
    for axes, (case, key) in zip(scales, cases, strict=True):
        for column in ("push_ms", "pull_ms"):
            values = [row[column] for row in of(case)]
            axes.plot([row[key] for row in of(case)], values, "o-", label=column[:4])
        axes.set(xlabel=key.replace("model_mib", "MiB"), ylabel="ms", ylim=0)
        if case != "size":
            axes.set_xticks([row[key] for row in of(case)])
        axes.legend()
    save(figure, "exchange")
    figure, axes = plt.subplots(figsize=(6, 2))
    axes.barh([row["kind"] for row in of("target")], [row["seconds"] for row in of("target")])
    axes.set(xlabel="seconds to the target")
    save(figure, "target")
    figure, axes = plt.subplots(figsize=(6, 4))
    for row in of("loss"):
        axes.scatter(row["worker_bytes"], row["held_out_loss"], label=row["kind"])
    losses = [row["held_out_loss"] for row in of("loss")]
    axes.set(xscale="log", ylim=(0.95 * min(losses), 1.1 * max(losses)))
    axes.set(xlabel="bytes that a worker exchanged", ylabel="held-out loss")
    axes.legend(fontsize="small")
    save(figure, "diloco")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-exchange", dest="exchange", action="store_false")
    parser.add_argument("--journal", action="store_true", help="measure the rows `journal` alone")
    parser.add_argument(
        "--equal-loss", action="store_true", help="measure the rows `equal_loss` alone"
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--size", default="mini", help="size of the suite's decoder")
    parser.add_argument("--link-size", default="tiny")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--link-steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", help="prefix of the names of the plots")
    options = parser.parse_args()
    if options.rank_of:
        result = train_rank(options.rank_of, options.size, options.steps, options.lr)
        Path(f"{options.json}-{os.environ['RANK']}").write_text(json.dumps(result))
        os._exit(0)
    if options.journal or options.equal_loss:
        if options.journal:
            rows = measure_journal(80, 5)
        else:
            rows = measure_equal_loss(options.size, options.steps, options.lr, options.rate)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
        print(format_table(rows))
        return
    rows = bench(quick=options.quick) if options.exchange else []
    size, rounds = (8, 5) if options.quick else (80, 15)
    scales = [
        *(("size", mebibytes, 1, 1) for mebibytes in (1, 8, 80, 320) if mebibytes <= 4 * size),
        *(("workers", size, workers, 1) for workers in (1, 2, 4)),
        *(("servers", size, 1, servers) for servers in (1, 2, 4)),
    ]
    if options.exchange:
        rows += measure_bound(size, rounds)
        rows += [_measure_scale(*scale, rounds=rounds) for scale in scales]
        rows += _measure_time_to_target(options.quick)
    rows += measure_losses(options.size, options.steps, options.lr) if options.steps else []
    if reason := explain_refusal():
        print(f"no link is emulated: {reason}", file=sys.stderr)
    elif options.link_steps:
        # Data-parallel training is so slow that it takes a tenth of the steps.
        steps_of = dict.fromkeys(LINKED, options.link_steps)
        steps_of = {"data-parallel": max(5, options.link_steps // 10)} | steps_of
        rows += [
            {key: value for key, value in row.items() if key != "held_out_loss"}
            for row in measure_link(steps_of, options.link_size, options.lr, options.rate)
        ]
    if options.plot:
        plot(rows, options.plot)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(format_table(rows))


if __name__ == "__main__":
    main()
