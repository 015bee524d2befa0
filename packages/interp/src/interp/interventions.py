"""Replacements for `patch`: steering vectors, attention knockout and sparse autoencoders.

    vector = steering_vector(model, "blocks.5", positive, negative)
    with patch(model, {"blocks.5": steer(vector, scale=4.0)}):
        model(tokens)
    with patch(decoder, {"blocks.*.attention.pattern": knock_out_attention([9], [3, 4])}):
        decoder(tokens)
    with patch(model, {"blocks.5": autoencoder.replace(ablate=[17])}):
        model(tokens)

Turner et al. 2023, "Activation Addition"; Geva et al. 2023, "Dissecting Recall of Factual
Associations"; Bricken et al. 2023, "Towards Monosemanticity"; Rajamanoharan et al. 2024, "Jumping
Ahead: Improving Reconstruction Fidelity with JumpReLU Sparse Autoencoders".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from interp.prompts import Prompt, forward, get_mask
from interp.tap import record


@torch.no_grad()
def steering_vector(
    model: nn.Module, site: str, positive: Prompt, negative: Prompt, *, position: int = -1
) -> Tensor:
    """Return the difference of mean activations, `positive` minus `negative` prompts, (d_model,).

    Activations are recorded at one site and one position. `positive` and `negative` are token ids
    (n, seq), or the model's keyword arguments; the numbers and lengths of the two sets of prompts
    may differ. Raises ValueError if the position is padding, and if a second run of the model has
    other activations, as with dropout.
    """
    means = []
    for prompt in (positive, negative):
        with record(model, site) as recorded:
            forward(model, prompt)
            activation = recorded[site]
            forward(model, prompt)
        has_mask = isinstance(prompt, Mapping) and prompt.get("attention_mask") is not None
        if has_mask and not bool(get_mask(prompt)[:, position].all()):
            raise ValueError(
                f"position {position} of a prompt is padding; pad on the left, or pass another "
                "position"
            )
        tolerance = 1e-4 * float(activation.abs().max())
        if not torch.allclose(recorded[site], activation, rtol=1e-3, atol=tolerance):
            raise ValueError(
                f"{site!r} differs when the run is repeated; call model.eval(), because dropout "
                "changes the vector"
            )
        # In half precision, rounding of the means would hide a small difference between them.
        chosen = activation[:, position]
        means.append(chosen.mean(0, dtype=torch.promote_types(chosen.dtype, torch.float32)))
    return (means[0] - means[1]).to(activation.dtype)


def steer(vector: Tensor, *, scale: float = 1.0) -> Callable[[Tensor], Tensor]:
    """Return a replacement that adds `scale * vector`, which must broadcast to the activations."""
    return lambda activation: activation + scale * vector.to(activation)


def knock_out_attention(
    queries: Sequence[int], keys: Sequence[int], *, heads: Sequence[int] | None = None
) -> Callable[[Tensor], Tensor]:
    """Return a replacement for patterns that stops `queries` from attending to `keys`.

    Patterns are (batch, heads, seq, seq), after the softmax. The remaining weights, including the
    weight of an attention sink (gpt-oss), are scaled to a sum of 1. This is equivalent to a score
    of -inf before the softmax. `heads` selects the affected heads; None selects all.

    Raises ValueError for a single index, a mask and floats. The replacement raises ValueError for a
    query that would attend to no key and no sink, and if a cache has earlier tokens.
    """
    query_index = _make_index_tensor(queries, "queries")
    key_index = _make_index_tensor(keys, "keys")
    head_index = None if heads is None else _make_index_tensor(heads, "heads")

    def knock_out(pattern: Tensor) -> Tensor:
        _, num_heads, length, num_keys = pattern.shape
        if length != num_keys:
            raise ValueError(
                f"the pattern has {length} queries and {num_keys} keys, as with a cache, so their "
                "positions differ; call the model with the whole text"
            )
        blocked = torch.zeros(num_heads, length, length, dtype=torch.bool, device=pattern.device)
        blocked_heads = torch.arange(num_heads) if head_index is None else head_index
        blocked[blocked_heads[:, None, None], query_index[:, None], key_index] = True
        wide = pattern.to(torch.promote_types(pattern.dtype, torch.float32))
        remaining = wide.masked_fill(blocked, 0.0)
        # The sum of a row is below 1 because of its sink or of rounding errors. Each weight has a
        # relative error of at most eps / 2, and the error of the sum grows with the number of keys.
        sink = 1 - wide.sum(-1, keepdim=True)
        sum_units = 4 + num_keys**0.5
        rounding = torch.finfo(pattern.dtype).eps / 2 + sum_units * torch.finfo(wide.dtype).eps
        sink = sink.where(sink > rounding, 0.0)
        total = remaining.sum(-1, keepdim=True) + sink
        is_changed = blocked.any(-1)[..., None]
        if bool((is_changed & (total == 0)).any()):
            raise ValueError(
                f"queries {list(queries)} would attend to nothing without keys {list(keys)}; leave "
                "at least one visible key"
            )
        return torch.where(is_changed, remaining / total, wide).to(pattern)

    return knock_out


def _make_index_tensor(indices: Sequence[int], noun: str) -> Tensor:
    """Return indices as a tensor; raise ValueError for a single number, a mask and floats."""
    if isinstance(indices, int):
        raise ValueError(f"expected a sequence of {noun}, got {indices}; pass [{indices}]")
    index = torch.tensor(list(indices)) if len(indices) else torch.empty(0, dtype=torch.long)
    if index.dtype == torch.bool or index.is_floating_point():
        raise ValueError(
            f"expected indices of {noun}, got {index.dtype}; for a mask pass mask.nonzero()[:, 0]"
        )
    return index


@dataclass(frozen=True, eq=False, kw_only=True)
class SparseAutoencoder:
    """A sparse autoencoder of activations, defined by its weights.

    Features are f = act((x - b_dec) W_enc + b_enc), where the subtraction is optional, and the
    reconstruction is f W_dec + b_dec. The activation is ReLU, or JumpReLU with `threshold`.
    """

    #: (d_model, features).
    w_enc: Tensor
    #: (features, d_model).
    w_dec: Tensor
    #: (features,).
    b_enc: Tensor
    #: (d_model,).
    b_dec: Tensor
    #: The threshold of JumpReLU, (features,), or None for ReLU.
    threshold: Tensor | None = None
    #: True if the encoder subtracts `b_dec` from its input.
    subtracts_b_dec: bool = True

    def encode(self, x: Tensor) -> Tensor:
        """Return the features (..., features) of activations (..., d_model)."""
        x = x.to(self.w_enc.dtype)
        centered = x - self.b_dec if self.subtracts_b_dec else x
        scores = centered @ self.w_enc + self.b_enc
        features = scores.relu()
        return features if self.threshold is None else features * (scores > self.threshold)

    def decode(self, features: Tensor) -> Tensor:
        """Return the reconstruction (..., d_model) of features (..., features)."""
        return features @ self.w_dec + self.b_dec

    def unexplained_variance(self, x: Tensor) -> Tensor:
        """Return the squared reconstruction error divided by the variance of `x` (..., d_model).

        The result is a scalar, because both are summed over all activations and dimensions.
        """
        # Sums of squares overflow in half precision.
        flat = x.flatten(0, -2).to(torch.promote_types(x.dtype, torch.float32))
        error = (flat - self.decode(self.encode(flat))).square().sum()
        return error / (flat - flat.mean(0)).square().sum()

    def replace(
        self, *, ablate: Sequence[int] = (), keep_error: bool = True
    ) -> Callable[[Tensor], Tensor]:
        """Return a replacement of activations by their reconstruction, for `patch`.

        The features with indices in `ablate` are set to 0. `keep_error=True` adds the error of the
        reconstruction from all features, so that only the ablated features have an effect.
        """
        index = _make_index_tensor(ablate, "features to ablate")

        def reconstruct(x: Tensor) -> Tensor:
            features = self.encode(x)
            remaining = features.clone()
            remaining[..., index.to(x.device)] = 0.0
            if keep_error:
                # The bias and the remaining features cancel.
                return x - (features - remaining) @ self.w_dec
            return self.decode(remaining)

        return reconstruct
