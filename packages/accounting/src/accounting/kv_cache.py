"""Size of the KV cache, and of the state that recurrent layers store instead."""

from accounting import checks
from accounting.breakdown import Breakdown, product, total
from accounting.model.transformer import Transformer
from accounting.plan import split
from accounting.precision import bytes_of


@checks.entry()
def kv_cache(
    model: Transformer,
    *,
    seq: int = 1,
    batch: int = 1,
    dtype: str = "bf16",
    tensor: int = 1,
) -> Breakdown:
    """Return the cache bytes of `batch` sequences of `seq` tokens on each of `tensor` devices.

    A layer with a window stores at most one window. (Between two tokens, transformers stores one
    key less.) MLA stores the latent, the single key that carries the position, and the key of its
    index. A recurrent layer stores its state, also in `dtype`. An encoder has no cache. Scales of
    quantized caches are not counted. Key and value heads are split over `tensor` devices until each
    device has one head; additional devices store copies. All devices store the whole cache of MLA.
    Raises `ValueError` if `tensor` is neither a divisor nor a multiple of the key heads, or if
    `seq` exceeds the learned positions.
    """
    if model.kv_heads and not model.mla and model.kv_heads % tensor and tensor % model.kv_heads:
        raise ValueError(
            f"expected tensor to divide kv_heads={model.kv_heads} or to be a multiple of it, "
            f"got tensor={tensor}"
        )
    model.check_positions(seq)
    entry = bytes_of(dtype)
    parts = []

    def add_part(name: str, width: int, **sizes: int) -> None:
        parts.append(product(name, "B", **sizes, width=width, bytes=entry))

    # If there are more devices than key heads, each device stores a copy of one head.
    kv_heads_per_device = max(1, model.kv_heads // tensor) if model.kv_heads else 0
    for name, layers, tokens in _layer_groups(model, seq) if model.causal else ():
        sizes: dict[str, int] = {"layers": layers, "sequences": batch, "tokens": tokens}
        kinds = {"keys": model.qk_dim, "values": model.v_head_dim}
        if model.mla:
            kinds = {"latents": model.mla.kv_rank, "position keys": model.mla.rope_head_dim}
            kinds |= {"index keys": model.mla.index_head_dim} if model.mla.index_heads else {}
        else:
            sizes["heads"] = kv_heads_per_device
        for kind, width in kinds.items():
            add_part(kind + name, width, **sizes)
    for mixer in model.mixers if model.causal else ():
        # The size of a recurrent state does not depend on the length of the sequence.
        sizes = {"layers": len(mixer.layers), "sequences": batch}
        add_part(f"state of {mixer.name}", split(mixer.state, tensor), **sizes)
    return total(f"KV cache of {model.name}", "B", *parts)


@checks.entry()
def kv_entries(model: Transformer, *, seq: int = 1, batch: int = 1) -> Breakdown:
    """Return the number of cached values, which is the cache size for a dtype of one byte."""
    return kv_cache(model, seq=seq, batch=batch, dtype="int8")


def _layer_groups(model: Transformer, seq: int) -> list[tuple[str, int, int]]:
    """Return (suffix, layers, cached tokens) for the layers without and for those with a window."""
    windowed = len(model.windowed_layers)
    groups = [("", len(model.attention_layers or ()) - windowed, seq)]
    if model.window:
        groups.append((" in windows", windowed, min(seq, model.window.size)))
    return [group for group in groups if group[1]]
