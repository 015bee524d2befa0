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
from accounting.plan import Plan
from accounting.precision import Precision, bytes_of, recipe
from accounting.transformer import Transformer


def activations(
    model: Transformer,
    plan: Plan | None = None,
    *,
    batch: int,
    seq: int,
    precision: str | Precision = "fp32",
    flash: bool = True,
    dropout: bool = False,
    fused_norm: bool = True,
    fused_projections: bool = False,
    stage: int = 0,
) -> Breakdown:
    """Bytes that one device keeps of one micro-batch of the layers of its stage, without the head.

    `batch` is the whole batch: a device sees `batch / (data x microbatches)` sequences at a time,
    each of `seq / context` tokens. A norm that is not one kernel (torch's RMSNorm on the CPU, or
    one written out) keeps its normalised values too: `fused_norm=False`. Under autocast each linear
    layer casts its input for itself, unless query, key and value are one matrix and gate and up
    another: `fused_projections=True`. `plan.recompute` says what is kept: everything, everything
    but the attention's core, or only the input of each block.
    """
    plan = plan or Plan()
    checks.whole("batch", batch)
    plan.check(model, batch=batch, seq=seq)
    here = plan.stage_model(model, stage)
    kind = recipe(precision)
    sequences = batch // (plan.data * plan.microbatches)
    tokens = sequences * (seq // plan.context)
    if plan.recompute == "full":
        block = _Tensors(here, plan, tokens, kind, fused_norm, fused_projections)
        inputs = block.stream("block inputs", layers=here.layers, bytes=block.wide)
        return total(f"activations of {model.name}", "B", inputs)
    keep_core = plan.recompute == "none"
    block = _Tensors(here, plan, tokens, kind, fused_norm, fused_projections)
    return total(
        f"activations of {model.name}",
        "B",
        block.attention(keys=seq, flash=flash, dropout=dropout, keep_core=keep_core),
        block.mlp(dropout=dropout),
        block.experts(),
    )


def head_activations(
    model: Transformer,
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
    if not model.vocab_size:
        return total("head and loss", "B")
    rows = Fraction(model.vocab_size, tensor)
    cast = size if logit != size else 0
    normed = int(model.final_norm and model.norm != "none")
    width = model.d_model
    return total(
        "head and loss",
        "B",
        product("token ids and targets", "B", tokens=tokens, tensors=2, bytes=8),
        product("norm input", "B", tokens=tokens * normed, d_model=width, bytes=wide),
        product(
            "normalised", "B", tokens=tokens * normed * (not fused_norm), d_model=width, bytes=wide
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
        model: Transformer,
        plan: Plan,
        tokens: int,
        kind: Precision,
        fused_norm: bool,
        fused_projections: bool,
    ) -> None:
        self.model, self.plan, self.tokens = model, plan, tokens
        self.size = bytes_of(kind.activations)
        self.wide = bytes_of(kind.stream) if kind.stream else self.size
        self.fused_norm = fused_norm
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
            self.stream("norm input", layers=kept, bytes=self.wide),
            self.stream("normalised", layers=kept * (not self.fused_norm), bytes=self.wide),
            product("norm statistics", "B", norms=kept, tokens=tokens, numbers=numbers, bytes=4),
        ]

    def attention(self, *, keys: int, flash: bool, dropout: bool, keep_core: bool) -> Breakdown:
        model, layers = self.model, self.model.layers
        if not model.heads:
            return total("attention", "B")
        h, qk, v = model.heads, model.qk_dim, model.v_head_dim
        # Fewer key heads than devices: each device keeps one of its own.
        g = h if model.mla else max(model.kv_heads, self.plan.tensor)
        latents = model.q_lora_rank + model.kv_lora_rank
        parts = [
            *self.norm(layers, _norms_before(model)[0]),
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
        layers = model.layers - len(model.expert_layers)
        own_input = 0 if model.parallel_block and model.norms_per_layer == 1 else layers
        readers = 2 if self.casts and model.gated_mlp else 1
        return total(
            "mlp",
            "B",
            *self.norm(model.layers, _norms_before(model)[1]),
            self.stream("input", layers=own_input * readers),
            self.split("hidden", layers=layers, width=_hidden(model) * model.d_ff),
            self.stream("dropout mask", layers=model.layers if dropout else 0, bytes=1),
        )

    def experts(self) -> Breakdown:
        """Every token visits several experts: its copies, their hidden layers and their outputs."""
        model, layers = self.model, len(self.model.expert_layers)
        k, hidden = model.experts_per_token, _hidden(model)
        return total(
            "experts",
            "B",
            self.stream("input", layers=layers),
            product(
                "router", "B", layers=layers, tokens=self.tokens, experts=model.experts, bytes=4
            ),
            self.stream("copies for experts", layers=layers * k),
            self.split("hidden", layers=layers, width=hidden * k * model.d_expert),
            self.stream("outputs of experts", layers=layers * k),
            self.split("shared hidden", layers=layers, width=hidden * model.d_shared),
        )


def _hidden(model: Transformer) -> int:
    """Tensors of the hidden width that an MLP saves."""
    if model.gated_mlp:
        # ReLU's output is one of the two factors already.
        return 3 if model.activation == "relu" else 4
    return 1 if model.activation == "relu" else 2


def _statistics(model: Transformer) -> int:
    return {"rmsnorm": 1, "layernorm": 2, "none": 0}[model.norm]


def _norms_before(model: Transformer) -> tuple[int, int]:
    """Norms of a layer around its attention, and around its MLP."""
    around_attention = (model.norms_per_layer + 1) // 2
    return around_attention, model.norms_per_layer - around_attention
