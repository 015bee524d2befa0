# ruff: noqa: E501 - each line of the table at the end describes one fault.
"""Injected faults that show what the audit finds.

Each fault is a function of the run that returns patches with the effect that a real mistake would
have on numbers. `mutate.py` injects them one by one in short runs.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import collectives
import collectives.bench.rows
import ddp
import tinyml
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zero
from accounting.memory.live import LiveMemory
from llmsys_suite.folder import RunFolder
from llmsys_suite.learning import choice
from llmsys_suite.learning.state import CHECKPOINT
from llmsys_suite.measure import clocks, phases, samples
from llmsys_suite.measure.interleaved import Interleaved
from llmsys_suite.measure.phases import Recorder
from llmsys_suite.measure.samples import PEER, SINGLE
from llmsys_suite.model import ModelConfig, cross_entropy
from llmsys_suite.ranks.rank import Run
from llmsys_suite.results import Skipped
from llmsys_suite.splits import split_model as splits
from llmsys_suite.splits.pipeline import SCHEDULES
from llmsys_suite.stages import (
    attention,
    compress,
    inspect,
    learn,
    links,
    memory,
    parallel,
    plan,
    scale,
    train,
)
from llmsys_suite.text.data import Corpus
from llmsys_suite.variants import VARIANTS, final_weights, single
from llmsys_suite.variants.initial_weights import draw_initial_weights
from llmsys_suite.variants.single import Variant

Patch = AbstractContextManager[Any]
MakePatches = Callable[[Run], Patch | list[Patch]]
FLAT = "ddp flat"
NAIVE = "ddp naive"
SERVER = "parameter server"


@dataclass(frozen=True)
class Fault:
    """A fault, its stage, and the variants that a short run needs to show it."""

    stage: str
    name: str
    make: MakePatches
    trained: tuple[str, ...] = (FLAT,)

    @property
    def label(self) -> str:
        """The name of the fault in the table."""
        return f"{self.stage}: {self.name}"

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants that are trained, with the two that all are compared with."""
        return SINGLE, PEER, *self.trained


def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> Patch:
    """Call `wrapper(original, *args, **kwargs)` in place of `owner.name`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    return mock.patch.object(owner, name, wrapped)


def after(owner: Any, name: str, change: Callable[..., Any]) -> Patch:
    """Call `change(result, *args)` on what `owner.name` returns, and return its result."""
    return around(owner, name, lambda original, *a, **k: change(original(*a, **k), *a))


def edit(stage: Any, change: Callable[[Any], Any]) -> Patch:
    """Apply `change` to the results of a stage in place."""

    def changed(result: Any, *_: Any) -> Any:
        if result is not None and not isinstance(result, Skipped):
            change(result)
        return result

    return after(stage, "run", changed)


def rows(stage: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Patch:
    """Update each row of a stage's results with the return value of `change`."""
    return edit(stage, lambda result: [row.update(change(row)) for row in result.rows])


def then(name: str, method: str, change: Callable[[Any], Any]) -> Patch:
    """Call `change(variant)` after a method of a variant."""
    cls = VARIANTS[name]

    def changed(result: Any, variant: Any, *_: Any) -> Any:
        if type(variant) is cls:
            change(variant)
        return result

    return after(next(base for base in cls.__mro__ if method in vars(base)), method, changed)


def instead(name: str, method: str, wrapper: Callable[..., Any]) -> Patch:
    """Call `wrapper(original, variant, *args)` in place of a method of a variant."""

    def wrapped(original: Any, variant: Any, *args: Any) -> Any:
        if type(variant) is VARIANTS[name]:
            return wrapper(original, variant, *args)
        return original(variant, *args)

    return around(Variant, method, wrapped)


def first(model: torch.nn.Module, part: str = "attention.q.weight") -> torch.nn.Parameter:
    """Return the first parameter whose name has this suffix."""
    return next(p for name, p in model.named_parameters() if name.endswith(part))


def gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the gradient of a parameter, which must have one."""
    assert parameter.grad is not None
    return parameter.grad


def gradients(model: torch.nn.Module, change: Callable[[torch.Tensor], Any]) -> None:
    """Apply `change` to every gradient in place."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            change(parameter.grad)


# ---- faults that take more than a line -------------------------------------------------------------


def forgets_to_copy_back(original: Any, model: Any, **more: Any) -> None:
    local = gradient(first(model)).clone()
    original(model, **more)
    gradient(first(model)).copy_(local)


def sends_twice(original: Any, model: Any, **more: Any) -> None:
    dist.all_reduce(torch.cat([gradient(p).flatten() for p in model.parameters()]))
    original(model, **more)


def sums_twice(original: Any, tensor: Any, *args: Any, **more: Any) -> Any:
    original(tensor.clone(), *args, **{k: v for k, v in more.items() if k != "async_op"})
    return original(tensor, *args, **more)


def goes_over_tcp(_: Any, tensor: Any, *args: Any, **more: Any) -> Any:
    more.pop("algorithm", None)
    return dist.all_reduce(tensor, *args, **more)


def stale_gradient(run: Run) -> Patch:
    record: dict[int, torch.Tensor] = {}

    def stale(v: Any) -> None:
        now = gradient(first(v.decoder)).clone()
        gradient(first(v.decoder)).copy_(record.get(id(v), torch.zeros_like(now)))
        record[id(v)] = now

    return then("ddp overlapped", "communicate", stale)


def swaps_gradients(v: Any) -> None:
    q, k = (gradient(first(v.decoder, f"attention.{part}.weight")) for part in "qk")
    both = q.clone(), k.clone()
    q.copy_(both[1])
    k.copy_(both[0])


def drops_last_elements(original: Any, v: Any) -> None:
    last = [p.detach().flatten()[-1].clone() for p in v.decoder.parameters()]
    original(v)
    for parameter, old in zip(v.decoder.parameters(), last, strict=True):
        parameter.data.flatten()[-1:].copy_(old)


def keeps_one_weight(run: Run) -> Patch:
    def keeps(original: Any, v: Any) -> None:
        old = first(v.decoder).detach().clone()
        original(v)
        if run.rank == 1:
            first(v.decoder).data.copy_(old)

    return instead("zero 2", "update", keeps)


def last_bit(run: Run) -> Patch:
    def nudges(v: Any) -> None:
        if run.rank == 1:
            weight = first(v.decoder).data
            weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))

    return then(PEER, "update", nudges)


def skips_a_late_step(run: Run) -> Patch:
    counts: dict[int, int] = {}

    def skips(original: Any, v: Any) -> None:
        counts[id(v)] = counts.get(id(v), 0) + 1
        v.optimizer.zero_grad() if counts[id(v)] == 4 else original(v)

    return instead("ddp shared memory", "update", skips)


def other_optimizer(rate: float, **more: Any) -> MakePatches:
    def patch_init(run: Run) -> Patch:
        make = functools.partial(torch.optim.AdamW, lr=rate * run.config.learning_rate, **more)
        return around(
            Variant,
            "__init__",
            lambda original, self, run_, config, make_optimizer=None: original(
                self, run_, config, make_optimizer or make
            ),
        )

    return patch_init


def every_other_step() -> Callable[..., None]:
    counts: dict[int, int] = {}

    def skips(original: Any, v: Any) -> None:
        counts[id(v)] = counts.get(id(v), 0) + 1
        if counts[id(v)] % 2:
            original(v)
        else:
            v.optimizer.zero_grad()

    return skips


def other_beta(original: Any, v: Any) -> None:
    for group in v.optimizer.param_groups:
        group["betas"] = (0.9, 0.998)
    original(v)


def keeps_local_late(run: Run) -> Callable[..., None]:
    counts: dict[int, int] = {}

    def keeps(original: Any, v: Any) -> None:
        counts[id(v)] = counts.get(id(v), 0) + 1
        if counts[id(v)] > 1 and run.rank == 0:
            gradients(v.decoder, lambda g: g.mul_(1.01))
        original(v)

    return keeps


def batches(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Patch:
    return around(
        Corpus, "draw_batch", lambda original, self, **options: original(self, **change(options))
    )


def loses_a_row(original: Any, v: Any, tokens: Any, targets: Any) -> Any:
    fewer = (tokens[:-1], targets[:-1]) if len(tokens) > 1 else (tokens, targets)
    return original(v, *fewer)


def recorded(wrapper: Callable[..., Any]) -> Patch:
    """Return a patch that calls `wrapper(append, phase, seconds)` for the recorder's `_append`."""

    def record(original: Any, self: Any, phase: str, seconds: float, extra: Any) -> None:
        wrapper(lambda phase, seconds: original(self, phase, seconds, extra), phase, seconds)

    return around(Recorder, "_append", record)


def fastest_rank(original: Any, recorded: Any) -> Any:
    steps: dict[str, dict[int, float]] = {}
    for s in recorded:
        if s["phase"] == samples.WHOLE_STEP and not s["warmup"]:
            fastest = steps.setdefault(s["variant"], {})
            fastest[s["step"]] = min(fastest.get(s["step"], 1e9), s["seconds"])
    return steps


def straggles(ranks: tuple[int, ...], run: Run) -> Patch:
    return then(FLAT, "update", lambda v: time.sleep(0.01 * (run.rank in ranks)))


def predicts(key: str, change: Callable[[Any], Any]) -> Patch:
    return after(
        plan,
        "predict",
        lambda prediction, *_: replace(prediction, **{key: change(getattr(prediction, key))}),
    )


def without_moments(p: Any, *_: Any) -> Any:
    parts = p.training_bytes_by_part
    total = p.training_peak_bytes - parts["optimizer"]
    return replace(p, training_peak_bytes=total, training_bytes_by_part=parts | {"optimizer": 0})


def short_sum(original: Any, tensor: Any, *args: Any, **more: Any) -> Any:
    last = tensor.view(-1)[-1].clone()
    done = original(tensor, *args, **more)
    tensor.view(-1)[-1] = last
    return done


def kernel(change: Callable[..., Any]) -> Patch:
    original = attention.KERNELS["flashattn2"]

    def changed(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
        return change(functools.partial(original, is_causal=is_causal), q, k, v)

    return mock.patch.dict(attention.KERNELS, {"flashattn2": changed})


def one_ahead(_: Any, q: Any, k: Any, v: Any) -> Any:
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def slow_attention(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
    time.sleep(0.01)
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def split(dimension: str, change: Callable[[Any], Any], method: str = "communicate") -> Patch:
    """Call `change(model)` after a method of models that are split along one dimension only."""

    def changed(result: Any, model: Any, *_: Any) -> Any:
        if getattr(model.layout, dimension) == model.run.world:
            change(model)
        return result

    return after(splits.SplitModel, method, changed)


def headless(model: Any) -> None:
    for name, parameter in model.named_parameters().items():
        if name == "head.weight":
            parameter.grad = None


def sums_over_microbatches(model: Any) -> None:
    count = model.layout.count_microbatches(model.run.config.rows)
    gradients(model.model, lambda g: g.mul_(count))


def one_microbatch_less(loss: Any, model: Any, *_: Any) -> Any:
    count = model.layout.count_microbatches(model.run.config.rows)
    return loss * (count - 1) / count if model.layout.pipeline > 1 else loss


def one_rank_waits(run: Run) -> Patch:
    """Do not train a norm, which tensor parallelism replicates, on one rank."""

    def waits(model: Any) -> None:
        if run.rank == 1:
            torch.nn.init.ones_(model.named_parameters()["norm.weight"])

    return split("tensor", waits, "update")


def at_twice_the_rate(original: Any, self: Any, run: Run, *more: Any) -> None:
    rate = 2 * run.config.learning_rate
    original(self, replace(run, config=replace(run.config, learning_rate=rate)), *more)


def blind_to_gradients(original: Any, self: Any, tensor: Any, operator: str) -> None:
    if self.phase != "backward":
        original(self, tensor, operator)


def scaled(key: str, change: Callable[[Any], Any]) -> Patch:
    """Change a column in every run of the stage `scale`."""
    return after(scale, "train_one", lambda row, *_: row | {key: change(row)})


def half_budget(original: Any, run: Run, budget: float, *more: int) -> Any:
    return original(run, budget / 2, *more) | {"compute_flops": budget}


def without_largest(original: Any, runs: Any) -> Any:
    most = max(row["compute_flops"] for row in runs)
    return original([row for row in runs if row["compute_flops"] < most])


def halved_bits(size: Any, *_: Any) -> Any:
    return replace(size, sparse_by_name={n: b // 2 for n, b in size.sparse_by_name.items()})


def methods(change: Callable[[dict[str, dict[str, Any]]], Any]) -> Patch:
    """Return the rows of the stage `compress` by method."""
    return edit(compress, lambda result: change({row["method"]: row for row in result.rows}))


def swapped_methods(by_method: Any) -> None:
    a, b = by_method["linear, 8 bits"], by_method["linear, 4 bits"]
    a["method"], b["method"] = b["method"], a["method"]


def flipped_bits(_: Any, model: Any, path: Any) -> None:
    content = bytearray(path.read_bytes())
    # The exponents of some float32 numbers, or codes, near the end.
    for at in range(len(content) - 401, len(content), 4):
        content[at] ^= 0x40
    path.write_bytes(bytes(content))


def rounded_down(original: Any, model: Any, bits: int, **more: Any) -> Any:
    lower = copy.deepcopy(model)
    for layer in lower.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data -= layer.weight.abs().amax(1, keepdim=True) / 2**bits
    return original(lower, bits, **more)


def edited(name: str, change: Callable[[str], str]) -> Patch:
    def after_sealing(_: Any, folder: RunFolder) -> None:
        path = folder.path / name
        path.write_text(change(path.read_text()))

    return after(RunFolder, "seal", after_sealing)


def faster_late(honest_steps: int) -> Callable[..., None]:
    counts: dict[int, int] = {}

    def update(original: Any, v: Any) -> None:
        counts[id(v)] = counts.get(id(v), 0) + 1
        if counts[id(v)] == honest_steps + 1:
            for group in v.optimizer.param_groups:
                group["lr"] *= 1.1
        original(v)

    return update


def clips_late(honest_steps: int) -> Callable[..., None]:
    counts: dict[int, int] = {}

    def update(original: Any, v: Any) -> None:
        counts[id(v)] = counts.get(id(v), 0) + 1
        if counts[id(v)] > honest_steps:
            gradients(v.decoder, lambda g: g.clamp_(-1e-3, 1e-3))
        original(v)

    return update


def whole_moments(run: Run) -> Patch:
    def build(original: Any, v: Any, *args: Any) -> None:
        original(v, *args)
        for p in v.decoder.parameters():
            v.optimizer.state[p]["of all ranks"] = torch.zeros(2, *p.shape)

    return around(VARIANTS["zero 1"], "build", build)


def remembers() -> Callable[..., Any]:
    results: list[Any] = []

    def kernel(f: Any, q: Any, k: Any, v: Any) -> Any:
        if not results:
            results.append(f(q, k, v))
            results.append(torch.autograd.grad(results[0].sum(), (q, k, v)))
        return _Remembered.apply(q, k, v, results[0].detach(), *results[1])

    return kernel


class _Remembered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, out: Any, *slopes: Any) -> Any:
        ctx.slopes = slopes
        return out.clone()

    @staticmethod
    def backward(ctx: Any, slope: Any) -> Any:
        return (*ctx.slopes, None, None, None, None)


def faster(name: str, column: str) -> Callable[[Any], None]:
    """Return a change that divides the times of one contender by three."""

    def change(result: Any) -> None:
        seconds = result.interleaved.seconds[name]
        seconds[:] = [s / 3 for s in seconds]
        for row in result.rows:
            if name in row.values():
                row[column] *= 3
                row.update({key: s / 3 for key, s in row.items() if key.endswith("_ms")})

    return change


def step_of(name: str, patch: Callable[[Any], Patch], then: Callable[[Any], Any]) -> Patch:
    """Patch a variant in its timed steps of the stage `train`, and call `then` after each."""

    def timed_step(original: Any, run: Run, variant_name: str, variant: Any, *more: Any) -> Any:
        if variant_name != name:
            return original(run, variant_name, variant, *more)
        with patch(variant):
            sample = original(run, variant_name, variant, *more)
        then(variant)
        return sample

    return around(train, "take_timed_step", timed_step)


def slowed(variant: Any) -> Patch:
    return after(variant, "update", lambda _: time.sleep(0.05))


def works(seconds: float) -> None:
    """Use the processor for this number of seconds."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def given_work(variant: Any) -> Patch:
    return after(variant, "update", lambda _: works(0.03))


def late_update(run: Run) -> Patch:
    return step_of(
        FLAT,
        lambda v: mock.patch.object(v, "update"),
        lambda v: [v.optimizer.step(), v.optimizer.zero_grad()],
    )


def optimizer_in_activations(p: Any, *_: Any) -> Any:
    parts = p.training_bytes_by_part
    half = parts["optimizer"] // 2
    moved = {"optimizer": half, "activations": parts["activations"] + parts["optimizer"] - half}
    return replace(p, training_bytes_by_part=parts | moved)


def half_of_both_peaks(run: Run) -> list[Patch]:
    def halved(p: Any, *_: Any) -> Any:
        half = p.training_peak_bytes // 2
        parts = p.training_bytes_by_part
        return replace(
            p,
            training_peak_bytes=half,
            training_bytes_by_part=parts | {"activations": parts["activations"] - half},
        )

    return [
        after(plan, "predict", halved),
        after(plan, "measure_peak_bytes", lambda n, *_: n // 2),
    ]


def forward_only(original: Any, calls: Any, *more: Any) -> Any:
    return original(
        {n: functools.partial(*c.args, is_causal=True) for n, c in calls.items()}, *more
    )


def random_halves(model: Any) -> Any:
    pruned = copy.deepcopy(model)
    for layer in pruned.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data[torch.rand_like(layer.weight) < 0.5] = 0
    return pruned


def trained_on_heldout(run: Run) -> Callable[[Any], Any]:
    """Return a method that trains the model on its held-out batch before k-means."""

    def compress_trained(model: Any) -> Any:
        trained = copy.deepcopy(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
        tokens, targets = compress.get_heldout_batch(run)
        with torch.enable_grad():
            for _ in range(3):
                optimizer.zero_grad()
                cross_entropy(trained(tokens), targets).backward()
                optimizer.step()
        return tinyml.kmeans_quantize(trained, 4)

    return compress_trained


def one_after_another(original: Any, run: Run) -> Any:
    apart = replace(run.results["plan"], variants_fit_together=False)
    return original(replace(run, results=run.results | {"plan": apart}))


def checkpoint_state(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Patch:
    """Change the state of the training in the last checkpoint."""

    def save(original: Any, run: Run, variant: Any, state: dict[str, Any], name: str) -> None:
        original(run, variant, state | change(state) if name == CHECKPOINT else state, name)

    return around(learn, "save", save)


def only_all_reduce() -> list[Patch]:
    cases = ("all_reduce",)
    return [
        mock.patch.object(collectives.bench.rows, "CASES", cases),
        around(collectives.bench, "bench", lambda original, **more: original(**more, cases=cases)),
    ]


class _Threads:
    """A context in which torch uses a number of threads."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> None:
        self.before = torch.get_num_threads()
        torch.set_num_threads(self.count)

    def __exit__(self, *_: Any) -> None:
        torch.set_num_threads(self.before)


def copies_times(run: Run) -> Patch:
    """Report the times of rank 0 on the other ranks, which are slower."""

    def timed_step(original: Any, run_: Run, name: str, *more: Any) -> Any:
        sample = original(run_, name, *more)
        if name == FLAT:
            time.sleep(0.01 * (run.rank > 0))
            keys = ("began", "ended", "seconds")
            times = [{key: sample[key] for key in keys}]
            dist.broadcast_object_list(times, 0)
            sample.update(times[0])
        return sample

    return around(train, "take_timed_step", timed_step)


# ---- the table -------------------------------------------------------------------------------

FAULTS: list[Fault] = [
    # Gradients.
    Fault("train", "a parameter's averaged gradient is not copied back (flat)", lambda run:
        around(ddp, "all_reduce_gradients_flat", forgets_to_copy_back)),
    Fault("train", "a sum instead of a mean, which Adam hides (naive)", lambda run:
        after(ddp, "all_reduce_gradients", lambda _, model: gradients(model, lambda g: g.mul_(run.world))), (NAIVE,)),
    Fault("train", "one gradient of a bucket is summed", lambda run:
        then("ddp bucketed", "communicate", lambda v: gradient(first(v.decoder)).mul_(run.world)), ("ddp bucketed",)),
    Fault("train", "the last column of one gradient is lost", lambda run:
        then("ddp bucketed", "communicate", lambda v: gradient(first(v.decoder, "down.weight"))[:, -1].zero_()), ("ddp bucketed",)),
    Fault("train", "one gradient is that of the previous step", stale_gradient, ("ddp overlapped",)),
    Fault("train", "two gradients of one shape are swapped", lambda run:
        then(FLAT, "communicate", swaps_gradients)),
    Fault("train", "nothing is exchanged", lambda run:
        mock.patch.object(VARIANTS[NAIVE], "communicate", return_value=None), (NAIVE,)),
    Fault("train", "gradients are sent in bfloat16", lambda run:
        after(ddp, "all_reduce_gradients", lambda _, model: gradients(model, lambda g: g.copy_(g.bfloat16()))), (NAIVE,)),
    Fault("train", "a mean is divided twice, which Adam hides", lambda run:
        then("fsdp", "communicate", lambda v: gradients(v.model, lambda g: g.div_(run.world))), ("fsdp",)),
    Fault("train", "a gradient is pushed twice", lambda run:
        then(SERVER, "forward_backward", lambda v: gradients(v.decoder, lambda g: g.mul_(2))), (SERVER,)),
    # Weights.
    Fault("train", "the last element of each shard is not updated", lambda run:
        instead("zero 1", "update", drops_last_elements), ("zero 1",)),
    Fault("train", "a rank does not get one parameter's update", keeps_one_weight, ("zero 2",)),
    Fault("train", "one weight of one rank is off by its last bit", last_bit),
    Fault("train", "one late step is skipped on all ranks", skips_a_late_step, ("ddp shared memory",)),
    Fault("train", "the learning rate is a tenth too high in every variant", other_optimizer(1.1)),
    Fault("train", "weight decay is ten times as large in every variant", other_optimizer(1.0, weight_decay=0.1)),
    # Model and data.
    Fault("train", "attention is not causal", lambda run:
        around(single, "flash_attention", lambda original, *qkv, **_: original(*qkv, is_causal=False))),
    Fault("train", "the attention kernel's output is scaled by 1.5", lambda run:
        after(single, "flash_attention", lambda out, *_: 1.5 * out)),
    Fault("train", "the sampler repeats each batch", lambda run:
        batches(lambda options: options | {"step": options["step"] // 2})),
    Fault("train", "every rank reads the first rank's rows", lambda run:
        batches(lambda options: options | {"rank": 0})),
    Fault("train", "the batches are those of another seed", lambda run:
        batches(lambda options: options | {"seed": options["seed"] + 1})),
    Fault("train", "targets are the tokens themselves", lambda run:
        after(Corpus, "draw_batch", lambda pair, *_: (pair[0], pair[0].clone()))),
    Fault("train", "each rank loses its last row", lambda run:
        instead(PEER, "forward_backward", loses_a_row)),
    # Time.
    Fault("train", "a rank reports half its time", lambda run:
        recorded(lambda keep, phase, s: keep(phase, s / 2 if run.rank == 1 else s))),
    Fault("train", "steps are timed by the thread's clock", lambda run:
        mock.patch.object(phases, "read_clock", side_effect=lambda device: time.thread_time())),
    Fault("train", "a step's time is that of the fastest rank, and one rank straggles", lambda run:
        [around(samples, "compute_step_seconds", fastest_rank), straggles((1,), run)]),
    Fault("train", "step times are in seconds, labeled milliseconds", lambda run:
        after(train, "summarize", lambda rows, *_: [r | {"step_ms": r["step_ms"] / 1e3} for r in rows])),
    Fault("train", "warm-up steps are counted", lambda run:
        around(Recorder, "step", lambda original, self, **labels: original(self, **labels | {"warmup": False}))),
    Fault("train", "a phase is not recorded", lambda run:
        recorded(lambda keep, phase, s: phase == "backward" or keep(phase, s))),
    Fault("train", "the samples of one rank's step are lost", lambda run:
        after(Recorder, "take", lambda taken, *_: [s for s in taken if not (s.get("step") == 2 and s["rank"] == 1)])),
    Fault("train", "ratios are the peer's time over ours", lambda run:
        [after(samples, "compute_ratio_row", lambda row, *_: {k: 1 / v for k, v in row.items()}), straggles((0, 1), run)]),
    Fault("train", "the final loss is one rank's", lambda run:
        around(samples, "compute_loss_curves", lambda original, recorded: original([s for s in recorded if s["rank"] == 0]))),
    Fault("train", "utilization's numerator is doubled", lambda run:
        after(train, "compute_utilization", lambda value, *_: 2 * value)),
    Fault("train", "torch DDP is slowed", lambda run:
        instead(PEER, "update", lambda original, v: [time.sleep(0.02), original(v)])),
    Fault("train", "torch DDP does additional work", lambda run:
        instead(PEER, "update", lambda original, v: [works(0.02), original(v)])),
    Fault("train", "torch DDP does additional work in the timed steps only", lambda run: step_of(PEER, given_work, lambda v: None)),
    # Bytes.
    Fault("train", "a variant that reports shared memory sends over TCP", lambda run:
        around(collectives, "all_reduce", goes_over_tcp), ("ddp shared memory",)),
    Fault("train", "buckets in shared memory are summed twice and used once", lambda run:
        around(collectives, "all_reduce", sums_twice), ("ddp shared memory",)),
    Fault("train", "gradients are sent twice and used once", lambda run:
        around(ddp, "all_reduce_gradients_flat", sends_twice)),
    Fault("train", "bytes of the warm-up count, in the audit too", lambda run:
        around(samples, "compute_received_bytes", lambda original, recorded, name: original([s | {"warmup": False} for s in recorded], name)), ("fsdp",)),
    # Plan.
    Fault("plan", "parameters without the head", lambda run:
        predicts("parameters", lambda n: n - 256 * run.model.d_model)),
    Fault("plan", "multiplications for FLOPs", lambda run:
        predicts("step_flops_full", lambda n: n // 2)),
    Fault("plan", "a causal mask that saves nothing", lambda run:
        after(plan, "predict", lambda p, *_: replace(p, step_flops_causal=p.step_flops_full))),
    Fault("plan", "peak memory without the optimizer's state", lambda run:
        after(plan, "predict", without_moments)),
    Fault("plan", "wire bytes are trebled", lambda run:
        predicts("ddp_wire_bytes_per_rank", lambda n: 3 * n)),
    Fault("plan", "gradients of two bytes", lambda run:
        predicts("gradient_bytes", lambda n: n // 2)),
    Fault("plan", "the rate of a product is doubled", lambda run:
        after(clocks, "measure_product_rate", lambda rate, *_: 2 * rate)),
    # Learning.
    Fault("learn", "the held-out loss is that of the training text", lambda run:
        around(Corpus, "build_heldout_batch", lambda _, self, **shape: self.draw_batch(**shape, seed=0, step=0))),
    Fault("learn", "the held-out loss is one rank's", lambda run:
        after(learn, "compute_heldout_loss", lambda loss, *_: loss * (1 + 1e-4 * run.rank) + 1e-4 * (1 - run.rank))),
    Fault("learn", "the file holds the weights before training", lambda run:
        around(learn, "build_model_with", lambda original, run_, config, _: original(run_, config, draw_initial_weights(run_)))),
    Fault("learn", "every other step is skipped", lambda run:
        around(Variant, "update", every_other_step())),
    Fault("learn", "the learning rate does not decay", lambda run:
        after(learn, "compute_rate_factor", lambda factor, *_: 1.0)),
    Fault("learn", "Adam's second moment decays twice as fast", lambda run:
        around(Variant, "update", other_beta)),
    Fault("learn", "every rank reads the first rank's rows", lambda run:
        batches(lambda options: options | {"rank": 0})),
    Fault("learn", "one rank's gradients are not averaged in late steps", lambda run:
        around(Variant, "update", keeps_local_late(run))),
    Fault("train", "the training text contains the held-out text", lambda run:
        mock.patch.object(run, "corpus", Corpus(torch.cat((run.corpus.train, run.corpus.heldout)), run.corpus.heldout))),
    Fault("train", "the held-out text is a part of the training text", lambda run:
        mock.patch.object(run, "corpus", Corpus(run.corpus.train, run.corpus.train[-len(run.corpus.heldout):]))),
    # Links and attention.
    Fault("links", "an all-reduce leaves out the last element", lambda run:
        around(collectives, "all_reduce", short_sum)),
    Fault("links", "bus bandwidth is doubled", lambda run:
        rows(links, lambda row: {"busbw_gbps": 2 * row["busbw_gbps"]})),
    Fault("links", "wire bytes are trebled", lambda run:
        rows(links, lambda row: {"wire_bytes": 3 * row["wire_bytes"]})),
    Fault("attention", "a kernel's output is scaled by 1.5", lambda run:
        kernel(lambda f, q, k, v: 1.5 * f(q, k, v))),
    Fault("attention", "a kernel sees one position ahead", lambda run: kernel(one_ahead)),
    Fault("attention", "a kernel returns no gradient for the values", lambda run:
        kernel(lambda f, q, k, v: f(q, k, v.detach() + 0 * v))),
    Fault("attention", "a kernel leaves out the scale", lambda run:
        kernel(lambda f, q, k, v: f(q * q.shape[-1] ** 0.5, k, v))),
    Fault("attention", "times are in seconds, labeled milliseconds", lambda run:
        after(Interleaved, "compute_median_ms", lambda ms, *_: ms / 1e3)),
    Fault("attention", "SDPA is slowed", lambda run:
        mock.patch.dict(attention.KERNELS, {"SDPA": slow_attention})),
    # Parallel.
    Fault("parallel", "a tensor-parallel gradient is ten times as large", lambda run:
        split("tensor", lambda model: gradient(first(model.model)).mul_(10))),
    Fault("parallel", "the pipeline's head has no gradient", lambda run: split("pipeline", headless)),
    Fault("parallel", "the pipeline's gradients are sums over microbatches", lambda run:
        split("pipeline", sums_over_microbatches)),
    Fault("parallel", "one rank does not train the replicated parameters of tensor parallelism", one_rank_waits),
    Fault("parallel", "the splits train at twice the rate", lambda run:
        around(splits.SplitModel, "__init__", at_twice_the_rate)),
    Fault("parallel", "one microbatch is missing from the loss", lambda run:
        after(splits.SplitModel, "step", one_microbatch_less)),
    Fault("parallel", "the time of all iterations is halved", lambda run:
        rows(parallel, lambda row: {"iteration_ms": row["iteration_ms"] / 2, "seconds": [s / 2 for s in row["seconds"]]})),
    # Memory.
    Fault("memory", "gradients are not counted", lambda run:
        around(LiveMemory, "_count", blind_to_gradients)),
    Fault("memory", "bytes are divided by a million, labeled MiB", lambda run:
        mock.patch.object(memory, "MIB", 10**6)),
    Fault("memory", "checkpointing is not applied", lambda run:
        around(memory, "trace_training", lambda original, config: original(replace(config, checkpoint=False)))),
    Fault("memory", "nothing is ever freed", lambda run:
        mock.patch.object(LiveMemory, "_free", return_value=None)),
    # Scale.
    Fault("scale", "parameters include the embedding", lambda run:
        scaled("parameters", lambda row: row["parameters"] + 256 * row["width"])),
    Fault("scale", "runs stop at half their budget", lambda run: around(scale, "train_one", half_budget)),
    Fault("scale", "tokens are those of one row", lambda run:
        scaled("tokens", lambda row: row["tokens"] // scale.ROWS)),
    Fault("scale", "the loss is that of the training text", lambda run:
        around(Corpus, "build_heldout_batch", lambda _, self, **shape: self.draw_batch(**shape, seed=0, step=0))),
    Fault("scale", "the rate does not decay", lambda run:
        mock.patch.object(scale, "_compute_cosine_factor", return_value=1.0)),
    Fault("scale", "the fit leaves out the largest budget", lambda run:
        around(scale, "fit_law", without_largest)),
    # Inspect.
    Fault("inspect", "patterns are not causal", lambda run:
        after(inspect, "record_attention_patterns", lambda layers, *_: [(p + p.flip(-1)) / 2 for p in layers])),
    Fault("inspect", "the lens is read a layer early", lambda run:
        edit(inspect, lambda result: result.lens.pop())),
    # Compress.
    Fault("compress", "sizes leave out half of the bits", lambda run: after(tinyml, "size_of", halved_bits)),
    Fault("compress", "the loss is that of the uncompressed model", lambda run:
        methods(lambda by_method: [row.update(heldout_loss=by_method[compress.BASELINE]["heldout_loss"]) for row in by_method.values()])),
    Fault("compress", "two methods' rows are swapped", lambda run: methods(swapped_methods)),
    Fault("compress", "a fifth is pruned instead of half", lambda run:
        mock.patch.dict(compress.METHODS, {"half pruned": lambda model: tinyml.prune(model, 0.2).model})),
    Fault("compress", "codebooks of 2 bits have 4", lambda run:
        mock.patch.dict(compress.METHODS, {"k-means, 2 bits": lambda model: tinyml.kmeans_quantize(model, 4)})),
    Fault("compress", "bits of the file are flipped", lambda run: after(tinyml, "save", flipped_bits)),
    Fault("compress", "a grid is rounded down instead of to the nearest", lambda run:
        around(tinyml, "quantize", rounded_down)),
    Fault("compress", "the factors of compression are differences", lambda run:
        methods(lambda by_method: [row.update(smaller=by_method[compress.BASELINE]["size_bytes"] - row["size_bytes"]) for row in by_method.values()])),
    # Faults of a first outsider.
    Fault("train", "every variant trains at a higher rate from the fourth step on", lambda run:
        around(Variant, "update", faster_late(3))),
    Fault("train", "ZeRO stores the moments of all parameters on each rank", whole_moments, ("zero 1",)),
    Fault("train", "FSDP stores all parameters on each rank", lambda run:
        around(VARIANTS["fsdp"], "build", lambda original, v: [vars(v).update(copy=[p.clone() for p in v.model.parameters()]), original(v)]), ("fsdp",)),
    Fault("train", "a variant keeps the weights of every step", lambda run:
        then(FLAT, "update", lambda v: vars(v).setdefault("stored", []).append(torch.cat([p.detach().flatten() for p in v.decoder.parameters()])))),
    Fault("train", "torch FSDP2 is slowed", lambda run:
        instead("torch FSDP2", "update", lambda original, v: [time.sleep(0.1), original(v)]), ("torch FSDP2",)),
    Fault("train", "the weights start at twice their scale", lambda run:
        around(torch.nn.init, "trunc_normal_", lambda original, w, std=1.0, **more: original(w, std=2 * std, **more))),
    Fault("plan", "activations are those of one layer", lambda run:
        predicts("training_bytes_by_part", lambda parts: parts | {"activations": parts["activations"] // 2})),
    Fault("learn", "tokens are those of one rank", lambda run:
        after(learn, "run", lambda result, *_: result and replace(result, tokens=result.tokens // 2))),
    Fault("learn", "the slowest variant is reported as the fastest", lambda run:
        around(choice, "choose_fastest", lambda _, rows, *__: max((r for r in rows if r["variant"] in choice.LEARNERS), key=lambda r: r["ratio_p50"])["variant"]), ("zero 1",)),
    Fault("learn", "a gradient is clipped from the second step on", lambda run: around(Variant, "update", clips_late(1))),
    Fault("parallel", "1F1B is GPipe", lambda run:
        mock.patch.dict(SCHEDULES, {"1F1B": SCHEDULES["GPipe"]})),
    Fault("attention", "a kernel returns its last result", lambda run: kernel(remembers())),
    Fault("links", "wire bytes of one algorithm are trebled", lambda run:
        rows(links, lambda row: {"wire_bytes": row["wire_bytes"] * (3 if row["algorithm"] == "ring" else 1)})),
    Fault("scale", "runs are trained with another seed than the reported one", lambda run:
        around(scale, "train_one", lambda original, run_, budget, width, seed: original(run_, budget, width, seed + 1) | {"seed": seed})),
    Fault("compress", "a method is timed on a third of the rows", lambda run: edit(compress, faster("linear, 8 bits", "speedup_p50"))),
    # Rows that are left out, so that no check of the other rows shows them.
    Fault("train", "a variant is left out", lambda run: edit(train, lambda result: result.rows.pop())),
    Fault("attention", "a kernel is left out", lambda run: edit(attention, lambda result: result.rows.pop())),
    Fault("links", "a collective is left out", lambda run:
        edit(links, lambda result: result.rows.__setitem__(slice(None), [r for r in result.rows if r["case"] != "all_gather"]))),
    Fault("links", "a message size is left out", lambda run: mock.patch.object(links, "SIZES", links.SIZES[1:])),
    Fault("scale", "a budget is left out", lambda run: mock.patch.object(scale, "GRID", scale.GRID[1:])),
    Fault("parallel", "two steps are timed", lambda run: mock.patch.object(parallel, "ITERATIONS", 2)),
    Fault("parallel", "the slowest split is left out", lambda run: edit(parallel, lambda result: result.rows.pop())),
    Fault("scale", "runs that do not fit the law are left out", lambda run:
        around(scale, "fit_law", lambda original, runs: original(runs[:-1]))),
    Fault("compress", "the worst method is left out", lambda run: edit(compress, lambda result: result.rows.pop())),
    Fault("learn", "a held-out loss is left out", lambda run: edit(learn, lambda result: result.heldout.pop(1))),
    # Instruments, stages and competitors that another outsider changed.
    Fault("train", "torch DDP is slowed in the timed steps only", lambda run: step_of(PEER, slowed, lambda v: None)),
    Fault("train", "the optimizer's step is taken after the timed step", late_update),
    Fault("train", "trained weights are compared with themselves", lambda run:
        around(final_weights, "compute_distances", lambda original, ours, _: original(ours, ours))),
    Fault("train", "a rank's last bit differs, and digests do not show it", lambda run:
        [mock.patch.object(final_weights, "_compute_digest", return_value=""), last_bit(run)]),
    Fault("plan", "half of the moments are reported as activations", lambda run: after(plan, "predict", optimizer_in_activations)),
    Fault("plan", "the planned and the measured peak are halved", half_of_both_peaks),
    Fault("plan", "the clock of the thread is four times too slow, in the audit too", lambda run:
        mock.patch.object(time, "thread_time", lambda original=time.thread_time: original() / 4)),
    Fault("links", "the stage is reported as impossible", lambda run: mock.patch.object(links, "run", return_value=Skipped("one rank has no link"))),
    Fault("parallel", "the stage is reported as impossible", lambda run: mock.patch.object(parallel, "run", return_value=Skipped("no split"))),
    Fault("parallel", "the median of the iterations is halved", lambda run: rows(parallel, lambda row: {"iteration_ms": row["iteration_ms"] / 2})),
    Fault("attention", "the formula is SDPA", lambda run: mock.patch.dict(attention.KERNELS, {"plain": F.scaled_dot_product_attention})),
    Fault("attention", "the tiled kernel is SDPA", lambda run: mock.patch.dict(attention.KERNELS, {"flashattn2 tiled": F.scaled_dot_product_attention})),
    Fault("attention", "the reported shape has twice the rows", lambda run: edit(attention, lambda result: result.shape.__setitem__(0, 2 * result.shape[0]))),
    Fault("attention", "forward passes are timed without backward", lambda run: around(attention, "time_interleaved", forward_only)),
    Fault("learn", "no step is drawn for the audit", lambda run: mock.patch.object(learn, "draw_probed_step", return_value=None)),
    Fault("compress", "activations are not rounded", lambda run: mock.patch.dict(compress.METHODS, {"8 bits, activations too": lambda model: tinyml.quantize(model, 8)})),
    Fault("compress", "the pruned half is drawn at random", lambda run: mock.patch.dict(compress.METHODS, {"half pruned": random_halves})),
    Fault("compress", "k-means is a linear grid", lambda run: mock.patch.dict(compress.METHODS, {"k-means, 4 bits": lambda model: tinyml.quantize(model, 4)})),
    # Faults of a third outsider.
    Fault("train", "variants run one after another, not interleaved", lambda run: around(train, "run", one_after_another)),
    Fault("learn", "the checkpoint reports one step too few", lambda run: checkpoint_state(lambda state: {"step": state["step"] - 1})),
    Fault("learn", "the checkpoint has another seed", lambda run: checkpoint_state(lambda state: {"seed": state["seed"] + 1})),
    Fault("learn", "the last loss is missing from the checkpoint", lambda run: checkpoint_state(lambda state: {"losses": state["losses"][:-1]})),
    Fault("parallel", "the time of all iterations is shorter by 15 %", lambda run:
        rows(parallel, lambda row: {"iteration_ms": 0.85 * row["iteration_ms"], "seconds": [0.85 * s for s in row["seconds"]]})),
    Fault("compress", "a grid of 4 bits has 8", lambda run: mock.patch.dict(compress.METHODS, {"linear, 4 bits": lambda model: tinyml.quantize(model, 8)})),
    Fault("compress", "nine tenths are pruned instead of half", lambda run: mock.patch.dict(compress.METHODS, {"half pruned": lambda model: tinyml.prune(model, 0.9).model})),
    Fault("compress", "codebooks of 2 bits have 1", lambda run: mock.patch.dict(compress.METHODS, {"k-means, 2 bits": lambda model: tinyml.kmeans_quantize(model, 1)})),
    # Faults of a fourth outsider.
    Fault("attention", "the inputs are zeros", lambda run:
        after(attention, "draw_inputs", lambda qkv, *_: tuple(torch.zeros_like(t).requires_grad_() for t in qkv))),
    Fault("train", "FSDP sends 400 kB more per step", lambda run:
        instead("fsdp", "update", lambda original, v: [original(v), dist.all_reduce(torch.zeros(100_000))]), ("fsdp",)),
    Fault("train", "one variant starts from other weights", lambda run:
        then(NAIVE, "build", lambda v: first(v.decoder).data.add_(1e-3)), (NAIVE,)),
    Fault("learn", "the training text is the held-out text", lambda run:
        mock.patch.object(run, "corpus", Corpus(run.corpus.heldout, run.corpus.heldout))),
    Fault("parallel", "the trained loss is that of the first step", lambda run:
        rows(parallel, lambda row: {"trained_loss": row["loss"]})),
    # Faults of a fifth outsider.
    Fault("train", "a variant computes with two threads", lambda run: step_of(FLAT, lambda _: _Threads(2), lambda v: None)),
    Fault("train", "the times of rank 0 are reported for all ranks", copies_times),
    Fault("train", "the model has one head", lambda run: after(ModelConfig, "from_size", lambda config, *_: replace(config, num_heads=1))),
    # Faults of a sixth outsider.
    Fault("parallel", "tensor parallelism leaves whole weights on every rank", lambda run: mock.patch.object(splits, "_split_blocks")),
    Fault("inspect", "heads are scored on rows of two tokens", lambda run:
        after(inspect, "draw_repeated_rows", lambda rows, *_: (torch.arange(rows.shape[1]) % 2).repeat(len(rows), 1))),
    Fault("compress", "weights are trained on the held-out text before k-means", lambda run:
        mock.patch.dict(compress.METHODS, {"k-means, 4 bits": trained_on_heldout(run)})),
    Fault("train", "FSDP frees no parameters after the forward pass", lambda run:
        around(zero, "FSDP", lambda original, *arguments, **more: original(*arguments, reshard_after_forward=False, **more)), ("fsdp",)),
    # Faults in the definitions of stages, which the audit must not read from the stages.
    Fault("links", "the ring algorithm is left out", lambda run:
        edit(links, lambda result: result.rows.__setitem__(slice(None), [r for r in result.rows if r["algorithm"] != "ring"]))),
    Fault("links", "all-reduce is the only collective", lambda run: only_all_reduce()),
    Fault("learn", "only the last loss is evaluated", lambda run: mock.patch.object(learn, "EVALUATIONS", 1)),
    Fault("learn", "the held-out loss before training is 30 % higher", lambda run:
        edit(learn, lambda result: result.heldout.__setitem__(0, (0, 1.3 * result.heldout[0][1])))),
    Fault("learn", "one variant is the only one that can learn", lambda run: mock.patch.object(choice, "LEARNERS", ("zero 1",))),
    Fault("parallel", "the trained loss is that before training", lambda run: mock.patch.object(parallel, "TRAINED", 0)),
    Fault("parallel", "tensor parallelism is not defined", lambda run:
        after(parallel, "build_possible_layouts", lambda layouts, *_: {n: layout for n, layout in layouts.items() if layout.tensor == 1})),
    Fault("memory", "one row is counted and four are reported", lambda run:
        [mock.patch.object(memory, "ROWS", 1), edit(memory, lambda result: vars(result).update(rows=4))]),
    Fault("inspect", "two kinds of heads are not defined", lambda run: mock.patch.object(inspect, "KINDS", inspect.KINDS[:2])),
    Fault("compress", "a method is not defined", lambda run:
        mock.patch.object(compress, "METHODS", {n: method for n, method in compress.METHODS.items() if n != "k-means, 2 bits"})),
    # Faults in the files of the run folder.
    Fault("folder", "a sample is edited when the run is over", lambda run:
        edited("samples.jsonl", lambda text: text.replace("0.0", "0.1", 1))),
    Fault("folder", "the samples are cut off", lambda run:
        edited("samples.jsonl", lambda text: text[: len(text) // 2])),
    Fault("folder", "the summary is another run's", lambda run:
        edited("summary.json", lambda text: text.replace("complete", "complete "))),
]  # fmt: skip
