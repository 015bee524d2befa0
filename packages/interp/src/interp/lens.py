"""What the stream already says: the logit lens, and each component's share of a logit.

- `logit_lens` decodes the stream after every layer with the model's own final norm and unembedding,
  a layer at a time, so that (layers, ..., vocabulary) never exists.             nostalgebraist 2020
- `attribution` splits a logit into one term per component of the stream; the terms sum to the
  logit. A final norm y = g * P x / s(x) + b (layer norm: P subtracts the mean; RMS norm: P = 1)
  is linear once s is held. Norms are black boxes: g, P and b are probed, and the result checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from interp.circuits.low_rank import require_alike

Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Lens:
    """What each layer's stream predicts; `...` is (batch, seq), entropy and divergence in nats."""

    names: tuple[str, ...]
    top_tokens: Tensor  # (layers, ..., top)
    top_probabilities: Tensor  # (layers, ..., top)
    entropy: Tensor  # (layers, ...)
    kl_to_last: Tensor  # (layers, ...)  KL(last layer || this layer)
    target_log_probability: Tensor | None  # (layers, ...)
    target_rank: Tensor | None  # (layers, ...)  0 is the first choice
    logits: Tensor | None  # (layers, ..., vocabulary), only if kept


@torch.no_grad()
def logit_lens(
    residuals: Mapping[str, Tensor] | Sequence[Tensor] | Tensor,
    norm: Norm | None,
    unembed: nn.Linear | Tensor | Callable[[Tensor], Tensor],
    *,
    targets: Tensor | None = None,
    top: int = 5,
    keep_logits: bool = False,
) -> Lens:
    """Decode streams (batch, seq, d_model), one per layer, the last being the model's final stream.

    `norm` is the final norm (None if there is none), `unembed` an `nn.Linear`, its weight
    (vocabulary, d_model), or any function to logits; `targets` (batch, seq) are the token ids to
    follow.
    """
    if isinstance(residuals, Mapping):
        names, streams = tuple(residuals), list(residuals.values())
    else:
        streams = list(residuals)
        names = tuple(str(i) for i in range(len(streams)))
    if not streams:
        raise ValueError("no residual streams were given")

    if isinstance(unembed, Tensor):
        require_alike("the streams and the unembedding", *streams, unembed)

    def decode(x: Tensor) -> Tensor:
        x = x if norm is None else norm(x)
        logits = x @ unembed.mT if isinstance(unembed, Tensor) else unembed(x)
        return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits

    last = decode(streams[-1]).log_softmax(-1)
    if targets is not None and targets.shape != last.shape[:-1]:
        raise ValueError(
            f"targets have shape {tuple(targets.shape)}; give {tuple(last.shape[:-1])}"
        )
    rows: list[tuple[Tensor, ...]] = []
    for x in streams:
        logits = decode(x)
        log_p = logits.log_softmax(-1)
        best = log_p.topk(min(top, log_p.shape[-1]), dim=-1)
        row = [best.indices, best.values.exp()]
        row += [_expected(log_p, -log_p), _expected(last, last - log_p)]
        if targets is not None:
            chosen = log_p.gather(-1, targets[..., None])
            row += [chosen[..., 0], (log_p > chosen).sum(-1)]
        rows.append((*row, logits) if keep_logits else tuple(row))
    columns = [torch.stack(column) for column in zip(*rows, strict=True)]
    followed = None if targets is None else columns[4]
    rank, kept = None if targets is None else columns[5], columns[-1] if keep_logits else None
    return Lens(names, columns[0], columns[1], columns[2], columns[3], followed, rank, kept)


@dataclass(frozen=True, eq=False)
class Attribution:
    """A logit as a sum: `terms.sum(0)` is `logits` up to rounding."""

    names: tuple[str, ...]
    terms: Tensor  # (names, ...)
    logits: Tensor  # (...), by the norm and the unembedding themselves

    def named(self) -> dict[str, Tensor]:
        """The terms by component."""
        return dict(zip(self.names, self.terms, strict=True))


@torch.no_grad()
def attribution(
    components: Mapping[str, Tensor],
    norm: Norm | None,
    unembed: nn.Linear | Tensor,
    targets: Tensor,
    *,
    against: Tensor | None = None,
    final: Tensor | None = None,
) -> Attribution:
    """Split the logit of `targets` (or its lead over `against`) into one term per component.

    `components` sum to the final stream (batch, seq, d_model) and may broadcast to it; token ids
    are (batch, seq). The terms "norm bias" and "unembed bias" are there where the model has them.
    Give `final`, the recorded final stream, to have checked that no component is missing.
    """
    if not components:
        raise ValueError("no components of the stream were given")
    shape = np.broadcast_shapes(*(part.shape for part in components.values()))
    parts = [part.expand(shape) for part in components.values()]
    stream = sum(parts[1:], start=parts[0])
    if final is not None:
        _require_close(
            stream, final, "the components do not sum to the final stream; one is missing"
        )
    weight = unembed if isinstance(unembed, Tensor) else unembed.weight
    bias = None if isinstance(unembed, Tensor) else unembed.bias
    if targets.shape != stream.shape[:-1]:
        raise ValueError(
            f"targets have shape {tuple(targets.shape)}; give {tuple(stream.shape[:-1])}"
        )
    direction = weight[targets] - (0 if against is None else weight[against])

    gain, shift, centered = probe_norm(norm, stream)
    read = gain * direction
    read = read - read.mean(-1, keepdim=True) if centered else read
    names, terms = list(components), [(part * read).sum(-1) for part in parts]
    if bool(shift.any()):
        names.append("norm bias")
        terms.append((shift * direction).sum(-1))
    if bias is not None:
        names.append("unembed bias")
        terms.append(bias[targets] - (0 if against is None else bias[against]))
    normed = stream if norm is None else norm(stream)
    logits = (normed * direction).sum(-1)
    return Attribution(
        tuple(names), torch.stack(terms), logits if bias is None else logits + terms[-1]
    )


def probe_norm(norm: Norm | None, x: Tensor) -> tuple[Tensor, Tensor, bool]:
    """`(gain, shift, centered)` with norm(x) = gain * P x + shift; 1 / s(x) is in `gain`.

    Works for any callable of that form, whatever its parameters are called; others raise
    ValueError.
    """
    if norm is None:
        return torch.ones_like(x), torch.zeros_like(x), False
    # Alternating signs: no entry of the probe is small, whether or not the norm subtracts the mean.
    probe = x.new_ones((1,) * (x.ndim - 1) + x.shape[-1:])
    probe[..., 1::2] = -1
    response, mirrored = norm(probe), norm(-probe)
    shift = (response + mirrored) / 2
    centered = _close(norm(probe + 3), response)
    gain = (response - shift) / (probe - probe.mean(-1, keepdim=True) if centered else probe)
    projected = gain * (x - x.mean(-1, keepdim=True) if centered else x)
    moved = norm(x) - shift
    scale = (moved * projected).sum(-1, keepdim=True) / projected.square().sum(
        -1, keepdim=True
    ).clamp_min(torch.finfo(x.dtype).tiny)
    if not _close(scale * projected, moved):
        raise ValueError(
            "the norm is not of the form g * x / s(x) + b (layer norm, RMS norm), so logits do not "
            "split into terms; patch the components instead"
        )
    return gain * scale, shift.expand_as(x), centered


def head_outputs(
    mixed: Tensor, w_o: Tensor, *, heads: int, prefix: str = "head"
) -> dict[str, Tensor]:
    """What each head adds to the stream, by name `prefix + number`; they sum to `mixed @ w_o.T`.

    `mixed` (..., heads * d_head) is what enters the output projection, `w_o` (d_model, heads *
    d_head).
    """
    parts = zip(mixed.chunk(heads, -1), w_o.chunk(heads, -1), strict=True)
    return {f"{prefix}{i}": x @ w.mT for i, (x, w) in enumerate(parts)}


def _expected(log_p: Tensor, values: Tensor) -> Tensor:
    # A token of probability 0 counts 0, also where its value is infinite.
    return torch.where(log_p > float("-inf"), log_p.exp() * values, 0).sum(-1)


def _close(a: Tensor, b: Tensor) -> bool:
    tolerance = torch.finfo(a.dtype).eps ** 0.5
    return bool((a - b).abs().max() <= tolerance * b.abs().max().clamp_min(1e-30))


def _require_close(a: Tensor, b: Tensor, complaint: str) -> None:
    if a.shape != b.shape or not _close(a, b):
        raise ValueError(f"{complaint} (shapes {tuple(a.shape)} and {tuple(b.shape)})")
