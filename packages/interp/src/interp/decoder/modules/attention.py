"""Causal attention of all families, and the latent attention of DeepSeek."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from interp.circuits.low_rank import LowRank, ov_circuit, qk_circuit
from interp.decoder.modules.cache import Cache
from interp.decoder.modules.settings import Settings
from interp.decoder.modules.weights import Weights

#: The epsilon of the norms inside DeepSeek's latent attention, which no option sets.
_LATENT_EPS = 1e-6


class LatentProjection(nn.Module):
    """A projection of DeepSeek's latent attention, through a narrow layer and a norm.

    The first dimensions of each key head come from `rotary` and are the same for all heads.
    """

    bias = None  # Callers read the bias of any projection.

    def __init__(self, weights: Weights, name: str, part: str, heads: int) -> None:
        super().__init__()
        latent = f"{name}.q" if part == "q" else f"{name}.kv"
        self.down = weights.build_linear(f"{latent}_down")
        gain = weights.build_parameter(f"{latent}_latent_norm.weight")
        self.norm = nn.RMSNorm(len(gain), eps=_LATENT_EPS, device="meta")
        self.norm.weight = gain
        self.up = weights.build_linear(f"{name}.{part}_up")
        self.rotary = weights.build_linear(f"{name}.k_rotary") if part == "k" else None
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """Return the queries, keys or values of all heads, (batch, seq, features)."""
        out: Tensor = self.up(self.norm(self.down(x)))
        return out if self.rotary is None else self._join(self.rotary(x), out, -1)

    def _join(self, shared: Tensor, separate: Tensor, dim: int) -> Tensor:
        """Prepend the shared dimensions to the separate dimensions of each head."""
        heads = separate.unflatten(dim, (self.heads, -1))
        shared = shared.unsqueeze(dim - 1).expand(*heads.shape[:dim], *shared.shape[dim:])
        return torch.cat([shared, heads], dim).flatten(dim - 1, dim)

    @property
    def weight(self) -> Tensor:
        """The product of both projections and the norm's gains, without the norm's division."""
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
    """Causal attention with grouped heads, a sliding window, a cap on scores, and any positions."""

    def __init__(self, weights: Weights, name: str, settings: Settings, layer: int) -> None:
        super().__init__()
        self.settings = settings
        self.layer = layer
        self.window = settings.windows[layer]
        self.heads, self.d_head = settings.heads, settings.d_head
        self.q, self.k, self.v = (self._build_projection(weights, name, part) for part in "qkv")
        self.q_norm = weights.build_norm(f"{name}.q_norm", settings)
        self.k_norm = weights.build_norm(f"{name}.k_norm", settings)
        self.pattern = nn.Identity()
        self.o = weights.build_linear(f"{name}.o")
        #: The logit of each head's sink, which reduces the weight of all keys (gpt-oss), or None.
        self.sinks = None
        if f"{name}.sinks" in weights:
            self.sinks = weights.build_parameter(f"{name}.sinks.weight")
        self.kv_heads = max(1, self.k.out_features // self.d_head)
        sizes = self.q.out_features, self.k.out_features, self.v.out_features, self.o.in_features
        #: The number of values per head, which differs from `d_head` in DeepSeek.
        self.d_value = self.o.in_features // self.heads
        expected = (
            self.heads * self.d_head,
            self.kv_heads * self.d_head,
            self.kv_heads * self.d_value,
            self.heads * self.d_value,
        )
        if sizes != expected or self.heads % self.kv_heads:
            raise ValueError(
                f"{name}: expected q, k, v and the input of o to have {expected} features, for "
                f"{self.heads} heads of {self.d_head} that share {self.kv_heads} key heads evenly, "
                f"got {sizes}; check the number and size of the heads"
            )
        self.rotary = settings.rotary[layer]

    def _build_projection(
        self, weights: Weights, name: str, part: str
    ) -> nn.Linear | LatentProjection:
        if f"{name}.{part}_up" in weights:
            return LatentProjection(weights, name, part, self.heads)
        return weights.build_linear(f"{name}.{part}")

    def forward(
        self,
        x: Tensor,
        padding: Tensor | None = None,
        position: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the sum of the heads' outputs (batch, seq, d_model).

        `position` is added to the input of queries and keys only. With a cache, `padding` and
        `position_ids` also cover the earlier tokens.
        """
        qk_input = x if position is None else x + position
        q, k = self.q(qk_input), self.k(qk_input)
        v = self.v(x)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        scores = self.compute_scores(q, k, padding, position_ids)  # [batch, heads, seq, keys]
        # In half precision, the softmax is computed in float32, as in most families.
        wide = torch.promote_types(scores.dtype, torch.float32)
        pattern = self.pattern(scores.softmax(-1, dtype=wide)[..., : k.shape[1]].to(x.dtype))
        values = self._clip(v).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        values = values.repeat_interleave(self.heads // self.kv_heads, dim=1)
        mixed: Tensor = self.o((pattern @ values).transpose(1, 2).flatten(2))
        return mixed

    def compute_scores(
        self,
        q: Tensor,
        k: Tensor,
        padding: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the input of the softmax, (batch, heads, seq, keys).

        `q` and `k` are activations of the sites q and k. The queries belong to the last keys. If
        `padding` (batch, keys) is True for a key, only the query of the same token attends to it,
        so that no row is empty. `position_ids` (batch, keys) are the positions, by default the
        column indices. A sink adds one column.
        """
        q = self._normalize_heads(self._clip(q), self.q_norm)
        k = self._normalize_heads(self._clip(k), self.k_norm)
        column = torch.arange(k.shape[-2], device=q.device)
        num_earlier = k.shape[-2] - q.shape[-2]
        positions = column if position_ids is None else position_ids[:, None]
        angles = self.select_angles(positions)
        q = self.rotate(q, positions[..., num_earlier:], angles)
        k = self.rotate(k, positions, angles)
        k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)  # [batch, heads, seq, d_head]
        scores = (q @ k.mT) * self.settings.scale
        if self.settings.alibi_slopes:
            slopes = torch.tensor(self.settings.alibi_slopes, dtype=q.dtype, device=q.device)
            distance = positions[..., num_earlier:, None] - positions[..., None, :]
            scores = scores - slopes[:, None, None] * distance
        if cap := self.settings.score_cap:
            scores = (scores / cap).tanh() * cap
        distance_in_columns = column[num_earlier:, None] - column
        hidden = distance_in_columns < 0
        if self.window is not None:
            hidden = hidden | (distance_in_columns >= self.window)
        if padding is not None:
            hidden = hidden | (padding[:, None, None, :] & (distance_in_columns != 0))
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.sinks is None:
            return scores
        return torch.cat([scores, self.sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)

    def _clip(self, x: Tensor) -> Tensor:
        bound = self.settings.clip
        return x if bound is None else x.clamp(-bound, bound)

    def select_angles(self, positions: Tensor) -> tuple[float, ...]:
        """Return the rotary angles of a call whose keys have these positions."""
        # Read the positions only if the angles depend on them, because this synchronizes a GPU.
        if self.rotary.original_length is None:
            return self.rotary.angles
        return self.rotary.compute_angles(int(positions.max()) + 1)

    def rotate(self, x: Tensor, positions: Tensor, angles: tuple[float, ...]) -> Tensor:
        """Rotate the pairs of the first dimensions of `x` (..., seq, d_head) by position.

        Rotated dimensions are also multiplied by `rotary.scale`. `positions` broadcasts to the
        shape of `x` without its last dimension.
        """
        if not angles:
            return x
        half = len(angles)
        # The angles are not a buffer, because .bfloat16() would round them, and position 1,000
        # multiplies the rounding errors.
        per_position = torch.tensor(angles, dtype=torch.float32, device=x.device)
        rotation = positions[..., None].float() * per_position  # [..., seq, half], in radians
        cos = (rotation.cos() * self.rotary.scale).to(x.dtype)
        sin = (rotation.sin() * self.rotary.scale).to(x.dtype)
        rotated, unrotated = x.split([2 * half, x.shape[-1] - 2 * half], dim=-1)
        if self.settings.interleaved:
            left, right = rotated[..., ::2], rotated[..., 1::2]
        else:
            left, right = rotated.chunk(2, dim=-1)
        new_left, new_right = left * cos - right * sin, right * cos + left * sin
        if self.settings.interleaved:
            return torch.cat([torch.stack([new_left, new_right], -1).flatten(-2), unrotated], -1)
        return torch.cat([new_left, new_right, unrotated], -1)

    def qk(self, distance: int = 0) -> LowRank:
        """Return W_QK of the heads for a key `distance` positions before the query.

        The rotary angles are those of texts up to the original length.
        """
        w_k = self.k.weight.unflatten(0, (self.kv_heads, self.d_head))
        # Rotary scores depend only on the difference of positions, so only the key is rotated.
        position = torch.tensor([-distance], device=w_k.device)
        rotated = self.rotate(w_k.mT, position, self.rotary.angles)
        if self.rotary.scale != 1:
            # A rotation by 0 multiplies by `rotary.scale` again, for the query.
            rotated = self.rotate(rotated, torch.zeros_like(position), self.rotary.angles)
        rotated = rotated.mT.flatten(0, 1)
        return qk_circuit(self.q.weight, rotated, heads=self.heads, kv_heads=self.kv_heads)

    def ov(self) -> LowRank:
        """Return W_OV of the heads, without biases."""
        return ov_circuit(self.v.weight, self.o.weight, heads=self.heads, kv_heads=self.kv_heads)

    def _split_heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.d_head)).transpose(1, 2)
        return heads

    def _normalize_heads(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Split `x` into heads, and normalize each head (Qwen 3) or all heads jointly (OLMo 2)."""
        gain = getattr(norm, "weight", None)
        if gain is not None and len(gain) == x.shape[-1]:
            return self._split_heads(norm(x))
        normed: Tensor = norm(self._split_heads(x))
        return normed
