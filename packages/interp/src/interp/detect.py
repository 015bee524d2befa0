"""Detection of previous-token, duplicate-token, induction and other kinds of heads.

The score of a head is its mean attention to the target keys of a kind:

    previous    the previous token
    duplicate   earlier occurrences of the current token
    induction   the tokens after earlier occurrences of the current token
    first       the first token, a frequent attention sink
    current     the current token

The mean is over all queries that have a target key. `chance` is the score of uniform attention to
the current and all earlier tokens. Padding is neither a query nor a key. Some head always has the
best score of a kind, even by chance, so each score has a p-value. The p-value is an upper bound of
the probability that any head attends as much to its target keys if keys are permuted. In this
bound, each cluster of queries counts once.

Olsson et al. 2022, "In-context Learning and Induction Heads".

Note [Clusters of queries]
Queries of equal tokens are not independent observations: copies of a prompt, common prefixes and
repeated tokens repeat the same choice of a head. The queries of each distinct token therefore form
a cluster c that counts once, with its mean x_c. Queries at the same position of several prompts are
not independent either, if a head attends by position. The queries are therefore clustered by token
and by position, and the p-value is the larger of the two. A significant score needs several
tokens and several positions. (For `first`, all queries of a prompt have the same target, so the
prompts that start with the same two tokens form one cluster.) Nothing is assumed about the
dependence within a cluster or among a query's m target keys. Because exp is convex,
E exp(t x_c) <= mean over q in c of mean_k exp(t m A_qk) for any t > 0, and by Chernoff's bound

    p <= heads * min_t prod_c (mean over q in c of mean_k exp(t m A_qk)) / exp(t sum_c x_c)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from interp.prompts import Prompt, as_prompt, get_mask, get_tokens, require_hidden_padding
from interp.text import Texts, Tokenizer

#: The largest p-value of a head that is not noise.
_SIGNIFICANCE = 0.05
#: The values of t at which the bound of the p-value is computed; see Note [Clusters of queries].
_EXPONENTS = (0.1, 0.3, 0.7, 2.0, 4.0, 8.0, 20.0, 70.0, 300.0)
#: The smallest (score - chance) / (1 - chance) of a head that is not noise.
_MIN_EFFECT = 0.1


@dataclass(frozen=True)
class DetectedHead:
    """One head and its score for one kind."""

    kind: str
    #: The name of the pattern that was passed, or its index.
    name: str
    #: The index of the pattern: the layer of the model, if each layer has a pattern.
    layer: int
    head: int
    #: The mean attention to the target keys, in [0, 1].
    score: float
    #: The score of uniform attention.
    chance: float
    #: The p-value, corrected for the number of heads.
    p_value: float

    @property
    def is_noise(self) -> bool:
        """True if the score is not significant, or is hardly larger than chance.

        A head is not noise if its p-value is at most 0.05 and (score - chance) / (1 - chance) is at
        least 0.1.
        """
        effect = (self.score - self.chance) / max(1 - self.chance, 1e-12)
        return not (self.p_value <= _SIGNIFICANCE and effect >= _MIN_EFFECT)


@dataclass(frozen=True, eq=False)
class HeadScores:
    """The scores of all heads by kind."""

    #: The names of the patterns, or their indices.
    names: tuple[str, ...]
    #: The scores (layers, heads), in [0, 1]; nan if no query has a target key.
    scores: Mapping[str, Tensor]
    #: The scores of uniform attention.
    chance: Mapping[str, float]
    #: The p-values (layers, heads) with the correction of Note [Clusters of queries].
    p_values: Mapping[str, Tensor]

    def significant(self, kind: str) -> list[DetectedHead]:
        """Return the heads of a kind that are not noise, by descending score; possibly none."""
        heads = self.top(kind, self._get_scores(kind).numel())
        return [head for head in heads if not head.is_noise]

    def best(self, kind: str) -> DetectedHead:
        """Return the head with the largest score; it may be noise, see `DetectedHead.is_noise`."""
        return self.top(kind, 1)[0]

    def top(self, kind: str, count: int) -> list[DetectedHead]:
        """Return the `count` heads with the largest scores, or all heads, in descending order.

        Heads without a score (nan) are last. Raises ValueError for an unknown kind.
        """
        scores = self._get_scores(kind)
        ranked = scores.flatten().nan_to_num(-1.0)
        heads = []
        for index in ranked.topk(min(count, scores.numel())).indices.tolist():
            layer, head = divmod(index, scores.shape[1])
            score, p_value = float(scores[layer, head]), float(self.p_values[kind][layer, head])
            name, chance = self.names[layer], self.chance[kind]
            heads.append(DetectedHead(kind, name, layer, head, score, chance, p_value))
        return heads

    def _get_scores(self, kind: str) -> Tensor:
        if kind not in self.scores:
            raise ValueError(f"expected kind to be one of {list(self.scores)}, got {kind!r}")
        return self.scores[kind]


@torch.no_grad()
def detect_heads(
    patterns: Tensor | Sequence[Tensor] | Mapping[str, Tensor],
    tokens: Prompt | Texts,
    *,
    queries: Tensor | slice | None = None,
    tokenizer: Tokenizer | None = None,
) -> HeadScores:
    """Return the scores and p-values of all heads for each kind, from their attention patterns.

    Args:
        patterns: (batch, heads, seq, seq) per layer, with rows that sum to 1, or to less if the
            model has attention sinks (gpt-oss). From the patterns that `record_patterns` returns
            for such a model, leave out the last column, the sink. Names of patterns become names of
            detected heads.
        tokens: (batch, seq) or (seq,), or a prompt with `input_ids` and an `attention_mask`, or
            texts with `tokenizer`.
        queries: The positions to average over: a slice, or booleans (seq,) or (batch, seq), by
            default all. With booleans and without an `attention_mask`, equal tokens at the start
            or the end count as padding if they are not queries and no query attends to them.
        tokenizer: A function from a text to token ids, or a tokenizer of transformers. Patterns of
            several texts must be those of the model called with `encode(tokenizer, texts)`.

    Raises ValueError for patterns that are not the result of a softmax or that attend to padding,
    and for wrong shapes.
    """
    if not isinstance(patterns, Mapping):
        patterns = {str(i): pattern for i, pattern in enumerate(patterns)}
    layers = list(patterns.values())
    if not layers:
        raise ValueError("expected attention patterns (batch, heads, seq, seq) per layer, got none")
    prompt = as_prompt(tokens, tokenizer)
    has_mask = isinstance(prompt, Mapping) and prompt.get("attention_mask") is not None
    token_mask = get_mask(prompt) if has_mask else None
    tokens = get_tokens(prompt)
    tokens = tokens.expand(layers[0].shape[0], -1) if tokens.ndim == 1 else tokens
    _require_shapes(layers, tokens)
    chosen, is_token = _select_queries_and_keys(layers, tokens, queries, token_mask)
    length = tokens.shape[1]

    # In half precision, a mean over thousands of queries would be inaccurate.
    dtype = torch.promote_types(layers[0].dtype, torch.float32)
    uniform = is_token[:, None].to(dtype).expand(-1, length, -1).tril()
    uniform = uniform / uniform.sum(-1, keepdim=True).clamp_min(1)
    kinds = find_target_keys(tokens, is_token)
    used = {kind: chosen & mask.any(-1) for kind, mask in kinds.items()}
    scores: dict[str, list[Tensor]] = {kind: [] for kind in kinds}
    bounds: dict[str, list[Tensor]] = {kind: [] for kind in kinds}
    # The weights include the mean over queries, so that each layer needs one contraction.
    weights = {
        kind: (mask & used[kind][..., None]).to(dtype) / used[kind].sum()
        for kind, mask in kinds.items()
    }
    chance = {kind: float((uniform * weight).sum()) for kind, weight in weights.items()}
    clusters = {kind: _cluster_queries(kind, tokens, used[kind], is_token) for kind in kinds}
    for i, pattern in enumerate(layers):
        wide = pattern.to(dtype)
        _require_softmax(i, wide, chosen.to(wide.device))
        if token_mask is not None:
            require_hidden_padding(wide, token_mask)
        visible = _find_visible_keys(wide, chosen.to(wide.device), is_token.to(wide.device))
        for kind, mask in kinds.items():
            weight = weights[kind].to(wide.device)
            score = torch.einsum("bhqk,bqk->h", wide, weight)
            scores[kind].append(score.cpu())
            clusterings = [cluster.to(wide.device) for cluster in clusters[kind]]
            log_bound = _compute_log_bound(wide, visible, mask.to(wide.device), clusterings)
            bounds[kind].append(log_bound.exp().cpu())
    stacked = {kind: torch.stack(layer_scores) for kind, layer_scores in scores.items()}
    num_heads = stacked["first"].numel()
    p_values = {kind: (torch.stack(p) * num_heads).clamp_max(1.0) for kind, p in bounds.items()}
    return HeadScores(tuple(patterns), stacked, chance, p_values)


def _cluster_queries(kind: str, tokens: Tensor, used: Tensor, is_token: Tensor) -> list[Tensor]:
    """Return one or two clusterings: cluster indices of queries (batch, seq), -1 if unused.

    See Note [Clusters of queries].
    """
    position = is_token.cumsum(-1)
    if kind == "first":
        row = torch.arange(len(tokens), device=tokens.device)
        start = (position == 1).to(torch.uint8).argmax(-1)
        next_column = (start + 1).clamp_max(tokens.shape[1] - 1)
        first_two_tokens = torch.stack([tokens[row, start], tokens[row, next_column]], 1)
        row_cluster = first_two_tokens.unique(dim=0, return_inverse=True)[1]
        clusterings = [row_cluster[:, None].expand(tokens.shape)]
    else:
        clusterings = [tokens.unique(return_inverse=True)[1], position]
    return [torch.where(used, clustering, -1) for clustering in clusterings]


def _select_queries_and_keys(
    layers: list[Tensor], tokens: Tensor, queries: Tensor | slice | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return masks of the queries to average over and of the keys that are not padding."""
    chosen = torch.ones_like(tokens, dtype=torch.bool)
    if isinstance(queries, slice):
        chosen = torch.zeros_like(chosen)
        chosen[:, queries] = True
    elif queries is not None:
        is_boolean = bool(((queries == 0) | (queries == 1)).all())
        if queries.shape not in (tokens.shape, tokens.shape[1:]) or not is_boolean:
            raise ValueError(
                f"queries are {queries.dtype} {tuple(queries.shape)}; pass a slice, or booleans "
                f"{tuple(tokens.shape[1:])} or {tuple(tokens.shape)} that are True at the queries"
            )
        chosen = queries.to(tokens.device).bool().expand(tokens.shape)
    if mask is not None:
        is_token = mask.to(tokens.device)
        return chosen & is_token, is_token
    if queries is None or isinstance(queries, slice):
        return chosen, torch.ones_like(chosen)
    unused = ~chosen
    for pattern in layers:
        attends = (pattern > 0).any(1) & chosen.to(pattern.device)[..., None]
        unused &= ~attends.any(1).to(unused.device)
    leading = (unused & (tokens == tokens[:, :1])).long().cumprod(-1)
    trailing = (unused & (tokens == tokens[:, -1:])).long().flip(-1).cumprod(-1).flip(-1)
    return chosen, (leading + trailing) == 0


def _find_visible_keys(pattern: Tensor, chosen: Tensor, is_token: Tensor) -> Tensor:
    """Return a mask (batch, seq_q, seq_k) of the keys that each query of this layer can attend to.

    A layer whose weights are all 0 beyond some distance is treated as having a sliding window.
    """
    position = torch.arange(pattern.shape[-1], device=pattern.device)
    distance = position[:, None] - position
    attends = (pattern > 0).any(1) & chosen[..., None]
    reach = distance[attends.any(0)].amax() if bool(attends.any()) else distance.amax()
    return ((distance >= 0) & (distance <= reach)) & is_token[:, None, :]


def _compute_log_bound(
    pattern: Tensor, visible: Tensor, targets: Tensor, clusterings: list[Tensor]
) -> Tensor:
    """Return the log of the bound of each head's p-value; see Note [Clusters of queries].

    The result is the largest bound over all clusterings, which have the same queries.
    """
    row, query = (clusterings[0] >= 0).nonzero(as_tuple=True)
    if not len(row):
        return pattern.new_zeros(pattern.shape[1])
    weights = pattern[row, :, query]  # [n, heads, seq_k]
    is_target = targets[row, query].to(pattern)  # [n, seq_k]
    visible_keys = visible[row, query]  # [n, seq_k]
    attained = torch.einsum("nhk,nk->nh", weights, is_target)
    scaled = is_target.sum(-1)[:, None, None] * weights
    scaled = scaled.masked_fill(~visible_keys[:, None], float("-inf"))
    log_keys = visible_keys.sum(-1).to(pattern).log()[:, None]
    # For each t, the log of the mean over keys, [n, heads].
    log_means = {t: (t * scaled).logsumexp(-1) - log_keys for t in _EXPONENTS}
    log_bounds = []
    for clustering in clusterings:
        cluster = clustering[row, query].unique(return_inverse=True)[1]
        log_bounds.append(_compute_log_chernoff(attained, log_means, cluster))
    return torch.stack(log_bounds).amax(0)


def _compute_log_chernoff(
    attained: Tensor, log_means: Mapping[float, Tensor], cluster: Tensor
) -> Tensor:
    """Return the log of Chernoff's bound (heads,) for the cluster (n,) of each query."""
    size = cluster.bincount().to(attained)
    observed = (attained / size[cluster][:, None]).sum(0)
    log_p = []
    for t, log_mean in log_means.items():
        largest = log_mean.new_full((len(size), log_mean.shape[1]), float("-inf"))
        largest = largest.scatter_reduce(0, cluster[:, None].expand_as(log_mean), log_mean, "amax")
        terms = (log_mean - largest[cluster]).exp()
        total = torch.zeros_like(largest).index_add(0, cluster, terms)
        log_p.append((largest + (total / size[:, None]).log()).sum(0) - t * observed)
    return torch.stack(log_p).amin(0)


def find_target_keys(tokens: Tensor, is_token: Tensor | None = None) -> dict[str, Tensor]:
    """Return the target keys of each kind as booleans (batch, seq_q, seq_k).

    `is_token` (batch, seq) is False at padding, which is never a target.
    """
    length = tokens.shape[1]
    is_token = torch.ones_like(tokens, dtype=torch.bool) if is_token is None else is_token
    ones = torch.ones(length, length, dtype=torch.bool, device=tokens.device)
    past, key = ones.tril(-1), is_token[:, None]
    same = (tokens[:, :, None] == tokens[:, None, :]) & past & key
    is_first = (is_token.cumsum(-1) == 1)[:, None] & key
    return {
        "previous": past & ones.triu(-1) & key,
        "duplicate": same,
        # Key j is a target if token j - 1 equals the query's token; j may be the query itself.
        "induction": torch.nn.functional.pad(same, (1, 0))[..., :length] & key,
        "first": past & is_first,
        "current": (ones.tril() & ones.triu()) & key,
    }


def _require_softmax(layer: int, pattern: Tensor, chosen: Tensor) -> None:
    """Raise ValueError if the row of a query in `chosen` is not the result of a softmax.

    The sum of such a row is positive and at most 1, or slightly larger due to rounding. A query
    without a visible key has a sum of 0. All entries of the pattern must be nonnegative.
    """
    rows = pattern.sum(-1).masked_fill(~chosen[:, None], 1.0)
    lowest, highest = float(rows.min()), float(rows.max())
    if not (lowest > 0 and highest <= 1.02 and float(pattern.min()) >= 0):
        raise ValueError(
            f"the rows of layer {layer}'s pattern sum to {lowest:.3g} ... {highest:.3g}, and its "
            f"smallest entry is {float(pattern.min()):.3g}; pass patterns after the softmax, and "
            "leave padding out with queries="
        )


def _require_shapes(layers: list[Tensor], tokens: Tensor) -> None:
    if tokens.ndim != 2:
        raise ValueError(f"tokens have shape {tuple(tokens.shape)}; pass (batch, seq) or (seq,)")
    heads = layers[0].shape[1] if layers[0].ndim == 4 else 0
    batch, length = tokens.shape
    expected = (batch, heads, length, length)
    for i, pattern in enumerate(layers):
        if pattern.shape != expected or not pattern.dtype.is_floating_point:
            raise ValueError(
                f"the pattern of layer {i} is {pattern.dtype} {tuple(pattern.shape)}; pass "
                f"floating-point patterns ({batch}, heads, {length}, {length}) of equal shapes"
            )
