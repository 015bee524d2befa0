"""The settings of a decoder, and the comparisons with the described model that it passed."""

from __future__ import annotations

from dataclasses import dataclass

from interp.decoder.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Properties of a decoder that the names and shapes of its weights do not determine."""

    #: The number of query heads per layer.
    heads: int
    #: The number of features of each query and key.
    d_head: int
    #: The scale of the scores, before the cap.
    scale: float
    #: The rotary positions of each layer.
    rotary: tuple[Rotary, ...]
    #: For each layer, the size of the sliding window, or None.
    windows: tuple[int | None, ...]
    #: The epsilon of all norms, except those inside latent attention.
    eps: float = 1e-5
    #: True for layer norm, which subtracts the mean; False for RMS norm.
    centered: bool = False
    #: True if the norms have no weights (OLMo 1).
    bare_norms: bool = False
    activation: str = "silu"
    #: True if rotated pairs are (2i, 2i + 1), as in GPT-J; False for (i, i + n / 2).
    interleaved: bool = False
    #: The slope of each head's linear position bias (ALiBi); () without a bias.
    alibi_slopes: tuple[float, ...] = ()
    #: True if learned positions are added to the inputs of queries and keys only.
    positions_in_attention: bool = False
    #: True if default positions do not count padding (OPT, Bloom); False for column indices.
    positions_skip_padding: bool = False
    #: True if the MLP reads the block's input instead of the stream after the attention.
    parallel: bool = False
    #: If not None, scores become cap * tanh(scores / cap) (Gemma 2).
    score_cap: float | None = None
    #: If not None, logits become cap * tanh(logits / cap) (Gemma 2).
    logit_cap: float | None = None
    #: The largest absolute value of queries, keys and values, which are clamped (OLMo 1).
    clip: float | None = None
    #: The bound of gate and up projections (gpt-oss); 1 is then also added to the up projection.
    mlp_clip: float | None = None
    #: The number of experts per token; 0 without experts.
    experts_used: int = 0
    #: True if the weights of the chosen experts are divided by their sum.
    experts_sum_to_one: bool = True
    #: The scale of the chosen experts' outputs.
    experts_scale: float = 1.0
    #: The number of groups of experts (DeepSeek).
    expert_groups: int = 1
    #: The number of groups that a token may use.
    expert_groups_used: int = 1
    #: The function that is applied to router logits: "sigmoid" (DeepSeek V3) or "softmax".
    router: str = "softmax"
    #: True if the router multiplies in float32 (DeepSeek).
    router_in_float32: bool = False
    #: The largest number of tokens that `describe` has verified, or None without a limit.
    context: int | None = None


@dataclass(frozen=True)
class Comparison:
    """One comparison of a decoder with the described model, under random weights."""

    #: The name, such as "padded"; see `interp.decoder.verify`.
    name: str
    #: The number of tokens.
    length: int
    #: The largest RMS error of a position's logits, divided by the standard deviation of all
    #: logits.
    error: float
    #: The largest accepted error.
    tolerance: float
