"""Bytes that decoding keeps for every token it has seen, and where they stop growing."""

from accounting import checks
from accounting.breakdown import Breakdown, product, total
from accounting.model.shape import Shape
from accounting.plan import split
from accounting.precision import bytes_of


@checks.entry()
def kv_cache(
    model: Shape,
    *,
    seq: int = 1,
    batch: int = 1,
    dtype: str = "bf16",
    scale_block: int = 0,
    tensor: int = 1,
    encoder_seq: int | None = None,
) -> Breakdown:
    """Bytes of keys and values of `batch` sequences of `seq` tokens on each of `tensor` devices.

    A layer with a window keeps no more than the window. MLA keeps the latent and the one key that
    carries the position. `scale_block` adds an fp32 scale for every so many values of a token, as
    quantized caches do. An encoder keeps none. Split over `tensor` devices, key heads are dealt out
    until each device has one; a latent is kept by all.
    """
    if model.kv_heads and not model.mla and model.kv_heads % tensor and tensor % model.kv_heads:
        raise ValueError(
            f"tensor is {tensor}, which neither divides kv_heads={model.kv_heads} "
            "nor is a multiple of it"
        )
    entry = bytes_of(dtype)
    parts = []

    def kept(name: str, width: int, **sizes: int) -> None:
        parts.append(product(name, "B", **sizes, width=width, bytes=entry))
        if scale_block:
            # The last block of a token may be short, and has a scale all the same.
            each = split(sizes.pop("heads", 1) * width, scale_block)
            parts.append(product(f"scales of {name}", "B", **sizes, scales=each, bytes=4))

    # Where there are more devices than heads of keys, each keeps a copy of one.
    held = max(1, model.kv_heads // tensor) if model.kv_heads else 0
    for name, layers, tokens in _layer_groups(model, seq) if model.causal else ():
        sizes: dict[str, int] = {"layers": layers, "sequences": batch, "tokens": tokens}
        kinds = {"keys": model.qk_dim, "values": model.v_head_dim}
        if model.mla:
            kinds = {"latents": model.mla.kv_rank, "position keys": model.mla.rope_head_dim}
            kinds |= {"index keys": model.mla.index_head_dim} if model.mla.index_heads else {}
        else:
            sizes["heads"] = held
        for kind, width in kinds.items():
            kept(kind + name, width, **sizes)
    for mixer in model.mixers:
        # A recurrence keeps a state of one size, however long the sequence.
        sizes = {"layers": len(mixer.layers), "sequences": batch}
        kept(f"state of {mixer.name}", split(mixer.state, tensor), **sizes)
    seen = model.source_tokens(encoder_seq, seq)
    if model.encoder:
        sizes = {"layers": model.layers, "sequences": batch, "tokens": seen, "heads": held}
        kept("keys and values of the encoder", model.qk_dim + model.v_head_dim, **sizes)
    return total(f"KV cache of {model.name}", "B", *parts)


@checks.entry()
def kv_entries(model: Shape, *, seq: int = 1, batch: int = 1) -> Breakdown:
    """Numbers in the cache, whatever their dtype."""
    return kv_cache(model, seq=seq, batch=batch, dtype="int8")


def _layer_groups(model: Shape, seq: int) -> list[tuple[str, int, int]]:
    few = len(model.windowed_layers)
    groups = [("", len(model.attention_layers or ()) - few, seq)]
    if few and model.window:
        groups.append((" in windows", few, min(seq, model.window.size)))
    return [group for group in groups if group[1]]
