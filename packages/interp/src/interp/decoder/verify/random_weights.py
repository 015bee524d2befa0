"""Random float32 weights for a model, drawn for one group of layers at a time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from interp.decoder.decoder import Decoder
from interp.decoder.modules.settings import Settings
from interp.decoder.names import is_norm_role, layer_of

#: Up to this size in bytes, a float32 copy of all weights is made at once.
COPY_BYTES = 2**30
#: The number of random numbers that are copied at once.
_PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Random weights of one scale, and the tokens that are passed to the model."""

    name: str
    length: int
    rows: int = 2
    stream_std: float = 1.0
    score_std: float = 2.5
    #: The standard deviation of the MLP's activations.
    inner_std: float = 1.5
    is_padded: bool = False
    passes_positions: bool = False
    tolerance: float = 5e-5
    seed: int = 0


def layer_groups(tensors: Mapping[str, Tensor]) -> list[range]:
    """Return groups of layers with a bounded float32 copy; neighboring groups share a layer.

    Layers that share a tensor are in one group, which has all layers.
    """
    layers = max(layer_of(name) for name in tensors) + 1
    layers_of: dict[int, set[int]] = {}
    for name, tensor in tensors.items():
        layers_of.setdefault(id(tensor), set()).add(layer_of(name))
    if any(len(numbers) > 1 for numbers in layers_of.values()):
        return [range(layers)]
    sizes = [0] * layers
    for name, tensor in tensors.items():
        if (layer := layer_of(name)) >= 0:
            sizes[layer] += 4 * tensor.numel()
    bound = max(COPY_BYTES, sum(tensor.nbytes for tensor in tensors.values()) // 2)
    groups, start = [], 0
    while True:
        stop = min(start + 2, layers)
        while stop < layers and sum(sizes[start : stop + 1]) <= bound:
            stop += 1
        groups.append(range(start, stop))
        if stop == layers:
            return groups
        start = stop - 1


class Noise:
    """Uniform random numbers with a standard deviation of 1, for weights of any size.

    Pieces of one buffer are copied from random offsets, because drawing the numbers of all weights
    for each probe would take longer than the forward passes.
    """

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.numbers = torch.empty(2 * _PIECE, dtype=torch.float32, device=device)
        self.numbers.uniform_(-(3**0.5), 3**0.5, generator=generator)

    def fill(self, tensor: Tensor, std: float, generator: torch.Generator) -> Tensor:
        """Fill a contiguous tensor with random numbers that have this standard deviation."""
        for piece in tensor.view(-1).split(_PIECE):
            offset = int(torch.randint(_PIECE, (), generator=generator))
            torch.mul(self.numbers[offset : offset + len(piece)], std, out=piece)
        return tensor


class _UnchangedStream(nn.Module):
    """A block that adds nothing to the stream."""

    def forward(self, x: Tensor, *arguments: object) -> Tensor:
        """Return the stream."""
        return x


class RandomWeights:
    """A source of random float32 weights for a model, zero in the layers outside a group."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        roles: Mapping[str, str],
        settings: Settings,
        group: range,
        gain_offset: float,
        noise: Noise,
    ) -> None:
        self.tensors = tensors
        self.roles = roles
        self.settings = settings
        self.group, self.gain_offset = group, gain_offset
        embed = next(tensors[name] for name, role in roles.items() if role == "embed.weight")
        self.vocabulary, self.device = len(embed), embed.device
        self.noise = noise
        # Queries and keys with this standard deviation have scores with a standard deviation of 1.
        self.unit_query_std = (settings.scale * settings.d_head**0.5) ** -0.5
        self.norms_queries = any(".q_norm." in role for role in roles.values())
        #: The latest weights, and the properties of the probe for which they were drawn.
        self.weights: dict[str, Tensor] = {}
        self.drawn_for: tuple[float, ...] = ()

    def draw(self, probe: Probe) -> dict[str, Tensor]:
        """Return the weights of a probe by name; they replace those of the previous probe."""
        wanted = probe.seed, probe.stream_std, probe.score_std, probe.inner_std
        if wanted == self.drawn_for:
            return self.weights
        self.drawn_for = wanted
        generator = torch.Generator().manual_seed(probe.seed)
        drawn: dict[int, Tensor] = {}  # Tied weights stay tied.
        for name, tensor in self.tensors.items():
            if id(tensor) not in drawn:
                drawn[id(tensor)] = self._draw(name, tensor, probe, generator)
            self.weights[name] = drawn[id(tensor)]
        return self.weights

    def _draw(self, name: str, tensor: Tensor, probe: Probe, generator: torch.Generator) -> Tensor:
        role = self.roles.get(name)
        if role is None:
            return tensor.float() if tensor.is_floating_point() else tensor
        layer = layer_of(name)
        if layer >= 0 and layer not in self.group:
            zero = torch.zeros((), dtype=torch.float32, device=self.device)
            return zero.expand(tensor.shape)
        part, _, kind = role.rpartition(".")
        part = re.sub(r"^blocks\.\d+\.|\.\d+$", "", part)
        size = self._size(part, probe)
        # The memory of the previous weights is reused, because page faults would dominate the time.
        weight = self.weights.get(name)
        if weight is None:
            weight = torch.empty(tensor.shape, dtype=torch.float32, device=self.device)
        if is_norm_role(role) and kind == "weight":
            gains = self.noise.fill(weight, 0.25 * size, generator)
            return gains.add_(size - self.gain_offset)
        if kind == "bias":
            return self.noise.fill(weight, 0.3 * size, generator)
        if part not in ("embed", "position", "attention.sinks"):
            # The orientation is unknown, so the geometric mean of the two dimensions is used.
            size /= (tensor.shape[-1] * tensor.shape[-2]) ** 0.25
        return self.noise.fill(weight, size, generator)

    def skip_zero_layers(self, decoder: Decoder) -> None:
        """Replace the blocks outside the group, which add zeros, by blocks without computation."""
        for layer in range(len(decoder.blocks)):
            if layer not in self.group:
                decoder.blocks[layer] = _UnchangedStream()

    def _size(self, part: str, probe: Probe) -> float:
        """Return the standard deviation of the part's output."""
        query = self.unit_query_std * probe.score_std**0.5
        write = probe.stream_std * min(1.0, 2 / len(self.settings.windows) ** 0.5)
        if part in ("attention.q_norm", "attention.k_norm"):
            return query
        if part.endswith(("q_down", "kv_down")):
            # A small latent makes the epsilon of its norm visible.
            return min(query, probe.stream_std * query)
        if part.startswith("attention.q") or part in ("attention.k", "attention.kv_up"):
            return probe.stream_std if self.norms_queries else query
        if part == "attention.sinks":
            return probe.score_std
        if part == "mlp.correction":
            return 1.0
        if part == "unembed":
            return 30.0
        if part in ("embed", "embed_norm", "position"):
            return probe.stream_std
        if part in ("attention.o", "attention_out", "mlp_out") or part.endswith("down"):
            return write
        if part.endswith(("up", "gate", "router")):
            return probe.inner_std
        return 1.0


class SkipZeroLayers(TorchFunctionMode):
    """A mode in which products with the weights of layers outside a group are not computed."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Only the zero weights of `RandomWeights` have strides (0, 0).
        if func is F.linear and len(args) > 1 and args[1].stride() == (0, 0):
            product = args[0].new_zeros(*args[0].shape[:-1], len(args[1]))
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
            return product if bias is None else product + bias
        return func(*args, **(kwargs or {}))
