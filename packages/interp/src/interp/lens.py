"""The logit lens and direct logit attribution.

- `logit_lens` decodes the stream after every layer with the model's final norm and unembedding
  (nostalgebraist 2020). It decodes one layer at a time, to avoid (layers, ..., vocabulary) logits.
- `attribution` splits a logit into one term per component of the stream; the terms sum to the
  logit. A final norm y = g * P x / s(x) + b (layer norm: P subtracts the mean; RMS norm: P = 1) is
  linear for a fixed s(x). Calls of the norm determine g, P and b, and the form is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Lens:
    """The predictions of each layer's stream. In shapes, `...` is (batch, seq)."""

    #: The names of the streams.
    names: tuple[str, ...]
    #: The most probable token ids, (layers, ..., top).
    top_tokens: Tensor
    #: The probabilities of `top_tokens`, (layers, ..., top).
    top_probabilities: Tensor
    #: The entropy of each prediction, (layers, ...), in nats.
    entropy: Tensor
    #: KL(last layer || this layer), (layers, ...), in nats.
    kl_to_last: Tensor
    #: The log-probability of `targets`, (layers, ...), or None without `targets`.
    target_log_probability: Tensor | None


@torch.no_grad()
def logit_lens(
    residuals: Mapping[str, Tensor] | Sequence[Tensor] | Tensor,
    norm: Norm | None,
    unembed: nn.Linear | Tensor | Callable[[Tensor], Tensor],
    *,
    targets: Tensor | None = None,
    top: int = 5,
) -> Lens:
    """Decode streams (batch, seq, d_model), one per layer; the last is the model's final stream.

    `norm` is the final norm or None. `unembed` is an `nn.Linear`, its weight (vocabulary, d_model),
    or any function from normalized streams to logits. For a model that caps its logits (Gemma 2),
    pass `norm=None` and `unembed=decoder.decode`. `targets` (batch, seq) are token ids whose
    log-probability is computed per layer. `top` is the number of most probable tokens to return.

    Raises ValueError for wrong shapes, and if the last stream is the output of the final norm, such
    as the last of Hugging Face's `hidden_states`, instead of its input. The output is not detected
    for fewer than 4 positions, or if the mean square of the input is less than about 500 times the
    norm's epsilon.
    """
    if isinstance(residuals, Tensor) and residuals.ndim < 4:
        raise ValueError(
            f"expected one tensor (layers, batch, seq, d_model), got {tuple(residuals.shape)}; "
            "pass a single stream as [stream]"
        )
    if isinstance(residuals, Mapping):
        names, streams = tuple(residuals), list(residuals.values())
    else:
        streams = list(residuals)
        names = tuple(str(i) for i in range(len(streams)))
    if not streams:
        raise ValueError("expected at least one residual stream, got none")

    _require_unnormed(streams[-1], norm)

    def decode(x: Tensor) -> Tensor:
        x = x if norm is None else norm(x)
        logits = x @ unembed.mT if isinstance(unembed, Tensor) else unembed(x)
        return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits

    final_log_p = decode(streams[-1]).log_softmax(-1)
    shape = tuple(final_log_p.shape[:-1])
    if targets is not None and targets.shape != shape:
        raise ValueError(f"expected targets of shape {shape}, got {tuple(targets.shape)}")
    rows: list[list[Tensor]] = []
    for x in streams:
        log_p = decode(x).log_softmax(-1)
        most_likely = log_p.topk(min(top, log_p.shape[-1]), dim=-1)
        row = [most_likely.indices, most_likely.values.exp(), _compute_expectation(log_p, -log_p)]
        row.append(_compute_expectation(final_log_p, final_log_p - log_p))
        if targets is not None:
            row.append(log_p.gather(-1, targets[..., None])[..., 0])
        rows.append(row)
    columns = [torch.stack(column) for column in zip(*rows, strict=True)]
    return Lens(
        names,
        top_tokens=columns[0],
        top_probabilities=columns[1],
        entropy=columns[2],
        kl_to_last=columns[3],
        target_log_probability=None if targets is None else columns[4],
    )


def _require_unnormed(stream: Tensor, norm: Norm | None) -> None:
    """Raise ValueError if the stream is an output of `norm`: g * u + b with |u|^2 = d_model.

    Streams of fewer than 4 positions are not checked, because they may have this norm by chance.
    """
    if norm is None or stream[..., 0].numel() < 4:
        return
    gain, shift, _ = _probe_gain_and_shift(norm, stream)
    rms = ((stream - shift) / gain).square().mean(-1).sqrt()
    if bool(((rms - 1).abs() < max(1e-3, torch.finfo(stream.dtype).eps)).all()):
        raise ValueError(
            "the last stream is an output of the norm, such as the last of Hugging Face's "
            "hidden_states; pass the input of the final norm, recorded with record()"
        )


@dataclass(frozen=True, eq=False)
class Attribution:
    """A logit as a sum of terms: `terms.sum(0)` equals `logits` up to rounding."""

    #: The names of the terms.
    names: tuple[str, ...]
    #: One term per name and position, (names, batch, seq).
    terms: Tensor
    #: The logits (batch, seq), or differences of logits, from the norm and the unembedding.
    logits: Tensor

    def named(self) -> dict[str, Tensor]:
        """Return the terms as a dictionary by component name."""
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
    """Split the logit of `targets` (minus the logit of `against`) into one term per component.

    `components` broadcast to the final stream (batch, seq, d_model) and sum to it. Token ids are
    (batch, seq). The terms "norm bias" and "unembed bias" are added if the model has these biases.
    A capped logit (Gemma 2) is not a sum of terms, so the cap is not applied here.

    Pass the recorded final stream as `final` to check that the components sum to it. Raises
    ValueError if they do not, for token ids of another shape or below 0, and for a norm that is not
    a layer norm or an RMS norm.
    """
    if not components:
        raise ValueError("expected at least one component of the stream, got none")
    shape = torch.broadcast_shapes(*(part.shape for part in components.values()))
    parts = [part.expand(shape) for part in components.values()]
    stream = sum(parts[1:], start=parts[0])
    if final is not None:
        require_sum(parts, final)
    weight = unembed if isinstance(unembed, Tensor) else unembed.weight
    bias = None if isinstance(unembed, Tensor) else unembed.bias
    direction = read_direction(weight, stream, targets, against)
    gain, shift, is_centered = probe_norm(norm, stream)
    scaled = gain * direction
    scaled = scaled - scaled.mean(-1, keepdim=True) if is_centered else scaled
    names = list(components)
    terms = [(part * scaled).sum(-1) for part in parts]
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


def read_direction(
    weight: Tensor, stream: Tensor, targets: Tensor, against: Tensor | None
) -> Tensor:
    """Return the rows of the unembedding at `targets`, minus the rows at `against` if passed.

    Raises ValueError unless both contain one nonnegative token id per position of the stream.
    """
    for name, ids in (("targets", targets), ("against", against)):
        if ids is not None and ids.shape != stream.shape[:-1]:
            raise ValueError(
                f"expected token ids {tuple(stream.shape[:-1])} as {name}, got {tuple(ids.shape)}"
            )
        if ids is not None and ids.numel() and ids.min() < 0:
            raise ValueError(f"expected token ids of at least 0 in {name}, got {int(ids.min())}")
    return weight[targets] - (0 if against is None else weight[against])


def probe_norm(norm: Norm | None, x: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Return `(gain, shift, is_centered)` with norm(x) = gain * P x + shift.

    P subtracts the mean if `is_centered`, otherwise P = 1. `gain` includes the factor 1 / s(x).
    Raises ValueError for a callable that is not of this form.
    """
    if norm is None:
        return torch.ones_like(x), torch.zeros_like(x), False
    gain, shift, is_centered = _probe_gain_and_shift(norm, x)
    projected = gain * (x - x.mean(-1, keepdim=True) if is_centered else x)
    scaled = norm(x) - shift
    # The products overflow in float16.
    wide = projected.to(torch.promote_types(x.dtype, torch.float32))
    square = wide.square().sum(-1, keepdim=True).clamp_min(torch.finfo(wide.dtype).tiny)
    scale = ((scaled * wide).sum(-1, keepdim=True) / square).to(x)
    if not _is_close(scale * projected, scaled):
        raise ValueError(
            "the norm is not of the form g * x / s(x) + b (layer norm, RMS norm), so logits are "
            "not a sum of terms; patch the components instead"
        )
    return gain * scale, shift.expand_as(x), is_centered


def _probe_gain_and_shift(norm: Norm, x: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Return `(g / s, b, is_centered)` of the norm g * P x / s(x) + b, with s at a probe vector."""
    # Signs alternate so that no entry is close to 0, neither before nor after centering.
    probe = x.new_ones((1,) * (x.ndim - 1) + x.shape[-1:])
    probe[..., 1::2] = -1
    response, mirrored = norm(probe), norm(-probe)
    shift = (response + mirrored) / 2
    is_centered = _is_close(norm(probe + 3), response)
    gain = (response - shift) / (probe - probe.mean(-1, keepdim=True) if is_centered else probe)
    return gain, shift, is_centered


def compute_head_outputs(
    mixed: Tensor, w_o: Tensor, *, heads: int, prefix: str = "head"
) -> dict[str, Tensor]:
    """Return the output of each head by name, `prefix + number`; outputs sum to `mixed @ w_o.T`.

    `mixed` (..., heads * d_head) is the input of the output projection, and `w_o` its weight
    (d_model, heads * d_head). Raises ValueError if `heads` does not divide the features.
    """
    require_whole_heads(mixed, heads)
    parts = zip(mixed.chunk(heads, -1), w_o.chunk(heads, -1), strict=True)
    return {f"{prefix}{i}": x @ w.mT for i, (x, w) in enumerate(parts)}


def require_whole_heads(mixed: Tensor, heads: int) -> None:
    """Raise ValueError unless the last dimension of `mixed` is a multiple of `heads`."""
    if heads < 1 or mixed.shape[-1] % heads:
        raise ValueError(
            f"expected {mixed.shape[-1]} features to be a multiple of heads, got heads={heads}; "
            "pass the number of heads of this activation"
        )


def _compute_expectation(log_p: Tensor, values: Tensor) -> Tensor:
    """Return the mean of `values`, weighted by exp(log_p). A token of probability 0 adds 0."""
    return torch.where(log_p > float("-inf"), log_p.exp() * values, 0).sum(-1)


def _is_close(a: Tensor, b: Tensor) -> bool:
    """Return True if |a - b| is at most max |b| times the square root of machine epsilon."""
    tolerance = torch.finfo(a.dtype).eps ** 0.5
    return bool((a - b).abs().max() <= tolerance * b.abs().max().clamp_min(1e-30))


def require_sum(parts: Iterable[Tensor], final: Tensor) -> None:
    """Raise ValueError if components do not sum to the final stream."""
    first_part, *other_parts = parts
    total = sum(other_parts, start=first_part)
    if total.shape != final.shape or not _is_close(total, final):
        raise ValueError(
            f"expected components that sum to the final stream {tuple(final.shape)}, got another "
            f"sum {tuple(total.shape)}; one is missing, or a patch changes the stream after they "
            "are recorded: pass all components of one run"
        )
