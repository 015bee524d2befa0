"""Induction circuits, "A B ... A" -> "B", constructed and trained.

`induction_circuit` constructs the weights of a previous-token head (0.0) and of a copying head that
K-composes with it (1.0). The residual stream has four parts of V (vocabulary), T (context), V and V
dimensions, and token 0 is BOS:

    [ token | position | previous token | output ]

    head 0.0  QK: position i > 0 attends to i - 1  OV: token part -> previous-token part
    head 1.0  QK: a token attends to positions     OV: token part -> output part, BOS -> 0
              whose previous token equals it, and
              with half this score to position 0

In head 0.0, position 0 attends to itself. In head 1.0, a token without an earlier occurrence
attends to BOS, and its output is exactly 0 if exp(-`sharpness` / 2) rounds to 0. `train_induction`
trains a model that learns induction. Elhage et al. 2021; Olsson et al. 2022.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from interp.decoder.attention_only import AttentionOnly

BOS = 0
#: The number of steps during which the learning rate of `train_induction` increases linearly.
_WARMUP_STEPS = 50


def induction_circuit(
    vocabulary: int = 5,
    context: int = 7,
    *,
    sharpness: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> AttentionOnly:
    """Return an exact induction circuit for sequences of BOS = 0 and tokens 1 ... vocabulary - 1.

    With the default `sharpness`, the logits are the mean of the one-hot successors of all earlier
    occurrences of a token, up to rounding errors. They are exactly 0 if there are no earlier
    occurrences. The default is twice the difference of scores at which a softmax weight of `dtype`
    rounds to 0: in float32 exp(-104) = 0, so it is 208.
    """
    if sharpness is None:
        sharpness = 2 * math.ceil(
            math.log(2) - math.log(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
        )
    v, t = vocabulary, context
    with torch.random.fork_rng(devices=[]):  # the random weights are replaced
        model = AttentionOnly(
            vocabulary=v,
            context=t,
            d_model=3 * v + t,
            layers=2,
            heads=1,
            d_head=max(v, t),
            scale=1.0,
        ).to(dtype)
    token, position, previous, output = torch.split(torch.eye(3 * v + t, dtype=dtype), [v, t, v, v])
    previous_token_head, copying_head = (block.attention for block in model.layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed.weight.copy_(token)
        assert model.position is not None
        model.position.weight.copy_(position)
        model.unembed.weight.copy_(output)
        # The query at i and the key at i - 1 match in coordinate i - 1.
        previous_token_head.q.weight[: t - 1] = sharpness * position[1:]
        previous_token_head.k.weight[: t - 1] = position[:-1]
        previous_token_head.q.weight[0] += sharpness * position[0]
        previous_token_head.v.weight[:v] = token
        previous_token_head.o.weight[:, :v] = previous.T
        # A query and a key match in the coordinate of their token. BOS has no earlier occurrence to
        # match, so its coordinate serves as the attention sink.
        copying_head.q.weight[1:v] = sharpness * token[1:]
        copying_head.q.weight[0] = sharpness / 2 * token.sum(0)
        copying_head.k.weight[1:v] = previous[1:]
        copying_head.k.weight[0] = position[0]
        copying_head.v.weight[1:v] = token[1:]
        copying_head.o.weight[:, 1:v] = output[1:].T
    return model.requires_grad_(False)


def repeated_tokens(
    batch: int,
    length: int,
    vocabulary: int,
    *,
    periods: tuple[int, int],
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `(tokens, repeated)`, both (batch, length): BOS and a repeated sequence, and a mask.

    The mask is True at all tokens after the first copy of the sequence. Each row has a random
    period in `periods` = (low, high), both inclusive, so that positions do not predict the next
    token. Tokens are distinct within a period, so that the next token of a later copy is certain.

    Raises ValueError unless 0 < low <= high < min(vocabulary, length).
    """
    low, high = periods
    if not 0 < low <= high < min(vocabulary, length):
        max_period = min(vocabulary, length) - 1
        raise ValueError(
            f"expected periods with 1 <= low <= high <= {max_period}, got {periods}; the tokens of "
            "a period are distinct, and one period must fit into the text"
        )
    period = torch.randint(low, high + 1, (batch, 1), generator=generator)
    order = torch.rand(batch, vocabulary - 1, generator=generator).argsort(-1) + 1
    index = torch.arange(length - 1).expand(batch, -1)
    tokens = order.gather(1, index % period)
    bos = torch.full((batch, 1), BOS)
    first_copy = torch.ones(batch, 1, dtype=torch.bool)
    return torch.cat([bos, tokens], 1), torch.cat([~first_copy, index >= period], 1)


def train_induction(
    *, seed: int = 0, steps: int = 500, batch: int = 32, learning_rate: float = 5e-3
) -> tuple[AttentionOnly, list[float]]:
    """Train a two-layer attention-only model on `repeated_tokens`; return `(model, losses)`.

    `losses` contains the mean loss of the repeated tokens at each step, in nats. The model has 2
    heads per layer, 64 dimensions, a vocabulary of 48 tokens and a context of 48. The periods of
    the sequences range from 12 to 23. `seed` determines the result; global generators are restored.
    """
    vocabulary, length = 48, 48
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # leaves the generators of accelerators as is
        model = AttentionOnly(
            vocabulary=vocabulary,
            context=length,
            d_model=64,
            layers=2,
            heads=2,
            positions="attention",
        )
    generator = torch.Generator().manual_seed(seed)
    # With squared gradients averaged over fewer steps (0.98), more seeds reach the phase change.
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98))
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / _WARMUP_STEPS)
        tokens, repeated = repeated_tokens(
            batch, length, vocabulary, periods=(12, 23), generator=generator
        )
        has_repeated_target = repeated[:, 1:]
        predicted = model(tokens)[:, :-1][has_repeated_target]
        loss = nn.functional.cross_entropy(predicted, tokens[:, 1:][has_repeated_target])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses
