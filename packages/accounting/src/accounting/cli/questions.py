"""The other questions of the command line: what a device serves, what differs; reading a model."""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from accounting import checks
from accounting.breakdown import Breakdown, binary_size, readable
from accounting.flops import flops
from accounting.hardware import find
from accounting.kv_cache import kv_cache
from accounting.memory.training import device_parameters
from accounting.model.matrices import all_matrices
from accounting.model.records import MLA, Experts, Window
from accounting.model.transformer import Transformer
from accounting.parameters import parameters
from accounting.plan import Plan, split
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
    """Bytes and operations of decoding on `gpus` devices, by tensor parallelism over all of them.

    Weights and cache follow this one plan: what tensor parallelism copies (norms, routers, latents,
    key heads of which there are fewer than devices) is on every device. Bytes are those of all
    devices. A token alone takes at least the time in which a device's weights and cache pass
    through its memory; a tenth of the memory is left free. `devices_needed` is the smallest number
    that has room for one sequence, 0 if none has. Raises `ValueError` if `gpus` does not divide the
    model.
    """
    device = find(hardware)
    size = float(bytes_of(weights))

    def on_each(ranks: int) -> tuple[float, float]:
        """Return the bytes on each of so many devices: weights, and the cache of a sequence."""
        plan = Plan(tensor=ranks)
        plan.check(model)
        held = sum(device_parameters(model, plan)) * size
        return held, float(kv_cache(model, seq=seq, dtype=cache, tensor=ranks).total)

    held, one = on_each(gpus)
    if not one:
        raise ValueError(f"{model.name} keeps no cache, so it does not decode; give a decoder")
    usable = 0.9 * device.memory_bytes
    work = float(flops(model, seq=seq, phase="decode").total)
    read = _read_parameters(model, gpus) * size + one
    return {
        "memory_bytes": usable * gpus,
        "weights_bytes": held * gpus,
        "cache_bytes_a_sequence": one * gpus,
        "cache_bytes_a_token": one * gpus / seq,
        "sequences_at_once": max(0, int((usable - held) // one)),
        "devices_needed": _devices_needed(model, usable, on_each),
        "flops_a_token": work,
        "bytes_a_token": read * gpus,
        "tokens_per_second_alone_at_most": device.memory_bandwidth / read,
        "prefill_flops": float(flops(model, seq=seq, phase="prefill").total),
    }


def _devices_needed(
    model: Transformer, usable: float, on_each: Callable[[int], tuple[float, float]]
) -> int:
    # A tensor-parallel degree divides the heads, or the MLP of a model without heads.
    for ranks in range(1, (model.heads or model.d_ff) + 1):
        try:
            need = sum(on_each(ranks))
        except ValueError:
            continue
        if need <= usable:
            return ranks
    return 0


def _read_parameters(model: Transformer, ranks: int) -> int:
    """Parameters that a device reads for one token: all but tables and experts not chosen."""
    read = 0
    for matrix in all_matrices(model):
        if matrix.kind == "table":
            continue
        copies = matrix.chosen if matrix.routed else matrix.copies
        cut = matrix.tensor_ranks(ranks, model.kv_heads)
        read += split(matrix.times * copies * matrix.one, cut)
    # Of a table one row is read; of a tied one, all that the head multiplies with.
    tied = model.vocab_size * model.embedding_dim if model.tied and model.lm_head else 0
    return read + split(tied, ranks)


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
