"""Defects that are planted to see whether the audit finds them: one function each, in a registry.

Each returns the patches that make it; what a real mistake of the kind would do to numbers, the
patch does. `mutate` plants them one by one in short runs.
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
import ddp
import tinyml
import torch
import torch.distributed as dist
import torch.nn.functional as F

from llmsys_suite import live_memory, phases, samples, variants
from llmsys_suite.data import Corpus
from llmsys_suite.folder import RunFolder
from llmsys_suite.run import Run
from llmsys_suite.samples import PEER, SINGLE
from llmsys_suite.stages import (
    attention,
    compress,
    inspect,
    links,
    memory,
    parallel,
    plan,
    precision,
    profile,
    scale,
    train,
)
from llmsys_suite.turns import Turns

Patch = AbstractContextManager[Any]
Plant = Callable[[Run], Patch | list[Patch]]
FEW = (SINGLE, PEER, "ddp flat")


@dataclass(frozen=True)
class Defect:
    """Something wrong, the stage that it is in, and the variants that a short run needs for it."""

    name: str
    stage: str
    plant: Plant
    variants: tuple[str, ...] = FEW

    @property
    def label(self) -> str:
        """One line of the table."""
        return f"{self.stage}: {self.name}"


DEFECTS: list[Defect] = []


def defect(stage: str, name: str, *trained: str) -> Callable[[Plant], Plant]:
    """Put a function into the registry."""

    def register(plant: Plant) -> Plant:
        variants = (SINGLE, PEER, *trained) if trained else FEW
        DEFECTS.append(Defect(name, stage, plant, variants))
        return plant

    return register


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


def edit(owner: Any, name: str, change: Callable[[Any], Any]) -> Patch:
    """`change` a stage's results in place."""

    def changed(result: Any, *_: Any) -> Any:
        if result and "skipped" not in result:
            change(result)
        return result

    return after(owner, name, changed)


def _first(model: torch.nn.Module, part: str = "attention.q.weight") -> torch.nn.Parameter:
    return next(p for name, p in model.named_parameters() if name.endswith(part))


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


# ---- train: gradients ------------------------------------------------------------------------


@defect("train", "a parameter's averaged gradient is not copied back (flat)")
def _(run: Run) -> Patch:
    def forgets(original: Any, model: Any, **more: Any) -> None:
        own = _gradient(_first(model)).clone()
        original(model, **more)
        _gradient(_first(model)).copy_(own)

    return around(ddp, "all_reduce_gradients_flat", forgets)


@defect("train", "a sum instead of a mean, which Adam hides (naive)", "ddp naive")
def _(run: Run) -> Patch:
    def sums(_: Any, model: Any) -> None:
        for parameter in model.parameters():
            _gradient(parameter).mul_(run.world)

    return after(ddp, "all_reduce_gradients", sums)


def _then(cls: type, method: str, change: Callable[[Any], None]) -> Patch:
    """After a variant's method, `change(variant)`."""

    def changed(result: Any, variant: Any, *_: Any) -> Any:
        if type(variant) is cls:
            change(variant)
        return result

    owner = next(base for base in cls.__mro__ if method in vars(base))
    return after(owner, method, changed)


@defect("train", "one gradient of a bucket is summed", "ddp bucketed")
def _(run: Run) -> Patch:
    def sums(v: Any) -> None:
        _gradient(_first(v.decoder)).mul_(run.world)

    return _then(variants.Bucketed, "communicate", sums)


@defect("train", "the last column of one gradient is lost", "ddp bucketed")
def _(run: Run) -> Patch:
    def loses(v: Any) -> None:
        _gradient(_first(v.decoder, "down.weight"))[:, -1] = 0

    return _then(variants.Bucketed, "communicate", loses)


@defect("train", "one gradient is that of the step before", "ddp overlapped")
def _(run: Run) -> Patch:
    kept: dict[int, torch.Tensor] = {}

    def stale(v: Any) -> None:
        gradient = _gradient(_first(v.decoder))
        now = gradient.clone()
        gradient.copy_(kept.get(id(v), torch.zeros_like(now)))
        kept[id(v)] = now

    return _then(variants.Overlapped, "communicate", stale)


@defect("train", "two gradients of one shape are swapped")
def _(run: Run) -> Patch:
    def swaps(v: Any) -> None:
        q, k = (_gradient(_first(v.decoder, f"attention.{part}.weight")) for part in "qk")
        both = q.clone(), k.clone()
        q.copy_(both[1])
        k.copy_(both[0])

    return _then(variants.Flat, "communicate", swaps)


@defect("train", "nothing is exchanged", "ddp naive")
def _(run: Run) -> Patch:
    return mock.patch.object(variants.Naive, "communicate", return_value=None)


@defect("train", "gradients travel in bfloat16", "ddp naive")
def _(run: Run) -> Patch:
    def rounds(_: Any, model: Any) -> None:
        for parameter in model.parameters():
            gradient = _gradient(parameter)
            gradient.copy_(gradient.bfloat16())

    return after(ddp, "all_reduce_gradients", rounds)


@defect("train", "a mean is divided twice, which Adam hides", "fsdp")
def _(run: Run) -> Patch:
    def divides(v: Any) -> None:
        for parameter in v.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(run.world)

    return _then(variants.FullySharded, "communicate", divides)


@defect("train", "a gradient is handed over twice", "parameter server")
def _(run: Run) -> Patch:
    def doubles(_: Any, v: Any, *__: Any) -> Any:
        if isinstance(v, variants.ParameterServer):
            for parameter in v.decoder.parameters():
                _gradient(parameter).mul_(2)
        return _

    return after(variants.Variant, "forward_backward", doubles)


# ---- train: weights --------------------------------------------------------------------------


@defect("train", "the last element of each shard is not updated", "zero 1")
def _(run: Run) -> Patch:
    def drops(original: Any, v: Any) -> None:
        last = [p.detach().flatten()[-1].clone() for p in v.decoder.parameters()]
        original(v)
        if type(v) is variants.ShardedState:
            for parameter, old in zip(v.decoder.parameters(), last, strict=True):
                parameter.data.flatten()[-1:].copy_(old)

    return around(variants.Variant, "update", drops)


@defect("train", "a rank does not get one parameter's update", "zero 2")
def _(run: Run) -> Patch:
    def keeps(original: Any, v: Any) -> None:
        old = _first(v.decoder).detach().clone()
        original(v)
        if type(v) is variants.ShardedGradients and run.rank == 1:
            _first(v.decoder).data.copy_(old)

    return around(variants.Variant, "update", keeps)


@defect("train", "one weight of one rank is off by its last bit")
def _(run: Run) -> Patch:
    def nudges(v: Any) -> None:
        if run.rank == 1:
            weight = _first(v.decoder).data
            weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))

    return _then(variants.TorchDDP, "update", nudges)


@defect("train", "one late step is skipped on all ranks", "ddp shared memory")
def _(run: Run) -> Patch:
    seen: dict[int, int] = {}

    def skips(original: Any, v: Any) -> None:
        seen[id(v)] = seen.get(id(v), 0) + 1
        if type(v) is variants.SharedMemory and seen[id(v)] == 4:
            v.optimizer.zero_grad()
        else:
            original(v)

    return around(variants.Variant, "update", skips)


@defect("train", "the learning rate is a tenth too high in every variant")
def _(run: Run) -> Patch:
    def raised(original: Any, self: Any, run_: Any, config: Any, optimizer: Any = None) -> None:
        higher = functools.partial(torch.optim.AdamW, lr=1.1 * run.config.learning_rate)
        original(self, run_, config, optimizer or higher)

    return around(variants.Variant, "__init__", raised)


@defect("train", "weight decay is ten times as large in every variant")
def _(run: Run) -> Patch:
    def decays(original: Any, self: Any, run_: Any, config: Any, optimizer: Any = None) -> None:
        rate = run.config.learning_rate
        more = functools.partial(torch.optim.AdamW, lr=rate, weight_decay=0.1)
        original(self, run_, config, optimizer or more)

    return around(variants.Variant, "__init__", decays)


# ---- train: model and data -------------------------------------------------------------------


@defect("train", "attention is not causal")
def _(run: Run) -> Patch:
    def sees_all(original: Any, q: Any, k: Any, v: Any, **_: Any) -> Any:
        return original(q, k, v, is_causal=False)

    return around(variants, "flash_attention", sees_all)


@defect("train", "the attention kernel's output is scaled by 1.5")
def _(run: Run) -> Patch:
    return after(variants, "flash_attention", lambda out, *_: 1.5 * out)


def _batches(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Patch:
    return around(Corpus, "batch", lambda original, self, **asked: original(self, **change(asked)))


@defect("train", "the sampler repeats each batch")
def _(run: Run) -> Patch:
    return _batches(lambda asked: asked | {"step": asked["step"] // 2})


@defect("train", "every rank reads the first rank's rows")
def _(run: Run) -> Patch:
    return _batches(lambda asked: asked | {"rank": 0})


@defect("train", "the batches are those of another seed")
def _(run: Run) -> Patch:
    return _batches(lambda asked: asked | {"seed": asked["seed"] + 1})


@defect("train", "targets are the tokens themselves")
def _(run: Run) -> Patch:
    return after(Corpus, "batch", lambda pair, *_: (pair[0], pair[0].clone()))


@defect("train", "each rank loses its last row")
def _(run: Run) -> Patch:
    def loses(original: Any, v: Any, tokens: Any, targets: Any) -> Any:
        if type(v) is variants.TorchDDP and len(tokens) > 1:
            tokens, targets = tokens[:-1], targets[:-1]
        return original(v, tokens, targets)

    return around(variants.Variant, "forward_backward", loses)


# ---- train: time -----------------------------------------------------------------------------


@defect("train", "a rank reports half its time")
def _(run: Run) -> Patch:
    def halves(original: Any, self: Any, phase: str, seconds: float, extra: Any) -> None:
        original(self, phase, seconds / 2 if run.rank == 1 else seconds, extra)

    return around(phases.Recorder, "_keep", halves)


@defect("train", "steps are timed by the thread's clock")
def _(run: Run) -> Patch:
    return mock.patch.object(phases.Recorder, "_now", side_effect=time.thread_time)


@defect("train", "a step's time is that of the fastest rank, and one rank straggles")
def _(run: Run) -> list[Patch]:
    def fastest(original: Any, recorded: Any) -> Any:
        found: dict[str, dict[int, float]] = {}
        for s in recorded:
            if s["phase"] == samples.WHOLE_STEP and not s["warmup"]:
                steps = found.setdefault(s["variant"], {})
                steps[s["step"]] = min(steps.get(s["step"], 1e9), s["seconds"])
        return found

    def straggles(v: Any) -> None:
        if run.rank == 1:
            time.sleep(0.01)

    return [around(samples, "step_seconds", fastest), _then(variants.Flat, "update", straggles)]


@defect("train", "step times are in seconds, labelled milliseconds")
def _(run: Run) -> Patch:
    def seconds(result: Any, *_: Any) -> Any:
        for row in result["rows"]:
            row["step_ms"] /= 1e3
        return result

    return after(train, "summarize", seconds)


@defect("train", "warm-up steps are counted")
def _(run: Run) -> Patch:
    def never(original: Any, self: Any, **labels: Any) -> Any:
        return original(self, **labels | {"warmup": False})

    return around(phases.Recorder, "step", never)


@defect("train", "a phase is not recorded")
def _(run: Run) -> Patch:
    def forgets(original: Any, self: Any, phase: str, seconds: float, extra: Any) -> None:
        if phase != "backward":
            original(self, phase, seconds, extra)

    return around(phases.Recorder, "_keep", forgets)


@defect("train", "the samples of one rank's step are lost")
def _(run: Run) -> Patch:
    def loses(taken: Any, *_: Any) -> Any:
        return [s for s in taken if not (s.get("step") == 2 and s["rank"] == 1)]

    return after(phases.Recorder, "take", loses)


@defect("train", "ratios are the peer's time over ours")
def _(run: Run) -> list[Patch]:
    def upside_down(row: Any, *_: Any) -> Any:
        return {key: 1 / value for key, value in row.items()}

    def straggles(v: Any) -> None:
        time.sleep(0.01)

    return [after(samples, "ratio_row", upside_down), _then(variants.Flat, "update", straggles)]


@defect("train", "the final loss is one rank's")
def _(run: Run) -> Patch:
    def one(original: Any, recorded: Any) -> Any:
        return original([s for s in recorded if s["rank"] == 0])

    return around(samples, "loss_curves", one)


@defect("train", "utilisation's numerator is doubled")
def _(run: Run) -> Patch:
    return after(train, "utilisation", lambda value, *_: 2 * value)


# ---- train: bytes ----------------------------------------------------------------------------


@defect("train", "wire bytes are trebled in a package's count")
def _(run: Run) -> Patch:
    return after(variants.Naive, "gradient_bytes", lambda value, *_: 3 * value)


@defect("train", "what is said to stay in shared memory goes over TCP", "ddp shared memory")
def _(run: Run) -> Patch:
    def over_tcp(original: Any, tensor: Any, *args: Any, **more: Any) -> Any:
        more.pop("algorithm", None)
        return dist.all_reduce(tensor, *args, **more)

    return around(collectives, "all_reduce", over_tcp)


@defect("train", "gradients are sent twice and used once")
def _(run: Run) -> Patch:
    def twice(original: Any, model: Any, **more: Any) -> None:
        dist.all_reduce(torch.cat([_gradient(p).flatten() for p in model.parameters()]))
        original(model, **more)

    return around(ddp, "all_reduce_gradients_flat", twice)


# ---- plan ------------------------------------------------------------------------------------


def _predicts(key: str, change: Callable[[Any], Any]) -> Patch:
    return after(plan, "predict", lambda found, *_: found | {key: change(found[key])})


@defect("plan", "parameters without the head")
def _(run: Run) -> Patch:
    return _predicts("parameters", lambda n: n - 256 * run.model.d_model)


@defect("plan", "multiplications for FLOPs")
def _(run: Run) -> Patch:
    return _predicts("step_flops_full", lambda n: n // 2)


@defect("plan", "a causal mask that saves nothing")
def _(run: Run) -> Patch:
    return after(plan, "predict", lambda p, *_: p | {"step_flops_causal": p["step_flops_full"]})


@defect("plan", "peak memory without the optimizer's state")
def _(run: Run) -> Patch:
    def forgets(p: Any, *_: Any) -> Any:
        parts = p["training_bytes_by_part"]
        total = p["training_peak_bytes"] - parts["optimizer"]
        parts = parts | {"optimizer": 0}
        return p | {"training_peak_bytes": total, "training_bytes_by_part": parts}

    return after(plan, "predict", forgets)


@defect("plan", "wire bytes are trebled")
def _(run: Run) -> Patch:
    return _predicts("ddp_wire_bytes_per_rank", lambda n: 3 * n)


@defect("plan", "gradients of two bytes")
def _(run: Run) -> Patch:
    return _predicts("gradient_bytes", lambda n: n // 2)


@defect("plan", "the rate of a product is doubled")
def _(run: Run) -> Patch:
    return after(plan, "matmul_flops_per_second", lambda rate, *_: 2 * rate)


# ---- links -----------------------------------------------------------------------------------


@defect("links", "an all-reduce leaves out the last element")
def _(run: Run) -> Patch:
    def short(original: Any, tensor: Any, *args: Any, **more: Any) -> Any:
        last = tensor.view(-1)[-1].clone()
        done = original(tensor, *args, **more)
        tensor.view(-1)[-1] = last
        return done

    return around(collectives, "all_reduce", short)


def _link_rows(change: Callable[[dict[str, Any]], None]) -> Patch:
    def each(result: Any) -> None:
        for row in result["rows"]:
            change(row)

    return edit(links, "run", each)


@defect("links", "bus bandwidth is doubled")
def _(run: Run) -> Patch:
    return _link_rows(lambda row: row.update(busbw_gbps=2 * row["busbw_gbps"]))


@defect("links", "wire bytes are trebled")
def _(run: Run) -> Patch:
    return _link_rows(lambda row: row.update(wire_bytes=3 * row["wire_bytes"]))


# ---- attention -------------------------------------------------------------------------------


def _kernel(change: Callable[..., Any]) -> Patch:
    original = attention.KERNELS["flashattn2"]

    def changed(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
        return change(original, q, k, v)

    return mock.patch.dict(attention.KERNELS, {"flashattn2": changed})


@defect("attention", "a kernel's output is scaled by 1.5")
def _(run: Run) -> Patch:
    return _kernel(lambda f, q, k, v: 1.5 * f(q, k, v, is_causal=True))


@defect("attention", "a kernel sees one position ahead")
def _(run: Run) -> Patch:
    def ahead(_: Any, q: Any, k: Any, v: Any) -> Any:
        t = q.shape[-2]
        mask = torch.ones(t, t, dtype=torch.bool).tril(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return _kernel(ahead)


@defect("attention", "a kernel gives values no gradient")
def _(run: Run) -> Patch:
    return _kernel(lambda f, q, k, v: f(q, k, v.detach() + 0 * v, is_causal=True))


@defect("attention", "a kernel leaves out the scale")
def _(run: Run) -> Patch:
    return _kernel(lambda f, q, k, v: f(q * q.shape[-1] ** 0.5, k, v, is_causal=True))


@defect("attention", "times are in seconds, labelled milliseconds")
def _(run: Run) -> Patch:
    return after(Turns, "median_ms", lambda ms, *_: ms / 1e3)


# ---- parallel --------------------------------------------------------------------------------


@defect("parallel", "a tensor-parallel gradient is ten times as large")
def _(run: Run) -> Patch:
    def tenfold(loss: Any, self: Any, *_: Any) -> Any:
        _gradient(_first(self.model)).mul_(10)
        return loss

    return after(parallel.TensorModel, "step", tenfold)


@defect("parallel", "the pipeline's head has no gradient")
def _(run: Run) -> Patch:
    def headless(loss: Any, self: Any, *_: Any) -> Any:
        if self.part.head is not None:
            self.part.head.weight.grad = None
        return loss

    return after(parallel.PipelineModel, "step", headless)


@defect("parallel", "the pipeline's gradients are sums over microbatches")
def _(run: Run) -> Patch:
    def sums(loss: Any, self: Any, *_: Any) -> Any:
        for parameter in self.part.parameters():
            _gradient(parameter).mul_(self.microbatches)
        return loss

    return after(parallel.PipelineModel, "step", sums)


@defect("parallel", "one microbatch is missing from the loss")
def _(run: Run) -> Patch:
    def misses(loss: Any, self: Any, *_: Any) -> Any:
        return loss * (self.microbatches - 1) / self.microbatches

    return after(parallel.PipelineModel, "step", misses)


def _parallel_rows(change: Callable[[dict[str, Any]], None]) -> Patch:
    def each(result: Any) -> None:
        for row in result["rows"]:
            change(row)

    return edit(parallel, "run", each)


@defect("parallel", "the time of all iterations is halved")
def _(run: Run) -> Patch:
    def halves(row: dict[str, Any]) -> None:
        row.update(total_s=row["total_s"] / 2, iteration_ms=row["iteration_ms"] / 2)

    return _parallel_rows(halves)


# ---- profile ---------------------------------------------------------------------------------


@defect("profile", "operators' times are in nanoseconds")
def _(run: Run) -> Patch:
    return after(profile, "summarize", lambda row, *_: row | {"total_ms": 1e3 * row["total_ms"]})


@defect("profile", "the products of attention count once for two")
def _(run: Run) -> Patch:
    return after(
        profile,
        "attention_flops",
        lambda row, *_: row | {"attention_product_flops": row["attention_product_flops"] // 2},
    )


@defect("profile", "means are of ten steps, divided by five")
def _(run: Run) -> Patch:
    def doubles(result: Any) -> None:
        for row in result["protocol"]:
            if "backward_mean_ms" in row:
                row["backward_mean_ms"] *= 2

    return edit(profile, "run", doubles)


# ---- precision -------------------------------------------------------------------------------


@defect("precision", "a sum in float16 is kept in float32")
def _(run: Run) -> Patch:
    def mixes(rows: Any, *_: Any) -> Any:
        rows[1]["sum"], rows[1]["relative_error"] = rows[3]["sum"], rows[3]["relative_error"]
        return rows

    return after(precision, "accumulation", mixes)


@defect("precision", "autocast is off")
def _(run: Run) -> Patch:
    def off(original: Any, kind: str, **more: Any) -> Any:
        return original(kind, **more | {"enabled": False})

    return around(torch, "autocast", off)


@defect("precision", "999 terms for 1000")
def _(run: Run) -> Patch:
    return around(precision, "accumulation", lambda original: original(terms=999))


# ---- memory ----------------------------------------------------------------------------------


@defect("memory", "gradients are not counted")
def _(run: Run) -> Patch:
    def blind(original: Any, self: Any, tensor: Any, operator: str) -> None:
        if self.phase != "backward":
            original(self, tensor, operator)

    return around(live_memory.LiveMemory, "_count", blind)


@defect("memory", "bytes are divided by a million, labelled MiB")
def _(run: Run) -> Patch:
    return mock.patch.object(memory, "MIB", 10**6)


@defect("memory", "checkpointing is not applied")
def _(run: Run) -> Patch:
    def never(original: Any, config: Any) -> Any:
        return original(replace(config, checkpoint=False))

    return around(memory, "training", never)


@defect("memory", "nothing is ever freed")
def _(run: Run) -> Patch:
    return mock.patch.object(live_memory.LiveMemory, "_free", return_value=None)


# ---- scale -----------------------------------------------------------------------------------


def _trained_runs(change: Callable[[dict[str, Any]], None]) -> Patch:
    def changed(row: Any, *_: Any) -> Any:
        change(row)
        return row

    return after(scale, "train_one", changed)


@defect("scale", "parameters include the embedding")
def _(run: Run) -> Patch:
    return _trained_runs(lambda row: row.update(parameters=row["parameters"] + 256 * row["width"]))


@defect("scale", "runs stop at half their budget")
def _(run: Run) -> Patch:
    def half(original: Any, run_: Any, budget: float, width: int) -> Any:
        return original(run_, budget / 2, width) | {"compute_flops": budget}

    return around(scale, "train_one", half)


@defect("scale", "tokens are those of one row")
def _(run: Run) -> Patch:
    return _trained_runs(lambda row: row.update(tokens=row["tokens"] // scale.ROWS))


@defect("scale", "the loss is that of the text trained on")
def _(run: Run) -> Patch:
    def trained_on(original: Any, self: Any, *, rows: int, context: int) -> Any:
        return self.batch(rows=rows, context=context, seed=0, step=0)

    return around(Corpus, "heldout_batch", trained_on)


@defect("scale", "the rate does not decay")
def _(run: Run) -> Patch:
    return mock.patch.object(scale, "_cosine", return_value=1.0)


@defect("scale", "the law's exponent is that of tokens")
def _(run: Run) -> Patch:
    def swaps(result: Any, *_: Any) -> Any:
        if result["law"]:
            result["law"]["exponent"] = 1 - result["law"]["exponent"]
        return result

    return after(scale, "fit", swaps)


@defect("scale", "the fit leaves out the largest budget")
def _(run: Run) -> Patch:
    def leaves_out(original: Any, rows: Any) -> Any:
        most = max(row["compute_flops"] for row in rows)
        return original([row for row in rows if row["compute_flops"] < most])

    return around(scale, "fit", leaves_out)


# ---- inspect ---------------------------------------------------------------------------------


@defect("inspect", "patterns are not causal")
def _(run: Run) -> Patch:
    def sees_all(original: Any, attention_: Any, x: Any, rope: Any) -> Any:
        pattern = original(attention_, x, rope)
        return (pattern + pattern.flip(-1)) / 2

    return around(inspect, "_pattern", sees_all)


@defect("inspect", "the lens is read a layer early")
def _(run: Run) -> Patch:
    return edit(inspect, "run", lambda result: result["lens"].pop())


@defect("inspect", "a component is missing from the attributions")
def _(run: Run) -> Patch:
    return edit(inspect, "run", lambda result: result["attribution"].pop(1))


@defect("inspect", "another head is ablated than the one that is named")
def _(run: Run) -> Patch:
    def other(original: Any, model: Any, layer: int, head: int, *batch: Any) -> Any:
        return original(model, layer, (head + 1) % model.config.num_heads, *batch)

    return around(inspect, "loss_without", other)


@defect("inspect", "the ablation does nothing")
def _(run: Run) -> Patch:
    def nothing(original: Any, model: Any, layer: int, head: int, *batch: Any) -> Any:
        return float(model.loss(*batch))

    return around(inspect, "loss_without", nothing)


# ---- compress --------------------------------------------------------------------------------


@defect("compress", "sizes leave out half of the bits")
def _(run: Run) -> Patch:
    def halves(size: Any, *_: Any) -> Any:
        return replace(size, sparse_by_name={n: b // 2 for n, b in size.sparse_by_name.items()})

    return after(tinyml, "size_of", halves)


def _methods(change: Callable[[dict[str, dict[str, Any]]], None]) -> Patch:
    def each(result: Any) -> None:
        change({row["method"]: row for row in result["rows"]})

    return edit(compress, "run", each)


@defect("compress", "the loss is that of the uncompressed model")
def _(run: Run) -> Patch:
    def same(rows: Any) -> None:
        for row in rows.values():
            row["heldout_loss"] = rows[compress.BASELINE]["heldout_loss"]

    return _methods(same)


@defect("compress", "two methods' rows are swapped")
def _(run: Run) -> Patch:
    def swaps(rows: Any) -> None:
        a, b = rows["linear, 8 bits"], rows["linear, 4 bits"]
        a["method"], b["method"] = b["method"], a["method"]

    return _methods(swaps)


@defect("compress", "bits of the file are flipped")
def _(run: Run) -> Patch:
    def flips(_: Any, model: Any, path: Any) -> None:
        content = bytearray(path.read_bytes())
        # The exponents of some float32 numbers, or codes, near the end.
        for at in range(len(content) - 401, len(content), 4):
            content[at] ^= 0x40
        path.write_bytes(bytes(content))

    return after(tinyml, "save", flips)


@defect("compress", "a grid is rounded down instead of to the nearest")
def _(run: Run) -> Patch:
    def down(original: Any, model: Any, bits: int, **more: Any) -> Any:
        lower = copy.deepcopy(model)
        for layer in lower.modules():
            if isinstance(layer, torch.nn.Linear):
                step = layer.weight.abs().amax(1, keepdim=True) / 2 ** (bits - 1)
                layer.weight.data -= step / 2
        return original(lower, bits, **more)

    return around(tinyml, "quantize", down)


@defect("compress", "times smaller are differences")
def _(run: Run) -> Patch:
    def differ(rows: Any) -> None:
        for row in rows.values():
            row["smaller"] = rows[compress.BASELINE]["size_bytes"] - row["size_bytes"]

    return _methods(differ)


# ---- the folder ------------------------------------------------------------------------------


def _edited(name: str, change: Callable[[str], str]) -> Patch:
    def after_sealing(_: Any, folder: RunFolder) -> None:
        path = folder.path / name
        path.write_text(change(path.read_text()))

    return after(RunFolder, "seal", after_sealing)


@defect("folder", "a sample is edited when the run is over")
def _(run: Run) -> Patch:
    return _edited("samples.jsonl", lambda text: text.replace("0.0", "0.1", 1))


@defect("folder", "the samples are cut off")
def _(run: Run) -> Patch:
    return _edited("samples.jsonl", lambda text: text[: len(text) // 2])


@defect("folder", "the summary is another run's")
def _(run: Run) -> Patch:
    return _edited("summary.json", lambda text: text.replace("complete", "complete "))
