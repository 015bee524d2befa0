"""One decoder-only transformer for all families: GPT-2, Llama, Gemma, DeepSeek and others.

    stream -> norm1 -> attention -> attention_out -> + -> norm2 -> mlp -> mlp_out -> +

A norm that a family does not have is an `nn.Identity`, so that all families have the same sites:

    embed, position                     the token and position embeddings
    blocks.*:input, blocks.*            the residual stream before and after a block
    blocks.*.attention.q, .k, .v        queries, keys, values of all heads, before norms, rotation
    blocks.*.attention.pattern          (batch, heads, seq, seq), after the softmax
    blocks.*.attention.o:input          z, the mixed values (batch, seq, heads * d_head)
    blocks.*.attention_out, .mlp_out    the outputs that are added to the stream
    norm:input, unembed                 the final stream, the logits (before a cap)

Modules share the memory of the weights that they are built from.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interp.circuits.low_rank import LowRank, ov_circuit, qk_circuit, stack_layers
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
    "quick_gelu": lambda x: x * (1.702 * x).sigmoid(),
    "relu": F.relu,
}
#: The epsilon of the norms inside DeepSeek's latent attention, which has no option.
_LATENT_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Properties of a decoder that the names and shapes of its weights do not determine."""

    heads: int
    d_head: int
    #: The factor of the scores, before the cap.
    scale: float
    #: For each layer, the angle per position of each rotated pair; () without rotary positions.
    frequencies: tuple[tuple[float, ...], ...]
    #: For each layer, the size of the sliding window, or None.
    windows: tuple[int | None, ...]
    eps: float = 1e-5
    #: True for layer norm, which subtracts the mean; False for RMS norm.
    centered: bool = False
    #: True if the norms have no weights (OLMo 1).
    bare_norms: bool = False
    activation: str = "silu"
    #: The same for texts of more than `long_after` tokens (LongRoPE); () if they do not change.
    long_frequencies: tuple[tuple[float, ...], ...] = ()
    long_after: int = 0
    #: For each layer, the factor of rotated queries and keys (YaRN); () for 1.
    rotary_scales: tuple[float, ...] = ()
    #: True if rotated pairs are (2i, 2i + 1), as in GPT-J; False for (i, i + n / 2).
    interleaved: bool = False
    #: The slope of each head's linear position bias (ALiBi); () without one.
    alibi_slopes: tuple[float, ...] = ()
    #: True if learned positions are added to the inputs of queries and keys only.
    positions_in_attention: bool = False
    #: True if default positions do not count padding (OPT, Bloom); False if they are the columns.
    positions_skip_padding: bool = False
    #: True if the MLP reads the block's input instead of the stream after the attention.
    parallel: bool = False
    score_cap: float | None = None
    logit_cap: float | None = None
    #: The bound of queries, keys and values (OLMo 1).
    clip: float | None = None
    #: The bound of the gate and up projections of gpt-oss, which also adds 1 to the latter.
    mlp_clip: float | None = None
    experts_used: int = 0
    experts_sum_to_one: bool = True
    #: The factor of the chosen experts' outputs.
    experts_scale: float = 1.0
    #: The number of groups of experts, and of those that a token may use (DeepSeek).
    expert_groups: int = 1
    expert_groups_used: int = 1
    #: "sigmoid" (DeepSeek V3), or "softmax".
    router: str = "softmax"
    #: True if the router multiplies in float32 (DeepSeek).
    router_in_float32: bool = False
    #: The largest number of tokens that `describe` has verified, None without a limit.
    context: int | None = None


@dataclass(frozen=True)
class Comparison:
    """One comparison of a description with its model, under random weights."""

    #: The weights that were drawn, or "padded"; see `interp.decoder.verify`.
    name: str
    #: The number of tokens.
    length: int
    #: The largest deviation of a position's logits, relative to the size of all logits.
    error: float
    tolerance: float


class Cache:
    """Keys and values of earlier tokens, so that `Decoder` is called with the new tokens only.

    Keys are stored before their norm and rotation. A call that raises an error adds nothing.
    """

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.grown: dict[int, tuple[Tensor, Tensor]] = {}
        #: The positions of all tokens, (batch, tokens), once there are any.
        self.position_ids: Tensor | None = None

    def get_seq_length(self) -> int:
        """Return the number of tokens."""
        return 0 if self.position_ids is None else self.position_ids.shape[1]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values (batch, tokens, features) of all tokens in a layer."""
        if layer in self.layers:
            k, v = (torch.cat(pair, 1) for pair in zip(self.layers[layer], (k, v), strict=True))
        self.grown[layer] = k, v
        return k, v

    def commit(self, position_ids: Tensor) -> None:
        """Store the keys and values of a call that reached the last layer."""
        self.layers, self.position_ids = self.grown, position_ids
        self.grown = {}


class Weights:
    """Tensors by canonical name, with a record of the names that were used."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return f"{name}.weight" in self.tensors

    def parameter(self, name: str) -> nn.Parameter:
        """Return a tensor as a parameter that shares its memory."""
        if name not in self.tensors:
            names = ", ".join(sorted(self.tensors))
            raise ValueError(f"the decoder has no {name}; found: {names}")
        self.used.add(name)
        return nn.Parameter(self.tensors[name].detach(), requires_grad=False)

    def linear(self, name: str) -> nn.Linear:
        """Return an `nn.Linear` that shares a weight and, if there is one, a bias."""
        out_features, in_features = self.parameter(f"{name}.weight").shape
        linear = nn.Linear(in_features, out_features, bias=False, device="meta")
        return self._share_memory(name, linear)

    def embedding(self, name: str) -> nn.Embedding:
        """Return an `nn.Embedding` that shares a table."""
        rows, d_model = self.parameter(f"{name}.weight").shape
        return self._share_memory(name, nn.Embedding(rows, d_model, device="meta"))

    def norm(self, name: str, settings: Settings) -> nn.Module:
        """Return the norm of that name, or the identity if the family does not have it."""
        if f"{name}.0" in self:
            heads = [key for key in self.tensors if re.fullmatch(rf"{name}\.\d+\.weight", key)]
            return HeadNorms(self.norm(f"{name}.{i}", settings) for i in range(len(heads)))
        if name not in self:
            return nn.Identity()
        size = len(self.parameter(f"{name}.weight"))
        if settings.centered:
            layer = nn.LayerNorm(size, eps=settings.eps, bias=False, device="meta")
            return self._share_memory(name, layer)
        return self._share_memory(name, nn.RMSNorm(size, eps=settings.eps, device="meta"))

    def stream_norm(self, name: str, settings: Settings) -> nn.Module:
        """Return a norm of the residual stream, which may have no weights."""
        if not settings.bare_norms:
            return self.norm(name, settings)
        d_model = self.tensors["embed.weight"].shape[1]
        if settings.centered:
            return nn.LayerNorm(d_model, eps=settings.eps, elementwise_affine=False)
        return nn.RMSNorm(d_model, eps=settings.eps, elementwise_affine=False)

    def _share_memory(self, name: str, module: Module) -> Module:
        for kind in ("weight", "bias"):
            if f"{name}.{kind}" in self.tensors:
                module.register_parameter(kind, self.parameter(f"{name}.{kind}"))
        return module


class HeadNorms(nn.ModuleList):
    """A separate norm for each head (Cohere, StableLM)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed heads (batch, heads, seq, d_head)."""
        return torch.stack([norm(x[:, i]) for i, norm in enumerate(self)], 1)


class Latent(nn.Module):
    """A projection through a narrow, normed layer: the latent attention of DeepSeek.

    The first dimensions of each head of keys come from `rotary` and are the same for all heads.
    """

    bias = None

    def __init__(self, weights: Weights, name: str, part: str, heads: int) -> None:
        super().__init__()
        narrow = f"{name}.q" if part == "q" else f"{name}.kv"
        self.down = weights.linear(f"{narrow}_down")
        gain = weights.parameter(f"{narrow}_latent_norm.weight")
        self.norm = nn.RMSNorm(len(gain), eps=_LATENT_EPS, device="meta")
        self.norm.weight = gain
        self.up = weights.linear(f"{name}.{part}_up")
        self.rotary = weights.linear(f"{name}.k_rotary") if part == "k" else None
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """Return queries, keys or values (batch, seq, features)."""
        out: Tensor = self.up(self.norm(self.down(x)))
        return out if self.rotary is None else self._join(self.rotary(x), out, -1)

    def _join(self, shared: Tensor, separate: Tensor, dim: int) -> Tensor:
        """Put the shared dimensions in front of the separate ones of each head."""
        heads = separate.unflatten(dim, (self.heads, -1))
        shared = shared.unsqueeze(dim - 1).expand(*heads.shape[:dim], *shared.shape[dim:])
        return torch.cat([shared, heads], dim).flatten(dim - 1, dim)

    @property
    def weight(self) -> Tensor:
        """The product of the projections, without the scale of the norm."""
        product = self.up.weight @ (self.norm.weight[:, None] * self.down.weight)
        return product if self.rotary is None else self._join(self.rotary.weight, product, -2)

    @property
    def out_features(self) -> int:
        """The number of features of all heads."""
        shared = 0 if self.rotary is None else self.heads * self.rotary.out_features
        return self.up.out_features + shared

    @property
    def readers(self) -> list[nn.Linear]:
        """The linear layers that read the stream."""
        return [self.down] if self.rotary is None else [self.down, self.rotary]


class DecoderAttention(nn.Module):
    """Causal attention with grouped heads, a sliding window, a cap, and any kind of positions."""

    def __init__(self, weights: Weights, name: str, settings: Settings, layer: int) -> None:
        super().__init__()
        self.settings, self.layer = settings, layer
        self.window = settings.windows[layer]
        self.heads, self.d_head = settings.heads, settings.d_head
        self.q, self.k, self.v = (self._projection(weights, name, part) for part in "qkv")
        self.q_norm = weights.norm(f"{name}.q_norm", settings)
        self.k_norm = weights.norm(f"{name}.k_norm", settings)
        self.pattern = nn.Identity()
        self.o = weights.linear(f"{name}.o")
        #: The logit of each head's sink, which takes weight from all keys (gpt-oss), or None.
        self.sinks = None
        if f"{name}.sinks" in weights:
            self.sinks = weights.parameter(f"{name}.sinks.weight")
        self.kv_heads = max(1, self.k.out_features // self.d_head)
        sizes = self.q.out_features, self.k.out_features, self.v.out_features, self.o.in_features
        #: The width of a head's values, which differs from `d_head` in DeepSeek.
        self.d_value = sizes[3] // self.heads
        expected = (
            self.heads * self.d_head,
            self.kv_heads * self.d_head,
            self.kv_heads * self.d_value,
            self.heads * self.d_value,
        )
        if sizes != expected or self.heads % self.kv_heads:
            raise ValueError(
                f"{name}: q, k, v of {sizes[:3]} features and an output of {sizes[3]} are not "
                f"{self.heads} heads of {self.d_head}, evenly shared"
            )
        # Not a buffer: .bfloat16() would round the angles, which matters at position 1,000.
        self.frequencies = self.long_frequencies = settings.frequencies[layer]
        if settings.long_frequencies:
            self.long_frequencies = settings.long_frequencies[layer]
        self.rotary_scale = settings.rotary_scales[layer] if settings.rotary_scales else 1.0

    def _projection(self, weights: Weights, name: str, part: str) -> nn.Linear | Latent:
        if f"{name}.{part}_up" in weights:
            return Latent(weights, name, part, self.heads)
        return weights.linear(f"{name}.{part}")

    def forward(
        self,
        x: Tensor,
        padding: Tensor | None = None,
        position: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the sum of the heads' outputs (batch, seq, d_model).

        With a cache, `padding` and `position_ids` are those of all tokens.
        """
        located = x if position is None else x + position
        q, k = self.q(located), self.k(located)
        v = self.v(x)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        scores = self.scores(q, k, padding, position_ids)  # [batch, heads, seq, keys]
        # Half precision: the sum over keys is computed in float32, as in every family.
        wide = torch.promote_types(scores.dtype, torch.float32)
        pattern = self.pattern(scores.softmax(-1, dtype=wide)[..., : k.shape[1]].to(x.dtype))
        values = self._clip(v).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        values = values.repeat_interleave(self.heads // self.kv_heads, dim=1)
        mixed: Tensor = self.o((pattern @ values).transpose(1, 2).flatten(2))
        return mixed

    def scores(
        self,
        q: Tensor,
        k: Tensor,
        padding: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the input of the softmax, (batch, heads, seq, keys), from the sites q and k.

        Queries are those of the last keys. Keys where `padding` (batch, keys) is True are visible
        to their own query only, so that no row is empty. `position_ids` (batch, keys) are the
        positions, by default the columns. A sink is one more column.
        """
        q = self._norm_heads(self._clip(q), self.q_norm)
        k = self._norm_heads(self._clip(k), self.k_norm)
        column = torch.arange(k.shape[-2], device=q.device)
        first = k.shape[-2] - q.shape[-2]
        positions = column if position_ids is None else position_ids[:, None]
        is_long = bool(self.settings.long_after) and self._is_long(positions)
        q = self.rotate(q, positions[..., first:], is_long=is_long)
        k = self.rotate(k, positions, is_long=is_long)
        k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)  # [batch, heads, seq, d_head]
        scores = (q @ k.mT) * self.settings.scale
        if self.settings.alibi_slopes:
            slopes = torch.tensor(self.settings.alibi_slopes, dtype=q.dtype, device=q.device)
            distance = positions[..., first:, None] - positions[..., None, :]
            scores = scores - slopes[:, None, None] * distance
        if cap := self.settings.score_cap:
            scores = (scores / cap).tanh() * cap
        columns_back = column[first:, None] - column
        hidden = columns_back < 0
        if self.window is not None:
            hidden = hidden | (columns_back >= self.window)
        if padding is not None:
            hidden = hidden | (padding[:, None, None, :] & (columns_back != 0))
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.sinks is None:
            return scores
        return torch.cat([scores, self.sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)

    def _is_long(self, positions: Tensor) -> bool:
        return int(positions.max()) + 1 > self.settings.long_after

    def _clip(self, x: Tensor) -> Tensor:
        bound = self.settings.clip
        return x if bound is None else x.clamp(-bound, bound)

    def rotate(self, x: Tensor, positions: Tensor, *, is_long: bool = False) -> Tensor:
        """Rotate the pairs of the first dimensions of `x` (..., seq, d_head) by their positions.

        `positions` is (seq,), or has the dimensions of `x` before the last.
        """
        if not self.frequencies:
            return x
        half = len(self.frequencies)
        frequencies = self.long_frequencies if is_long else self.frequencies
        angles = torch.tensor(frequencies, dtype=torch.float32, device=x.device)
        angle = positions[..., None].float() * angles  # [..., seq, half]
        cos = (angle.cos() * self.rotary_scale).to(x.dtype)
        sin = (angle.sin() * self.rotary_scale).to(x.dtype)
        rotated, rest = x.split([2 * half, x.shape[-1] - 2 * half], dim=-1)
        if self.settings.interleaved:
            left, right = rotated[..., ::2], rotated[..., 1::2]
        else:
            left, right = rotated.chunk(2, dim=-1)
        new_left, new_right = left * cos - right * sin, right * cos + left * sin
        if self.settings.interleaved:
            return torch.cat([torch.stack([new_left, new_right], -1).flatten(-2), rest], -1)
        return torch.cat([new_left, new_right, rest], -1)

    def qk(self, distance: int = 0) -> LowRank:
        """Return W_QK of the heads for a key `distance` positions before the query.

        LongRoPE's angles are those of texts within the original length.
        """
        w_k = self.k.weight.unflatten(0, (self.kv_heads, self.d_head))
        # Rotary scores depend on the difference of positions only: the key is rotated by all of it.
        position = torch.tensor([-distance], device=w_k.device)
        rotated = self.rotate(w_k.mT, position)
        if self.rotary_scale != 1:
            # The query is scaled too.
            rotated = self.rotate(rotated, torch.zeros_like(position))
        rotated = rotated.mT.flatten(0, 1)
        return qk_circuit(self.q.weight, rotated, heads=self.heads, kv_heads=self.kv_heads)

    def ov(self) -> LowRank:
        """Return W_OV of the heads."""
        return ov_circuit(self.v.weight, self.o.weight, heads=self.heads, kv_heads=self.kv_heads)

    def _split_heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.d_head)).transpose(1, 2)
        return heads

    def _norm_heads(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Split into heads and apply the norm: to each head (Qwen 3) or to all (OLMo 2)."""
        gain = getattr(norm, "weight", None)
        if gain is not None and len(gain) == x.shape[-1]:
            return self._split_heads(norm(x))
        normed: Tensor = norm(self._split_heads(x))
        return normed


class DecoderMLP(nn.Module):
    """The MLP down(act(up x)), or the gated MLP down(act(gate x) * up x)."""

    def __init__(self, weights: Weights, name: str, settings: Settings) -> None:
        super().__init__()
        if settings.activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(f"activation {settings.activation!r} is not one of {known}")
        self.act, self.clip = ACTIVATIONS[settings.activation], settings.mlp_clip
        self.gate = weights.linear(f"{name}.gate") if f"{name}.gate" in weights else None
        self.up, self.down = weights.linear(f"{name}.up"), weights.linear(f"{name}.down")

    def forward(self, x: Tensor) -> Tensor:
        """Map each position (..., d_model) separately."""
        up = self.up(x)
        if self.gate is None:
            inner = self.act(up)
        elif self.clip is None:
            inner = self.act(self.gate(x)) * up
        else:
            inner = self.act(self.gate(x).clamp(max=self.clip)) * (
                up.clamp(-self.clip, self.clip) + 1
            )
        out: Tensor = self.down(inner)
        return out


class Experts(nn.Module):
    """A mixture of experts: a router chooses MLPs per token, and one MLP may serve all tokens."""

    def __init__(self, weights: Weights, name: str, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.router = weights.linear(f"{name}.router")
        #: Added to the probabilities when experts are chosen, but not to their weights.
        self.correction = None
        if f"{name}.correction.bias" in weights.tensors:
            self.correction = weights.parameter(f"{name}.correction.bias")
        self.experts = nn.ModuleList(
            DecoderMLP(weights, f"{name}.experts.{i}", settings)
            for i in range(self.router.out_features)
        )
        self.shared = self.shared_gate = None
        if f"{name}.shared.up" in weights:
            self.shared = DecoderMLP(weights, f"{name}.shared", settings)
            if f"{name}.shared_gate" in weights:
                self.shared_gate = weights.linear(f"{name}.shared_gate")

    def forward(self, x: Tensor) -> Tensor:
        """Return the chosen experts' outputs, weighted by the router."""
        weights, chosen = self._choose(x)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            is_chosen = chosen == i  # [batch, seq, used]
            tokens = is_chosen.any(-1)
            if bool(tokens.any()):
                weight = (weights * is_chosen).sum(-1)[tokens].to(x.dtype)
                out[tokens] += weight[:, None] * expert(x[tokens])
        if self.shared is not None:
            gate = 1.0 if self.shared_gate is None else self.shared_gate(x).sigmoid()
            out = out + gate * self.shared(x)
        return out

    def _choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the indices of each token's experts, (batch, seq, used)."""
        options = self.settings
        if options.router_in_float32 and x.dtype != torch.float32:
            logits = F.linear(x.float(), self.router.weight.float())
        else:
            logits = self.router(x)
        is_sigmoid = options.router == "sigmoid"
        probabilities = logits.sigmoid() if is_sigmoid else logits.softmax(-1, dtype=torch.float32)
        ranked = probabilities if self.correction is None else probabilities + self.correction
        if options.expert_groups > 1:
            groups = ranked.unflatten(-1, (options.expert_groups, -1))
            # DeepSeek V3 ranks a group by its two best experts, V2 by the best.
            best = groups.topk(2 if is_sigmoid else 1, dim=-1).values.sum(-1)
            used = best.topk(options.expert_groups_used, dim=-1).indices
            is_hidden = torch.ones_like(best, dtype=torch.bool).scatter(-1, used, False)
            ranked = groups.masked_fill(is_hidden[..., None], float("-inf")).flatten(-2)
        chosen = ranked.topk(options.experts_used, dim=-1).indices
        weights = probabilities.gather(-1, chosen)
        if options.experts_sum_to_one:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * options.experts_scale, chosen


class NoMLP(nn.Module):
    """A placeholder for the MLP of an attention-only model. It adds zeros."""

    def forward(self, x: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(x)


class DecoderBlock(nn.Module):
    """Attention and MLP, each with a norm before and a norm after, added to the stream."""

    def __init__(self, weights: Weights, layer: int, settings: Settings) -> None:
        super().__init__()
        name = f"blocks.{layer}"
        self.parallel = settings.parallel
        self.norm1 = weights.stream_norm(f"{name}.norm1", settings)
        self.attention = DecoderAttention(weights, f"{name}.attention", settings, layer)
        self.attention_out = weights.norm(f"{name}.attention_out", settings)
        # Parallel blocks with one norm (Phi, GPT-J, Cohere) use it for attention and MLP.
        is_shared = settings.parallel and f"{name}.norm2" not in weights
        norm2 = f"{name}.norm1" if is_shared else f"{name}.norm2"
        self.norm2 = weights.stream_norm(norm2, settings)
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
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Map the residual stream (batch, seq, d_model) to the stream after the block."""
        heads = self.attention(self.norm1(x), padding, position, position_ids, cache)
        after_attention = x + self.attention_out(heads)
        mlp_input = x if self.parallel else after_attention
        out: Tensor = after_attention + self.mlp_out(self.mlp(self.norm2(mlp_input)))
        return out


def _warn_if_tokens_follow(padding: Tensor) -> None:
    if bool(((padding.cumsum(-1) > 0) & ~padding).any()):
        warnings.warn(
            "tokens follow padding, and learned positions count padding too unless position_ids "
            "are passed; (attention_mask.cumsum(-1) - 1).clamp(min=0) gives the logits of the "
            "prompt without padding",
            stacklevel=3,
        )


def _require_one_text_per_row(position_ids: Tensor, padding: Tensor | None) -> None:
    """Raise ValueError if a row of positions (batch, seq) packs several texts."""
    for row, ids in enumerate(position_ids):
        steps = ids.diff() if padding is None else ids[~padding[row]].diff()
        # Without a mask, Hugging Face's models start another text at any step other than 1.
        if bool((steps < 1).any()) or (padding is None and bool((steps > 1).any())):
            raise ValueError(
                f"position_ids of row {row} are {ids.tolist()}; they must count up by 1 along "
                "the text (increase, with an attention_mask): packed texts are not supported, "
                "pass one text per row"
            )


class Decoder(nn.Module):
    """A decoder from tokens (batch, seq) to logits (batch, seq, vocabulary)."""

    def __init__(self, tensors: Mapping[str, Tensor], settings: Settings) -> None:
        super().__init__()
        weights = Weights(tensors)
        self.settings = settings
        #: The model that `describe` was called with.
        self.source: Source | None = None
        #: The comparisons with that model that this description passed.
        self.comparisons: tuple[Comparison, ...] = ()
        self.embed = weights.embedding("embed")
        self.embed_norm = weights.norm("embed_norm", settings)
        self.position = weights.embedding("position") if "position" in weights else None
        layers = len(settings.windows)
        self.blocks = nn.ModuleList(DecoderBlock(weights, i, settings) for i in range(layers))
        self.norm = weights.stream_norm("norm", settings)
        if "unembed" in weights:
            self.unembed = weights.linear("unembed")
        else:
            vocabulary, d_model = self.embed.weight.shape
            self.unembed = nn.Linear(d_model, vocabulary, bias=False, device="meta")
            self.unembed.weight = self.embed.weight
        if unused := sorted(tensors.keys() - weights.used):
            raise ValueError(f"these tensors fit nowhere in the decoder: {', '.join(unused)}")
        self.eval()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the logits of the tokens.

        `attention_mask` (batch, seq) is 0 at padding. `position_ids` (batch, seq) are the positions
        of learned and rotary positions. Their default is that of the family in Hugging Face: the
        columns, or the number of earlier tokens that are not padding (OPT, Bloom). Pass them if
        tokens follow padding and positions are learned; otherwise a warning is issued.

        With a `cache` of earlier tokens, `attention_mask` covers these tokens too, and the new
        tokens are added to the cache.
        """
        self.require_fresh()
        past = 0 if cache is None else cache.get_seq_length()
        self._require_tokens(input_ids, past)
        padding = None if attention_mask is None else attention_mask == 0
        if padding is not None and padding.shape != (len(input_ids), past + input_ids.shape[1]):
            raise ValueError(
                f"attention_mask is {tuple(padding.shape)}; pass "
                f"{(len(input_ids), past + input_ids.shape[1])}, the shape of the tokens"
                + (" and those in the cache" if past else "")
            )
        positions = self.positions(input_ids, padding, position_ids, cache)
        x, position = self.embed_norm(self.embed(input_ids)), None
        if self.position is not None:
            columns = torch.arange(input_ids.shape[1], device=input_ids.device)
            position = self.position(columns if positions is None else positions[:, past:])
            if not self.settings.positions_in_attention:
                x, position = x + position, None
        for block in self.blocks:
            x = block(x, padding, position, positions, cache)
        if cache is not None and positions is not None:
            cache.commit(positions)
        return self._logits(x)

    def positions(
        self,
        tokens: Tensor,
        padding: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor | None:
        """Return the positions of all tokens, (batch, tokens), or None for the columns."""
        earlier = None if cache is None else cache.position_ids
        new: Tensor | None = None
        if position_ids is not None:
            new = self._new_positions(position_ids, tokens)
        elif padding is not None and self.settings.positions_skip_padding:
            return ((~padding).cumsum(-1) - 1).clamp(min=0)
        elif cache is not None:
            new = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
            new = new if earlier is None else new + earlier[:, -1:] + 1
        is_default = position_ids is None and earlier is None
        if is_default and padding is not None and self.position is not None:
            _warn_if_tokens_follow(padding)
        if new is not None and earlier is not None:
            new = torch.cat([earlier, new], 1)
        if new is not None and position_ids is not None:
            _require_one_text_per_row(new, padding)
        return new

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        # Conversions and moves copy the weights, which then no longer follow the described model.
        source = None if self.source is None else self.source.all_copied()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.source = source
        return self

    def require_fresh(self) -> None:
        """Raise RuntimeError if the described model has changed and this decoder has not."""
        if self.source is not None:
            self.source.require_fresh()

    def _require_tokens(self, tokens: Tensor, past: int) -> None:
        if tokens.ndim != 2 or tokens.is_floating_point() or not tokens.numel():
            raise ValueError(
                f"tokens are {tokens.dtype} {tuple(tokens.shape)}; pass at least one id, in a "
                "tensor of integers (batch, seq)"
            )
        if int(tokens.max()) >= self.embed.num_embeddings or int(tokens.min()) < 0:
            raise ValueError(
                f"token ids reach from {int(tokens.min())} to {int(tokens.max())}; this vocabulary "
                f"has {self.embed.num_embeddings}: is it the tokenizer of another model?"
            )
        length, context = past + tokens.shape[1], self.settings.context
        if self.position is not None and length > self.position.num_embeddings:
            raise ValueError(
                f"expected at most {self.position.num_embeddings} tokens, the number of learned "
                f"positions, got {length}; pass a shorter text"
            )
        if context is not None and length > context:
            raise ValueError(
                f"this description was verified with up to {context} tokens, got {length}; "
                f"describe(model, context={length}) verifies more"
            )

    def _new_positions(self, position_ids: Tensor, tokens: Tensor) -> Tensor:
        """Return the positions of the tokens, (batch, seq)."""
        if position_ids.is_floating_point() or position_ids.shape not in (
            tokens.shape,
            (1, tokens.shape[1]),
        ):
            raise ValueError(
                f"position_ids are {position_ids.dtype} {tuple(position_ids.shape)}; pass "
                f"integers {tuple(tokens.shape)}"
            )
        table = self.position.num_embeddings if self.position is not None else None
        lowest, highest = int(position_ids.min()), int(position_ids.max())
        if lowest < 0 or (table is not None and highest >= table):
            raise ValueError(
                f"position_ids reach from {lowest} to {highest}; they must be within 0 and "
                f"{'the length of the text' if table is None else table - 1}"
            )
        return position_ids.expand(tokens.shape)

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
        """The blocks as `DecoderBlock` modules, for type checkers."""
        return cast(list[DecoderBlock], list(self.blocks))

    def qk(self, distance: int = 0) -> LowRank:
        """Return W_QK of every head, batch (layers, heads), for keys `distance` positions back.

        Biases, norms of queries and keys, and ALiBi are not included.
        """
        self.require_fresh()
        return stack_layers([block.attention.qk(distance) for block in self.layers])

    def ov(self) -> LowRank:
        """Return W_OV of every head without biases, batch (layers, heads)."""
        self.require_fresh()
        return stack_layers([block.attention.ov() for block in self.layers])

    @torch.no_grad()
    def components(self, prompt: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all terms of the residual stream by name; they sum to the input of `norm`.

        `prompt` are tokens or keyword arguments of `forward`. An attention's output is split into
        heads unless a norm follows it.
        """
        outputs = ("blocks.*.attention.o:input", "blocks.*.attention_out", "blocks.*.mlp_out")
        sites = ["embed_norm", *outputs]
        if self.position is not None:
            sites.append("position")
        with record(self, *sites, clone=True) as seen:
            if isinstance(prompt, Tensor):
                self(prompt)
            else:
                self(**prompt)
        parts = {"embed": seen["embed_norm"]}
        if self.position is not None and not self.settings.positions_in_attention:
            parts["position"] = seen["position"].expand(parts["embed"].shape)
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
