"""Bytes of the KV cache, and of the state that recurrent layers store instead."""

from collections.abc import Iterator
from fractions import Fraction

from accounting import checks
from accounting.breakdown import Breakdown, multiply, sum_parts
from accounting.model.records import Mixer
from accounting.model.transformer import Transformer
from accounting.plan import check_key_heads, split
from accounting.precision import get_itemsize


@checks.validate()
def kv_cache(
    model: Transformer,
    *,
    seq: int = 1,
    batch: int = 1,
    dtype: str = "bf16",
    tensor: int = 1,
) -> Breakdown:
    """Return the cache bytes of `batch` sequences of `seq` tokens on each of `tensor` devices.

    A layer with a window stores at most the keys of one window; between two tokens, transformers
    stores one key fewer. MLA stores per token the latent, the rotary key that all heads share and,
    with sparse attention, the index key. A layer with compressed entries stores one vector per
    token of the window, the entries, and the keys and gates that the next entry reads. A recurrent
    layer stores its state, which is split over the devices. All of these are in `dtype`, and scales
    of quantized caches are not counted. An encoder has no cache. Key and value heads are split over
    `tensor` devices until each device has one head; additional devices store copies. Each device
    stores the whole cache of MLA and of compressed entries. Raises `ValueError` if `tensor` is
    neither a divisor nor a multiple of the number of key heads, or if `seq` exceeds the learned
    positions.
    """
    check_key_heads(model, tensor)
    model.check_positions(seq)
    value_bytes = get_itemsize(dtype)
    parts = []
    for group in model.attention_groups if model.causal else ():
        layers = len(set(group.layers) & set(model.key_layers))
        tokens = min(seq, model.window.size) if model.window and group.is_windowed else seq
        sizes: dict[str, int] = {"layers": layers, "sequences": batch, "tokens": tokens}
        kinds = {"keys": group.qk_dim, "values": group.v_head_dim}
        if model.low_rank:
            kinds = {"keys": group.qk_dim}
        if model.mla:
            kinds = {"latents": model.mla.kv_rank, "position keys": model.mla.rope_head_dim}
            kinds |= {"index keys": model.mla.index_head_dim} if model.mla.index_heads else {}
        else:
            # If there are more devices than key heads, several devices store copies of one head.
            sizes["heads"] = max(1, group.kv_heads // tensor)
        for kind, width in kinds.items():
            name = kind + group.suffix
            parts.append(multiply(name, "B", **sizes, width=width, bytes=value_bytes))
    for mixer in model.mixers if model.causal else ():
        if mixer.compressed:
            parts += _iter_entry_parts(mixer, model.head_dim, seq, batch, value_bytes)
        if not mixer.state:
            continue
        # The size of a recurrent state does not depend on the length of the sequence.
        sizes = {"layers": len(mixer.layers), "sequences": batch}
        width, name = split(mixer.state, tensor), f"state of {mixer.name}"
        parts.append(multiply(name, "B", **sizes, width=width, bytes=value_bytes))
    return sum_parts(f"KV cache of {model.name}", "B", *parts)


def _iter_entry_parts(
    mixer: Mixer, head_dim: int, seq: int, batch: int, value_bytes: Fraction
) -> Iterator[Breakdown]:
    """Yield the bytes of compressed entries, of their index, and of the tokens not compressed yet.

    Every tensor-parallel device stores all of them.
    """
    entries = mixer.compressed
    assert entries
    stored, remaining = divmod(seq, entries.rate)
    series = 1 + entries.overlaps
    for kind, width in {"entries": head_dim, "index": entries.index_head_dim}.items():
        sizes = {"layers": len(mixer.layers), "sequences": batch, "width": width}
        name = mixer.name if kind == "entries" else f"index of {mixer.name}"
        yield multiply(name, "B", **sizes, tokens=stored, bytes=value_bytes)
        # A token has one key and one gate, or two of each if entries overlap. The next entry reads
        # the first key and gate of the tokens of the last entry again.
        waiting = series * remaining + (entries.rate if entries.overlaps and stored else 0)
        name = f"state of {name}"
        yield multiply(name, "B", **sizes, tokens=waiting, vectors=2, bytes=value_bytes)
