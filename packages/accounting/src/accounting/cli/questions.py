"""The other questions of the command line: which plan, what a device serves, what differs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accounting import checks
from accounting.breakdown import Breakdown, binary_size, readable
from accounting.flops import flops
from accounting.hardware import HARDWARE, find
from accounting.kv_cache import kv_cache
from accounting.model.records import MLA, Experts, Window
from accounting.model.transformer import Transformer
from accounting.parameters import parameters
from accounting.precision import bytes_of
from accounting.search.answer import plan_for


def plan(words: Sequence[str]) -> int:
    """The fastest plan over all axes, what it holds, how long and for how much."""
    parser = argparse.ArgumentParser(prog="python -m accounting plan", description=plan.__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--hardware", default="H100", help=", ".join(HARDWARE))
    parser.add_argument("--tokens", type=amount, default=1e12, help="1T, 300B or 1e12")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--batch", type=int, help="sequences a step")
    parser.add_argument("--memory", type=float, help="GB a device, in place of its own")
    parser.add_argument("--price", type=float, help="USD a device and hour")
    parser.add_argument("--precision")
    for option, field in AXES.items():
        text = field in ("schedule", "recompute", "offload")
        parser.add_argument(f"--{option}", dest=field, type=str if text else int)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(words)
    given = {field: getattr(options, field) for field in AXES.values()}
    answer = plan_for(
        read_model(options.model),
        gpus=options.gpus,
        hardware=options.hardware,
        tokens=options.tokens,
        seq=options.seq,
        batch=options.batch,
        memory_bytes=None if options.memory is None else options.memory * 1e9,
        usd_per_hour=options.price,
        precision=options.precision,
        **{field: value for field, value in given.items() if value is not None},
    )
    print(json.dumps(answer.to_dict(), indent=1) if options.json else answer)
    return 0


AXES = {
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "ep": "expert",
    "zero": "zero",
    "microbatches": "microbatches",
    "schedule": "schedule",
    "virtual-stages": "virtual_stages",
    "recompute": "recompute",
    "offload": "offload",
}
"""The options that give a plan's fields."""


def serve(words: Sequence[str]) -> int:
    """What devices hold and do to serve a model: cache, sequences at once, time a token."""
    parser = argparse.ArgumentParser(prog="python -m accounting serve", description=serve.__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--gpus", type=int, default=1, help="tensor-parallel devices")
    parser.add_argument("--hardware", default="H100", help=", ".join(HARDWARE))
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--weights", default="bf16", help="dtype of the weights")
    parser.add_argument("--cache", default="bf16", help="dtype of the cache")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(words)
    found = serving(
        read_model(options.model),
        gpus=options.gpus,
        hardware=options.hardware,
        seq=options.seq,
        weights=options.weights,
        cache=options.cache,
    )
    print(
        json.dumps(found, indent=1)
        if options.json
        else "\n".join(
            f"{name.replace('_', ' '):<34}{value:>22,.6g}" for name, value in found.items()
        )
    )
    return 0 if found["sequences_at_once"] else 1


def serving(
    model: Transformer,
    *,
    gpus: int = 1,
    hardware: str = "H100",
    seq: int = 8192,
    weights: str = "bf16",
    cache: str = "bf16",
) -> dict[str, float]:
    """Bytes and operations of decoding on `gpus` devices that share every layer.

    A token alone takes at least the time in which its weights and its cache pass through memory; a
    tenth of the memory is left free.
    """
    device = find(hardware)
    checks.whole("gpus", gpus)
    size = float(bytes_of(weights))
    held = float(parameters(model).total) * size
    active = float(parameters(model, active=True).total) * size
    one = float(kv_cache(model, seq=seq, dtype=cache).total)
    room = 0.9 * device.memory_bytes * gpus - held
    work = float(flops(model, seq=seq, phase="decode").total)
    rate = device.memory_bandwidth * gpus
    return {
        "weights_bytes": held,
        "cache_bytes_a_sequence": one,
        "cache_bytes_a_token": one / seq,
        "sequences_at_once": max(0, int(room // one)) if one else 0,
        "flops_a_token": work,
        "bytes_a_token": active + one,
        "tokens_per_second_alone_at_most": rate / (active + one),
        "prefill_flops": float(flops(model, seq=seq, phase="prefill").total),
    }


def diff(words: Sequence[str]) -> int:
    """Two models, side by side."""
    parser = argparse.ArgumentParser(prog="python -m accounting diff", description=diff.__doc__)
    parser.add_argument("models", metavar="MODEL", nargs=2)
    parser.add_argument("--seq", type=int, default=4096)
    options = parser.parse_args(words)
    a, b = (read_model(text) for text in options.models)
    print(f"{'':<34}{a.name:>24}{b.name:>24}{'ratio':>9}")
    costs: tuple[tuple[str, Callable[[Transformer], Breakdown], Callable[[float], str]], ...] = (
        ("parameters", parameters, readable),
        ("active", lambda model: parameters(model, active=True), readable),
        ("FLOPs a token", lambda model: flops(model, seq=options.seq), lambda x: f"{x:.4g}"),
        ("cache", lambda model: kv_cache(model, seq=options.seq), binary_size),
    )
    for name, cost, show in costs:
        found = [cost(model) for model in (a, b)]
        per = options.seq if name.startswith("FLOPs") else 1
        pairs = [(name, [float(whole.total) / per for whole in found])]
        parts = dict.fromkeys(part.name for whole in found for part in whole)
        pairs += [
            (f"  {part}", [float(w[part].total) / per if part in w else 0.0 for w in found])
            for part in parts
        ]
        for label, (left, right) in pairs:
            ratio = f"{right / left:9.3f}" if left else f"{'-':>9}"
            print(f"{label:<34}{show(left):>24}{show(right):>24}{ratio}")
    return 0


def amount(text: str) -> float:
    """`1T`, `300B`, `4M` or a plain number."""
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 0.0)
    return float(text[:-1]) * scale if scale else float(text)


QUESTIONS = {"plan": plan, "serve": serve, "diff": diff}


def read_model(text: str) -> Transformer:
    """A path to a config.json, or `name=value` sizes with commas between them."""
    if Path(text).exists() or "=" not in text:
        return Transformer.from_hf(text)
    sizes: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        name, _, inner = name.strip().partition(".")
        if name in _RECORDS:
            # experts.count=8 and so on: a field of a record.
            nested.setdefault(name, {})[inner] = _read(value.strip())
            continue
        if name not in Transformer.__dataclass_fields__:
            fields = Transformer.__dataclass_fields__
            raise ValueError(
                f"{name!r} is no field of a model; the fields are {', '.join(fields)}"
                f"{checks.nearest(name, fields)}"
            )
        sizes[name] = _read(value.strip())
    for name, given in nested.items():
        record = _RECORDS[name]
        known = record.__dataclass_fields__
        for field in given:
            checks.choice(f"a field of {name}", field, known)
        sizes[name] = record(**given)
    return Transformer(**sizes)


_RECORDS: dict[str, Any] = {"mla": MLA, "experts": Experts, "window": Window}


def _read(value: str) -> object:
    """True and False however they are written, whole numbers, `1+3+5` as layers, else a name."""
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if "+" in value:
        return tuple(int(item) for item in value.split("+"))
    try:
        return int(value)
    except ValueError:
        return value
