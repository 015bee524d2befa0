"""Induction, "A B ... A" -> "B": a previous-token head, and a copying head that K-composes with it.

`induction_circuit` writes the two heads down as weights. The residual stream has four blocks,

    [ token | position | previous token | output ]        sizes V, T, V, V, where token 0 is BOS

    head 0.0  QK: position i looks at i - 1        OV: token block -> previous-token block
    head 1.0  QK: my token looks at its previous   OV: token block -> output block, BOS -> 0
              token; half as strongly at position 0

A token that never occurred before attends to BOS, and the output is exactly 0. Where exp of
-`sharpness / 2` rounds to 0, the softmax is an exact mean. `train_induction` lets gradient descent
find the same, `confirm_circuit` shows it by ablation. Elhage et al. 2021; Olsson et al. 2022.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from interp.circuits.composition import composition_scores
from interp.circuits.heads import attention_head
from interp.decoder.attention_only import AttentionOnly
from interp.detect import FoundHead, detect_heads
from interp.patching.streams import drop_heads
from interp.tap import patch, record

BOS = 0


def induction_circuit(
    vocabulary: int = 5,
    context: int = 7,
    *,
    sharpness: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> AttentionOnly:
    """The circuit for sequences that start with BOS = 0 and go on with tokens 1 ... vocabulary - 1.

    Logits are exactly the mean of the one-hot successors of all earlier occurrences of each token,
    0 if there are none, at the default `sharpness`: twice the distance at which a softmax weight of
    `dtype` rounds to 0 (in float32 exp(-104) = 0, so 208). `InductionExercise` is the short form.
    """
    if sharpness is None:
        sharpness = 2 * math.ceil(
            math.log(2) - math.log(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
        )
    size, v, t = max(vocabulary, context), vocabulary, context
    model = AttentionOnly(
        vocabulary=v, context=t, d_model=3 * v + t, layers=2, heads=1, d_head=size, scale=1.0
    ).to(dtype)
    token, position, previous, output = torch.split(torch.eye(3 * v + t, dtype=dtype), [v, t, v, v])
    first, second = (block.attention for block in model.layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed.weight.copy_(token)
        assert model.position is not None
        model.position.weight.copy_(position)
        model.unembed.weight.copy_(output)
        # Queries at i and keys at i - 1 meet in coordinate i - 1.
        first.q.weight[: t - 1] = sharpness * position[1:]
        first.k.weight[: t - 1] = position[:-1]
        # Position 0 has nothing before it: it looks at itself.
        first.q.weight[0] += sharpness * position[0]
        first.v.weight[:v] = token
        first.o.weight[:, :v] = previous.T
        # Queries and keys meet in the coordinate of the token; BOS is never looked for and stands
        # for the sink.
        second.q.weight[1:v] = sharpness * token[1:]
        second.q.weight[0] = sharpness / 2 * token.sum(0)
        second.k.weight[1:v] = previous[1:]
        second.k.weight[0] = position[0]
        second.v.weight[1:v] = token[1:]
        second.o.weight[:, 1:v] = output[1:].T
    return model.requires_grad_(False)


class InductionExercise:
    """The same by hand, as exercises set it: vectors of [token | position], 4 + 5 = 9 dimensions.

    There is no one stream: what the first head moves, the token before, takes the place of the
    positions, and position 0 is left out, as it has nothing before it. Without a match the copying
    head spreads over all. `previous_qk`, `previous_ov`, `match_qk` and `copy_ov` are the circuits.
    """

    def __init__(self, vocabulary: int = 4, context: int = 5, *, sharpness: float = 10.0) -> None:
        v, d = vocabulary, vocabulary + context
        token, place = torch.eye(d).split([v, context])
        self.previous_qk = 10 * sharpness * place[1:].T @ place[:-1]  # position i scores i - 1
        self.previous_ov = token.T @ token
        before, current = torch.eye(2 * v).split(v)  # what the second head reads
        self.match_qk = sharpness * current.T @ before
        self.copy_ov = current.T @ current
        self.vocabulary, self.embed, self.positions = v, token, place

    def __call__(self, tokens: Tensor) -> Tensor:
        """What follows the last of `tokens` (batch, seq): weights (batch, vocabulary)."""
        x = self.embed[tokens] + self.positions[: tokens.shape[-1]]
        moved = attention_head(x, self.previous_qk, self.previous_ov)
        both = torch.cat([moved[..., : self.vocabulary], x[..., : self.vocabulary]], -1)[..., 1:, :]
        return attention_head(both, self.match_qk, self.copy_ov)[..., -1, self.vocabulary :]


def repeated_tokens(
    batch: int,
    length: int,
    vocabulary: int,
    *,
    periods: tuple[int, int],
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """`(tokens, repeated)`: BOS, then distinct tokens that repeat; booleans mark later copies.

    The period is random in [low, high] for each row, so that no head can get by on positions, and
    tokens are distinct within a period, so that the next token is certain.
    """
    low, high = periods
    if not 0 < low <= high < min(vocabulary, length):
        most = min(vocabulary, length) - 1
        raise ValueError(f"periods {periods} must lie within 1 and {most}: all tokens differ")
    period = torch.randint(low, high + 1, (batch, 1), generator=generator)
    order = torch.rand(batch, vocabulary - 1, generator=generator).argsort(-1) + 1
    place = torch.arange(length - 1).expand(batch, -1)
    tokens = order.gather(1, place % period)
    bos = torch.full((batch, 1), BOS)
    first_copy = torch.ones(batch, 1, dtype=torch.bool)
    return torch.cat([bos, tokens], 1), torch.cat([~first_copy, place >= period], 1)


@dataclass(frozen=True)
class InductionTask:
    """The training task: sequences of `repeated_tokens` and how long to train on them."""

    vocabulary: int = 48
    length: int = 48
    periods: tuple[int, int] = (12, 23)
    d_model: int = 64
    heads: int = 2
    batch: int = 32
    steps: int = 500
    learning_rate: float = 5e-3
    warmup: int = 50
    seed: int = 0


def train_induction(task: InductionTask | None = None) -> tuple[AttentionOnly, list[float]]:
    """Train a two-layer attention-only model on repeats; `(model, loss of each step)`."""
    task = task or InductionTask()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        sizes = {"d_model": task.d_model, "layers": 2, "heads": task.heads}
        model = AttentionOnly(
            vocabulary=task.vocabulary, context=task.length, positions="attention", **sizes
        )
    generator = torch.Generator().manual_seed(task.seed)
    # A shorter memory of squared gradients (0.98) carries more seeds through the phase change.
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate, betas=(0.9, 0.98))
    losses = []
    for step in range(task.steps):
        for group in optimizer.param_groups:
            group["lr"] = task.learning_rate * min(1.0, (step + 1) / task.warmup)
        tokens, repeated = repeated_tokens(
            task.batch, task.length, task.vocabulary, periods=task.periods, generator=generator
        )
        predicts = repeated[:, 1:]
        loss = nn.functional.cross_entropy(model(tokens)[:, :-1][predicts], tokens[:, 1:][predicts])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@dataclass(frozen=True)
class Confirmation:
    """A circuit and the evidence for it; accuracies are on the second and later copies."""

    previous: FoundHead
    induction: FoundHead
    accuracy: float
    accuracy_without_previous: float
    k_composition: float  # between the two heads
    k_composition_others: float  # the largest with any other head of layer 0


@torch.no_grad()
def confirm_circuit(model: AttentionOnly, tokens: Tensor, repeated: Tensor) -> Confirmation:
    """Find the previous-token head and the induction head, and what ablating the former does.

    The previous-token head is sought where it matters, on the first copy.
    """
    with record(model, "blocks.*.attention.pattern") as seen:
        accuracy = _accuracy(model(tokens), tokens, repeated)
    previous = detect_heads(list(seen.values())[:1], tokens, queries=~repeated).best("previous")
    induction = detect_heads(seen, tokens, queries=repeated).best("induction")

    dropped = drop_heads(previous.head, heads=model.layers[0].attention.heads)
    with patch(model, {"blocks.0.attention.o:input": dropped}):
        ablated = _accuracy(model(tokens), tokens, repeated)
    scores = composition_scores(model.ov(), model.qk(), kind="k")[
        0, :, induction.layer, induction.head
    ]
    others = [s for i, s in enumerate(scores.tolist()) if i != previous.head]
    composed = scores[previous.head].item()
    return Confirmation(previous, induction, accuracy, ablated, composed, max(others, default=0.0))


def _accuracy(logits: Tensor, tokens: Tensor, repeated: Tensor) -> float:
    predicts = repeated[:, 1:]
    right = logits[:, :-1].argmax(-1) == tokens[:, 1:]
    return float(right[predicts].float().mean())
