"""Measure the figures of docs/answers.md that no package's bench has: rows in docs/answers/rows.

    python docs/answers/measure.py                 measure all
    python docs/answers/measure.py warmup layers   measure these
    python docs/answers/measure.py isoflop parametric --data FOLDER

The last two need public data sets that are not part of this repository: `isoflops_curves.json` of
the course's repository, and the points that Epoch AI extracted from Chinchilla's figure 4.

Each function below returns the rows of one file; its docstring says what is measured. Processes
have one thread. Steps and epochs are timed in wall time, which requires an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from llmsys_suite.model import ModelConfig
    from llmsys_suite.step.case import Case

ROWS = Path(__file__).parent / "rows"
EXAMPLES = Path(__file__).parents[2] / "packages" / "llmsys-suite" / "examples"
PROCESSES = 5
#: Layers of the two models from which a size that does not fit is extrapolated.
FEW = (2, 4)
#: Seconds after which a size counts as one that does not fit.
SECONDS_PER_SIZE = 240.0

Row = dict[str, Any]


def main() -> None:
    """Measure, and store the rows with a description of the machine."""
    from llmsys_suite.environment import collect_environment

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="*", default=[name for name in CASES if name not in NEED_DATA]
    )
    parser.add_argument("--data", type=Path)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # For child processes.
    torch.set_num_threads(1)
    for name in arguments.names:
        torch.manual_seed(0)
        begin = time.perf_counter()
        rows = CASES[name](arguments.data) if name in NEED_DATA else CASES[name]()
        facts = {k: v for k, v in collect_environment().items() if k in FACTS}
        stored = {
            "command": f"python docs/answers/measure.py {name}"
            + (" --data FOLDER" if name in NEED_DATA else ""),
            "environment": facts,
            "rows": rows,
        }
        (ROWS / f"{name}.json").write_text(json.dumps(stored, indent=1) + "\n")
        print(f"{name}: {len(rows)} rows in {time.perf_counter() - begin:.0f} s")


FACTS = (
    "date", "processor", "cores", "threads", "memory_gib", "cpu_flags", "gpus", "torch", "python",
)  # fmt: skip

TWICE = """
import json, sys
from llmsys_suite.step.case import Case
from llmsys_suite.step.process import measure
case = Case(**json.loads(sys.argv[1]))
print(json.dumps([measure(case) for _ in range(2)]))
"""


def warmup() -> list[Row]:
    """Measure mean and deviation of ten steps after 0, 1, 2 and 5 steps, in new processes.

    Values are medians over five processes. A second model in the same, warm processes follows.
    """
    from llmsys_suite.step.case import PHASES, WARMUPS, Case
    from llmsys_suite.step.sweep import compute_row

    rows = []
    for batch in (4, 32):
        case = Case(rows=batch)
        command = [sys.executable, "-c", TWICE, json.dumps({"rows": batch})]
        processes = [json.loads(_get_command_output(command)) for _ in range(PROCESSES)]
        for which, process in enumerate(("cold", "warm")):
            for skipped in WARMUPS:
                measured = [compute_row(case, run[which], skipped) for run in processes]
                columns = [f"{phase}_{what}_ms" for phase in PHASES for what in ("mean", "std")]
                medians = {c: statistics.median(values[c] for values in measured) for c in columns}
                rows.append({"batch": batch, "process": process, "warmup": skipped} | medians)
    return rows


def _get_command_output(command: list[str]) -> str:
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()[-1]


def sizes() -> list[Row]:
    """Time forward, backward and optimizer of the course's sizes, batch 1: ten steps after five.

    Sizes that do not fit in memory or four minutes are extrapolated from models of fewer layers.
    """
    from llmsys_suite.step import sweep
    from llmsys_suite.step.case import Case

    cases = [Case(size=size, rows=1) for size in ("small", "medium", "large", "xl", "2.7B", "10B")]
    by_size = {case.size: case for case in cases}
    rows = []
    largest: Row = {}
    for row in sweep.measure(cases, limit=SECONDS_PER_SIZE):
        case = by_size[row["size"]]
        if "warmup" not in row:
            line = _extrapolate_times(case)
            rows.append(line | {"note": f"{row['note']}; {line['note']}"})
        elif row["warmup"] == 5:
            rows.append(row)
            largest = row
    # The largest size that fits is predicted too, for comparison.
    line = _extrapolate_times(by_size[largest["size"]])
    line["note"] += f": {line['step_p50_ms'] / largest['step_p50_ms']:.2f} of what it takes"
    return [
        {"needed_gib": by_size[row["size"]].predict_peak_bytes() / 2**30} | _flatten_row(row)
        for row in (*rows, line)
    ]


def _extrapolate_times(case: Case) -> Row:
    """Return the predicted time of a case, from steps of models with few layers.

    A step consists of a number of equal layers and a constant part, so its time is linear in the
    number of layers.
    """
    from llmsys_suite.step import sweep
    from llmsys_suite.step.case import PHASES

    labels = case.get_labels() | {"warmup": 5}
    few = [replace(case, layers=layers) for layers in FEW]
    try:
        for shallow in few:
            sweep.require_fit(shallow)
        ran = [sweep.run_in_process(shallow, SECONDS_PER_SIZE) for shallow in few]
    except sweep.LeftOut as reason:
        return labels | {"note": f"not extrapolated: {FEW[1]} layers: {reason}"}
    ends = [
        sweep.compute_row(shallow, measured, 5) for shallow, measured in zip(few, ran, strict=True)
    ]
    beyond = (case.model.num_layers - FEW[0]) / (FEW[1] - FEW[0])
    for key in (*(f"{phase}_mean_ms" for phase in PHASES), "step_p50_ms"):
        low, high = (end[key] for end in ends)
        labels[key] = low + beyond * (high - low)
    labels["tokens_per_s"] = case.tokens / (labels["step_p50_ms"] / 1e3)
    return labels | {"note": f"extrapolated from {FEW[0]} and {FEW[1]} layers"}


def _flatten_row(row: Row) -> Row:
    return {key: value for key, value in row.items() if key != "operators"}


def _measure_case(**options: Any) -> Row:
    """Measure one case: ten steps after five others. End the program if it was not timed."""
    from llmsys_suite.step import sweep
    from llmsys_suite.step.case import Case

    profile = options.pop("profile", False)
    row = list(sweep.measure([Case(**options)], limit=600, profile=profile))[-1]
    if row["note"]:
        sys.exit(f"{options} was not timed: {row['note']}")
    return row


def precision() -> list[Row]:
    """Time forward and backward separately in float32, bfloat16 and float16 autocast."""
    cases = [
        {"size": size, "rows": rows, "dtype": dtype}
        for size, rows in (("tiny", 4), ("small", 1))
        for dtype in ("fp32", "bf16", "fp16")
    ]
    columns = [
        f"{phase}_{what}_ms" for phase in ("forward", "backward") for what in ("mean", "std")
    ]
    rows = [_measure_case(**case) for case in cases]
    return [{key: row[key] for key in ("size", "dtype", *columns)} for row in rows]


def kernels() -> list[Row]:
    """Split the time of a step of the small model by context: products, softmax, the rest."""
    rows = []
    for context in (128, 256, 512, 1024):
        measured = _measure_case(size="small", context=context, rows=1, profile=True)
        for phase in measured["operators"]:
            rows.append(
                {
                    "context": context,
                    "phase": phase["phase"],
                    "timer_ms": measured[f"{phase['phase']}_mean_ms"],
                    "operators_ms": phase["total_ms"],
                    "top_operators": ", ".join(
                        f"{item['operator']} x {item['calls']}" for item in phase["top"][:3]
                    ),
                    "matrix_products": phase["product_share"],
                    "attention_products": phase["attention_product_share"],
                    "softmax": phase["softmax_share"],
                }
            )
    return rows


def allocator() -> list[Row]:
    """Time the small model's optimizer if the C library returns memory, and if it keeps it."""
    keeping = {"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "8000000000"}
    rows = []
    for context, memory in itertools.product((128, 1024), ("returned", "kept")):
        with mock.patch.dict(os.environ, keeping if memory == "kept" else {}):
            measured = _measure_case(size="small", context=context, rows=1)
        row = {"context": context, "memory": memory}
        rows.append(row | {"optimizer_ms": measured["optimizer_mean_ms"]})
    return rows


def layers() -> list[Row]:
    """Count live bytes of the 2.7B model, batch 4, vocabulary 10,000, on the meta device."""
    from llmsys_suite.model import ModelConfig
    from llmsys_suite.stages import memory

    rows = []
    for context in (128, 256, 512):
        measured = memory.profile("2.7B", context)
        config = ModelConfig.from_size("2.7B", vocabulary=memory.VOCABULARY, context=context)
        step = memory.trace_training(config)
        # Blocks without a phase existed before the step: weights, moments and the batch.
        stored = sum(block.nbytes for block in step.at_peak if not block.phase)
        row = {"context": context} | measured["peaks"]
        for name, autocast in (("forward_end_mib", False), ("forward_end_autocast_mib", True)):
            saved = _count_saved_bytes(config, memory.ROWS, autocast=autocast)
            row[name] = (stored + saved) / memory.MIB
        row["training_peak_autocast_mib"] = _record_autocast_step(config).peak_bytes / memory.MIB
        if context == 512:
            row["drawn"] = {
                "inference": _thin_timeline(measured["drawn"]["inference_timeline"]),
                "training": _thin_timeline(measured["drawn"]["training_timeline"]),
            }
            row["largest"] = _group_largest_blocks(step.at_peak)[:5]
        rows.append(row)
    return rows


def _count_saved_bytes(config: ModelConfig, rows: int, *, autocast: bool) -> int:
    """Return the bytes that a forward pass saves for the backward pass.

    The dtype is float32, or bf16 under autocast. Fake tensors follow the rules of a GPU on any
    machine. Under autocast, activations are smaller, but a bf16 copy of each weight that a product
    has read is saved as well.
    """
    from accounting.memory.live import LiveMemory
    from llmsys_suite.model import Decoder, plain_attention
    from torch._subclasses.fake_tensor import FakeTensorMode

    # The initialization is disabled, because it reads values, which fake tensors do not have.
    with (
        FakeTensorMode(),
        torch.device("cuda"),
        mock.patch("torch.nn.init.trunc_normal_", lambda weight, **_: weight),
    ):
        model = Decoder(config, plain_attention)
        tokens = torch.zeros(rows, config.context, dtype=torch.long)
        memory = LiveMemory()
        memory.add([*model.parameters(), *model.buffers(), tokens], "model or batch")
        stored_bytes = memory.live_bytes
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_enabled("cuda", autocast)
        try:
            with memory:
                loss = model.compute_loss(tokens, tokens)
                live_bytes = memory.live_bytes
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.clear_autocast_cache()
        del loss  # frees the graph and its saved tensors
    return live_bytes - stored_bytes


class _Autocast(TorchFunctionMode):
    """CUDA's autocast to bf16 for the operators of the suite's model, on any device.

    torch has no autocast for meta tensors, and it cannot run a backward pass of fake CUDA tensors
    without a GPU. At the end of the forward pass, the live bytes are those of `_saved_bytes`, which
    uses torch's own autocast.
    """

    HALF = (F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)
    FULL = (Tensor.softmax, F.rms_norm, F.cross_entropy)

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[Tensor, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Cast the floating-point arguments of an operator, then call it."""
        if func in self.HALF:
            args = [self._half(item) for item in args]
        elif func in self.FULL:
            args = [
                item.float() if isinstance(item, Tensor) and item.is_floating_point() else item
                for item in args
            ]
        return func(*args, **(kwargs or {}))

    def _half(self, item: Any) -> Any:
        if not isinstance(item, Tensor) or item.dtype != torch.float32:
            return item
        if not (item.is_leaf and item.requires_grad):
            return item.bfloat16()
        if item not in self.cache:
            self.cache[item] = item.bfloat16()
        return self.cache[item]


def _record_autocast_step(config: Any) -> Any:
    """Return the live memory of an AdamW step whose forward pass runs under bf16 autocast."""
    from accounting.memory.live import make_state, training_step_memory
    from llmsys_suite.model import Decoder, plain_attention
    from llmsys_suite.stages import memory

    with torch.device("meta"):
        model = Decoder(config, plain_attention)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tokens = torch.zeros(memory.ROWS, config.context, dtype=torch.long)
        make_state(optimizer)

        def loss() -> Tensor:
            with _Autocast() as autocast:
                value = model.compute_loss(tokens, tokens)
            autocast.cache.clear()
            return value

        return training_step_memory(model, loss, optimizer)


def _group_largest_blocks(blocks: list[Any]) -> list[Row]:
    """Return the blocks by operator, phase and module, the groups with the most bytes first."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for block in blocks:
        key = block.operator, block.phase, block.module
        groups.setdefault(key, []).append(block.nbytes / 2**20)
    rows = [
        {
            "operator": operator,
            "made_in": phase or "before",
            "module": module,
            "blocks": len(sizes),
            "largest_mib": max(sizes),
            "total_mib": sum(sizes),
        }
        for (operator, phase, module), sizes in groups.items()
    ]
    return sorted(rows, key=lambda row: row["total_mib"], reverse=True)


def _thin_timeline(timeline: list[tuple[str, float]], points: int = 130) -> list[tuple[str, float]]:
    stride = max(1, len(timeline) // points)
    parts = (timeline[i : i + stride] for i in range(0, len(timeline), stride))
    return [
        (phase, round(live / 1024, 3))
        for phase, live in (max(p, key=lambda x: x[1]) for p in parts)
    ]


def mixed_memory() -> list[Row]:
    """Count the peak of a forward pass of the 2.7B model, batch 4, in float32 and bf16 autocast.

    Fake tensors on `cuda` follow the autocast rules of a GPU on any machine.
    """
    from accounting.memory.live import LiveMemory
    from llmsys_suite.model import Decoder, ModelConfig, plain_attention
    from llmsys_suite.stages import memory
    from torch._subclasses.fake_tensor import FakeTensorMode

    def peak_mib(config: ModelConfig, *, autocast: bool, cache: bool) -> float:
        """Return the peak of a forward pass without gradients in MiB."""
        model = Decoder(config, plain_attention)
        tokens = torch.zeros(memory.ROWS, config.context, dtype=torch.long)
        live = LiveMemory()
        live.add([*model.parameters(), *model.buffers()], "parameter or buffer")
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_cache_enabled(cache)
        torch.set_autocast_enabled("cuda", autocast)
        try:
            with torch.no_grad(), live:
                model(tokens)
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_cache_enabled(True)
            torch.clear_autocast_cache()
        return live.peak_bytes / memory.MIB

    rows = []
    for context in (128, 256, 512):
        config = ModelConfig.from_size("2.7B", vocabulary=memory.VOCABULARY, context=context)
        row: Row = {"context": context}
        for name, autocast, cache in (
            ("float32", False, True),
            ("autocast", True, True),
            ("autocast_uncached", True, False),
        ):
            with (
                FakeTensorMode(),
                torch.device("cuda"),
                mock.patch("torch.nn.init.trunc_normal_", lambda weight, **_: weight),
            ):
                row[f"inference_{name}_mib"] = peak_mib(config, autocast=autocast, cache=cache)
        rows.append(row)
    return rows


def attention_memory() -> list[Row]:
    """Count live bytes of plain attention before its backward pass: batch 8, one head, float32."""
    from accounting.memory.live import LiveMemory
    from llmsys_suite.model import plain_attention

    rows = []
    for seq in (256, 1024, 4096, 8192, 16384):
        for width in (16, 32, 64, 128):
            with torch.device("meta"):
                q, k, v = (torch.randn(8, 1, seq, width, requires_grad=True) for _ in range(3))
            memory = LiveMemory()
            memory.add((q, k, v), "inputs")
            with memory:
                out = plain_attention(q, k, v, is_causal=True)
                live_bytes = memory.live_bytes
                out.sum().backward()
            rows.append(
                {
                    "seq": seq,
                    "head_dim": width,
                    "held_before_backward_mib": live_bytes / 2**20,
                    "peak_mib": memory.peak_bytes / 2**20,
                    "score_matrices_at_peak": round(memory.peak_bytes / (8 * seq * seq * 4), 2),
                }
            )
    return rows


def attention_time() -> list[Row]:
    """Time attention, batch 8, one head: plain, compiled, SDPA, flashattn2.

    The first two have no time where their scores would take more than half of the memory.
    """
    from flashattn2 import flash_attention
    from llmsys_suite.model import plain_attention

    methods: dict[str, Callable[..., Tensor]] = {
        "plain": plain_attention,
        "compiled": torch.compile(plain_attention),
        "SDPA": F.scaled_dot_product_attention,
        "flashattn2": flash_attention,
    }
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    passes_of = {256: 100, 512: 100, 1024: 100, 2048: 20, 4096: 5, 8192: 2, 16384: 1}
    rows = []
    for (seq, passes), width in itertools.product(passes_of.items(), (16, 128)):
        inputs = [torch.randn(8, 1, seq, width, requires_grad=True) for _ in range(3)]
        # At most six matrices of scores: those of the backward pass, and the mask.
        scores_fit = 6 * 8 * seq**2 * 4 < memory / 2
        taken: dict[str, list[float | None]] = {}
        for method, call in methods.items():
            if method in ("plain", "compiled") and not scores_fit:
                taken[method] = [None, None]
                continue
            # The first call of a compiled function compiles it.
            if passes > 1 or method == "compiled":
                call(*inputs, is_causal=True).sum().backward()
            forward = backward = 0.0
            for _ in range(passes):
                begin = time.process_time()
                out = call(*inputs, is_causal=True).sum()
                between = time.process_time()
                out.backward()
                forward += between - begin
                backward += time.process_time() - between
            taken[method] = [1e3 * forward / passes, 1e3 * backward / passes]
        for which, name in enumerate(("forward", "backward")):
            rows.append(
                {"seq": seq, "head_dim": width, "pass": name, "passes": passes}
                | {f"{method}_ms": times[which] for method, times in taken.items()}
            )
    return rows


def model_compiled() -> list[Row]:
    """Time the tiny model with and without compilation, and the steps after which it pays."""
    plain, compiled = (
        _measure_case(size="tiny", compile=compile_model) for compile_model in (False, True)
    )
    rows = [
        {
            "model": name,
            "first_step_s": row["first_step_ms"] / 1e3,
            "forward_ms": row["forward_mean_ms"],
            "step_ms": row["step_p50_ms"],
        }
        for name, row in (("plain", plain), ("compiled", compiled))
    ]
    cost_ms = compiled["first_step_ms"] - plain["first_step_ms"]
    gain_ms = plain["step_p50_ms"] - compiled["step_p50_ms"]
    return [rows[0], rows[1] | {"pays_after": cost_ms / gain_ms if gain_ms > 0 else math.inf}]


def checkpointing() -> list[Row]:
    """Time steps with and without activation checkpointing, and count its planned live bytes."""
    from llmsys_suite.stages.memory import trace_training
    from llmsys_suite.step.case import Case

    rows = []
    for size in ("tiny", "small"):
        took = {}
        for checkpoint in (False, True):
            row = _measure_case(size=size, checkpoint=checkpoint)
            took[checkpoint] = row["forward_mean_ms"] + row["backward_mean_ms"]
            rows.append(
                {
                    "size": size,
                    "checkpointed": checkpoint,
                    "forward_backward_ms": took[checkpoint],
                    "time_ratio": took[checkpoint] / took[False],
                    "hfu": row["hfu"],
                    "peak_mib": trace_training(
                        Case(size=size, checkpoint=checkpoint).model
                    ).peak_bytes
                    / 2**20,
                }
            )
    return rows


EPOCH = """
import json, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from ddp import DDP
from llmsys_suite.text.data import load_corpus
from llmsys_suite.model import Decoder, ModelConfig
from zero import FSDP
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
corpus, context, rows = load_corpus(Path(sys.argv[2])), 64, 8
torch.manual_seed(0)
model = Decoder(ModelConfig(d_model=64, d_ff=192, num_layers=2, num_heads=2, context=context))
wrappers = {"ddp": DDP, "torch ddp": torch.nn.parallel.DistributedDataParallel}
if sys.argv[1] == "fsdp":  # the small model is one unit, as with torch's fully_shard(model)
    wrapped = FSDP(model, shard=(Decoder,))
elif sys.argv[1] == "torch fsdp2":
    from torch.distributed.fsdp import fully_shard
    wrapped = fully_shard(model)
else:
    wrapped = wrappers[sys.argv[1]](model)
optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
windows = torch.arange(0, len(corpus.train) - context - 1, context)
order = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]
order = order[: len(order) // rows * rows]
dist.barrier()
begin = time.perf_counter()
for batch in order.split(rows):
    mine = batch[rank * rows // world : (rank + 1) * rows // world]
    text = torch.stack([corpus.train[i : i + context + 1] for i in mine.tolist()]).long()
    logits = wrapped(text[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    loss.backward()
    if hasattr(wrapped, "finish_gradient_synchronization"):
        wrapped.finish_gradient_synchronization()
    optimizer.step(); optimizer.zero_grad()
dist.barrier()
seconds, total = time.perf_counter() - begin, loss.detach().clone()
dist.all_reduce(total)
if rank == 0:
    print(json.dumps({"steps": len(order) // rows, "tokens": len(order) * context,
                      "epoch_s": seconds, "last_loss": float(total / world)}))
dist.destroy_process_group()
"""


def epoch() -> list[Row]:
    """Time an epoch of a text on two ranks, with these packages and with torch."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        text, program = Path(scratch) / "text", Path(scratch) / "epoch.py"
        text.mkdir()
        text.joinpath("argparse.txt").write_bytes(Path(argparse.__file__).read_bytes())
        program.write_text(EPOCH)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        for method in ("ddp", "torch ddp", "fsdp", "torch fsdp2"):
            command = [*launch, "--nproc-per-node", "2", str(program), method, str(text)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            measured = next(line for line in done.stdout.splitlines() if line.startswith("{"))
            rows.append({"trained_with": method, "ranks": 2} | json.loads(measured))
    return rows


def rates() -> list[Row]:
    """Find the best learning rate by batch size: linear regression and a network, SGD and Adam."""
    from scaling import sweep_learning_rate
    from scaling.sweeps.batch_size import SETTINGS

    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    few = (1, 2, 4, 8, 16, 32, 64)
    long = {"batch_sizes": sizes, "seeds": 12, "steps": 100}
    cases: tuple[tuple[str, str, float, dict[str, Any]], ...] = (
        ("linear", "sgd", 0.0, {"batch_sizes": sizes}),
        ("linear", "sgd", 8.0, {"batch_sizes": sizes}),
        ("linear", "adam", 8.0, {"batch_sizes": sizes, "seeds": 32}),
        (
            "linear",
            "adam",
            0.0,
            {"batch_sizes": sizes, "seeds": 32, "rates": _make_grid(0.02, 1.5, 31)},
        ),
        ("linear", "adam", 8.0, long | {"rates": _make_grid(0.004, 0.4, 21)}),
        ("linear", "adam", 0.0, long | {"rates": _make_grid(0.01, 0.5, 21)}),
        ("mlp", "sgd", 0.0, {"batch_sizes": few, "seeds": 4}),
        ("mlp", "adam", 0.0, {"batch_sizes": few, "seeds": 4}),
    )
    rows = []
    for task, optimizer, noise, options in cases:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sweep = sweep_learning_rate(task, optimizer, noise=noise, **options)  # type: ignore[arg-type]
        best = sweep.best_rates
        steps = options.get("steps", SETTINGS[task, optimizer].steps)  # type: ignore[index]
        row: Row = {"task": task, "optimizer": optimizer, "label_noise": noise, "steps": steps}
        for size, rate in zip(sweep.batch_sizes, best, strict=True):
            row[f"batch_{int(size)}"] = None if math.isnan(rate) else round(float(rate), 5)
        row["warnings"] = len(caught)
        rows.append(row)
    return rows


def rate_curves() -> list[Row]:
    """Measure the final loss by learning rate and batch size: regression and a network."""
    from scaling import sweep_learning_rate

    sizes = {"linear": (1, 4, 16, 64, 256), "mlp": (1, 4, 16, 64)}
    rows = []
    for task, optimizer, options in (
        ("linear", "sgd", {}),
        ("linear", "adam", {"seeds": 32, "noise": 8.0}),
        ("mlp", "sgd", {"seeds": 4}),
        ("mlp", "adam", {"seeds": 4}),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sweep = sweep_learning_rate(
                task,  # type: ignore[arg-type]
                optimizer,  # type: ignore[arg-type]
                batch_sizes=sizes[task],
                **options,
            )
        for size, losses in zip(sweep.batch_sizes, sweep.loss, strict=True):
            curve = [
                (float(f"{rate:.4g}"), float(f"{loss:.4g}"))
                for rate, loss in zip(sweep.rates, losses, strict=True)
                if math.isfinite(loss)
            ]
            rows.append({"task": task, "optimizer": optimizer, "batch": int(size), "curve": curve})
    return rows


def language_rates() -> list[Row]:
    """Find the best learning rates of a small decoder on text, by examples/learning_rate.py."""
    sweep = runpy.run_path(str(EXAMPLES / "learning_rate.py"))["main"]()
    measured = zip(
        sweep.batch_sizes, sweep.best_rates, sweep.intervals, sweep.loss.min(axis=1), strict=True
    )
    return [
        {"batch": int(batch), "best_rate": rate, "low": x.low, "high": x.high, "least_loss": loss}
        for batch, rate, x, loss in measured
    ]


def _make_grid(low: float, high: float, count: int) -> list[float]:
    return [low * (high / low) ** (i / (count - 1)) for i in range(count)]


def digits() -> list[Row]:
    """Measure weights, sensitivity and bits of a trained classifier of 8 x 8 digits."""
    import tinyml

    model, images, labels, heldout = _train_digits()
    batch = [(images[heldout], labels[heldout])]

    def right(logits: Tensor, targets: Tensor) -> Tensor:
        return (logits.argmax(1) == targets).float().mean()

    def accuracy(compressed: nn.Module) -> float:
        with torch.no_grad():
            return float(right(compressed(images[heldout]), labels[heldout]))

    rows: list[Row] = [{"case": "dense", "accuracy": accuracy(model)}]
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            weight = layer.weight.detach().flatten()
            scaled = (weight / weight.std()).clamp(-4, 4)
            counts = torch.histc(scaled, bins=33, min=-4, max=4) / len(weight)
            rows.append(
                {
                    "case": "histogram",
                    "layer": name,
                    "weights": len(weight),
                    "std": float(weight.std()),
                    "within_half_std": float((weight.abs() < 0.5 * weight.std()).float().mean()),
                    "shares": [round(fraction, 4) for fraction in counts.tolist()],
                }
            )
    amounts = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
    scan = tinyml.sensitivity(model, batch, right, amounts=amounts)
    for name, values in scan.values.items():
        rows.append({"case": "sensitivity", "layer": name} | {str(k): v for k, v in values.items()})
    for bits in (8, 6, 4, 3, 2):
        palette, linear = tinyml.kmeans_quantize(model, bits), tinyml.quantize(model, bits)
        rows.append(
            {
                "case": "bits",
                "bits": bits,
                "kmeans_accuracy": accuracy(palette),
                "linear_accuracy": accuracy(linear),
                "kmeans_error": _compute_distance(model, palette),
                "linear_error": _compute_distance(model, linear),
                "kmeans_bytes": tinyml.size_of(palette).bytes,
                "linear_bytes": tinyml.size_of(linear).bytes,
            }
        )
    return rows + list(_measure_channels(model, images[heldout][:64], accuracy))


def _compute_distance(model: nn.Module, compressed: nn.Module) -> float:
    """Return the root mean square change of the weights, relative to the weights."""
    change = square = 0.0
    for item, other in zip(_get_weights(model), _get_weights(compressed), strict=True):
        change += float((item - other).square().sum())
        square += float(item.square().sum())
    return math.sqrt(change / square)


def _get_weights(model: nn.Module) -> list[Tensor]:
    return [
        layer.weight.detach()
        for layer in model.modules()
        if isinstance(layer, nn.Conv2d | nn.Linear)
    ]


def _measure_channels(
    model: nn.Module, images: Tensor, accuracy: Callable[[nn.Module], float]
) -> Iterator[Row]:
    import tinyml
    from torch.utils.flop_counter import FlopCounterMode

    smaller = {0.0: model, 0.3: tinyml.prune_channels(model, 0.3, images[:1])}
    times: dict[float, list[float]] = {fraction: [] for fraction in smaller}
    with torch.no_grad():
        for _ in range(200):
            for fraction, network in smaller.items():
                begin = time.process_time()
                network(images)
                times[fraction].append(time.process_time() - begin)
        for fraction, network in smaller.items():
            with FlopCounterMode(display=False) as counter:
                network(images[:1])
            yield {
                "case": "channels",
                "removed": fraction,
                "macs": counter.get_total_flops() // 2,
                "parameters": sum(p.numel() for p in network.parameters()),
                "accuracy_untuned": accuracy(network),
                "time_ms": 1e3 * statistics.median(times[fraction]),
            }


def _train_digits() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    labels = torch.tensor(classes).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, heldout = order[:1437], order[1437:]
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(12):
        for part in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[part]), labels[part]).backward()
            optimizer.step()
    return model.eval(), images, labels, heldout


def prompt_overfits() -> list[Row]:
    """Train a prompt of a frozen decoder on four answers; measure losses on them and others."""
    from llmsys_suite.model import Decoder, ModelConfig
    from tinyml import SoftPrompt

    torch.manual_seed(0)
    config = ModelConfig(d_model=32, d_ff=96, num_layers=2, num_heads=2, context=96, vocabulary=16)
    model = Decoder(config).requires_grad_(False)
    seen, unseen = torch.randint(16, (4, 12)), torch.randint(16, (256, 12))
    answers = torch.arange(12) >= 8
    rows = []
    for length in (5, 40):
        torch.manual_seed(0)
        prompt = SoftPrompt(length, 32)
        optimizer = torch.optim.Adam(prompt.parameters(), lr=0.05)

        def loss(tokens: Tensor, prompt: SoftPrompt = prompt) -> Tensor:
            stream = prompt(model.embedding(tokens))
            rope = model.rope[:, : stream.shape[1]]
            for block in model.blocks:
                stream = block(stream, rope)
            logits = model.head(model.norm(stream))
            targets = prompt.targets(tokens, answers.expand(len(tokens), -1))
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

        for step in range(1501):
            value = loss(seen)
            if step in (0, 150, 1500):
                with torch.no_grad():
                    others = float(loss(unseen))
                rows.append(
                    {
                        "prompt_vectors": length,
                        "step": step,
                        "loss_of_4_seen": float(value.detach()),
                        "loss_of_256_others": others,
                    }
                )
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    return rows


def sharding() -> list[Row]:
    """Predict one rank's bytes of the xl model on two ranks, batch 4, context 128."""
    from llmsys_suite.model import Decoder, ModelConfig
    from zero import FSDP, ShardedOptimizer, memory_report

    config = ModelConfig.from_size("xl", vocabulary=10_000, context=128)

    def replicated(group: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Decoder(config)
        return model, torch.optim.AdamW(model.parameters(), foreach=False)

    def sharded(group: Any, gradients: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Decoder(config)
        return model, ShardedOptimizer(
            model.parameters(), torch.optim.AdamW, group=group, shard_gradients=gradients
        )

    def fully(group: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = FSDP(Decoder(config), group=group, shard=(nn.Linear, nn.Embedding))
        return model, torch.optim.AdamW(model.parameters(), foreach=False)

    def loss(model: nn.Module) -> Tensor:
        tokens = torch.zeros(4, 128, dtype=torch.long)
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    rows = []
    for method, build in (
        ("AdamW, replicated", replicated),
        ("ShardedOptimizer", lambda group: sharded(group, False)),
        ("shard_gradients=True", lambda group: sharded(group, True)),
        ("FSDP", fully),
    ):
        report = memory_report(build, loss, world=2)
        row: Row = {"method": method}
        for moment in report.predicted:
            row[f"{moment.name.replace(' ', '_')}_gib"] = moment.total / 2**30
        rows.append(row | {"peak_gib": report.predicted_peak / 2**30})
    return rows


def isoflop(data: Path) -> list[Row]:
    """Find the optimum of each budget, and extrapolate to 1e23 and 1e24 FLOPs."""
    import scaling

    runs = scaling.load_runs(data / "isoflops_curves.json")
    rows: list[Row] = []
    for label, options in (("a parabola each", {"nearest": len(runs)}), ("all skewed alike", {})):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit = scaling.fit_isoflop(runs, **options)
        if options:
            rows += [
                _format_optimum("valley", v.compute, v.parameters, v.tokens) for v in fit.valleys
            ]
        for compute in (1e23, 1e24):
            best = fit.optimal(compute)
            row = _format_optimum(label, compute, best.parameters, best.tokens)
            rows.append(row | {"warnings": len(caught)})
    for group in runs.budgets():
        least = int(group.loss.argmin())
        values = (group.compute, group.parameters, group.tokens)
        rows.append(_format_optimum("best run", *(float(value[least]) for value in values)))
    for label, method in (
        ("best run of each", "minimum"),
        ("the same, with an offset", "minimum-offset"),
    ):
        size = _fit_shortcut(runs, method)
        for compute in (1e23, 1e24):
            rows.append(
                _format_optimum(label, compute, size(compute), compute / (6 * size(compute)))
            )
    return rows


def _fit_shortcut(runs: Any, method: str) -> Callable[[float], float]:
    """Return a function from compute to the best size, as found by a misleading method.

    The method uses the best run of each budget. "minimum" fits a line in logs through these runs.
    "minimum-offset" fits a C^b + c by least squares in N, which contradicts C = 6 N D.
    """
    import numpy as np
    from scipy.optimize import curve_fit

    best = [group[[int(np.argmin(group.loss))]] for group in runs.budgets()]
    c = np.array([run.compute[0] for run in best])
    n = np.array([run.parameters[0] for run in best])
    exponent, intercept = np.polyfit(np.log(c), np.log(n), 1)
    if method == "minimum":
        return lambda compute: float(np.exp(intercept) * compute**exponent)

    def law(c: Any, a: float, b: float, offset: float) -> Any:
        return a * c**b + offset

    # curve_fit uses absolute step sizes, so compute and sizes are divided by their means.
    start = [np.exp(intercept) * c.mean() ** exponent / n.mean(), exponent, 0.0]
    constants, _ = curve_fit(law, c / c.mean(), n / n.mean(), start, maxfev=20_000)
    return lambda compute: float(n.mean() * law(compute / c.mean(), *constants))


def _format_optimum(label: str, compute: float, parameters: float, tokens: float) -> Row:
    return {
        "fit": label,
        "compute": float(f"{compute:.6g}"),
        "parameters": float(parameters),
        "tokens": float(tokens),
    }


def parametric(data: Path) -> list[Row]:
    """Fit a law to the points extracted from Chinchilla's figure 4, with two losses."""
    import scaling

    runs = scaling.load_runs(data / "chinchilla_svg_extracted_data.csv").without_highest(5)
    rows = []
    for loss in ("huber", "lad"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", scaling.ScalingWarning)
            law = scaling.fit_parametric(runs, loss=loss).law
        rows.append(
            {"loss": loss, "E": law.E, "A": law.A, "B": law.B, "alpha": law.alpha, "beta": law.beta}
        )
    return rows


def parallel() -> list[Row]:
    """Time ten steps of the model on two ranks, with pipeline and with tensor parallelism."""
    rows: list[Row] = _run_stages("parallel")["parallel"]["rows"]
    for row in rows:
        seconds = row.pop("seconds")
        row |= {"iterations": len(seconds), "total_s": sum(seconds)}
    return rows


def _run_stages(*wanted: str) -> dict[str, Any]:
    """Run `llmsys run` and return the summary of each stage. End the program if a stage fails.

    A run whose audit finds an error is complete, although its exit status is 1.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, "-m", "llmsys_suite", "run", *wanted, "--out", str(folder)]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE)
        file = folder / "summary.json"
        summary: dict[str, Any] = {"status": "missing"}
        if file.exists():
            summary = json.loads(file.read_text())
        if summary["status"] != "complete":
            stage = summary.get("failed_stage", "before its first stage")
            sys.exit(f"`llmsys run` failed with status {done.returncode}: {stage}")
        stages: dict[str, Any] = summary["stages"]
        return stages


def run() -> list[Row]:
    """Run `llmsys run`; return the time and a short result of each stage."""
    stages = _run_stages()
    losses = stages["train"]["losses"]["single process"]
    plan = stages["plan"]
    audit = stages["audit"]
    learn = stages["learn"]
    steps, heldout = learn["heldout"][-1]
    measured = {
        "learn": f"{heldout:.2f} nats per held-out byte, after {steps} steps of {learn['variant']}",
        "plan": f"{plan['parameters']:,} parameters",
        "train": f"loss {losses[0]:.2f} to {losses[-1]:.2f} in {len(losses)} steps",
        "audit": f"{audit['checks'] - len(audit['red'])} of {audit['checks']} checks passed",
    }
    return [
        {
            "stage": name,
            "seconds": round(result["stage_seconds"], 1),
            "found": measured.get(name, ""),
        }
        for name, result in stages.items()
        if "stage_seconds" in result
    ]


NEED_DATA = ("isoflop", "parametric")
CASES: dict[str, Callable[..., list[Row]]] = {
    case.__name__: case
    for case in (
        warmup,
        sizes,
        precision,
        kernels,
        allocator,
        layers,
        mixed_memory,
        attention_memory,
        attention_time,
        model_compiled,
        checkpointing,
        epoch,
        parallel,
        rates,
        rate_curves,
        language_rates,
        digits,
        prompt_overfits,
        sharding,
        isoflop,
        parametric,
        run,
    )
}


if __name__ == "__main__":
    main()
