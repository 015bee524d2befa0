"""Random float32 weights of a model, which make each property of the model visible in its logits.

Note [Weights that share memory]
A float32 copy of a bfloat16 model would need twice its memory. For a large model, drawing its
numbers would take longer than the forward passes. All weights with the same standard deviation are
therefore views of one buffer of random numbers, at different offsets. In a large model, the buffer
is little larger than the largest of these weights. Weights with a mean other than 0, the gains of
norms, are copies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from interp.decoder.modules.settings import Settings
from interp.decoder.names import is_norm_role

#: The distance between the offsets of successive weights in a buffer. It is a prime, so that
#: neighboring weights do not consist of the same rows.
_STRIDE = 1009


@dataclass(frozen=True)
class Scale:
    """The standard deviations of a model's activations under random weights."""

    name: str
    stream_std: float = 1.0
    score_std: float = 2.5
    #: The standard deviation of the MLP's activations.
    inner_std: float = 1.5
    value_std: float = 1.0
    #: The standard deviation of the outputs of attention and MLP, if their inputs have size 1; by
    #: default `stream_std`. It is smaller in models of more than 4 layers.
    write_std: float | None = None


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
        self.norms_queries = any(".q_norm." in role for role in roles.values())
        self._noise: tuple[int, Tensor] | None = None
        self._buffers: dict[float, Tensor] = {}

    def draw(self, scale: Scale, seed: int) -> dict[str, Tensor]:
        """Return weights by name; see Note [Weights that share memory]."""
        sizes: dict[str, tuple[float, float]] = {}
        ends: dict[float, int] = {}
        for index, (name, tensor) in enumerate(self.tensors.items()):
            if name in self.roles:
                mean, std = sizes[name] = self._mean_and_std(self.roles[name], tensor.shape, scale)
                ends[std] = max(ends.get(std, 0), _STRIDE * index + tensor.numel())
        if self._noise is None or self._noise[0] != seed:
            generator = torch.Generator(self.device).manual_seed(seed)
            noise = torch.empty(max(ends.values()), dtype=torch.float32, device=self.device)
            self._noise = seed, noise.uniform_(-(3**0.5), 3**0.5, generator=generator)
            self._buffers = {}
        # Buffers that the earlier weights used too are kept, and the others are freed.
        self._buffers = {
            std: buffer
            for std, buffer in self._buffers.items()
            if len(buffer) >= ends.get(std, math.inf)
        }
        for std, end in ends.items():
            if std not in self._buffers:
                self._buffers[std] = std * self._noise[1][:end]
        drawn: dict[int, Tensor] = {}  # Tied weights stay tied.
        for index, (name, tensor) in enumerate(self.tensors.items()):
            if id(tensor) in drawn:
                continue
            if name not in sizes:
                drawn[id(tensor)] = tensor.float() if tensor.is_floating_point() else tensor
                continue
            mean, std = sizes[name]
            weight = self._buffers[std][_STRIDE * index :][: tensor.numel()].view(tensor.shape)
            drawn[id(tensor)] = weight + mean if mean else weight
        return {name: drawn[id(tensor)] for name, tensor in self.tensors.items()}

    def _mean_and_std(self, role: str, shape: torch.Size, scale: Scale) -> tuple[float, float]:
        """Return the mean and the standard deviation of a weight."""
        part, _, kind = role.rpartition(".")
        part = re.sub(r"^blocks\.\d+\.", "", part)
        size = self._output_std(part, scale)
        if is_norm_role(role) and kind == "weight":
            return size - self.gain_offset, 0.25 * size
        if kind == "bias":
            return 0.0, 0.3 * size
        if part not in ("embed", "position", "attention.sinks"):
            # The orientation is unknown, so the geometric mean of the two dimensions is used.
            size /= (shape[-1] * shape[-2]) ** 0.25
        return 0.0, size

    def _output_std(self, part: str, scale: Scale) -> float:
        """Return the standard deviation of the part's output."""
        query = self.unit_query_std * scale.score_std**0.5
        write = (scale.write_std or scale.stream_std) * min(1.0, 2 / self.layers**0.5)
        if part in ("attention.q_norm", "attention.k_norm"):
            return query
        if part.endswith(("q_down", "kv_down")):
            # A small latent makes the epsilon of its norm visible.
            return min(query, scale.stream_std * query)
        if part.startswith("attention.q") or part in ("attention.k", "attention.kv_up"):
            return scale.stream_std if self.norms_queries else query
        fixed = {
            "attention.sinks": scale.score_std,
            "attention.v": scale.value_std,
            # At every scale, because sharp routing amplifies rounding errors.
            "mlp.router": 1.5,
            "unembed": 30.0,
        }
        if part in fixed:
            return fixed[part]
        if part in ("embed", "embed_norm", "position"):
            return scale.stream_std
        if part in ("attention.o", "attention_out", "mlp_out") or part.endswith("down"):
            return write
        if part.endswith(("up", "gate")):
            return scale.inner_std
        return 1.0
