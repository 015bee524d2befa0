"""Random float32 weights of a model, which make each property of the model visible in its logits.

Note [Weights that share memory]
A float32 copy of a bfloat16 model would need twice its memory. For a large model, drawing its
numbers would take longer than the forward passes. All weights with the same standard deviation are
therefore views of one buffer of random numbers, at different offsets. In a large model, the buffer
is little larger than the largest of these weights. Weights with a mean other than 0, the gains of
norms, are copies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from interp.decoder.modules.settings import Settings
from interp.decoder.names import is_norm_role

#: The distance between the offsets of successive weights in a buffer. It is a prime number, so that
#: neighboring weights do not consist of the same rows.
_STRIDE = 1009
#: If projections into the MLP have a larger standard deviation, its output projection is smaller,
#: so that the output of the MLP stays small beside the stream.
_MAX_INNER_STD = 8.0


@dataclass(frozen=True)
class Scale:
    """The standard deviations of a model's activations under random weights."""

    #: The embeddings, the initial residual stream.
    stream_std: float = 1.0
    #: The attention scores. With the default, each query attends to a few keys.
    score_std: float = 2.5
    #: The gate and up projections of the MLP.
    inner_std: float = 1.5
    #: The values of the attention.
    value_std: float = 1.0
    #: The outputs of attention and MLP, divided by `stream_std`, for inputs of their output
    #: projections with a standard deviation of 1. Models of more than 4 layers use a fraction.
    write_ratio: float = 1.0


class RandomWeights:
    """A source of random float32 weights for the tensors of a model."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        roles: Mapping[str, str],
        settings: Settings,
        gain_offset: float,
    ) -> None:
        self.tensors = tensors
        self.roles = roles
        self.layers = len(settings.windows)
        self.gain_offset = gain_offset
        embed = next(name for name, role in roles.items() if role == "embed.weight")
        self.vocabulary = len(tensors[embed])
        self.device = tensors[embed].device
        # Queries and keys with this standard deviation have scores with a standard deviation of 1.
        self.unit_query_std = (settings.scale * settings.d_head**0.5) ** -0.5
        self.is_gated = any(".gate" in role for role in roles.values())
        self.has_query_norms = any(".q_norm." in role for role in roles.values())
        # A large stream would make scores larger than `score_std` if queries read it without a
        # norm, or if positions of the same standard deviation are added after that norm.
        has_norms = settings.bare_norms or any(".norm1." in role for role in roles.values())
        is_scaled = settings.positions_in_attention or not has_norms
        self.max_stream_std = 1.0 if is_scaled else float("inf")
        self._noise: tuple[int, Tensor] | None = None

    def draw(self, scale: Scale, seed: int) -> dict[str, Tensor]:
        """Return weights by name; see Note [Weights that share memory]."""
        moments: dict[str, tuple[float, float]] = {}
        lengths: dict[float, int] = {}  # The lengths of the buffers, by standard deviation.
        for index, (name, tensor) in enumerate(self.tensors.items()):
            if name in self.roles:
                mean, std = self._compute_mean_and_std(self.roles[name], tensor.shape, scale)
                moments[name] = mean, std
                lengths[std] = max(lengths.get(std, 0), _STRIDE * index + tensor.numel())
        if self._noise is None or self._noise[0] != seed:
            generator = torch.Generator(self.device).manual_seed(seed)
            noise = torch.empty(max(lengths.values()), dtype=torch.float32, device=self.device)
            # Uniform numbers with a standard deviation of 1.
            self._noise = seed, noise.uniform_(-(3**0.5), 3**0.5, generator=generator)
        buffers = {std: std * self._noise[1][:length] for std, length in lengths.items()}
        drawn: dict[int, Tensor] = {}  # Tied weights stay tied.
        for index, (name, tensor) in enumerate(self.tensors.items()):
            if id(tensor) in drawn:
                continue
            if name not in moments:
                drawn[id(tensor)] = tensor.float() if tensor.is_floating_point() else tensor
                continue
            mean, std = moments[name]
            weight = buffers[std][_STRIDE * index :][: tensor.numel()].view(tensor.shape)
            drawn[id(tensor)] = weight + mean if mean else weight
        return {name: drawn[id(tensor)] for name, tensor in self.tensors.items()}

    def _compute_mean_and_std(
        self, role: str, shape: torch.Size, scale: Scale
    ) -> tuple[float, float]:
        """Return the mean and the standard deviation of the entries of a weight."""
        part, _, kind = role.rpartition(".")
        part = re.sub(r"^blocks\.\d+\.", "", part)
        std = self._compute_output_std(part, scale)
        if is_norm_role(role) and kind == "weight":
            return std - self.gain_offset, 0.25 * std
        if kind == "bias":
            return 0.0, 0.3 * std
        if part not in ("embed", "position", "attention.sinks"):
            # Weights may be (in, out) or (out, in), so the geometric mean of both sizes is used.
            std /= (shape[-1] * shape[-2]) ** 0.25
        return 0.0, std

    def _compute_output_std(self, part: str, scale: Scale) -> float:
        """Return the standard deviation of the output of a module, such as "attention.q"."""
        query_std = self.unit_query_std * scale.score_std**0.5
        stream_std = min(scale.stream_std, self.max_stream_std)
        if part in ("attention.q_norm", "attention.k_norm"):
            return query_std
        if part.endswith(("q_down", "kv_down")):
            # A small latent makes the epsilon of its norm visible.
            return min(query_std, stream_std * query_std)
        if part.startswith("attention.q") or part in ("attention.k", "attention.kv_up"):
            return stream_std if self.has_query_norms else query_std
        std_of_part = {
            "attention.sinks": scale.score_std,
            "attention.v": scale.value_std,
            # The same at every scale, because sharp routing would amplify rounding errors.
            "mlp.router": 1.5,
            "unembed": 30.0,
        }
        if part in ("embed", "embed_norm", "position"):
            return stream_std
        write_std = stream_std * scale.write_ratio * min(1.0, 2 / self.layers**0.5)
        if part in ("attention.o", "attention_out", "mlp_out"):
            return write_std
        if part.endswith("down"):
            excess = max(1.0, scale.inner_std / _MAX_INNER_STD)
            # The output projection of a gated MLP reads products of two projections.
            return write_std / excess ** (2 if self.is_gated else 1)
        if part.endswith(("up", "gate")):
            return scale.inner_std
        return std_of_part.get(part, 1.0)
