"""Memory and time of inference, by the roofline of each pipeline stage."""

import math
from dataclasses import replace
from typing import NamedTuple

from accounting import checks
from accounting.breakdown import Breakdown
from accounting.flops import Phase, count_entry_pairs, flops
from accounting.hardware import Hardware, find
from accounting.kv_cache import kv_cache
from accounting.memory.states import count_device_parameters
from accounting.model.records import Mixer
from accounting.model.transformer import Transformer, list_matrices
from accounting.plan import Plan, split
from accounting.precision import get_itemsize
from accounting.time.collective import compute_seconds
from accounting.time.communication import count_reduced_blocks
from accounting.time.efficiency import (
    BANDWIDTH_FRACTION,
    MATMUL_FRACTION,
    STREAM_PASSES,
)
from accounting.time.intervals import Interval, predict_seconds
from accounting.time.step import get_group_link


class Stage(NamedTuple):
    """A pipeline stage: its layers, and bytes per device of weights and one sequence's cache."""

    model: Transformer
    weight_bytes: float
    cache_bytes: float
    #: Bytes of the cache that one new token reads.
    read_bytes: float


@checks.validate()
def estimate_serving(
    model: Transformer,
    *,
    gpus: int = 1,
    hardware: str = "H100",
    seq: int = 8192,
    weights: str = "bf16",
    cache: str = "bf16",
    batch: int = 1,
    data: int = 1,
    expert: int = 1,
    pipeline: int = 1,
) -> dict[str, float]:
    """Return memory and time of inference on `gpus` devices.

    `data` replicas of the model each serve an equal part of the `batch` sequences. A replica has
    `pipeline` stages, and the devices of a stage form one tensor-parallel group, which splits
    weights and cache. Every device of a stage stores a copy of the tensors that tensor parallelism
    does not split: norms, routers, latents, and key heads if they are fewer than the devices.

    The experts of a layer are distributed over the same stage of `expert` replicas, so `expert`
    divides `data`. Each of these replicas sends its tokens to the replicas of the chosen experts
    and receives the outputs: two all-to-alls per layer with experts. The load of the experts is
    assumed to be equal. Devices are numbered by tensor-parallel rank first, then by the replicas
    that share experts, and then by stage.

    `memory_bytes` is nine tenths of the memory of all devices, and `weights_bytes` the weights on
    all of them. `cache_bytes_per_sequence` and `bytes_per_token`, the memory traffic of a decode
    step with one sequence, are sums over the devices of one replica. `bytes_per_device` has the
    weights and the caches of the sequences on the fullest device. `sequences_at_once` is the number
    of caches of `seq` tokens that fit beside the weights.

    A prefill processes `batch` prompts of `seq` tokens, and a decode step adds one token to each.
    Matrix products run in the dtype of the weights if the device lists it, and otherwise in bf16,
    fp16, or the first dtype that it lists. Attention is assumed to run in 16 bits or more. Each
    time has two bounds: `_low` is the roofline of all stages at the full peak and bandwidth, with
    attention in the dtype of the matrix products, and `_high` adds the widest known error of
    training steps. `tokens_per_second_low` follows from the `_high` time of a decode step, and
    `tokens_per_second_high` from its `_low` time.

    Raises `ValueError` if the degrees do not divide the devices, the batch and the model, or if the
    model has no cache.
    """
    device = find(hardware)
    size = float(get_itemsize(weights))
    _require_equal_replicas(gpus, batch, data, pipeline)
    tensor = gpus // (data * pipeline)
    sequences = batch // data
    plan = Plan(data=data, tensor=tensor, pipeline=pipeline, expert=expert)
    _check_plan(plan, model)
    loads = []
    for number in range(pipeline):
        part = plan.build_stage_model(model, number)
        stored = kv_cache(part, seq=seq, dtype=cache, tensor=tensor)
        stage_bytes = sum(count_device_parameters(model, plan, number)) * size
        # Layers that share keys and values read the same cache one after another.
        unshared = kv_cache(replace(part, shared_kv_layers=()), seq=seq, dtype=cache, tensor=tensor)
        read_bytes = float(unshared.total) - _count_unselected_bytes(part, stored, seq)
        loads.append(Stage(part, stage_bytes, float(stored.total), read_bytes))
    weight_bytes = data * tensor * sum(stage.weight_bytes for stage in loads)
    cache_bytes = tensor * sum(stage.cache_bytes for stage in loads)
    if not cache_bytes:
        raise ValueError(f"expected a decoder, got {model.name}, which has no cache")
    usable = 0.9 * device.memory_bytes
    read = sum(_count_parameters_read(x.model, tensor) * size + x.read_bytes for x in loads)
    room = math.inf
    for stage in loads:
        if stage.weight_bytes > usable:
            room = 0
        elif stage.cache_bytes:  # A stage without attention stores no cache.
            room = min(room, (usable - stage.weight_bytes) // stage.cache_bytes)
    prefill, decode = (
        _predict_inference_seconds(
            loads, device, tensor, expert, phase, batch=sequences, seq=seq, weights=weights
        )
        for phase in ("prefill", "decode")
    )
    return {
        "memory_bytes": usable * gpus,
        "weights_bytes": weight_bytes,
        "cache_bytes_per_sequence": cache_bytes,
        "bytes_per_device": max(x.weight_bytes + sequences * x.cache_bytes for x in loads),
        "sequences_at_once": data * int(room),
        "bytes_per_token": read * tensor,
        "batch": batch,
        **_name_bounds("prefill_seconds", prefill),
        **_name_bounds("decode_step_seconds", decode),
        **_name_bounds("tokens_per_second", decode.to_rate(batch)),
    }


def _require_equal_replicas(gpus: int, batch: int, data: int, pipeline: int) -> None:
    """Raise `ValueError` unless all stages have equally many devices, and replicas sequences."""
    if gpus % (data * pipeline):
        raise ValueError(
            f"expected data x pipeline = {data} x {pipeline} to divide gpus, got gpus={gpus}"
        )
    if batch % data:
        raise ValueError(
            f"expected data={data} to divide batch, got batch={batch}; batch is the number of "
            "sequences of all replicas"
        )


def _check_plan(plan: Plan, model: Transformer) -> None:
    """Raise `ValueError` if a plan does not divide a model, with the origin of its `tensor`."""
    try:
        plan.check(model)
    except ValueError as error:
        if "expected tensor" not in str(error):
            raise
        raise ValueError(
            f"{error}; tensor is gpus / (data x pipeline) = {plan.devices} / ({plan.data} x "
            f"{plan.pipeline}), so pass another number of gpus, replicas (--dp) or pipeline "
            "stages (--pp)"
        ) from None


def _name_bounds(name: str, interval: Interval) -> dict[str, float]:
    return {f"{name}_low": interval.low, name: interval.middle, f"{name}_high": interval.high}


def _predict_inference_seconds(
    loads: list[Stage],
    device: Hardware,
    tensor: int,
    expert: int,
    phase: Phase,
    *,
    batch: int,
    seq: int,
    weights: str,
) -> Interval:
    """Return the seconds of a prefill or a decode step of a replica with `batch` sequences.

    The stages run one after another.
    """
    size = float(get_itemsize(weights))
    dtypes = [d for d in (weights, "bf16", "fp16", *device.peaks) if d in device.peaks]
    dtype = dtypes[0]
    attention_peak = device.peak(next((d for d in dtypes if get_itemsize(d) >= 2), dtype))
    wire = max(2, int(get_itemsize(dtype)))
    utilization = MATMUL_FRACTION.get(dtype, 0.8) * device.power_factor
    tokens = batch * (seq if phase == "prefill" else 1)
    least = modeled = 0.0
    for part, _, cache_bytes, read_bytes in loads:
        work = flops(part, seq=seq, batch=batch, phase=phase)
        scores = float(work["attention"].total) / tensor if "attention" in work else 0.0
        products = _count_device_operations(part, work, tensor, tokens) - scores
        moved = _count_parameters_read(part, tensor, tokens, expert) * size
        # A prefill writes the whole cache.
        moved += batch * (read_bytes if phase == "decode" else cache_bytes)
        peak, bandwidth = device.peak(dtype), device.memory_bandwidth
        least += max((products + scores) / peak, moved / bandwidth)
        stream = STREAM_PASSES / 3 * part.layers * tokens * part.d_model * wire
        modeled += products / (peak * utilization)
        modeled += scores / (attention_peak * device.attention_fraction)
        modeled += (moved + stream) / (bandwidth * BANDWIDTH_FRACTION)
        payload = tokens * part.d_model * wire
        if tensor > 1:
            link = get_group_link(device, stride=1, ranks=tensor)
            modeled += compute_seconds(
                "all_reduce", tensor, count_reduced_blocks(part), payload, link
            )
        if expert > 1 and part.experts:
            # Each token is sent to its experts, and their outputs are sent back.
            exchanges = 2 * len(part.expert_layers)
            link = get_group_link(device, stride=tensor, ranks=expert, operation="all_to_all")
            sent = part.experts.per_token * payload
            modeled += compute_seconds("all_to_all", expert, exchanges, sent, link)
    if len(loads) > 1:
        link = get_group_link(device, stride=tensor * expert, ranks=2, operation="send")
        modeled += compute_seconds("send", 2, len(loads) - 1, payload, link)
    return replace(predict_seconds(modeled), low=least)


def _count_device_operations(
    model: Transformer, work: Breakdown, tensor: int, tokens: int
) -> float:
    """Return the operations on a device, which repeats the products that are not split.

    `work` are the operations of a whole stage. Latents, routers and the index of sparse attention
    are not split. Key heads are repeated if they are fewer than the devices.
    """
    index = float(work["index"].total) if "index" in work else 0.0
    operations = (float(work.total) + (tensor - 1) * index) / tensor
    for matrix in list_matrices(model):
        if matrix.kind == "matrix":
            repeated = 1 / matrix.count_tensor_shards(tensor, model.kv_heads) - 1 / tensor
            used = tokens * matrix.count * matrix.chosen
            operations += 2 * repeated * used * matrix.entries
    return operations


def _count_unselected_bytes(model: Transformer, cache: Breakdown, seq: int) -> float:
    """Return the bytes of latents, position keys and entries that a new token does not read.

    An index of sparse attention does not select them. Without an index, the result is 0.
    """
    if model.low_rank:
        return sum(_count_unselected_entry_bytes(mixer, cache, seq) for mixer in model.mixers)
    if not model.mla or not model.mla.index_heads:
        return 0.0
    latents = sum(float(p.total) for p in cache if p.name in ("latents", "position keys"))
    return latents * (1 - min(seq, model.mla.index_top) / seq)


def _count_unselected_entry_bytes(mixer: Mixer, cache: Breakdown, seq: int) -> float:
    """Return the bytes of a mixer's compressed entries that a new token does not read."""
    entries = mixer.compressed
    if not entries or not entries.index_heads or seq < entries.rate:
        return 0.0
    stored = sum(float(part.total) for part in cache if part.name == mixer.name)
    return stored * (1 - count_entry_pairs(entries, seq, decode=True) / (seq // entries.rate))


def _count_parameters_read(model: Transformer, ranks: int, tokens: int = 1, expert: int = 1) -> int:
    """Return the number of parameters that a device reads if each replica has `tokens` tokens.

    Tables such as embeddings do not count, except for the one that a tied head reads. Tokens are
    assumed to choose experts independently of each other, so some experts are not read. With expert
    parallelism, a device stores a fraction 1 / `expert` of the experts, and `expert` replicas send
    it their tokens.
    """
    read = 0.0
    for matrix in list_matrices(model):
        if matrix.kind == "table":
            continue
        copies = float(matrix.copies)
        if matrix.routed:
            copies *= (1 - (1 - matrix.chosen / matrix.copies) ** (tokens * expert)) / expert
        shards = matrix.count_tensor_shards(ranks, model.kv_heads)
        read += split(matrix.count * matrix.entries, shards) * copies
    # A lookup reads one row of a table; a tied head reads the whole table.
    tied = model.vocab_size * model.embedding_dim if model.tied and model.lm_head else 0
    return round(read) + split(tied, ranks)
