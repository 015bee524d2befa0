"""Every matrix of a model, as records: what all counts are derived from."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from accounting.model.records import Matrix
from accounting.model.shape import Shape


@lru_cache(maxsize=4096)
def matrices(model: Shape) -> tuple[Matrix, ...]:
    """The parameters of a model without its encoder, one record for each kind that has entries."""
    found = (
        *_embedding(model),
        *attention_matrices(model),
        *_mlp(model, "mlp", model.d_ff, model.mlp_layers or ()),
        *_experts(model),
        *_mixers(model),
        *_norms(model),
        *_head(model),
        *model.extra,
    )
    return tuple(matrix for matrix in found if matrix.size)


def all_matrices(model: Shape) -> tuple[Matrix, ...]:
    """Those of the encoder too."""
    return matrices(model) + (matrices(model.encoder) if model.encoder else ())


def attention_matrices(model: Shape) -> Iterator[Matrix]:
    """Projections of attention and cross-attention, with biases, inner norms and sinks."""
    layers = model.attention_layers or ()
    if not model.heads:
        return
    d, h, g = model.d_model, model.heads, model.kv_heads
    qk, v = model.qk_dim, model.v_head_dim

    def matrix(name: str, rows: int, columns: int, split: str, part: str = "attention") -> Matrix:
        meets = "source" if part != "attention" and split == "heads" else "tokens"
        return Matrix(part, name, rows, columns, split, layers=layers, meets=meets)

    def vector(name: str, width: int, split: str, part: str = "attention") -> Matrix:
        return Matrix(part, name, 1, width, split, kind="vector", layers=layers)

    if model.mla:
        yield from _latent_attention(model, matrix, vector)
    else:
        for part, wide in (("attention", d), ("cross attention", 0)):
            if part == "cross attention":
                if model.encoder is None:
                    break
                wide = model.encoder.d_model
            yield matrix("query", d, h * qk, "columns", part)
            yield matrix("key", wide, g * qk, "heads", part)
            yield matrix("value", wide, g * v, "heads", part)
            yield matrix("out", h * v, d, "rows", part)
            if model.qkv_bias:
                yield vector("query bias", h * qk, "columns", part)
                yield vector("key bias", g * qk, "heads", part)
                yield vector("value bias", g * v, "heads", part)
            if model.out_bias:
                yield vector("out bias", d, "none", part)
    if model.output_gate:
        yield matrix("gate", d, h * v, "columns")
        if model.qkv_bias:
            yield vector("gate bias", h * v, "columns")
    if model.qk_norm and model.norm != "none":
        if model.qk_norm in (True, "head"):
            yield vector("query and key norms", 2 * qk * model.norm_vectors, "none")
        else:
            yield vector("query norm", h * qk * model.norm_vectors, "columns")
            yield vector("key norm", g * qk * model.norm_vectors, "heads")
    if model.sinks:
        yield vector("sinks", h, "columns")


def _latent_attention(model: Shape, matrix, vector) -> Iterator[Matrix]:  # type: ignore[no-untyped-def]
    mla, d, h = model.mla, model.d_model, model.heads
    assert mla is not None
    rank, latent = mla.q_rank, mla.kv_rank
    if rank:
        yield matrix("query down", d, rank, "none")
        yield matrix("query up", rank, h * model.qk_dim, "columns")
    else:
        yield matrix("query", d, h * model.qk_dim, "columns")
    yield matrix("latent down", d, latent + mla.rope_head_dim, "none")
    yield matrix("latent up", latent, h * (model.head_dim + model.v_head_dim), "columns")
    yield matrix("out", h * model.v_head_dim, d, "rows")
    if model.qkv_bias:
        # The biases sit on the way down into the latents.
        yield vector("bias of the way down", rank + latent + mla.rope_head_dim, "none")
    if model.out_bias:
        yield vector("out bias", d, "none")
    if model.norm != "none":
        yield vector("norms of latents", rank + latent, "none")


def _mlp(
    model: Shape,
    part: str,
    width: int,
    layers: tuple[int, ...],
    *,
    copies: int = 1,
    chosen: int = 1,
    bias: bool | None = None,
    name: str = "",
) -> Iterator[Matrix]:
    d, names = model.d_model, ("gate", "up") if model.gated_mlp else ("up",)
    one = Matrix(part, "", 1, 1, layers=layers, copies=copies, chosen=chosen, routed=copies > 1)
    for each in names:
        yield replace(one, name=name + each, rows=d, columns=width, split="columns")
    yield replace(one, name=name + "down", rows=width, columns=d, split="rows")
    if model.mlp_bias if bias is None else bias:
        wide = len(names) * width
        yield replace(one, name=name + "biases", columns=wide, split="columns", kind="vector")
        yield replace(one, name=name + "out bias", columns=d, kind="vector")


def _experts(model: Shape) -> Iterator[Matrix]:
    experts = model.experts
    if experts is None:
        return
    layers, d = experts.layers or (), model.d_model
    yield Matrix("experts", "router", d, experts.count, layers=layers)
    if experts.router_bias:
        yield Matrix("experts", "router bias", 1, experts.count, kind="vector", layers=layers)
    count, chosen = experts.count, experts.per_token
    yield from _mlp(
        model, "experts", experts.width, layers, copies=count, chosen=chosen, bias=experts.bias
    )
    if experts.shared:
        yield from _mlp(model, "experts", experts.shared, layers, name="shared ")
    if experts.shared_gate:
        yield Matrix("experts", "shared gate", d, 1, layers=layers)


def _mixers(model: Shape) -> Iterator[Matrix]:
    for mixer in model.mixers:
        for matrix in mixer.matrices:
            yield replace(matrix, part=mixer.name, layers=mixer.layers)


def _embedding(model: Shape) -> Iterator[Matrix]:
    """Token and position tables, and the projections of an embedding narrower than the model."""
    width, vocabulary = model.embedding_dim, model.vocab_size
    yield Matrix("embedding", "tokens", vocabulary, width, "rows", kind="table")
    yield Matrix("embedding", "positions", model.positions, model.d_model, kind="table")
    if width != model.d_model and vocabulary:
        yield Matrix("embedding", "projection in", width, model.d_model)
        yield Matrix("embedding", "projection out", model.d_model, width, where="last")


def _norms(model: Shape) -> Iterator[Matrix]:
    """The norms on the residual stream."""
    width, everywhere = model.norm_vectors * model.d_model, tuple(range(model.layers))
    yield Matrix(
        "norms", "in layers", model.norms_per_layer, width, kind="vector", layers=everywhere
    )
    if model.final_norm:
        yield Matrix("norms", "final", 1, width, kind="vector", where="last")


def _head(model: Shape) -> Iterator[Matrix]:
    """The language-model head, where it is not the embedding."""
    if model.lm_head and not model.tied:
        yield Matrix(
            "head", "matrix", model.embedding_dim, model.vocab_size, "columns", where="last",
            meets="last",
        )  # fmt: skip
    if model.lm_head and model.head_bias:
        yield Matrix("head", "bias", 1, model.vocab_size, "columns", "vector", where="last")
