"""Verification that a description computes the same function as its model.

The model's own weights can hide a difference: at the usual initialization attention is nearly
uniform, biases are 0 and a wrong norm epsilon has no effect. The model is therefore called with
random float32 weights that make each property visible, and the description must have its logits:

    random     scores with a standard deviation of 2.5, at several lengths up to the context
    large      large scores and activations, which reach caps and clamps
    small      a residual stream whose mean square is about the norms' epsilon
    padded     left and right padding, with position ids and without, if the model accepts them

One float32 copy of the weights is made. For a large model, one group of layers is copied at a time;
the other layers have zero weights that use no memory and no time, and add nothing to the stream.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from interp.decoder.constants import Constants
from interp.decoder.decoder import Decoder
from interp.decoder.modules.settings import Comparison, Settings
from interp.decoder.names import is_norm_role, layer_of

Build = Callable[[Mapping[str, Tensor], Settings], Decoder]

#: The largest number of tokens that is verified unless the caller passes `context`.
_DEFAULT_CONTEXT = 1024
#: The limit of one forward pass in FLOPs; larger models are verified with shorter sequences.
_FORWARD_FLOPS = 3e11
_SHORT_LENGTH = 24
#: The number of random numbers that are copied at once.
_PIECE = 1 << 20
#: A float32 copy of all weights is made at once up to this number of bytes.
COPY_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Random weights of one scale, and the tokens that the model is called with."""

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


@torch.no_grad()
def matching_settings(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    roles: Mapping[str, str],
    candidates: Sequence[Settings],
    build: Build,
    *,
    constants: Constants,
) -> tuple[Settings, tuple[Comparison, ...]]:
    """Return the first of `candidates` that describes `model`, and the comparisons that it passed.

    `roles` maps the names of `tensors` to canonical ones, `build` makes a `Decoder` from tensors
    and settings. The settings' `context` is the largest verified length. Raises ValueError if no
    candidate describes the model.
    """
    with evaluating(model):
        context = _context(model, tensors, roles, candidates[0])
        noise = _Noise(next(iter(tensors.values())).device)
        probes = _probes(model, context, candidates[0])
        # The remaining candidates, each with its largest error in each probe.
        remaining = [(candidate, [0.0] * len(probes)) for candidate in candidates]
        for group in _layer_groups(tensors):
            draw = _Draw(tensors, roles, remaining[0][0], group, constants.gain_offset, noise)
            for i, probe in enumerate(probes):
                settings = [candidate for candidate, _ in remaining]
                errors = _accepted_errors(model, draw, probe, settings, build)
                passed = []
                for (candidate, largest), error in zip(remaining, errors, strict=True):
                    if error <= probe.tolerance:
                        largest[i] = max(largest[i], error)
                        passed.append((candidate, largest))
                remaining = passed
    selected, largest = remaining[0]
    comparisons = tuple(
        Comparison(
            "padded" if probe.is_padded else probe.name, probe.length, error, probe.tolerance
        )
        for probe, error in zip(probes, largest, strict=True)
    )
    return replace(selected, context=context), comparisons


def _accepted_errors(
    model: nn.Module, draw: _Draw, probe: Probe, candidates: Sequence[Settings], build: Build
) -> list[float]:
    """Return the error of each candidate in a probe; raise ValueError if none is accepted."""
    # Rounding occasionally sends a token to another expert, but rarely for two draws of weights.
    attempts = 2 if candidates[0].experts_used else 1
    errors: list[float] = []
    for seed in range(attempts):
        errors = _errors(model, draw, replace(probe, seed=seed), candidates, build)
        if any(error <= probe.tolerance for error in errors):
            return errors
    nearest = min(errors, key=lambda error: float("inf") if error != error else error)
    raise ValueError(
        f"no description of this {type(model).__name__} has its logits: with {probe.name} weights "
        f"and {probe.length} tokens the nearest deviates by {nearest:.2g} of their size, expected "
        f"at most {probe.tolerance:.2g}; pass the properties of the model as settings (eps=, "
        "activation=, rope_theta=, scale=, windows=, ...)"
    )


def _errors(
    model: nn.Module, draw: _Draw, probe: Probe, candidates: Sequence[Settings], build: Build
) -> list[float]:
    """Return the deviation of each candidate's logits from the model's, relative to their size."""
    weights = draw(probe)
    tokens = _tokens(draw.vocabulary, probe, draw.device)
    mask, positions = _padding(probe, draw.device)
    arguments: dict[str, Any] = {}
    if mask is not None:
        arguments["attention_mask"] = mask
    if positions is not None:
        arguments["position_ids"] = positions
    with _SkipZeroLayers():
        expected = compute_logits(model, tokens, weights=weights, **arguments)
    errors = []
    for candidate in candidates:
        decoder = build(weights, candidate)
        draw.skip_zero_layers(decoder)
        with warnings.catch_warnings(), _SkipZeroLayers():
            # Positions that count padding are the property under test.
            warnings.simplefilter("ignore", UserWarning)
            logits = decoder(tokens, **arguments)
        errors.append(distance(logits, expected, mask))
    return errors


class _SkipZeroLayers(TorchFunctionMode):
    """A mode in which products with the weights of layers outside a group are not computed."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Only the zero weights of `_Draw` have strides (0, 0).
        if func is F.linear and len(args) > 1 and args[1].stride() == (0, 0):
            product = args[0].new_zeros(*args[0].shape[:-1], len(args[1]))
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
            return product if bias is None else product + bias
        return func(*args, **(kwargs or {}))


def distance(ours: Tensor, expected: Tensor, mask: Tensor | None = None) -> float:
    """Return the largest RMS error of one position's logits, over the standard deviation of all."""
    if ours.shape != expected.shape:
        raise ValueError(
            f"the model returns {tuple(expected.shape)} instead of logits {tuple(ours.shape)}; "
            "describe the model that has the unembedding"
        )
    visible = torch.ones(ours.shape[:2], device=ours.device) if mask is None else mask
    ours, expected = ours[visible.bool()].float(), expected[visible.bool()].float()
    size = (expected - expected.mean()).square().mean().sqrt()
    size = size.clamp_min(torch.finfo(size.dtype).tiny)
    return float((ours - expected).square().mean(-1).sqrt().max() / size)


def compute_logits(
    model: nn.Module,
    tokens: Tensor,
    *,
    weights: Mapping[str, Tensor] | None = None,
    **arguments: Any,
) -> Tensor:
    """Return the model's logits; `weights` replace its parameters, and buffers are then float32."""
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
    """Put every module into evaluation mode, and restore its mode on exit."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def has_argument(model: nn.Module, argument: str) -> bool:
    """Return True if the model's `forward` has an argument of that name."""
    return argument in inspect.signature(model.forward).parameters


def _probes(model: nn.Module, context: int, settings: Settings) -> list[Probe]:
    """Return the probes, all of which a description must pass.

    Consecutive probes of one scale have the same weights.
    """
    short = min(_SHORT_LENGTH, context)
    probes = [Probe(name="random", length=short), Probe(name="random", length=1)]
    if has_argument(model, "attention_mask") and short > 4:
        padded = Probe(name="random", length=short, rows=3, is_padded=True)
        probes.append(padded)
        if has_argument(model, "position_ids"):
            probes.append(replace(padded, passes_positions=True))
    lengths = sorted({context // 2, context} - set(range(short + 1)))
    probes += [Probe(name="random", length=length, rows=1) for length in lengths]
    return [
        *probes,
        Probe(name="small", length=short, rows=1, stream_std=3e-3),
        Probe(name="large", length=short, rows=1, score_std=20.0, inner_std=8.0, tolerance=2e-3),
    ]


def _context(
    model: nn.Module, tensors: Mapping[str, Tensor], roles: Mapping[str, str], settings: Settings
) -> int:
    """Return the number of tokens up to which the description is verified."""
    config = getattr(model, "config", None)
    named = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    tables = [len(tensors[name]) for name, role in roles.items() if role == "position.weight"]
    if tables and isinstance(named, int):
        tables.append(named)  # OPT's table has more rows than positions.
    if settings.context is not None:
        if not 1 <= settings.context <= min([settings.context, *tables]):
            limit = f" and at most {min(tables)}, the learned positions" if tables else ""
            raise ValueError(f"expected a context of at least 1{limit}, got {settings.context}")
        return settings.context
    parameters = sum(tensor.numel() for tensor in tensors.values())
    affordable = int(_FORWARD_FLOPS / (2 * max(1, parameters)))
    longest = min(_DEFAULT_CONTEXT, max(128, affordable))
    if tables or isinstance(named, int):
        return min(longest, *tables, *([named] if isinstance(named, int) else []))
    return _longest_text(model, longest, next(iter(tensors.values())).device)


def _longest_text(model: nn.Module, longest: int, device: torch.device) -> int:
    """Return the largest length up to `longest` that the model can be called with."""
    accepted, refused = 1, longest + 1
    length = longest
    while accepted + 1 < refused:
        try:
            compute_logits(model, torch.zeros(1, length, dtype=torch.long, device=device))
            accepted = length
        except (RuntimeError, ValueError, IndexError, AssertionError, TypeError):
            refused = length
        length = (accepted + refused) // 2
    return accepted


def _tokens(vocabulary: int, probe: Probe, device: torch.device) -> Tensor:
    """Return random token ids (rows, length), special ones among them."""
    generator = torch.Generator().manual_seed(probe.seed)
    tokens = torch.randint(vocabulary, (probe.rows, probe.length), generator=generator)
    # Models reserve the first or the last ids for padding and the ends of texts.
    special = torch.tensor([0, 1, 2, 3, -1, -2]) % vocabulary
    if probe.length > 3 * len(special):
        tokens[:, 7 : 7 + len(special)] = special
    return tokens.to(device)


def _padding(probe: Probe, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Return the attention mask and position ids that a probe passes, (rows, length) or None."""
    if not probe.is_padded:
        return None, None
    mask = torch.ones(probe.rows, probe.length, dtype=torch.long, device=device)
    mask[1, : probe.length // 3] = 0
    mask[2, -(probe.length // 4) :] = 0
    if probe.passes_positions:
        return mask, (mask.cumsum(-1) - 1).clamp_min(0)
    return mask, None


def _layer_groups(tensors: Mapping[str, Tensor]) -> list[range]:
    """Return groups of layers with a bounded float32 copy; neighbors have one layer in common."""
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


class _Noise:
    """Uniform random numbers with a standard deviation of 1, for weights of any size.

    Pieces of one buffer at random offsets are copied, because it would take longer than the forward
    passes to draw the numbers of all weights for each probe.
    """

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.numbers = torch.empty(2 * _PIECE, device=device)
        self.numbers.uniform_(-(3**0.5), 3**0.5, generator=generator)

    def fill(self, tensor: Tensor, std: float, generator: torch.Generator) -> Tensor:
        """Fill a contiguous tensor with random numbers of this standard deviation."""
        for piece in tensor.view(-1).split(_PIECE):
            offset = int(torch.randint(_PIECE, (), generator=generator))
            torch.mul(self.numbers[offset : offset + len(piece)], std, out=piece)
        return tensor


class _UnchangedStream(nn.Module):
    """A block that adds nothing to the stream."""

    def forward(self, x: Tensor, *arguments: object) -> Tensor:
        """Return the stream."""
        return x


class _Draw:
    """A source of random float32 weights for a model, zero in the layers outside a group."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        roles: Mapping[str, str],
        settings: Settings,
        group: range,
        gain_offset: float,
        noise: _Noise,
    ) -> None:
        self.tensors = tensors
        self.roles = roles
        self.settings = settings
        self.group, self.gain_offset = group, gain_offset
        embed = next(tensors[name] for name, role in roles.items() if role == "embed.weight")
        self.vocabulary, self.device = len(embed), embed.device
        self.noise = noise
        # Queries and keys of this size have scores with a standard deviation of 1.
        self.unit_query_std = (settings.scale * settings.d_head**0.5) ** -0.5
        self.norms_queries = any(".q_norm." in role for role in roles.values())
        #: The latest weights, and the properties of the probe that they were drawn for.
        self.weights: dict[str, Tensor] = {}
        self.drawn_for: tuple[float, ...] = ()

    def __call__(self, probe: Probe) -> dict[str, Tensor]:
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
            return torch.zeros((), device=self.device).expand(tensor.shape)
        part, _, kind = role.rpartition(".")
        part = re.sub(r"^blocks\.\d+\.|\.\d+$", "", part)
        size = self._size(part, probe)
        # The memory of the previous weights is reused: page faults would take longer than the rest.
        weight = self.weights.get(name)
        if weight is None:
            weight = torch.empty(tensor.shape, device=self.device)
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
        """Replace the blocks outside the group, which add zeros, by ones that are not computed."""
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
