"""The tensors that a forward pass in eager torch saves for the backward pass.

A linear layer saves its input. A norm saves its input and one or two statistics per token. ReLU
saves its output, and every other activation function its input. A product saves both factors, and
softmax its output. Flash attention saves q, k, v, the output and the log-sum-exp. A tensor that two
operations save counts once; activations.toml lists all tensors. With dropout, GELU and attention
without a flash kernel, in 16 bits, the sum per layer is the `sbh(34 + 5as/h)` of Korthikanti et al.
2022, "Reducing Activation Recomputation", equation 1.
"""

from collections import Counter
from fractions import Fraction
from typing import Any

from accounting import checks
from accounting.breakdown import Breakdown, multiply, sum_parts
from accounting.model.formulas import Table, evaluate, read_tables
from accounting.model.transformer import Transformer
from accounting.plan import Plan, validate_plan
from accounting.precision import get_itemsize
from accounting.workload import Workload, build_workload

_TENSORS = read_tables("memory/activations.toml")
#: Number of tensors that functions of several operators in transformers save, besides their input
#: and output. For example, `gelu_new` saves half of its input, a tanh, and the tanh plus one.
_WRITTEN_OUT = {"quick_gelu": 1, "gelu_python": 2, "gelu_new": 3, "xielu": 4, "gelu_fast": 6}


@checks.validate()
def count_activation_bytes(
    model: Transformer,
    plan: Plan | None = None,
    work: Workload | None = None,
    *,
    stage: int = 0,
    **run: Any,
) -> Breakdown:
    """Return the bytes that one device of a `stage` saves per micro-batch, without the head.

    `run` contains fields of a `Workload`. `batch` is the whole batch in sequences; a device
    processes `batch / (data x microbatches)` of them at a time, each with `seq / context` tokens.
    `plan.recompute` selects the saved tensors: all (`none`), all except the core of attention
    (`selective`), or only the input of each block (`full`).
    """
    work = build_workload(work, run)
    checks.require_integer("batch", work.batch)
    plan = validate_plan(plan, model, batch=work.batch, seq=work.seq)
    if work.transformers:
        _check_transformers(model)
    stage_model = plan.build_stage_model(model, stage)
    names = _collect_layer_variables(stage_model, plan, work)
    if plan.recompute == "full":
        parts = _build_rows("block inputs", names)
    else:
        rows: dict[str, list[Breakdown | None]] = {
            "attention": _build_rows("attention", names) if names["n"] else [],
            "mlp": _build_rows("mlp", names),
            "experts": _build_rows("experts", names) if stage_model.experts else [],
            "mixers": _build_mixer_rows(stage_model, names),
        }
        # Norms before or after attention or a mixer, and before or after the MLP.
        without_attention = "mixers" if stage_model.mixers else "mlp"
        around = (stage_model.norms_per_layer + 1) // 2
        norms = Counter({"attention" if names["n"] else without_attention: around})
        norms["mlp"] += stage_model.norms_per_layer - around
        if stage_model.norm != "none":
            for part, count in norms.items():
                on_stage = {"norms": stage_model.layers * count}
                rows[part] = [*_build_rows("norms", names | on_stage), *rows[part]]
        parts = [sum_parts(part, "B", *leaves) for part, leaves in rows.items()]
    return sum_parts(f"activations of {model.name}", "B", *parts)


def _check_transformers(model: Transformer) -> None:
    """Raise `ValueError` for models whose eager modules in transformers are not modeled."""
    reasons = {
        "the tensors of its experts and of attention with sinks are not modeled": model.sinks,
        "its eager scan saves many times as much as a kernel": any(
            mixer.scan for mixer in model.mixers
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(
                f"expected transformers=False for {model.name}, got True; {reason}; trace a step "
                "with fits"
            )


def count_head_activation_bytes(model: Transformer, plan: Plan, work: Workload) -> Breakdown:
    """Return the bytes of the end of the model: final norm, logits, and the loss with its gradient.

    The result is for a micro-batch on one device. The cross-entropy saves the log-softmax in the
    dtype of the logits. The gradients of the log-softmax and of the logits are allocated at the
    start of the backward, where many training steps peak.
    """
    if not model.vocab_size or not model.lm_head:
        return sum_parts("head and loss", "B")
    names = _collect_sizes(model, plan, work) | {
        "logit": get_itemsize(work.kind.logits),
        "final": model.final_norm and model.norm != "none",
        "compiled": work.compiled,
        "V": Fraction(model.vocab_size, plan.tensor),
    }
    return sum_parts("head and loss", "B", *_build_rows("head and loss", names))


def count_gradients_in_flight(
    model: Transformer, *, tokens: int, tensor: int = 1, keys: int | None, hidden_tensors: int = 2
) -> list[int]:
    """Return the numbers of temporary gradient values in the backward of an MLP and of attention.

    The first number counts the gradients of `hidden_tensors` hidden tensors of the MLP, the experts
    or a mixer, whichever is widest. The hidden tensors of a mixer are as wide as its widest matrix.
    The second number counts the gradients of two score matrices with `keys` columns, or of q, k and
    v for flash attention (`keys=None`). Both include the gradient of the residual stream.
    """
    widths = [model.d_ff if model.mlp_layers else 0]
    if model.experts:
        widths.append(model.experts.per_token * model.experts.width + model.experts.shared)
    widths += (matrix.columns for m in model.mixers for matrix in m.matrices if matrix.rows > 1)
    hidden = max(widths)
    scores = 3 * model.qk_dim if keys is None else 2 * keys
    return [
        tokens * (model.d_model + width // tensor)
        for width in (hidden_tensors * hidden, model.heads * scores)
    ]


def _collect_sizes(model: Transformer, plan: Plan, work: Workload) -> Table:
    """Return the values of the names that all formulas of activations.toml use."""
    tokens = work.tokens(plan)
    is_written_out = work.transformers and model.norm == "rmsnorm"
    fused_norm = (work.fused_norm or work.compiled) and not is_written_out
    size = get_itemsize(work.kind.activations)
    wide = get_itemsize(work.kind.stream) if work.kind.stream else size
    return {
        "t": tokens,
        "r": Fraction(tokens, plan.tensor if plan.sequence_parallel else 1),
        "size": size,
        "wide": wide,
        # A norm that consists of several operators computes in fp32, and saves its input and
        # result.
        "normed": wide if fused_norm else max(wide, Fraction(4)),
        "d": model.d_model,
        "fused_norm": fused_norm,
        "statistics": {"rmsnorm": 1, "layernorm": 2, "none": 0}[model.norm],
    }


def _collect_layer_variables(model: Transformer, plan: Plan, work: Workload) -> Table:
    """Return the variables of the layer formulas, as a mapping from name to value."""
    dense = len(model.mlp_layers or ())
    # In transformers, a layer whose window is at most `seq` saves a mask.
    is_masked = work.transformers and model.window is not None and work.seq >= model.window.size
    return _collect_sizes(model, plan, work) | {
        "m": model,
        "mla": model.mla,
        "experts": model.experts,
        "seq": work.seq,
        "per_rank": lambda width: Fraction(width) / plan.tensor,
        "n": len(model.attention_layers or ()),
        "h": model.heads,
        # If there are fewer key heads than devices, each device stores a copy of one head.
        "g": model.heads if model.mla else max(model.kv_heads, plan.tensor),
        "qk": model.qk_dim,
        "v": model.v_head_dim,
        "hidden": _count_hidden_tensors(model, work),
        "dense": dense,
        "casts": work.kind.stream is not None and not work.compiled,
        "fed": 0 if model.parallel_block and model.norms_per_layer == 1 else dense,
        "x": len(model.expert_layers),
        "transformers": work.transformers,
        "masked": len(model.windowed_layers) if is_masked else 0,
        "flash": work.flash,
        "dropout": work.dropout,
        "scores": not work.flash and plan.recompute == "none",
    }


def _count_hidden_tensors(model: Transformer, work: Workload) -> int:
    """Return the number of saved tensors per layer that have the width of the MLP."""
    written_out = _WRITTEN_OUT.get(model.activation, 0) if work.transformers else 0
    is_relu = model.activation == "relu"
    if not model.gated_mlp:
        # ReLU saves only its output, which is also the input of the next matrix.
        return 1 if is_relu else 2 + written_out
    # A fused gate saves gate, up and the product.
    return 3 if is_relu or work.fused_gate or work.compiled else 4 + written_out


def _build_rows(part: str, names: Table) -> list[Breakdown | None]:
    return [
        multiply(
            row["name"], "B", **{key: evaluate(f, names) for key, f in row.items() if key != "name"}
        )
        for row in _TENSORS[part]["rows"]
    ]


def _build_mixer_rows(model: Transformer, names: Table) -> list[Breakdown | None]:
    """Return the bytes that recurrent layers save: their input, and the values in mixers.toml."""
    parts: list[Breakdown | None] = []
    for mixer in model.mixers:
        layers = {"layers": len(mixer.layers)}
        stream = {"tokens": names["r"], "d_model": model.d_model, "bytes": names["size"]}
        width = names["per_rank"](mixer.saved)
        saved = {"tokens": names["t"], "width": width, "bytes": names["size"]}
        parts.append(multiply(f"input of {mixer.name}", "B", **layers | stream))
        parts.append(multiply(mixer.name, "B", **layers | saved))
    return parts
