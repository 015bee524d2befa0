"""What a forward pass keeps for the backward, tensor by tensor, as eager torch keeps it.

A linear layer saves its input, a norm its input and a number or two a token, an activation its
input (ReLU its output), a product both its factors, softmax its output, flash attention q, k, v,
output and log-sum-exp. Tensors that two operations save are counted once. With dropout, GELU and
plain attention in 16 bits this is the `sbh(34 + 5as/h)` of Korthikanti et al. 2022, "Reducing
Activation Recomputation", equation 1.
"""

from __future__ import annotations

from fractions import Fraction

from accounting import checks
from accounting.breakdown import Breakdown, Number, product, total
from accounting.model.shape import Shape
from accounting.plan import Plan
from accounting.precision import Precision, bytes_of, recipe


def activations(
    model: Shape,
    plan: Plan | None = None,
    *,
    batch: int,
    seq: int,
    precision: str | Precision = "fp32",
    flash: bool = True,
    dropout: bool = False,
    fused_norm: bool = True,
    fused_projections: bool = False,
    fused_gate: bool = False,
    stage: int = 0,
) -> Breakdown:
    """Bytes that one device keeps of one micro-batch of the layers of its stage, without the head.

    `batch` is the whole batch: a device sees `batch / (data x microbatches)` sequences at a time,
    each of `seq / context` tokens. A norm that is not one kernel (torch's RMSNorm on the CPU, or
    one written out) keeps its normalized values too: `fused_norm=False`. Under autocast each linear
    layer casts its input for itself, unless query, key and value are one matrix and gate and up
    another: `fused_projections=True`. A kernel that makes the gated product in one go keeps gate
    and up and not the gate's activation: `fused_gate=True`. `plan.recompute` says what is kept:
    everything, everything but the attention's core, or only the input of each block.
    """
    plan = plan or Plan()
    checks.whole("batch", batch)
    plan.check(model, batch=batch, seq=seq)
    here = plan.stage_model(model, stage)
    kind = recipe(precision)
    sequences = batch // (plan.data * plan.microbatches)
    tokens = sequences * (seq // plan.context)
    encoder = None
    if here.encoder:
        # It sees as many tokens as its table of positions has rows, else as many as the decoder.
        source = here.encoder.positions or seq
        encoder = activations(
            here.encoder,
            plan,
            batch=batch,
            seq=source,
            precision=precision,
            flash=flash,
            dropout=dropout,
            fused_norm=fused_norm,
            fused_projections=fused_projections,
        )
    if plan.recompute == "full":
        block = _Tensors(here, plan, tokens, kind, fused_norm, fused_projections)
        inputs = block.stream("block inputs", layers=here.layers, bytes=block.wide)
        more = total("encoder", "B", *encoder.parts) if encoder else None
        return total(f"activations of {model.name}", "B", inputs, more)
    keep_core = plan.recompute == "none"
    block = _Tensors(here, plan, tokens, kind, fused_norm, fused_projections, fused_gate)
    return total(
        f"activations of {model.name}",
        "B",
        block.attention(keys=seq, flash=flash, dropout=dropout, keep_core=keep_core),
        block.mlp(dropout=dropout),
        block.experts(),
        block.mixers(),
        total("encoder", "B", *encoder.parts) if encoder else None,
    )


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
    size, logit = bytes_of(kind.activations), bytes_of(kind.logits)
    wide = bytes_of(kind.stream) if kind.stream else size
    if not model.vocab_size or not model.lm_head:
        return total("head and loss", "B")
    rows = Fraction(model.vocab_size, tensor)
    cast = size if logit != size else 0
    in_norm = wide if fused_norm else max(wide, Fraction(4))
    normed = int(model.final_norm and model.norm != "none")
    width = model.d_model
    return total(
        "head and loss",
        "B",
        product("token ids and targets", "B", tokens=tokens, tensors=2, bytes=8),
        product("norm input", "B", tokens=tokens * normed, d_model=width, bytes=in_norm),
        product(
            "normalized",
            "B",
            tokens=tokens * normed * (not fused_norm),
            d_model=width,
            bytes=in_norm,
        ),
        product(
            "norm statistics", "B", tokens=tokens * normed, numbers=_statistics(model), bytes=4
        ),
        product("head input", "B", tokens=tokens, d_model=width, bytes=size),
        product("logits before the cast", "B", tokens=tokens, vocabulary=rows, bytes=cast),
        product("log-softmax", "B", tokens=tokens, vocabulary=rows, bytes=logit),
        product("total weight", "B", numbers=1, bytes=4),
        product("its gradient", "B", tokens=tokens, vocabulary=rows, bytes=logit),
        product("gradient of the logits", "B", tokens=tokens, vocabulary=rows, bytes=logit),
    )


class _Tensors:
    """The saved tensors of the blocks, in bytes, on one device."""

    def __init__(
        self,
        model: Shape,
        plan: Plan,
        tokens: int,
        kind: Precision,
        fused_norm: bool,
        fused_projections: bool,
        fused_gate: bool = False,
    ) -> None:
        self.fused_gate = fused_gate
        self.model, self.plan, self.tokens = model, plan, tokens
        self.size = bytes_of(kind.activations)
        self.wide = bytes_of(kind.stream) if kind.stream else self.size
        self.fused_norm = fused_norm
        # A norm of several operators works in fp32, and keeps its input and its result so.
        self.normed = self.wide if fused_norm else max(self.wide, Fraction(4))
        # A wide stream is cast once for every linear layer that reads it.
        self.casts = kind.stream is not None and not fused_projections
        self.residual_split = plan.tensor if plan.sequence_parallel else 1

    def stream(self, name: str, *, layers: int, bytes: Number | None = None) -> Breakdown:
        """A tensor of the residual stream's width."""
        size = self.size if bytes is None else bytes
        return product(
            name,
            "B",
            layers=layers,
            tokens=Fraction(self.tokens, self.residual_split),
            d_model=self.model.d_model,
            bytes=size,
        )

    def split(
        self, name: str, *, layers: int, width: Number, bytes: Number | None = None
    ) -> Breakdown:
        """A tensor whose width the tensor-parallel devices share."""
        size = self.size if bytes is None else bytes
        return product(
            name,
            "B",
            layers=layers,
            tokens=self.tokens,
            width=Fraction(width) / self.plan.tensor,
            bytes=size,
        )

    def norm(self, layers: int, count: int) -> list[Breakdown]:
        model = self.model
        kept = layers * count if model.norm != "none" else 0
        numbers = _statistics(model)
        tokens = Fraction(self.tokens, self.residual_split)
        return [
            self.stream("norm input", layers=kept, bytes=self.normed),
            self.stream("normalized", layers=kept * (not self.fused_norm), bytes=self.normed),
            product("norm statistics", "B", norms=kept, tokens=tokens, numbers=numbers, bytes=4),
        ]

    def attention(self, *, keys: int, flash: bool, dropout: bool, keep_core: bool) -> Breakdown:
        model, layers = self.model, len(self.model.attention_layers or ())
        if not layers:
            return total("attention", "B")
        h, qk, v = model.heads, model.qk_dim, model.v_head_dim
        # Fewer key heads than devices: each device keeps one of its own.
        g = h if model.mla else max(model.kv_heads, self.plan.tensor)
        latents = model.mla.q_rank + model.mla.kv_rank if model.mla else 0
        parts = [
            *self.norm(model.layers, _norms_before(model)[0]),
            self.stream("projection input", layers=layers * (3 if self.casts else 1)),
            self.split("queries", layers=layers, width=h * qk),
            self.split("keys", layers=layers, width=g * qk),
            self.split("values", layers=layers, width=g * v),
            self.split("output", layers=layers, width=h * v),
        ]
        if model.mla:
            # Down-projected, then normed: both sides of the norm are saved, on every device.
            parts.append(
                product(
                    "latents",
                    "B",
                    layers=layers,
                    tokens=self.tokens,
                    sides=2,
                    width=latents,
                    bytes=self.size,
                )
            )
        if model.qk_norm:
            parts.append(self.split("before the qk norm", layers=layers, width=(h + g) * qk))
        if model.output_gate:
            parts.append(self.split("gate and gated", layers=layers, width=2 * h * v))
        if model.encoder:
            # Queries and output of the look at the encoder, whose keys and values are kept too.
            parts.append(self.split("cross attention", layers=layers, width=(h + g) * (qk + v)))
        if flash:
            parts.append(self.split("log-sum-exp", layers=layers, width=h, bytes=4))
        elif keep_core:
            parts.append(self.split("probabilities", layers=layers, width=h * keys))
            if dropout:
                parts.append(self.split("dropped", layers=layers, width=h * keys))
                parts.append(self.split("dropout mask", layers=layers, width=h * keys, bytes=1))
        if dropout:
            parts.append(self.stream("output dropout mask", layers=layers, bytes=1))
        return total("attention", "B", *parts)

    def mlp(self, *, dropout: bool) -> Breakdown:
        model = self.model
        layers = len(model.mlp_layers or ())
        own_input = 0 if model.parallel_block and model.norms_per_layer == 1 else layers
        readers = 2 if self.casts and model.gated_mlp else 1
        return total(
            "mlp",
            "B",
            *self.norm(model.layers, _norms_before(model)[1]),
            self.stream("input", layers=own_input * readers),
            self.split("hidden", layers=layers, width=self.hidden() * model.d_ff),
            self.stream("dropout mask", layers=model.layers if dropout else 0, bytes=1),
        )

    def experts(self) -> Breakdown:
        """Every token visits several experts: its copies, their hidden layers and their outputs."""
        experts = self.model.experts
        if experts is None:
            return total("experts", "B")
        layers, k, hidden = len(experts.layers or ()), experts.per_token, self.hidden()
        return total(
            "experts",
            "B",
            self.stream("input", layers=layers),
            product(
                "router", "B", layers=layers, tokens=self.tokens, experts=experts.count, bytes=4
            ),
            self.stream("copies for experts", layers=layers * k),
            self.split("hidden", layers=layers, width=hidden * k * experts.width),
            self.stream("outputs of experts", layers=layers * k),
            self.split("shared hidden", layers=layers, width=hidden * experts.shared),
        )

    def hidden(self) -> int:
        """Tensors of the hidden width that an MLP keeps."""
        model = self.model
        if model.gated_mlp:
            # ReLU's output is one of the two factors already.
            return 3 if model.activation == "relu" or self.fused_gate else 4
        return 1 if model.activation == "relu" else 2

    def mixers(self) -> Breakdown:
        """What recurrent layers keep: their input and the numbers that their records say."""
        parts = []
        for mixer in self.model.mixers:
            layers = len(mixer.layers)
            parts.append(self.stream(f"input of {mixer.name}", layers=layers))
            parts.append(self.split(mixer.name, layers=layers, width=mixer.kept))
        return total("mixers", "B", *parts)


def _statistics(model: Shape) -> int:
    return {"rmsnorm": 1, "layernorm": 2, "none": 0}[model.norm]


def _norms_before(model: Shape) -> tuple[int, int]:
    """Norms of a layer around its attention, and around its MLP."""
    around_attention = (model.norms_per_layer + 1) // 2
    return around_attention, model.norms_per_layer - around_attention
