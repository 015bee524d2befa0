"""The other questions of the command line: inference, differences, and models as text."""

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
from accounting.model.transformer import Transformer, content_of
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
    """Return bytes and operations of inference with tensor parallelism over all `gpus` devices.

    Weights and cache follow the same plan: tensors that tensor parallelism copies (norms, routers,
    latents, key heads if there are fewer than devices) are on every device. Bytes are summed over
    all devices. A single token takes at least the time to read a device's weights and cache from
    its memory. A tenth of the memory is left free. `devices_needed` is the smallest number of
    devices with room for one sequence, or 0 if there is none. Raises `ValueError` if `gpus` does
    not divide the model.
    """
    device = find(hardware)
    size = float(bytes_of(weights))

    def on_each(ranks: int) -> tuple[float, float]:
        """Return the bytes on each of `ranks` devices: weights, and the cache of one sequence."""
        plan = Plan(tensor=ranks)
        plan.check(model)
        weight_bytes = sum(device_parameters(model, plan)) * size
        return weight_bytes, float(kv_cache(model, seq=seq, dtype=cache, tensor=ranks).total)

    weight_bytes, cache_bytes = on_each(gpus)
    if not cache_bytes:
        raise ValueError(f"expected a decoder, got {model.name}, which keeps no cache")
    usable = 0.9 * device.memory_bytes
    work = float(flops(model, seq=seq, phase="decode").total)
    read = _read_parameters(model, gpus) * size + cache_bytes
    return {
        "memory_bytes": usable * gpus,
        "weights_bytes": weight_bytes * gpus,
        "cache_bytes_per_sequence": cache_bytes * gpus,
        "cache_bytes_per_token": cache_bytes * gpus / seq,
        "sequences_at_once": max(0, int((usable - weight_bytes) // cache_bytes)),
        "devices_needed": _devices_needed(model, usable, on_each),
        "flops_per_token": work,
        "bytes_per_token": read * gpus,
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
    """Return the parameters that a device reads per token, without tables and unused experts."""
    read = 0
    for matrix in all_matrices(model):
        if matrix.kind == "table":
            continue
        copies = matrix.chosen if matrix.routed else matrix.copies
        cut = matrix.tensor_ranks(ranks, model.kv_heads)
        read += split(matrix.times * copies * matrix.entries, cut)
    # A lookup reads one row of a table; a tied head reads the whole table.
    tied = model.vocab_size * model.embedding_dim if model.tied and model.lm_head else 0
    return read + split(tied, ranks)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One cost of two models, and the format of its numbers."""

    name: str
    first: float
    second: float
    show: Callable[[float], str]


@checks.entry()
def differences(
    first: Transformer, second: Transformer, *, seq: int = 4096
) -> Iterator[Difference]:
    """Yield each cost of two models, and each part that either of them has."""
    costs: tuple[tuple[str, Callable[[Transformer], Breakdown], Callable[[float], str]], ...] = (
        ("parameters", parameters, readable),
        ("active", lambda model: parameters(model, active=True), readable),
        ("FLOPs per token", lambda model: flops(model, seq=seq), lambda x: f"{x:.4g}"),
        ("cache", lambda model: kv_cache(model, seq=seq), binary_size),
    )
    for name, cost, show in costs:
        both = cost(first), cost(second)
        per = seq if name == "FLOPs per token" else 1
        left, right = (float(whole.total) / per for whole in both)
        yield Difference(name=name, first=left, second=right, show=show)
        for part in dict.fromkeys(part.name for whole in both for part in whole):
            left, right = (float(w[part].total) / per if part in w else 0.0 for w in both)
            yield Difference(name=f"  {part}", first=left, second=right, show=show)


@checks.entry()
def amount(text: str) -> float:
    """Parse `1T`, `300B`, `4M` or a plain number."""
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 0.0)
    return float(text[:-1]) * scale if scale else float(text)


@checks.entry()
def read_model(text: str) -> Transformer:
    """Read a model from the path of a config.json, or from `name=value` sizes with commas."""
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
            raise ValueError(f"expected {name} once, got it twice")
        elif name in known:
            sizes[name] = _read(value.strip())
        else:
            raise ValueError(
                f"expected a field of a model ({', '.join(known)}), got {name!r}"
                f"{checks.nearest(name, known)}"
            )
    records = {name: _build(_RECORDS[name], values, f"{name}.") for name, values in nested.items()}
    model: Transformer = _build(Transformer, sizes | records)
    return model


def _build(kind: Any, values: dict[str, Any], prefix: str = "") -> Any:
    """Return a record of these fields; raise `ValueError` if a required field is missing."""
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.name not in values]
    if needed:
        example = ",".join(f"{prefix}{name}=..." for name in needed)
        raise ValueError(
            f"expected the fields {', '.join(prefix + name for name in needed)}; add {example}"
        )
    return kind(**values)


@checks.entry()
def stored_dtype(text: str) -> str:
    """Return the dtype of the weights that a config.json states, or bf16 if it is not quantized.

    With fp8, tables, norms and scales count as fp8 too. Other methods raise `ValueError`.
    """
    if not Path(text).exists():
        return "bf16"
    quantization = content_of(text).get("quantization_config")
    if quantization is None:
        return "bf16"
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != "fp8":
        raise ValueError(
            f"expected quantization_config with quant_method 'fp8', got {method!r}; pass the dtype "
            "of the weights with --weights"
        )
    return "fp8"


_RECORDS: dict[str, Any] = {"mla": MLA, "experts": Experts, "window": Window}


def _read(value: str) -> object:
    """Parse a bool, an integer, layers such as `1+3+5`, or a name."""
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return tuple(map(int, value.split("+"))) if "+" in value else int(value)
    except ValueError:
        return value
