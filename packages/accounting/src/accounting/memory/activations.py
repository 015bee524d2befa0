"""What a forward pass keeps for the backward, tensor by tensor, as eager torch keeps it.

A linear layer saves its input, a norm its input and a number or two a token, an activation its
input (ReLU its output), a product both its factors, softmax its output, flash attention q, k, v,
output and log-sum-exp. Tensors that two operations save are counted once: activations.toml lists
them. With dropout, GELU and plain attention in 16 bits this is the `sbh(34 + 5as/h)` of Korthikanti
et al. 2022, "Reducing Activation Recomputation", equation 1.
"""

from dataclasses import replace
from fractions import Fraction
from typing import Any

from accounting import checks
from accounting.breakdown import Breakdown, product, total
from accounting.model.formulas import Table, tables, value
from accounting.model.shape import Shape
from accounting.plan import Plan, fitted
from accounting.precision import Precision, bytes_of, recipe
from accounting.workload import WORKLOAD, Workload, workload

_TENSORS = tables("memory/activations.toml")


@checks.entry(*WORKLOAD)
def activations(
    model: Shape,
    plan: Plan | None = None,
    work: Workload | None = None,
    *,
    stage: int = 0,
    **run: Any,
) -> Breakdown:
    """Bytes that one device keeps of one micro-batch of the layers of its stage, without the head.

    `run` are the fields of a `Workload`: `batch` is the whole batch, of which a device sees
    `batch / (data x microbatches)` sequences at a time, each of `seq / context` tokens.
    `plan.recompute` says what is kept: everything, everything but the attention's core, or only the
    input of each block.
    """
    work = workload(work, run)
    checks.whole("batch", work.batch)
    plan = fitted(plan, model, batch=work.batch, seq=work.seq)
    here = plan.stage_model(model, stage)
    names = _of_layers(here, plan, work)
    if plan.recompute == "full":
        parts = _rows("block inputs", names)
    else:
        # Norms around the attention, and around the MLP.
        around = (here.norms_per_layer + 1) // 2
        before = {"attention": around, "mlp": here.norms_per_layer - around}
        parts = []
        for part, norms in before.items():
            if part == "mlp" or names["n"]:
                kept = here.layers * norms if here.norm != "none" else 0
                leaves = (*_rows("norms", names | {"norms": kept}), *_rows(part, names))
                parts.append(total(part, "B", *leaves))
        parts.append(total("experts", "B", *_rows("experts", names)) if here.experts else None)
        parts.append(total("mixers", "B", *_mixers(here, names)))
    if here.encoder:
        # It sees as many tokens as its table of positions has rows, else as many as the decoder.
        source = replace(work, seq=here.encoder.positions or work.seq)
        parts.append(total("encoder", "B", *activations(here.encoder, plan, source).parts))
    return total(f"activations of {model.name}", "B", *parts)


@checks.entry()
def head_activations(
    model: Shape,
    *,
    tokens: int,
    precision: str | Precision,
    tensor: int = 1,
    fused_norm: bool = True,
    compiled: bool = False,
    loss_chunks: int = 1,
) -> Breakdown:
    """The end of the model: final norm, logits, and the loss with its gradient.

    The cross-entropy keeps the log-softmax in fp32; at the start of the backward its gradient and
    that of the logits are there as well, which is where many training steps peak. In `loss_chunks`
    this holds of one chunk at a time.
    """
    kind = recipe(precision)
    if loss_chunks > tokens:
        raise ValueError(f"loss_chunks is {loss_chunks}; a micro-batch here has {tokens} tokens")
    if not model.vocab_size or not model.lm_head:
        return total("head and loss", "B")
    names = _sizes(model, kind, fused_norm) | {"t": tokens, "logit": bytes_of(kind.logits)}
    names["final"] = model.final_norm and model.norm != "none"
    names |= {"compiled": compiled, "c": -(-tokens // loss_chunks)}
    names["V"] = Fraction(model.vocab_size, tensor)
    return total("head and loss", "B", *_rows("head and loss", names))


def flying_gradients(model: Shape, *, tokens: int, tensor: int = 1, keys: int | None) -> list[int]:
    """Numbers that the backward of one block holds for a while beside what is saved: in its MLP the
    gradients of two hidden tensors, in its attention those of two score matrices (of `keys` a row;
    with None, flash attention, of queries, keys and values), and that of the stream."""
    hidden = model.d_ff
    if model.experts:
        hidden = model.experts.per_token * model.experts.width + model.experts.shared
    scores = 3 * model.qk_dim if keys is None else 2 * keys
    return [
        tokens * (model.d_model + width // tensor) for width in (2 * hidden, model.heads * scores)
    ]


def _sizes(model: Shape, kind: Precision, fused_norm: bool) -> Table:
    """Bytes of an element, and what belongs to every norm."""
    size = bytes_of(kind.activations)
    wide = bytes_of(kind.stream) if kind.stream else size
    return {
        # A norm of several operators works in fp32, and keeps its input and its result so.
        **{"size": size, "wide": wide, "normed": wide if fused_norm else max(wide, Fraction(4))},
        **{"d": model.d_model, "fused_norm": fused_norm},
        "statistics": {"rmsnorm": 1, "layernorm": 2, "none": 0}[model.norm],
    }


def _of_layers(model: Shape, plan: Plan, work: Workload) -> Table:
    """The names that the table's formulas of layers speak of."""
    tokens, kind, experts = work.tokens(plan), work.kind, model.experts
    dense = len(model.mlp_layers or ())
    # ReLU's output is one of the two factors already; a fused gate keeps gate and up alone.
    hidden = 1 if model.activation == "relu" else 2
    if model.gated_mlp:
        hidden = 3 if model.activation == "relu" or work.fused_gate else 4
    return _sizes(model, kind, work.fused_norm) | {
        **{"m": model, "mla": model.mla, "experts": experts, "t": tokens, "seq": work.seq},
        "r": Fraction(tokens, plan.tensor if plan.sequence_parallel else 1),
        "share": lambda width: Fraction(width) / plan.tensor,
        **{"n": len(model.attention_layers or ()), "h": model.heads},
        # Fewer key heads than devices: each device keeps one of its own.
        "g": model.heads if model.mla else max(model.kv_heads, plan.tensor),
        **{"qk": model.qk_dim, "v": model.v_head_dim, "hidden": hidden, "dense": dense},
        "casts": kind.stream is not None and not work.fused_projections,
        "fed": 0 if model.parallel_block and model.norms_per_layer == 1 else dense,
        "x": len(model.expert_layers),
        **{"flash": work.flash, "dropout": work.dropout},
        "scores": not work.flash and plan.recompute == "none",
    }


def _rows(part: str, names: Table) -> list[Breakdown | None]:
    return [
        product(
            row["name"], "B", **{key: value(f, names) for key, f in row.items() if key != "name"}
        )
        for row in _TENSORS[part]["rows"]
    ]


def _mixers(model: Shape, names: Table) -> list[Breakdown]:
    """What recurrent layers keep: their input and the numbers that their records say."""
    parts = []
    for mixer in model.mixers:
        layers = {"layers": len(mixer.layers)}
        stream = {"tokens": names["r"], "d_model": model.d_model, "bytes": names["size"]}
        kept = {"tokens": names["t"], "width": names["share"](mixer.kept), "bytes": names["size"]}
        parts.append(product(f"input of {mixer.name}", "B", **layers | stream))
        parts.append(product(mixer.name, "B", **layers | kept))
    return parts
