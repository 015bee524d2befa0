"""The other questions of the command line: what a device serves, what differs; reading a model."""

import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from accounting import checks
from accounting.breakdown import Breakdown, binary_size, readable
from accounting.flops import flops
from accounting.hardware import find
from accounting.kv_cache import kv_cache
from accounting.model.matrices import matrices
from accounting.model.records import MLA, Experts, Window
from accounting.model.transformer import Transformer
from accounting.parameters import parameters
from accounting.precision import bytes_of


@checks.entry()
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
    tenth of the memory is left free. What has no room says how many devices have it.
    """
    device = find(hardware)
    size = float(bytes_of(weights))
    held = float(parameters(model).total) * size
    # Of a table of embeddings one row is read; of a tied one, all that the head multiplies with.
    tables = sum(m.size for m in matrices(model) if m.kind == "table")
    tied = model.vocab_size * model.embedding_dim if model.tied and model.lm_head else 0
    active = float(parameters(model, active=True).total - tables + tied) * size
    one = float(kv_cache(model, seq=seq, dtype=cache).total)
    usable = 0.9 * device.memory_bytes
    room = usable * gpus - held
    work = float(flops(model, seq=seq, phase="decode").total)
    rate = device.memory_bandwidth * gpus
    return {
        "memory_bytes": usable * gpus,
        "weights_bytes": held,
        "cache_bytes_a_sequence": one,
        "cache_bytes_a_token": one / seq,
        "sequences_at_once": max(0, int(room // one)),
        "devices_needed": math.ceil((held + one) / usable),
        "flops_a_token": work,
        "bytes_a_token": active + one,
        "tokens_per_second_alone_at_most": rate / (active + one),
        "prefill_flops": float(flops(model, seq=seq, phase="prefill").total),
    }


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One cost of two models, and how it is written."""

    name: str
    first: float
    second: float
    show: Callable[[float], str]


@checks.entry()
def differences(
    first: Transformer, second: Transformer, *, seq: int = 4096
) -> Iterator[Difference]:
    """What two models cost, and each part that either of them has."""
    costs: tuple[tuple[str, Callable[[Transformer], Breakdown], Callable[[float], str]], ...] = (
        ("parameters", parameters, readable),
        ("active", lambda model: parameters(model, active=True), readable),
        ("FLOPs a token", lambda model: flops(model, seq=seq), lambda x: f"{x:.4g}"),
        ("cache", lambda model: kv_cache(model, seq=seq), binary_size),
    )
    for name, cost, show in costs:
        found = cost(first), cost(second)
        per = seq if name == "FLOPs a token" else 1
        left, right = (float(whole.total) / per for whole in found)
        yield Difference(name=name, first=left, second=right, show=show)
        for part in dict.fromkeys(part.name for whole in found for part in whole):
            left, right = (float(w[part].total) / per if part in w else 0.0 for w in found)
            yield Difference(name=f"  {part}", first=left, second=right, show=show)


@checks.entry()
def amount(text: str) -> float:
    """`1T`, `300B`, `4M` or a plain number."""
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 0.0)
    return float(text[:-1]) * scale if scale else float(text)


@checks.entry()
def read_model(text: str) -> Transformer:
    """A path to a config.json, or `name=value` sizes with commas between them."""
    if Path(text).exists() or "=" not in text:
        return Transformer.from_hf(text)
    sizes: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    known = Transformer.__dataclass_fields__
    for item in text.split(","):
        name, _, value = item.partition("=")
        name, _, inner = name.strip().partition(".")
        if name in _RECORDS and inner:
            # experts.count=8 and so on: a field of a record.
            checks.choice(f"a field of {name}", inner, _RECORDS[name].__dataclass_fields__)
            nested.setdefault(name, {})[inner] = _read(value.strip())
        elif name in sizes:
            raise ValueError(f"{name} is given twice")
        elif name in known:
            sizes[name] = _read(value.strip())
        else:
            raise ValueError(
                f"{name!r} is no field of a model; the fields are {', '.join(known)}"
                f"{checks.nearest(name, known)}"
            )
    records = {name: _made(_RECORDS[name], given, f"{name}.") for name, given in nested.items()}
    made: Transformer = _made(Transformer, sizes | records)
    return made


def _made(kind: Any, given: dict[str, Any], prefix: str = "") -> Any:
    """A record of these fields, or the names of those that it lacks."""
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.name not in given]
    if needed:
        example = ",".join(f"{prefix}{name}=..." for name in needed)
        raise ValueError(f"{', '.join(prefix + name for name in needed)} missing; add {example}")
    return kind(**given)


_RECORDS: dict[str, Any] = {"mla": MLA, "experts": Experts, "window": Window}


def _read(value: str) -> object:
    """True and False however they are written, whole numbers, `1+3+5` as layers, else a name."""
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return tuple(map(int, value.split("+"))) if "+" in value else int(value)
    except ValueError:
        return value
