"""One decoder for every family: what GPT-2, Llama, Gemma, OLMo and the others have in common.

    stream -> norm1 -> attention -> attention_out -> + -> norm2 -> mlp -> mlp_out -> +

Where a family has no norm there is an `nn.Identity`, so that the tap names are the same for all:

    embed, position                     what enters the stream
    blocks.*:input, blocks.*            the stream before and after a block
    blocks.*.attention.q, .k, .v        queries, keys, values of all heads (before norms, rotation)
    blocks.*.attention.pattern          (batch, heads, seq, seq), after the softmax
    blocks.*.attention.o:input          z: what the heads have mixed, (batch, seq, heads * d_head)
    blocks.*.attention_out, .mlp_out    what is added to the stream
    norm:input, unembed                 the final stream, the logits (before a cap)

Modules are built around the weights that they are given: nothing is copied or made twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interp.circuits.low_rank import LowRank, ov_circuit, qk_circuit, stacked
from interp.decoder.source import Source
from interp.lens import head_outputs
from interp.tap import record

Module = TypeVar("Module", bound=nn.Module)
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the weights of a decoder do not say by their names and shapes."""

    heads: int
    d_head: int
    scale: float  # of the scores, before the cap
    # For each layer: the angles per position of each rotated pair, () without rotation; the window.
    frequencies: tuple[tuple[float, ...], ...]
    windows: tuple[int | None, ...]
    eps: float = 1e-5
    centered: bool = False  # layer norm, which subtracts the mean, rather than RMS norm
    activation: str = "silu"
    positions_in_attention: bool = False  # learned positions are seen by queries and keys alone
    parallel: bool = False  # the MLP reads the block's input, not the attention's output
    score_cap: float | None = None
    logit_cap: float | None = None
    experts_used: int = 0
    experts_sum_to_one: bool = True
    context: int | None = None  # the most tokens that `describe` has verified, None without a limit


class Weights:
    """Tensors by canonical name; what is left over at the end fitted nowhere."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self.taken = tensors, set[str]()

    def __contains__(self, name: str) -> bool:
        return f"{name}.weight" in self.tensors

    def parameter(self, name: str) -> nn.Parameter:
        """One tensor as a parameter that shares its memory."""
        if name not in self.tensors:
            raise ValueError(f"the decoder has no {name}; found: {', '.join(sorted(self.tensors))}")
        self.taken.add(name)
        return nn.Parameter(self.tensors[name].detach(), requires_grad=False)

    def linear(self, name: str) -> nn.Linear:
        """An `nn.Linear` around a weight and, where there is one, a bias."""
        wide, narrow = self.parameter(f"{name}.weight").shape
        return self._around(name, nn.Linear(narrow, wide, bias=False, device="meta"))

    def embedding(self, name: str) -> nn.Embedding:
        """An `nn.Embedding` around a table."""
        rows, d_model = self.parameter(f"{name}.weight").shape
        return self._around(name, nn.Embedding(rows, d_model, device="meta"))

    def norm(self, name: str, settings: Settings) -> nn.Module:
        """The norm of that name, or the identity where the family has none."""
        if name not in self:
            return nn.Identity()
        size = len(self.parameter(f"{name}.weight"))
        if settings.centered:
            layer = nn.LayerNorm(size, eps=settings.eps, bias=False, device="meta")
            return self._around(name, layer)
        return self._around(name, nn.RMSNorm(size, eps=settings.eps, device="meta"))

    def _around(self, name: str, module: Module) -> Module:
        for kind in ("weight", "bias"):
            if f"{name}.{kind}" in self.tensors:
                module.register_parameter(kind, self.parameter(f"{name}.{kind}"))
        return module


class DecoderAttention(nn.Module):
    """Causal attention with grouped heads, rotary or learned positions, a window and a cap."""

    def __init__(self, weights: Weights, name: str, settings: Settings, layer: int) -> None:
        super().__init__()
        self.settings, self.window = settings, settings.windows[layer]
        self.heads, self.d_head = settings.heads, settings.d_head
        self.q, self.k, self.v = (weights.linear(f"{name}.{part}") for part in "qkv")
        self.q_norm = weights.norm(f"{name}.q_norm", settings)
        self.k_norm = weights.norm(f"{name}.k_norm", settings)
        self.pattern = nn.Identity()
        self.o = weights.linear(f"{name}.o")
        self.kv_heads = max(1, self.k.out_features // self.d_head)
        wide, shared = self.heads * self.d_head, self.kv_heads * self.d_head
        sizes = self.q.out_features, self.k.out_features, self.v.out_features, self.o.in_features
        if sizes != (wide, shared, shared, wide) or self.heads % self.kv_heads:
            raise ValueError(
                f"{name}: q, k, v of {sizes[:3]} features and an output of {sizes[3]} are not "
                f"{self.heads} heads of {self.d_head}, evenly shared"
            )
        # No buffer: .bfloat16() would round it, and at position 1,000 the digits count.
        self.frequencies = settings.frequencies[layer]

    def forward(
        self,
        x: Tensor,
        padding: Tensor | None = None,
        position: Tensor | None = None,
        place: Tensor | None = None,
    ) -> Tensor:
        """Return what the heads add to the stream (batch, seq, d_model)."""
        located = x if position is None else x + position
        v = self._by_head(self.v(x)).repeat_interleave(self.heads // self.kv_heads, dim=1)
        q, k = self.q(located), self.k(located)
        scores = self.scores(q, k, padding, place)  # [batch, heads, seq, seq]
        # Half precision: the sum over keys in float32, as every family does it.
        wide = torch.promote_types(scores.dtype, torch.float32)
        pattern = self.pattern(scores.softmax(-1, dtype=wide).to(x.dtype))
        mixed: Tensor = self.o((pattern @ v).transpose(1, 2).flatten(2))
        return mixed

    def scores(
        self,
        q: Tensor,
        k: Tensor,
        padding: Tensor | None = None,
        place: Tensor | None = None,
    ) -> Tensor:
        """Return the input of the softmax, (batch, heads, seq, seq), from the taps q and k.

        Keys that `padding` (batch, seq) marks True are seen by no query but their own, so that
        no row is empty. `place` (batch, seq) are positions to rotate by, otherwise the columns.
        """
        q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        column = torch.arange(q.shape[-2], device=q.device)
        turn = column if place is None else place[:, None]
        q, k = self.rotate(q, turn), self.rotate(k, turn)
        k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)  # [batch, heads, seq, d_head]
        scores = (q @ k.mT) * self.settings.scale
        if cap := self.settings.score_cap:
            scores = (scores / cap).tanh() * cap
        ago = column[:, None] - column  # how long before the query each key stands
        hidden = ago < 0 if self.window is None else (ago < 0) | (ago >= self.window)
        if padding is not None:
            hidden = hidden | (padding[:, None, None, :] & (ago != 0))
        return scores.masked_fill(hidden, float("-inf"))

    def rotate(self, x: Tensor, place: Tensor) -> Tensor:
        """Turn the pairs (i, i + n/2) of the first n dims (..., seq, d_head) by place * angle.

        `place` is (seq,), or has the dimensions of `x` before the last.
        """
        if not self.frequencies:
            return x
        half = len(self.frequencies)
        angles = torch.tensor(self.frequencies, dtype=torch.float32, device=x.device)
        angle = place[..., None].float() * angles  # [..., seq, half]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        left, right, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], -1)

    def qk(self, distance: int = 0) -> LowRank:
        """W_QK of the heads, for a key that stands `distance` before the query."""
        w_k = self.k.weight.unflatten(0, (self.kv_heads, self.d_head))
        # Both are rotated by their places; only the difference counts, so the key takes it all.
        place = torch.tensor([-distance], device=w_k.device)
        turned = self.rotate(w_k.mT, place).mT.flatten(0, 1)
        return qk_circuit(self.q.weight, turned, heads=self.heads, kv_heads=self.kv_heads)

    def ov(self) -> LowRank:
        """W_OV of the heads."""
        return ov_circuit(self.v.weight, self.o.weight, heads=self.heads, kv_heads=self.kv_heads)

    def _by_head(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.d_head)).transpose(1, 2)
        return heads

    def _normed(self, x: Tensor, norm: nn.Module) -> Tensor:
        """By head, normed over each head (Qwen 3, Gemma 3) or over all of them at once (OLMo 2)."""
        gain = getattr(norm, "weight", None)
        if gain is not None and len(gain) == x.shape[-1]:
            return self._by_head(norm(x))
        normed: Tensor = norm(self._by_head(x))
        return normed


class DecoderMLP(nn.Module):
    """down(act(up x)), or gated: down(act(gate x) * up x)."""

    def __init__(self, weights: Weights, name: str, settings: Settings) -> None:
        super().__init__()
        if settings.activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(f"activation {settings.activation!r} is not one of {known}")
        self.act = ACTIVATIONS[settings.activation]
        self.gate = weights.linear(f"{name}.gate") if f"{name}.gate" in weights else None
        self.up, self.down = weights.linear(f"{name}.up"), weights.linear(f"{name}.down")

    def forward(self, x: Tensor) -> Tensor:
        """Each position by itself."""
        inner = self.act(self.up(x)) if self.gate is None else self.act(self.gate(x)) * self.up(x)
        out: Tensor = self.down(inner)
        return out


class Experts(nn.Module):
    """MLPs of which a router picks some for each token, and one that all tokens may share."""

    def __init__(self, weights: Weights, name: str, settings: Settings) -> None:
        super().__init__()
        self.router = weights.linear(f"{name}.router")
        self.used, self.sum_to_one = settings.experts_used, settings.experts_sum_to_one
        self.experts = nn.ModuleList(
            DecoderMLP(weights, f"{name}.experts.{i}", settings)
            for i in range(self.router.out_features)
        )
        self.shared = self.shared_gate = None
        if f"{name}.shared.up" in weights:
            self.shared = DecoderMLP(weights, f"{name}.shared", settings)
            self.shared_gate = weights.linear(f"{name}.shared_gate")

    def forward(self, x: Tensor) -> Tensor:
        """The chosen experts' outputs, weighed by the router."""
        share, chosen = self.router(x).softmax(-1, dtype=torch.float32).topk(self.used, dim=-1)
        share = share / share.sum(-1, keepdim=True) if self.sum_to_one else share
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            picked = chosen == i  # [batch, seq, used]
            here = picked.any(-1)
            if bool(here.any()):
                out[here] += (share * picked).sum(-1)[here].to(x.dtype)[:, None] * expert(x[here])
        if self.shared is not None and self.shared_gate is not None:
            out = out + self.shared_gate(x).sigmoid() * self.shared(x)
        return out


class NoMLP(nn.Module):
    """What stands for the MLP in a model of attention alone: it adds nothing."""

    def forward(self, x: Tensor) -> Tensor:
        """Zeros."""
        return torch.zeros_like(x)


class DecoderBlock(nn.Module):
    """Attention and MLP, each between a norm before and a norm after, added to the stream."""

    def __init__(self, weights: Weights, layer: int, settings: Settings) -> None:
        super().__init__()
        name = f"blocks.{layer}"
        self.parallel = settings.parallel
        self.norm1 = weights.norm(f"{name}.norm1", settings)
        self.attention = DecoderAttention(weights, f"{name}.attention", settings, layer)
        self.attention_out = weights.norm(f"{name}.attention_out", settings)
        self.norm2 = weights.norm(f"{name}.norm2", settings)
        self.mlp: nn.Module
        if f"{name}.mlp.router" in weights:
            self.mlp = Experts(weights, f"{name}.mlp", settings)
        elif any(".mlp." in known or ".norm2." in known for known in weights.tensors):
            self.mlp = DecoderMLP(weights, f"{name}.mlp", settings)
        else:
            self.mlp = NoMLP()
        self.mlp_out = weights.norm(f"{name}.mlp_out", settings)

    def forward(
        self,
        x: Tensor,
        padding: Tensor | None = None,
        position: Tensor | None = None,
        place: Tensor | None = None,
    ) -> Tensor:
        """Map the stream (batch, seq, d_model) to the stream."""
        attended = x + self.attention_out(self.attention(self.norm1(x), padding, position, place))
        read = x if self.parallel else attended
        out: Tensor = attended + self.mlp_out(self.mlp(self.norm2(read)))
        return out


def _warn_of_tokens_after(padding: Tensor) -> None:
    if bool(((padding.cumsum(-1) > 0) & ~padding).any()):
        warnings.warn(
            "tokens follow padding, and learned positions count padding too unless position_ids "
            "are passed; (attention_mask.cumsum(-1) - 1).clamp(min=0) gives the logits of the "
            "prompt without padding",
            stacklevel=3,
        )


class Decoder(nn.Module):
    """Tokens (batch, seq) to logits (batch, seq, vocabulary); see the tap names above."""

    def __init__(self, tensors: Mapping[str, Tensor], settings: Settings) -> None:
        super().__init__()
        weights = Weights(tensors)
        self.settings = settings
        self.source: Source | None = None  # the model that `describe` was given
        self.embed = weights.embedding("embed")
        self.position = weights.embedding("position") if "position" in weights else None
        layers = len(settings.windows)
        self.blocks = nn.ModuleList(DecoderBlock(weights, i, settings) for i in range(layers))
        self.norm = weights.norm("norm", settings)
        if "unembed" in weights:
            self.unembed = weights.linear("unembed")
        else:
            vocabulary, d_model = self.embed.weight.shape
            self.unembed = nn.Linear(d_model, vocabulary, bias=False, device="meta")
            self.unembed.weight = self.embed.weight
        if left := sorted(tensors.keys() - weights.taken):
            raise ValueError(f"these tensors fit nowhere in the decoder: {', '.join(left)}")
        self.eval()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the tokens.

        `attention_mask` (batch, seq) is 0 at padding. `position_ids` (batch, seq) are the positions
        of learned and rotary positions, by default the columns, as in Hugging Face's models. Pass
        them if tokens follow padding and positions are learned; otherwise a warning is given.
        """
        self.require_fresh()
        self._require_tokens(input_ids)
        padding = None if attention_mask is None else attention_mask == 0
        if padding is not None and padding.shape != input_ids.shape:
            shapes = tuple(padding.shape), tuple(input_ids.shape)
            raise ValueError(f"attention_mask is {shapes[0]}; give {shapes[1]}, as the tokens are")
        if position_ids is not None:
            position_ids = self._checked_positions(position_ids, padding, input_ids)
        x, position = self.embed(input_ids), None
        if self.position is not None:
            if position_ids is None and padding is not None:
                _warn_of_tokens_after(padding)
            columns = torch.arange(input_ids.shape[1], device=input_ids.device)
            position = self.position(columns if position_ids is None else position_ids)
            if not self.settings.positions_in_attention:
                x, position = x + position, None
        for block in self.blocks:
            x = block(x, padding, position, position_ids)
        return self._logits(x)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        # Conversions and moves give this decoder weights of its own.
        source = None if self.source is None else self.source.all_copied()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.source = source
        return self

    def require_fresh(self) -> None:
        """Raise RuntimeError if the described model has changed and this decoder has not."""
        if self.source is not None:
            self.source.require_fresh()

    def _require_tokens(self, tokens: Tensor) -> None:
        if tokens.ndim != 2 or tokens.is_floating_point() or not tokens.numel():
            given = f"{tokens.dtype} {tuple(tokens.shape)}"
            raise ValueError(f"tokens are {given}; give ids (batch, seq), one at least")
        if int(tokens.max()) >= self.embed.num_embeddings or int(tokens.min()) < 0:
            raise ValueError(
                f"token ids reach from {int(tokens.min())} to {int(tokens.max())}; this vocabulary "
                f"has {self.embed.num_embeddings}: is it the tokenizer of another model?"
            )
        length, context = tokens.shape[1], self.settings.context
        if self.position is not None and length > self.position.num_embeddings:
            raise ValueError(f"{length} tokens do not fit {self.position.num_embeddings} positions")
        if context is not None and length > context:
            raise ValueError(
                f"this description was verified with up to {context} tokens, got {length}; "
                f"describe(model, context={length}) verifies more"
            )

    def _checked_positions(
        self, position_ids: Tensor, padding: Tensor | None, tokens: Tensor
    ) -> Tensor:
        """Return the positions (batch, seq); refuse those of several texts in a row."""
        if position_ids.is_floating_point() or position_ids.shape not in (
            tokens.shape,
            (1, tokens.shape[1]),
        ):
            given = f"{position_ids.dtype} {tuple(position_ids.shape)}"
            raise ValueError(f"position_ids are {given}; give integers {tuple(tokens.shape)}")
        position_ids = position_ids.expand(tokens.shape)
        table = self.position.num_embeddings if self.position is not None else None
        lowest, highest = int(position_ids.min()), int(position_ids.max())
        if lowest < 0 or (table is not None and highest >= table):
            raise ValueError(
                f"position_ids reach from {lowest} to {highest}; they must lie within 0 and "
                f"{'the length of the text' if table is None else table - 1}"
            )
        for row, ids in enumerate(position_ids):
            steps = ids.diff() if padding is None else ids[~padding[row]].diff()
            # Without a mask, Hugging Face's models start another text at any other step than 1.
            if bool((steps < 1).any()) or (padding is None and bool((steps > 1).any())):
                raise ValueError(
                    f"position_ids of row {row} are {ids.tolist()}; they must count up by 1 along "
                    "the text (rise, with an attention_mask): packed texts are not supported, give "
                    "each a row of its own"
                )
        return position_ids

    def decode(self, stream: Tensor) -> Tensor:
        """Return the logits of a stream: the final norm, the unembedding and the cap."""
        self.require_fresh()
        return self._logits(stream)

    def _logits(self, stream: Tensor) -> Tensor:
        logits: Tensor = self.unembed(self.norm(stream))
        cap = self.settings.logit_cap
        return logits if cap is None else (logits / cap).tanh() * cap

    @property
    def layers(self) -> list[DecoderBlock]:
        """The blocks under their own type."""
        return cast(list[DecoderBlock], list(self.blocks))

    def qk(self, distance: int = 0) -> LowRank:
        """W_QK of every head, batch (layers, heads); under rotary positions at that distance.

        Without biases, and without the norms of queries and keys where there are any.
        """
        self.require_fresh()
        return stacked([block.attention.qk(distance) for block in self.layers])

    def ov(self) -> LowRank:
        """W_OV of every head without biases, batch (layers, heads)."""
        self.require_fresh()
        return stacked([block.attention.ov() for block in self.layers])

    @torch.no_grad()
    def components(self, tokens: Tensor) -> dict[str, Tensor]:
        """Everything that is added to the stream, by name; the sum is what `norm` reads.

        An attention's output is split into its heads unless a norm follows it.
        """
        outs = ("blocks.*.attention.o:input", "blocks.*.attention_out", "blocks.*.mlp_out")
        sites = ("embed", *(() if self.position is None else ("position",)), *outs)
        with record(self, *sites, clone=True) as seen:
            self(tokens)
        parts = {"embed": seen["embed"]}
        if self.position is not None and not self.settings.positions_in_attention:
            parts["position"] = seen["position"].unsqueeze(0)
        for i, block in enumerate(self.layers):
            o = block.attention.o
            if isinstance(block.attention_out, nn.Identity):
                mixed = seen[f"blocks.{i}.attention.o:input"]
                heads = block.attention.heads
                parts |= head_outputs(mixed, o.weight, heads=heads, prefix=f"head {i}.")
                if o.bias is not None:
                    parts[f"attention bias {i}"] = o.bias.expand(1, 1, -1)
            else:
                parts[f"attention {i}"] = seen[f"blocks.{i}.attention_out"]
            parts[f"mlp {i}"] = seen[f"blocks.{i}.mlp_out"]
        return parts
