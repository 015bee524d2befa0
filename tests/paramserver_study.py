"""All that is measured of paramserver, and drawn: the bench's rows, and those that need more.

    python tests/paramserver_study.py --plot docs/results/paramserver

Rows `exchange` are the bench's, and where Ray is installed the same over Ray: by this package's
transport, and by the pattern of Ray's own examples, an actor with the weights. Rows `bound`:
exchanges in turns with what bounds them: the copies in and out of shared memory and the update; as
many bytes there and back over bare frames of ZeroMQ, and over a plain Unix socket, from and into
memory that is there, nothing computed: no transport that sends them is faster. Rows `size`,
`workers` and `servers`: a push and pull of the whole model over shared memory, one of the three
varied. Rows `target`: four workers, one five times slower; the time until the loss is a tenth of
what it was, as who first pulls such parameters sees it, and as the last one does: the slow worker
looks only once in its own long step. (The bound is a head start: far targets gain less by it.)
DiLoCo beside data-parallel training of the suite's decoder on the suite's text, at equal tokens:
Rows `loss`: bytes that a worker sends and receives, and the loss on text that nobody trained on.
Rows `link`: two hosts joined by a link of that rate, and the share of a worker's time in which it
computes. Both ways of training see the same rows of text in the same order.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from emulated_hosts import emulated_hosts, run_everywhere, why_not
from llmsys_suite.data import Corpus, load_corpus
from llmsys_suite.model import Decoder, ModelConfig
from paramserver import (
    Asynchronous,
    BulkSynchronous,
    Integers,
    LocalSteps,
    StaleSynchronous,
    TopK,
    join,
    run,
)
from paramserver.bench import bench, table
from paramserver.bench.rows import median_times, time_exchanges, time_rpc
from torch import nn

CONTEXT, ROWS, WORKERS, LOCAL_STEPS = 128, 4, 2, 50  # rows a worker
POLICIES = {
    "DiLoCo": LocalSteps(LOCAL_STEPS),
    "DiLoCo, 8 bits": LocalSteps(LOCAL_STEPS, compression=Integers(8)),
    "DiLoCo, 4 bits": LocalSteps(LOCAL_STEPS, compression=Integers(4)),
    "DiLoCo, top 1 %": LocalSteps(LOCAL_STEPS, compression=TopK(0.01)),
    "DiLoCo, 4 bits, 5 fragments, overlap 5": LocalSteps(
        LOCAL_STEPS, compression=Integers(4), fragments=5, overlap=5
    ),
}

LINKED = ("DiLoCo", "DiLoCo, 4 bits, 5 fragments, overlap 5")  # whole, and as small as it gets


class TimedAdamW(torch.optim.AdamW):
    """AdamW that knows for how long it has computed."""

    seconds = 0.0

    def step(self, closure=None):
        start = time.perf_counter()
        super().step(closure)
        TimedAdamW.seconds += time.perf_counter() - start


def rate_at(step: int, steps: int) -> float:
    """Warm-up, then a cosine down to a tenth, as in the paper."""
    warm = min(1.0, (step + 1) / max(1, steps // 20))
    return warm * (0.55 + 0.45 * float(torch.cos(torch.tensor(torch.pi * step / steps))))


def decoder(size: str) -> Decoder:
    torch.manual_seed(0)
    return Decoder(ModelConfig.named(size, context=CONTEXT))


def batch(corpus: Corpus, step: int, worker: int) -> tuple[torch.Tensor, torch.Tensor]:
    return corpus.batch(
        rows=ROWS * WORKERS, context=CONTEXT, seed=0, step=step, rank=worker, world=WORKERS
    )


def held_out(model: Decoder, corpus: Corpus) -> float:
    with torch.no_grad():
        return float(model.loss(*corpus.heldout_batch(rows=64, context=CONTEXT)))


def train(worker, steps: int) -> tuple[float, float, int]:
    """Of one worker: seconds that it computed, seconds that all took, bytes that it exchanged."""
    torch.set_num_threads(1)
    corpus, exchanging, optimizer = load_corpus(), 0.0, worker._optimizer
    base = optimizer.param_groups[0]["lr"]
    begin = None
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = base * rate_at(step, steps)
        start = time.perf_counter()
        worker.pull()
        pulled = time.perf_counter()
        if begin is None:
            begin = start = pulled  # the first pull is of the whole model
        tokens, targets = batch(corpus, step, worker.rank)
        worker.module.loss(tokens, targets).backward()
        computed = time.perf_counter()
        worker.push()
        exchanging += pulled - start + time.perf_counter() - computed
    total, moved = time.perf_counter() - begin, worker.bytes_pushed + worker.bytes_pulled
    # The optimizer's step is a part of `push`.
    return total - exchanging + TimedAdamW.seconds, total, moved


def together(corpus: Corpus, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What all workers read at a step."""
    return tuple(
        map(torch.cat, zip(*(batch(corpus, step, w) for w in range(WORKERS)), strict=True))
    )


def data_parallel_bytes(model: Decoder, steps: int) -> int:
    """A ring: each of n sends and receives 2 (n - 1) / n of the gradients a step."""
    return sum(p.nbytes for p in model.parameters()) * 2 * 2 * (WORKERS - 1) // WORKERS * steps


def _scale(case: str, mebibytes: int, workers: int, servers: int, *, rounds: int) -> dict:
    """Of the slowest worker, when all exchange at the same time."""
    found = time_exchanges(mebibytes, rounds, workers=workers, servers=servers)
    row = {"case": case, "model_mib": mebibytes, "workers": workers, "servers": servers}
    return row | median_times(max(found, key=lambda pairs: sum(map(sum, pairs))))


def bound_rows(mebibytes: int, rounds: int) -> list[dict]:
    """The same bytes there and back, nothing computed, in turns with all of an exchange and RPC."""
    measured = {
        "shared_memory": lambda: time_exchanges(mebibytes, rounds, transport="shared_memory")[0],
        "copies": lambda: _time_copies(mebibytes, rounds),
        "zeromq": lambda: time_exchanges(mebibytes, rounds, transport="zeromq")[0],
        "bare zeromq": lambda: _time_peer(_ZeroMQPeer, mebibytes, rounds),
        "socket": lambda: _time_peer(_SocketPeer, mebibytes, rounds),
        "rpc": lambda: time_rpc(mebibytes, rounds),
    }
    found: dict = {name: [] for name in measured}
    for _ in range(2):
        for name, measure in measured.items():
            found[name] += measure()
    return [
        {"case": "bound", "transport": name, "model_mib": mebibytes}
        | median_times(pairs)
        | {"rpc_over_this_p50": statistics.median(
            sum(theirs) / sum(ours) for theirs, ours in zip(found["rpc"], pairs, strict=True)
        )}
        for name, pairs in found.items()
    ]  # fmt: skip


def _time_copies(mebibytes: int, rounds: int) -> list:
    """A copy into memory that is shared and an update from there; a copy out of it."""
    mine, shared, served = (torch.randn(mebibytes * 2**18) for _ in range(3))
    times = []
    for number in range(rounds + 1):
        start = time.perf_counter()
        shared.copy_(mine)
        served.add_(shared, alpha=-0.0)
        middle = time.perf_counter()
        mine.copy_(served)
        if number:
            times.append((middle - start, time.perf_counter() - middle))
    return times


def _time_peer(connect, mebibytes: int, rounds: int) -> list:
    """To and from a process that keeps what comes and sends as much back."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("forkserver")
        address, data, times = f"{folder}/peer", bytearray(mebibytes * 2**20), []
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
    """The stream that the kernel has between processes of a host."""

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
    """Frames as this package sends them: a mebibyte each, sent as they lie, kept where they go."""

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
            came = self.socket.recv(copy=False).buffer
            data[: len(came)] = came
            data = data[len(came) :]

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def ray_rows(mebibytes: int, rounds: int) -> list[dict]:
    """A push and a pull over Ray; none where it is not installed."""
    try:
        import ray
    except ImportError:
        print("nothing is measured over Ray: it is not installed", file=sys.stderr)
        return []
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=4, runtime_env=environment)
    found = {"ray": [], "ray_pattern": []}
    try:
        for _ in range(2):  # in turns
            found["ray"] += time_exchanges(mebibytes, rounds, transport="ray")[0]
            server = ray.remote(_Weights).remote(mebibytes)
            found["ray_pattern"] += ray.get(ray.remote(_ray_pattern).remote(server, rounds))
            ray.kill(server)
    finally:
        ray.shutdown()
    pattern = found["ray_pattern"]
    return [
        {"case": "ray", "transport": name, "model_mib": mebibytes}
        | median_times(pairs)
        | {"pattern_over_this_p50": statistics.median(
            sum(theirs) / sum(ours) for theirs, ours in zip(pattern, pairs, strict=True)
        )}
        for name, pairs in found.items()
    ]  # fmt: skip


class _Weights:
    """The server of Ray's examples: an actor that holds the weights and applies gradients."""

    def __init__(self, mebibytes):
        self.x = nn.Parameter(torch.randn(mebibytes * 2**18))
        self.optimizer = torch.optim.SGD([self.x], lr=0.0)

    def apply(self, gradient):
        self.x.grad = torch.from_numpy(gradient.copy())
        self.optimizer.step()

    def weights(self):
        return self.x.detach().numpy()


def _ray_pattern(server, rounds):
    import ray

    mine = torch.from_numpy(ray.get(server.weights.remote()).copy())
    gradient, times = torch.randn_like(mine), []
    for _ in range(rounds):
        start = time.perf_counter()
        ray.get(server.apply.remote(gradient.numpy()))
        middle = time.perf_counter()
        mine.copy_(torch.from_numpy(ray.get(server.weights.remote()).copy()))
        times.append((middle - start, time.perf_counter() - middle))
    return times


def _target(quick: bool) -> list[dict]:
    """Time to a target for the policies, with one of four workers five times slower."""
    kinds: tuple = (BulkSynchronous(), StaleSynchronous(4), Asynchronous())
    rounds = 1 if quick else 5
    seconds: dict[str, list[tuple[float, float]]] = {repr(kind): [] for kind in kinds}
    for _ in range(rounds):  # in turns, so that a slow minute hits all
        for kind in kinds:
            # What is applied once a step is the mean of four; what is applied four times is one.
            rate = 0.4 if kind.averages else 0.1
            result = run(
                _regress, _regression(), partial(torch.optim.SGD, lr=rate), kind, workers=4
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


def _regression() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(32, 1, bias=False)


def _regress(worker) -> float:
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


def loss_rows(size: str, steps: int, lr: float) -> list[dict[str, object]]:
    """Held-out loss and bytes of all ways. Data-parallel: one process on all rows, which it is."""
    torch.set_num_threads(1)
    corpus, model = load_corpus(), decoder(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * rate_at(step, steps)
        optimizer.zero_grad()
        model.loss(*together(corpus, step)).backward()
        optimizer.step()
    base, most = held_out(model, corpus), data_parallel_bytes(model, steps)
    found = [("data-parallel", base, most)]
    for name, policy in POLICIES.items():
        make = partial(TimedAdamW, lr=lr)
        result = run(train, decoder(size), make, policy, args=(steps,), workers=WORKERS)
        model.load_state_dict(result.parameters)
        found.append((name, held_out(model, corpus), result.values[0][2]))
        print(*found[-1], file=sys.stderr)
    return [
        {
            "case": "loss", "kind": name, "size": size, "workers": WORKERS, "steps": steps,
            "tokens": steps * ROWS * WORKERS * CONTEXT, "held_out_loss": loss,
            "loss_over_data_parallel": loss / base, "worker_bytes": moved,
            "times_fewer_bytes": most / moved,
        }
        for name, loss, moved in found
    ]  # fmt: skip


def one_rank(kind: str, size: str, steps: int, lr: float) -> tuple[float, float, int]:
    """In a process group: seconds computed, seconds in all, bytes exchanged."""
    dist.init_process_group("gloo")
    model = decoder(size)
    if kind != "data-parallel":
        # Half of the model on each: nobody is slower because it also serves, and waited for.
        make, hosts = partial(TimedAdamW, lr=lr), range(WORKERS)
        with join(model, make, POLICIES[kind], servers=hosts, timeout=240) as worker:
            return train(worker, steps)
    torch.set_num_threads(1)
    corpus, wrapped = load_corpus(), nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def step(number: int) -> None:
        tokens, targets = batch(corpus, number, dist.get_rank())
        logits = wrapped(tokens).flatten(0, 1)
        nn.functional.cross_entropy(logits, targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    with wrapped.no_sync():  # nothing is sent: what the steps take by themselves
        start = time.perf_counter()
        for number in range(10):
            step(number)
        alone = (time.perf_counter() - start) / 10
    start = time.perf_counter()
    for number in range(steps):
        step(number)
    return alone * steps, time.perf_counter() - start, data_parallel_bytes(model, steps)


def link_rows(size: str, steps: int, lr: float, rate: str) -> list[dict[str, object]]:
    """The share of a worker's time that it computes, of two hosts on one link."""
    rows: list[dict[str, object]] = []
    # As many steps as a minute of the slower one allows.
    for kind, count in {
        "data-parallel": max(5, steps // 10),
        **dict.fromkeys(LINKED, steps),
    }.items():
        with tempfile.TemporaryDirectory() as folder, emulated_hosts(WORKERS, rate) as hosts:
            command = [sys.executable, __file__, "--rank-of", kind, "--json", f"{folder}/rows"]
            command += ["--size", size, "--steps", str(count), "--lr", str(lr)]
            if any(run_everywhere(hosts, command, dict(os.environ), seconds=900)):
                raise RuntimeError(f"a rank of {kind} failed")
            sent = max(host.sent_bytes() for host in hosts)
            found = [json.loads(Path(f"{folder}/rows-{w}").read_text()) for w in range(WORKERS)]
        rows.append(
            {
                "case": "link",
                "kind": kind,
                "size": size,
                "rate": rate,
                "steps": count,
                "computing_share": min(computed / total for computed, total, _ in found),
                "step_ms": max(total for _, total, _ in found) / count * 1e3,
                "sent_bytes_a_step": sent / count,
            }
        )
        print(rows[-1], file=sys.stderr)
    return rows


def plot(rows: list[dict[str, object]], path: str) -> None:
    """PATH-exchange.png, PATH-target.png and PATH-diloco.png."""
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
    axes.set(xscale="log", yscale="log")  # what diverged would flatten the others
    axes.set_yticks([2, 5, 10, 20], ["2", "5", "10", "20"])
    axes.yaxis.set_minor_formatter("")
    axes.set(xlabel="bytes that a worker exchanged", ylabel="held-out loss")
    axes.legend(fontsize="small")
    save(figure, "diloco")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-exchange", dest="exchange", action="store_false")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--size", default="mini", help="one of the suite's")
    parser.add_argument("--link-size", default="tiny")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--link-steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", help="the pictures' names begin so")
    given = parser.parse_args()
    if given.rank_of:
        found = one_rank(given.rank_of, given.size, given.steps, given.lr)
        Path(f"{given.json}-{os.environ['RANK']}").write_text(json.dumps(found))
        os._exit(0)
    rows = bench(quick=given.quick) if given.exchange else []
    size, rounds = (8, 5) if given.quick else (80, 15)
    scales = [
        *(("size", mebibytes, 1, 1) for mebibytes in (1, 8, 80, 320) if mebibytes <= 4 * size),
        *(("workers", size, workers, 1) for workers in (1, 2, 4)),
        *(("servers", size, 1, servers) for servers in (1, 2, 4)),
    ]
    if given.exchange:
        rows += bound_rows(size, rounds)
        rows += ray_rows(size, rounds)
        rows += [_scale(*scale, rounds=rounds) for scale in scales]
        rows += _target(given.quick)
    rows += loss_rows(given.size, given.steps, given.lr) if given.steps else []
    if reason := why_not():
        print(f"no link is emulated: {reason}", file=sys.stderr)
    elif given.link_steps:
        rows += link_rows(given.link_size, given.link_steps, given.lr, given.rate)
    if given.plot:
        plot(rows, given.plot)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
