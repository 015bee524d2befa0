"""Check that a description computes the same function as its model.

The model's own weights can hide a difference: at the usual initialization attention is nearly flat,
biases are 0 and a wrong norm epsilon is invisible. So the model is called with other weights in
float32, drawn to bring out each property, and the description must follow:

    moderate   scores of a standard deviation of 2.5, at several lengths up to the context
    sharp      large scores and activations, which reach caps and clamps
    small      a stream of the size of the norms' epsilon
    padded     left and right padding, with position ids and without, if the model takes them

One float32 copy of the weights is made; of a large model, a group of layers at a time, while the
other layers have zero weights that take no memory and add nothing to the stream.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from interp.decoder.decoder import Decoder, Settings
from interp.decoder.names import layer_of

Build = Callable[[Mapping[str, Tensor], Settings], Decoder]

_DEFAULT_CONTEXT = 1024  # the longest text that is verified unless the caller asks for more
_FORWARD_FLOPS = 3e11  # of one call; larger models are verified with shorter texts
_SHORT = 24
COPY_BYTES = 2**30  # a float32 copy of the weights up to this size is made at once


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One regime of random weights, and the tokens that the model is called with."""

    name: str
    length: int
    rows: int = 2
    stream_std: float = 1.0
    score_std: float = 2.5
    inner_std: float = 1.5  # of the MLP's activations
    is_padded: bool = False
    passes_positions: bool = False
    tolerance: float = 5e-5
    seed: int = 0


@torch.no_grad()
def matching_settings(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    roles: Mapping[str, str],
    candidates: Sequence[Settings],
    build: Build,
    *,
    gain_offset: float = 0.0,
) -> Settings:
    """Return the first of `candidates` that describes `model`, with the context it is verified to.

    `roles` maps the names of `tensors` to canonical ones, `build` makes a `Decoder` of tensors and
    settings, `gain_offset` is what the model adds to the gains of its norms. Raises ValueError if
    no candidate describes the model.
    """
    with evaluating(model):
        context = _context(model, tensors, roles, candidates[0])
        for probe in _probes(model, context, candidates[0]):
            for group in _layer_groups(tensors):
                draw = _Draw(tensors, roles, candidates[0], group, gain_offset)
                candidates = _survivors(model, draw, probe, candidates, build)
    return replace(candidates[0], context=context)


def _survivors(
    model: nn.Module, draw: _Draw, probe: Probe, candidates: Sequence[Settings], build: Build
) -> list[Settings]:
    # Rounding sends a token to another expert once in a while, but not with other weights again.
    attempts = 2 if candidates[0].experts_used else 1
    errors: list[float] = []
    for seed in range(attempts):
        errors = _errors(model, draw, replace(probe, seed=seed), candidates, build)
        survivors = [
            candidate
            for candidate, error in zip(candidates, errors, strict=True)
            if error <= probe.tolerance
        ]
        if survivors:
            return survivors
    nearest = min(errors, key=lambda error: float("inf") if error != error else error)
    raise ValueError(
        f"no description of this {type(model).__name__} gives its logits: with {probe.name} "
        f"weights and {probe.length} tokens the nearest is {nearest:.2g} of their size away, "
        f"expected at most {probe.tolerance:.2g}; pass what the model does otherwise as settings "
        "(eps=, activation=, rope_theta=, scale=, windows=, ...)"
    )


def _errors(
    model: nn.Module, draw: _Draw, probe: Probe, candidates: Sequence[Settings], build: Build
) -> list[float]:
    """Return how far each candidate's logits are from the model's, relative to their size."""
    weights = draw(probe)
    tokens = _tokens(draw.vocabulary, probe, draw.device)
    mask, positions = _padding(probe, draw.device)
    arguments: dict[str, Any] = {}
    if mask is not None:
        arguments["attention_mask"] = mask
    if probe.passes_positions:
        arguments["position_ids"] = positions
    expected = call(model, tokens, weights=weights, **arguments)
    errors = []
    for candidate in candidates:
        decoder = build(weights, candidate)
        logits = decoder(tokens, attention_mask=mask, position_ids=positions)
        errors.append(distance(logits, expected, mask))
    return errors


def distance(ours: Tensor, theirs: Tensor, mask: Tensor | None = None) -> float:
    """Return the largest deviation of a position's logits, relative to the size of all logits."""
    if ours.shape != theirs.shape:
        raise ValueError(
            f"the model gives {tuple(theirs.shape)} where logits would be {tuple(ours.shape)}; "
            "describe the model that has the unembedding"
        )
    seen = torch.ones(ours.shape[:2], device=ours.device) if mask is None else mask
    ours, theirs = ours[seen.bool()].float(), theirs[seen.bool()].float()
    size = (theirs - theirs.mean()).square().mean().sqrt()
    size = size.clamp_min(torch.finfo(size.dtype).tiny)
    return float((ours - theirs).square().mean(-1).sqrt().max() / size)


def call(
    model: nn.Module,
    tokens: Tensor,
    *,
    weights: Mapping[str, Tensor] | None = None,
    **arguments: Any,
) -> Tensor:
    """Return the model's logits, with `weights` in place of its own and buffers in float32."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        arguments["use_cache"] = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if weights is None:
            out = model(tokens, **arguments)
        else:
            buffers = {
                name: buffer.float() if buffer.is_floating_point() else buffer
                for name, buffer in model.named_buffers()
            }
            out = functional_call(model, {**buffers, **weights}, (tokens,), arguments)
    if isinstance(out, Tensor):
        return out
    logits: Tensor = out["logits"] if "logits" in out else out[0]
    return logits


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and back into the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def takes(model: nn.Module, argument: str) -> bool:
    """Return True if the model's forward has an argument of that name."""
    return argument in inspect.signature(model.forward).parameters


def _probes(model: nn.Module, context: int, settings: Settings) -> list[Probe]:
    short = min(_SHORT, context)
    probes = [
        Probe(name="random", length=short),
        Probe(name="small", length=short, stream_std=3e-3),
        Probe(name="large", length=short, score_std=20.0, inner_std=8.0, tolerance=2e-3),
        Probe(name="random", length=1),
    ]
    if takes(model, "attention_mask") and short > 4:
        padded = Probe(name="random", length=short, rows=3, is_padded=True)
        probes.append(padded)
        if takes(model, "position_ids"):
            probes.append(replace(padded, passes_positions=True))
    lengths = sorted({context // 2, context} - set(range(short + 1)))
    probes += [Probe(name="random", length=length, rows=1) for length in lengths]
    return probes


def _context(
    model: nn.Module, tensors: Mapping[str, Tensor], roles: Mapping[str, str], settings: Settings
) -> int:
    """Return the number of tokens that the description is verified to."""
    tables = [len(tensors[name]) for name, role in roles.items() if role == "position.weight"]
    if settings.context is not None:
        if not 1 <= settings.context <= min([settings.context, *tables]):
            most = f" and at most {min(tables)}, the learned positions" if tables else ""
            raise ValueError(f"expected a context of at least 1{most}, got {settings.context}")
        return settings.context
    config = getattr(model, "config", None)
    named = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    affordable = int(_FORWARD_FLOPS / (2 * max(1, parameters)))
    longest = min(_DEFAULT_CONTEXT, max(128, affordable))
    if tables or isinstance(named, int):
        return min(longest, *tables, *([named] if isinstance(named, int) else []))
    return _longest_text(model, longest, next(iter(tensors.values())).device)


def _longest_text(model: nn.Module, longest: int, device: torch.device) -> int:
    """Return the largest length up to `longest` that the model can be called with."""
    runs, fails = 1, longest + 1
    length = longest
    while runs + 1 < fails:
        try:
            call(model, torch.zeros(1, length, dtype=torch.long, device=device))
            runs = length
        except (RuntimeError, ValueError, IndexError, AssertionError, TypeError):
            fails = length
        length = (runs + fails) // 2
    return runs


def _tokens(vocabulary: int, probe: Probe, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(probe.seed)
    tokens = torch.randint(vocabulary, (probe.rows, probe.length), generator=generator)
    # The ids that models reserve for padding and the ends of texts are the first or the last.
    special = torch.tensor([0, 1, 2, 3, -1, -2]) % vocabulary
    if probe.length > 3 * len(special):
        tokens[:, 7 : 7 + len(special)] = special
    return tokens.to(device)


def _padding(probe: Probe, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Return the attention mask and position ids of a probe, each (rows, length) or None."""
    if not probe.is_padded:
        return None, None
    mask = torch.ones(probe.rows, probe.length, dtype=torch.long, device=device)
    mask[1, : probe.length // 3] = 0
    mask[2, -(probe.length // 4) :] = 0
    if probe.passes_positions:
        return mask, (mask.cumsum(-1) - 1).clamp_min(0)
    return mask, torch.arange(probe.length, device=device).expand_as(mask)


def _layer_groups(tensors: Mapping[str, Tensor]) -> list[range]:
    """Return groups of layers whose float32 copy is bounded; neighbors have one layer in common."""
    layers = max(layer_of(name) for name in tensors) + 1
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


class _Draw:
    """Random float32 weights for a model, of which the layers outside a group are inert."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        roles: Mapping[str, str],
        settings: Settings,
        group: range,
        gain_offset: float,
    ) -> None:
        self.tensors, self.roles, self.settings = tensors, roles, settings
        self.group, self.gain_offset = group, gain_offset
        embed = next(tensors[name] for name, role in roles.items() if role == "embed.weight")
        self.vocabulary, self.device = len(embed), embed.device
        # Queries and keys of this size have scores of a standard deviation of 1.
        self.unit = (settings.scale * settings.d_head**0.5) ** -0.5
        self.norms_queries = any(".q_norm." in role for role in roles.values())

    def __call__(self, probe: Probe) -> dict[str, Tensor]:
        generator = torch.Generator(self.device).manual_seed(probe.seed)
        weights: dict[str, Tensor] = {}
        drawn: dict[int, Tensor] = {}  # tied weights stay tied
        for name, tensor in self.tensors.items():
            if id(tensor) not in drawn:
                drawn[id(tensor)] = self._draw(name, tensor, probe, generator)
            weights[name] = drawn[id(tensor)]
        return weights

    def _draw(self, name: str, tensor: Tensor, probe: Probe, generator: torch.Generator) -> Tensor:
        role = self.roles.get(name)
        if role is None:
            return tensor.float() if tensor.is_floating_point() else tensor
        layer = layer_of(name)
        if layer >= 0 and layer not in self.group:
            return torch.zeros((), device=self.device).expand(tensor.shape)
        noise = torch.empty(tensor.shape, device=self.device)
        noise.uniform_(-(3**0.5), 3**0.5, generator=generator)  # of a standard deviation of 1
        part, _, kind = role.rpartition(".")
        part = part.split(".", 2)[-1] if layer >= 0 else part
        size = self._size(part, probe)
        if part in ("norm", "norm1", "norm2") or part.endswith("_norm") or part.endswith("_out"):
            if kind == "bias":
                return noise.mul_(0.3 * size)
            return noise.mul_(0.25).add_(1).mul_(size).sub_(self.gain_offset)
        if kind == "bias":
            return noise.mul_(0.3 * size)
        if part in ("embed", "position"):
            return noise.mul_(size)
        # Either orientation: the geometric mean of the two dimensions.
        return noise.mul_(size / (tensor.shape[-1] * tensor.shape[-2]) ** 0.25)

    def _size(self, part: str, probe: Probe) -> float:
        """Return the size of what the part computes."""
        query = self.unit * probe.score_std**0.5
        write = probe.stream_std * min(1.0, 2 / len(self.settings.windows) ** 0.5)
        if part in ("attention.q_norm", "attention.k_norm"):
            return query
        if part.startswith("attention.q") or part == "attention.k":
            return probe.stream_std if self.norms_queries else query
        if part == "unembed":
            return 30.0
        if part in ("embed", "position"):
            return probe.stream_std
        if part in ("attention.o", "attention_out", "mlp_out") or part.endswith("down"):
            return write
        if part.endswith(("up", "gate", "router")):
            return probe.inner_std
        return 1.0
