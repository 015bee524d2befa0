"""What a forward pass keeps for the backward, tensor by tensor, as eager torch keeps it.

A linear layer saves its input, a norm its input and a number or two a token, an activation its
input (ReLU its output), a product both its factors, softmax its output, flash attention q, k, v,
output and log-sum-exp. Tensors that two operations save are counted once. With dropout, GELU and
plain attention in 16 bits this is the `sbh(34 + 5as/h)` of Korthikanti et al. 2022, "Reducing
Activation Recomputation", equation 1.
"""

from dataclasses import replace
from fractions import Fraction
from typing import Any

from accounting import checks
from accounting.breakdown import Breakdown, Number, Sizes, product, total
from accounting.model.shape import Shape
from accounting.plan import Plan, fitted
from accounting.precision import Precision, bytes_of, recipe
from accounting.workload import Workload, workload


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
    saved = _Saved(here, plan, work)
    if plan.recompute == "full":
        parts = [saved.stream("block inputs", here.layers, saved.wide)]
    else:
        parts = [saved.attention(), saved.mlp(), saved.experts(), saved.mixers()]
    if here.encoder:
        # It sees as many tokens as its table of positions has rows, else as many as the decoder.
        source = replace(work, seq=here.encoder.positions or work.seq)
        parts.append(total("encoder", "B", *activations(here.encoder, plan, source).parts))
    return total(f"activations of {model.name}", "B", *parts)


def head_activations(
    model: Shape,
    *,
    tokens: int,
    precision: str | Precision,
    tensor: int = 1,
    fused_norm: bool = True,
) -> Breakdown:
    """The end of the model: final norm, logits, and the loss with its gradient.

    The cross-entropy keeps the log-softmax in fp32; at the start of the backward its gradient and
    that of the logits are there as well, which is where many training steps peak.
    """
    checks.whole("tokens", tokens)
    checks.whole("tensor", tensor)
    kind = recipe(precision)
    if not model.vocab_size or not model.lm_head:
        return total("head and loss", "B")
    size, logit = bytes_of(kind.activations), bytes_of(kind.logits)
    wide = bytes_of(kind.stream) if kind.stream else size
    in_norm = wide if fused_norm else max(wide, Fraction(4))
    normed = tokens if model.final_norm and model.norm != "none" else 0
    unfused = 0 if fused_norm else normed

    def stream(name: str, count: int, each: Fraction) -> Breakdown:
        return product(name, "B", tokens=count, d_model=model.d_model, bytes=each)

    def logits(name: str, each: Fraction) -> Breakdown:
        rows = Fraction(model.vocab_size, tensor)
        return product(name, "B", tokens=tokens, vocabulary=rows, bytes=each)

    return total(
        "head and loss",
        "B",
        product("token ids and targets", "B", tokens=tokens, tensors=2, bytes=8),
        stream("norm input", normed, in_norm),
        stream("normalized", unfused, in_norm),
        product("norm statistics", "B", tokens=normed, numbers=_statistics(model), bytes=4),
        stream("head input", tokens, size),
        logits("logits before the cast", size if logit != size else Fraction(0)),
        logits("log-softmax", logit),
        product("total weight", "B", numbers=1, bytes=4),
        logits("its gradient", logit),
        logits("gradient of the logits", logit),
    )


class _Saved:
    """The saved tensors of the blocks, in bytes, on one device."""

    def __init__(self, model: Shape, plan: Plan, work: Workload) -> None:
        self.model, self.plan, self.work = model, plan, work
        self.tokens, kind = work.tokens(plan), work.kind
        self.size = bytes_of(kind.activations)
        self.wide = bytes_of(kind.stream) if kind.stream else self.size
        # A norm of several operators works in fp32, and keeps its input and its result so.
        self.normed = self.wide if work.fused_norm else max(self.wide, Fraction(4))
        # A wide stream is cast once for every linear layer that reads it.
        self.casts = kind.stream is not None and not work.fused_projections
        self.residual = Fraction(self.tokens, plan.tensor if plan.sequence_parallel else 1)

    def stream(self, name: str, layers: int, size: Number | None = None) -> Breakdown:
        """A tensor of the residual stream's width."""
        size = self.size if size is None else size
        sizes: Sizes = {"tokens": self.residual, "d_model": self.model.d_model}
        return product(name, "B", layers=layers, **sizes, bytes=size)

    def split(self, name: str, layers: int, width: Number, size: Number | None = None) -> Breakdown:
        """A tensor whose width the tensor-parallel devices share."""
        size = self.size if size is None else size
        sizes: Sizes = {"tokens": self.tokens, "width": Fraction(width) / self.plan.tensor}
        return product(name, "B", layers=layers, **sizes, bytes=size)

    def norm(self, count: int) -> list[Breakdown]:
        """`count` norms of every layer."""
        kept = self.model.layers * count if self.model.norm != "none" else 0
        sizes: Sizes = {"tokens": self.residual, "numbers": _statistics(self.model)}
        return [
            self.stream("norm input", kept, self.normed),
            self.stream("normalized", kept * (not self.work.fused_norm), self.normed),
            product("norm statistics", "B", norms=kept, **sizes, bytes=4),
        ]

    def attention(self) -> Breakdown:
        model, layers = self.model, len(self.model.attention_layers or ())
        if not layers:
            return total("attention", "B")
        h, qk, v, mla = model.heads, model.qk_dim, model.v_head_dim, model.mla
        # Fewer key heads than devices: each device keeps one of its own.
        g = h if mla else max(model.kv_heads, self.plan.tensor)
        parts = [
            *self.norm(_norms_before(model)[0]),
            self.stream("projection input", layers * (3 if self.casts else 1)),
            self.split("queries", layers, h * qk),
            self.split("keys", layers, g * qk),
            self.split("values", layers, g * v),
            self.split("output", layers, h * v),
        ]
        if mla:
            # Down-projected, then normed: both sides of the norm are saved, on every device.
            sizes = {"tokens": self.tokens, "sides": 2, "width": mla.q_rank + mla.kv_rank}
            parts.append(product("latents", "B", layers=layers, **sizes, bytes=self.size))
        if model.qk_norm:
            parts.append(self.split("before the qk norm", layers, (h + g) * qk))
        if model.output_gate:
            parts.append(self.split("gate and gated", layers, 2 * h * v))
        if model.encoder:
            # Queries and output of the look at the encoder, whose keys and values are kept too.
            parts.append(self.split("cross attention", layers, (h + g) * (qk + v)))
        if self.work.flash:
            parts.append(self.split("log-sum-exp", layers, h, 4))
        elif self.plan.recompute == "none":
            parts.append(self.split("probabilities", layers, h * self.work.seq))
            if self.work.dropout:
                parts.append(self.split("dropped", layers, h * self.work.seq))
                parts.append(self.split("dropout mask", layers, h * self.work.seq, 1))
        if self.work.dropout:
            parts.append(self.stream("output dropout mask", layers, 1))
        return total("attention", "B", *parts)

    def mlp(self) -> Breakdown:
        model, layers = self.model, len(self.model.mlp_layers or ())
        own_input = 0 if model.parallel_block and model.norms_per_layer == 1 else layers
        readers = 2 if self.casts and model.gated_mlp else 1
        return total(
            "mlp",
            "B",
            *self.norm(_norms_before(model)[1]),
            self.stream("input", own_input * readers),
            self.split("hidden", layers, self.hidden() * model.d_ff),
            self.stream("dropout mask", model.layers * self.work.dropout, 1),
        )

    def experts(self) -> Breakdown:
        """Every token visits several experts: its copies, their hidden layers and their outputs."""
        experts = self.model.experts
        if experts is None:
            return total("experts", "B")
        layers, k, hidden = len(experts.layers or ()), experts.per_token, self.hidden()
        scores = {"layers": layers, "tokens": self.tokens, "experts": experts.count}
        return total(
            "experts",
            "B",
            self.stream("input", layers),
            product("router", "B", **scores, bytes=4),
            self.stream("copies for experts", layers * k),
            self.split("hidden", layers, hidden * k * experts.width),
            self.stream("outputs of experts", layers * k),
            self.split("shared hidden", layers, hidden * experts.shared),
        )

    def hidden(self) -> int:
        """Tensors of the hidden width that an MLP keeps."""
        if self.model.gated_mlp:
            # ReLU's output is one of the two factors already.
            return 3 if self.model.activation == "relu" or self.work.fused_gate else 4
        return 1 if self.model.activation == "relu" else 2

    def mixers(self) -> Breakdown:
        """What recurrent layers keep: their input and the numbers that their records say."""
        parts = []
        for mixer in self.model.mixers:
            parts.append(self.stream(f"input of {mixer.name}", len(mixer.layers)))
            parts.append(self.split(mixer.name, len(mixer.layers), mixer.kept))
        return total("mixers", "B", *parts)


def _statistics(model: Shape) -> int:
    return {"rmsnorm": 1, "layernorm": 2, "none": 0}[model.norm]


def _norms_before(model: Shape) -> tuple[int, int]:
    """Norms of a layer around its attention, and around its MLP."""
    around_attention = (model.norms_per_layer + 1) // 2
    return around_attention, model.norms_per_layer - around_attention
