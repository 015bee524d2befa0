"""Which heads are which: how much attention each head puts where a kind of head would put it.

    previous    on the token before
    duplicate   on earlier occurrences of the current token
    induction   on what followed the earlier occurrences of the current token
    first       on position 0, where heads with nothing to do rest
    current     on the token itself
    successor   (of weights, not patterns) nowhere: what it moves from a token raises the next one

A score is the mean over the queries that have such a key at all; `chance` is the score of a head
that spreads its attention evenly over the past. Some head always has the best score of a kind: its
p-value bounds the probability that the best of all heads scores as much if keys were permuted.

Queries of one token are not independent observations: copies of a prompt, prompts with a common
prefix and repeated tokens show the same choice of the head again. The queries of each distinct
token form a cluster c, and a cluster counts once, with its mean x_c. (For `first`, all queries of a
prompt read one key, so prompts that start with the same two tokens form a cluster.) Nothing is
assumed about dependence within a cluster or among a query's m target keys: exp is convex, so
E exp(t x_c) <= mean over q in c of mean_k exp(t m A_qk) for any t > 0, and by Chernoff's bound

    p <= heads * min_t prod_c (mean over q in c of mean_k exp(t m A_qk)) / exp(t sum_c x_c)

Olsson et al. 2022, "In-context Learning and Induction Heads"; Gould et al. 2023, "Successor Heads".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from interp.circuits.low_rank import LowRank

_LEVEL, _LEAST = 0.05, 0.1  # how unlikely, and how far from chance to 1, a head of a kind is


@dataclass(frozen=True)
class FoundHead:
    """One head, its score in [0, 1], and how likely the best of all is as good by chance."""

    kind: str
    layer: int
    head: int
    score: float
    chance: float
    p_value: float

    @property
    def is_noise(self) -> bool:
        """Whether chance explains the score, or it is hardly above chance."""
        share = (self.score - self.chance) / max(1 - self.chance, 1e-12)
        return not (self.p_value <= _LEVEL and share >= _LEAST)


@dataclass(frozen=True, eq=False)
class HeadScores:
    """Scores in [0, 1] by kind, each (layers, heads), and the scores of evenly spread attention.

    `p_values` are corrected for the number of heads and count the queries of each distinct token
    once. A kind that no query could show (no token repeats) scores nan.
    """

    scores: Mapping[str, Tensor]
    chance: Mapping[str, float]
    p_values: Mapping[str, Tensor]

    def found(self, kind: str) -> list[FoundHead]:
        """The heads of that kind, best first: those that noise does not explain, maybe none."""
        every = self.top(kind, self._of(kind).numel())
        return [head for head in every if not head.is_noise]

    def best(self, kind: str) -> FoundHead:
        """The head that is most of that kind; its `is_noise` says that there is none."""
        return self.top(kind, 1)[0]

    def top(self, kind: str, count: int) -> list[FoundHead]:
        """The `count` heads that are most of that kind, best first."""
        scores = self._of(kind)
        likely = self.p_values[kind].flatten()
        values, indices = scores.flatten().nan_to_num(-1.0).topk(min(count, scores.numel()))
        found = []
        for v, i in zip(values.tolist(), indices.tolist(), strict=True):
            layer, head = divmod(i, scores.shape[1])
            score, p_value = v if v >= 0 else float("nan"), float(likely[i])
            found.append(FoundHead(kind, layer, head, score, self.chance[kind], p_value))
        return found

    def _of(self, kind: str) -> Tensor:
        if kind not in self.scores:
            raise ValueError(f"kind {kind!r} is not one of {', '.join(self.scores)}")
        return self.scores[kind]


@torch.no_grad()
def detect_heads(
    patterns: Tensor | Sequence[Tensor] | Mapping[str, Tensor],
    tokens: Tensor | None = None,
    *,
    queries: Tensor | slice | None = None,
    successors: tuple[LowRank, Tensor] | None = None,
) -> HeadScores:
    """Score every head from its attention patterns.

    `patterns`: (batch, heads, seq, seq) for each layer, rows summing to 1; `tokens` (batch, seq)
    or (seq,), without which only the positional kinds have a score. `queries` restricts the
    positions that are averaged over: a slice, or booleans (seq,) or (batch, seq), as an
    `attention_mask` of padded prompts is. `successors`:
    circuits from token to token, `full_ov(...)`, and the ids of tokens in order (one, two, ...).
    """
    layers = list(patterns.values()) if isinstance(patterns, Mapping) else list(patterns)
    if not layers:
        raise ValueError(
            "no attention patterns were given; give (batch, heads, seq, seq) per layer"
        )
    if tokens is None:
        tokens = torch.arange(layers[0].shape[-1], device=layers[0].device)
    tokens = tokens.expand(layers[0].shape[0], -1) if tokens.ndim == 1 else tokens
    _check(layers, tokens)
    batch, length = tokens.shape
    chosen = torch.ones(batch, length, dtype=torch.bool, device=tokens.device)
    if isinstance(queries, slice):
        chosen = torch.zeros_like(chosen)
        chosen[:, queries] = True
    elif queries is not None:
        chosen = queries.to(tokens.device).bool().expand(batch, length)

    # Half precision would lose a mean over thousands of queries.
    dtype = torch.promote_types(layers[0].dtype, torch.float32)
    evenly = torch.ones(length, length, dtype=dtype, device=tokens.device).tril()
    evenly = evenly / evenly.sum(-1, keepdim=True)
    kinds = targets(tokens)
    used = {kind: chosen & mask.any(-1) for kind, mask in kinds.items()}
    scores: dict[str, list[Tensor]] = {kind: [] for kind in kinds}
    bounds: dict[str, list[Tensor]] = {kind: [] for kind in kinds}
    # The mean over queries is part of the weights: one contraction a layer.
    weights = {
        kind: (mask & used[kind][..., None]).to(dtype) / used[kind].sum()
        for kind, mask in kinds.items()
    }
    chance = {kind: float((evenly * weight).sum()) for kind, weight in weights.items()}
    clusters = {kind: _clusters(kind, tokens, used[kind]) for kind in kinds}
    real = _real_keys(layers, chosen)
    for i, pattern in enumerate(layers):
        wide = pattern.to(dtype)
        # A query that is padding may see nothing at all.
        error = ((wide.sum(-1) - 1).abs() * chosen[:, None].to(wide)).max().item()
        if not error <= 0.02:
            raise ValueError(
                f"a row of layer {i}'s pattern is off 1 by {error:.3g}; give it after softmax, and "
                "leave padding out with queries="
            )
        visible = _visible_keys(wide, chosen.to(wide.device), real.to(wide.device))
        for kind, mask in kinds.items():
            weight = weights[kind].to(wide.device)
            score = torch.einsum("bhqk,bqk->h", wide, weight)
            scores[kind].append(score.cpu())
            cluster = clusters[kind].to(wide.device)
            bound = _log_bound(wide, visible, mask.to(wide.device), cluster)
            bounds[kind].append(bound.exp().cpu())
    found = {kind: torch.stack(values) for kind, values in scores.items()}
    heads = found["first"].numel()
    p_values = {kind: (torch.stack(p) * heads).clamp_max(1.0) for kind, p in bounds.items()}
    if successors is not None:
        kind = "successor"
        found[kind], chance[kind], p_values[kind] = _successors(*successors)
    return HeadScores(found, chance, p_values)


def _clusters(kind: str, tokens: Tensor, used: Tensor) -> Tensor:
    """Return the number of each query's cluster, (batch, seq), or -1 for unused queries."""
    if kind == "first":
        start = tokens[:, :2].unique(dim=0, return_inverse=True)[1]
        number = start[:, None].expand(tokens.shape)
    else:
        number = tokens.unique(return_inverse=True)[1]
    return torch.where(used, number, -1)


def _real_keys(layers: list[Tensor], chosen: Tensor) -> Tensor:
    """Return True for the keys (batch, seq) that are no padding.

    A padding token is not a query itself, and no query puts weight on it.
    """
    real = chosen.clone()
    for pattern in layers:
        attends = (pattern > 0).any(1) & chosen.to(pattern.device)[..., None]
        real |= attends.any(1).to(real.device)
    return real


def _visible_keys(pattern: Tensor, chosen: Tensor, real: Tensor) -> Tensor:
    """Return True for the keys that queries of this layer can see, (batch, seq_q, seq_k).

    A layer whose weights are all 0 from some distance on has a sliding window.
    """
    place = torch.arange(pattern.shape[-1], device=pattern.device)
    distance = place[:, None] - place
    attends = (pattern > 0).any(1) & chosen[..., None]
    reach = distance[attends.any(0)].amax() if bool(attends.any()) else distance.amax()
    return ((distance >= 0) & (distance <= reach)) & real[:, None, :]


def _log_bound(pattern: Tensor, visible: Tensor, targets: Tensor, clusters: Tensor) -> Tensor:
    """Return the log of the bound on each head's p-value, (heads,); see the module's docstring."""
    row, query = (clusters >= 0).nonzero(as_tuple=True)
    if not len(row):
        return pattern.new_zeros(pattern.shape[1])
    weights = pattern[row, :, query]  # [n, heads, seq_k]
    wanted = targets[row, query]  # [n, seq_k]
    seen = visible[row, query]  # [n, seq_k]
    cluster = clusters[row, query].unique(return_inverse=True)[1]
    size = cluster.bincount().to(pattern)
    scale = wanted.sum(-1).to(pattern)[:, None, None]
    observed = torch.einsum("nhk,nk,n->h", weights, wanted.to(pattern), 1 / size[cluster])
    scaled = (scale * weights).masked_fill(~seen[:, None], float("-inf"))
    log_keys = seen.sum(-1).to(pattern).log()[:, None]
    log_p = []
    for t in (0.1, 0.3, 0.7, 2.0, 4.0, 8.0, 20.0, 70.0, 300.0):
        log_mean = (t * scaled).logsumexp(-1) - log_keys  # [n, heads]
        most = log_mean.new_full((len(size), log_mean.shape[1]), float("-inf"))
        most = most.scatter_reduce(0, cluster[:, None].expand_as(log_mean), log_mean, "amax")
        total = torch.zeros_like(most).index_add(0, cluster, (log_mean - most[cluster]).exp())
        log_p.append((most + (total / size[:, None]).log()).sum(0) - t * observed)
    return torch.stack(log_p).amin(0)


def _successors(circuits: LowRank, chain: Tensor) -> tuple[Tensor, float, Tensor]:
    """How often a head raises the next token of the chain most among the chain's, and by chance."""
    count = len(chain)
    if chain.ndim != 1 or count < 3 or len(chain.unique()) < count:
        raise ValueError(f"successors need 3 distinct token ids in order or more, not {chain}")
    chain = chain.to(circuits.a.device)
    raised = circuits.a[..., chain, :] @ circuits.b[..., chain]  # [layers, heads, to, from]
    raises = raised.argmax(-2).cpu()
    # The chain in any other order, too: what the best of all heads scores then.
    shuffled = torch.rand(999, count, generator=torch.Generator().manual_seed(0)).argsort(-1)
    orders = torch.cat([torch.arange(count)[None], shuffled])
    hits = (raises[..., orders[:, :-1]] == orders[:, 1:]).to(torch.float32).mean(-1)
    score, best = hits[..., 0], hits[..., 1:].amax((0, 1))
    p_values = ((best >= score[..., None]).sum(-1) + 1) / (len(best) + 1)
    return score, 1 / count, p_values


def targets(tokens: Tensor) -> dict[str, Tensor]:
    """The keys that each kind of head looks at: booleans (batch, seq_q, seq_k) by kind."""
    batch, length = tokens.shape
    ones = torch.ones(length, length, dtype=torch.bool, device=tokens.device)
    past, every = ones.tril(-1), (batch, -1, -1)
    same = (tokens[:, :, None] == tokens[:, None, :]) & past
    first = torch.arange(length, device=tokens.device) == 0
    return {
        "previous": (past & ones.triu(-1)).expand(every),
        "duplicate": same,
        # Key j is a target if token j - 1 is the query's; j = query itself is one too.
        "induction": torch.nn.functional.pad(same, (1, 0))[..., :length],
        "first": (past & first).expand(every),
        "current": (ones.tril() & ones.triu()).expand(every),
    }


def _check(layers: list[Tensor], tokens: Tensor) -> None:
    if tokens.ndim != 2:
        raise ValueError(f"tokens have shape {tuple(tokens.shape)}; give (batch, seq) or (seq,)")
    heads = layers[0].shape[1] if layers[0].ndim == 4 else 0
    expected = (tokens.shape[0], heads, tokens.shape[1], tokens.shape[1])
    for i, pattern in enumerate(layers):
        if pattern.shape != expected or not pattern.dtype.is_floating_point:
            raise ValueError(
                f"the pattern of layer {i} is {pattern.dtype} {tuple(pattern.shape)}; with tokens "
                f"{tuple(tokens.shape)} each layer's must be floating (batch, heads, seq, seq)"
            )
