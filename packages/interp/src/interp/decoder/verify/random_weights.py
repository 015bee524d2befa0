"""Random float32 weights for a model, drawn for one group of layers at a time."""

from __future__ import annotations

import re
from collections import Counter
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
#: The largest number of random numbers that are copied at once.
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

    def __init__(self, device: torch.device, weights: int) -> None:
        #: The number of random numbers that are copied at once.
        self.piece = min(_PIECE, max(_PIECE // 16, 2 * weights))
        generator = torch.Generator(device).manual_seed(0)
        self.numbers = torch.empty(2 * self.piece, dtype=torch.float32, device=device)
        self.numbers.uniform_(-(3**0.5), 3**0.5, generator=generator)

    def fill(self, tensor: Tensor, std: float, generator: torch.Generator) -> Tensor:
        """Fill a contiguous tensor with random numbers that have this standard deviation."""
        for piece in tensor.view(-1).split(self.piece):
            offset = int(torch.randint(self.piece, (), generator=generator, device="cpu"))
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
        gain_offset: float,
    ) -> None:
        self.tensors = tensors
        self.roles = roles
        self.settings = settings
        self.gain_offset = gain_offset
        self.group = range(0)
        embed = next(name for name, role in roles.items() if role == "embed.weight")
        #: The name of the unembedding, which may be the embedding.
        self.unembed = next((n for n, role in roles.items() if role == "unembed.weight"), embed)
        self.vocabulary, self.d_model = tensors[embed].shape
        self.device = tensors[embed].device
        self.noise = Noise(self.device, sum(tensor.numel() for tensor in tensors.values()))
        # Queries and keys with this standard deviation have scores with a standard deviation of 1.
        self.unit_query_std = (settings.scale * settings.d_head**0.5) ** -0.5
        self.norms_queries = any(".q_norm." in role for role in roles.values())
        #: The latest weights, and the properties of the probe for which they were drawn.
        self.weights: dict[str, Tensor] = {}
        self.drawn_for: tuple[float, ...] = ()
        #: The standard deviation and the seed with which each weight was filled.
        self.filled: dict[str, tuple[float, int]] = {}
        #: Weights of layers outside the group, by shape. Their memory is reused, because page
        #: faults would dominate the time.
        self.unused: dict[torch.Size, list[Tensor]] = {}

    def select_group(self, group: range) -> None:
        """Draw the next weights for this group of layers."""
        if group == self.group:
            return
        self.group, self.drawn_for = group, ()
        wanted = Counter(
            tensor.shape
            for name, tensor in self.tensors.items()
            if name not in self.filled and not self._is_outside_group(name)
        )
        for name in [name for name in self.filled if self._is_outside_group(name)]:
            del self.filled[name]
            weight = self.weights.pop(name)
            if wanted[weight.shape] > len(self.unused.get(weight.shape, ())):
                self.unused.setdefault(weight.shape, []).append(weight)

    def draw(self, probe: Probe) -> bool:
        """Draw `weights` for a probe; return False if the latest weights have its properties."""
        wanted = probe.seed, probe.stream_std, probe.score_std, probe.inner_std
        if wanted == self.drawn_for:
            return False
        self.drawn_for = wanted
        generator = torch.Generator("cpu")
        drawn: dict[int, Tensor] = {}  # Tied weights stay tied.
        for i, (name, tensor) in enumerate(self.tensors.items()):
            if id(tensor) not in drawn:
                generator.manual_seed(probe.seed * len(self.tensors) + i)
                drawn[id(tensor)] = self._draw(name, tensor, probe, generator)
            self.weights[name] = drawn[id(tensor)]
        return True

    def _is_outside_group(self, name: str) -> bool:
        layer = layer_of(name)
        return layer >= 0 and layer not in self.group

    def _draw(self, name: str, tensor: Tensor, probe: Probe, generator: torch.Generator) -> Tensor:
        role = self.roles.get(name)
        if role is None:
            return tensor.float() if tensor.is_floating_point() else tensor
        if self._is_outside_group(name):
            zero = torch.zeros((), dtype=torch.float32, device=self.device)
            return zero.expand(tensor.shape)
        part, _, kind = role.rpartition(".")
        part = re.sub(r"^blocks\.\d+\.|\.\d+$", "", part)
        size = self._size(part, probe)
        if self.filled.get(name) == (size, probe.seed):
            return self.weights[name]
        weight = self.weights[name] if name in self.filled else self._allocate(tensor.shape)
        self.filled[name] = size, probe.seed
        if is_norm_role(role) and kind == "weight":
            gains = self.noise.fill(weight, 0.25 * size, generator)
            return gains.add_(size - self.gain_offset)
        if kind == "bias":
            return self.noise.fill(weight, 0.3 * size, generator)
        if part not in ("embed", "position", "attention.sinks"):
            # The orientation is unknown, so the geometric mean of the two dimensions is used.
            size /= (tensor.shape[-1] * tensor.shape[-2]) ** 0.25
        return self.noise.fill(weight, size, generator)

    def _allocate(self, shape: torch.Size) -> Tensor:
        if unused := self.unused.get(shape):
            return unused.pop()
        return torch.empty(shape, dtype=torch.float32, device=self.device)

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


class SkipProducts(TorchFunctionMode):
    """A mode in which products that a comparison does not need are not computed.

    Products with the zero weights of layers outside a group are zeros. Products with the weight
    `unembed` are computed for its first `rows` tokens, and are zeros for other tokens.
    """

    def __init__(self, unembed: Tensor, rows: int) -> None:
        super().__init__()
        self.unembed, self.rows = unembed, rows
        #: True if the model has multiplied by `unembed` in `F.linear`.
        self.has_unembedded = False

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not F.linear or len(args) < 2:
            return func(*args, **(kwargs or {}))
        x, weight = args[:2]
        bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
        if weight.stride() == (0, 0):  # Only the zero weights of `RandomWeights` have it.
            product = x.new_zeros(*x.shape[:-1], len(weight))
            return product if bias is None else product + bias
        if weight is not self.unembed:
            return func(x, weight, bias)
        self.has_unembedded = True
        bias = None if bias is None else bias[: self.rows]
        product = func(x, weight[: self.rows], bias)
        return F.pad(product, (0, len(weight) - product.shape[-1]))
