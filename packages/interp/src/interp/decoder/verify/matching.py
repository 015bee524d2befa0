"""The comparison of candidate settings with a model, under random weights of each scale.

A candidate is a `Settings`. The description of a candidate is the `Decoder` with these settings. A
probe is one call of the model and of each description, with equal weights and arguments.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from interp.decoder.constants import Constants
from interp.decoder.decoder import Decoder
from interp.decoder.modules.settings import Comparison, Settings
from interp.decoder.verify.random_weights import RandomWeights, Scale
from interp.prompts import has_argument

Build = Callable[[Mapping[str, Tensor], Settings], Decoder]

#: The largest number of tokens that is verified unless the caller passes `context`.
_DEFAULT_CONTEXT = 1024
#: The number of FLOPs that the longest probe may need: large models are verified on shorter texts,
#: of at least `_MIN_CONTEXT` tokens.
_FORWARD_FLOPS = 3e11
_MIN_CONTEXT = 128
#: The number of tokens of most probes.
_SHORT_LENGTH = 16

#: A stream whose mean square, 9e-6, is about the epsilon of the norms, so that a wrong epsilon
#: changes the logits.
_SMALL = Scale(stream_std=3e-3)
#: Scores and activations that reach caps and clamps: a cap of 50 on scores, the clamps of gpt-oss.
_LARGE = Scale(score_std=20.0, inner_std=8.0)
#: Large streams, scores, values and activations that reveal bounds no trained model reaches. The
#: outputs of layers are relatively small, so that rounding errors do not grow from layer to layer.
_HUGE = Scale(stream_std=1e3, score_std=2e4, inner_std=3e3, value_std=100.0, write_ratio=1e-4)


@dataclass(frozen=True, eq=False, kw_only=True)
class Probe:
    """One call of the model: the scale of its random weights, and its arguments."""

    #: The name of the comparison.
    name: str
    scale: Scale = field(default_factory=Scale)
    #: The shape of the tokens is (rows, length).
    length: int
    rows: int = 1
    #: The attention mask and the position ids of the call, both (rows, length), if any.
    arguments: Mapping[str, Tensor] = field(default_factory=dict)
    #: The size of the sliding windows during the call, or None for the sizes of the model.
    window: int | None = None
    #: The largest accepted distance. Rounding errors of Llama and Qwen 3 MoE with 48 layers are
    #: below 7e-6.
    tolerance: float = 5e-5


def suggest_remedy(model: nn.Module) -> str:
    """Return the end of an error message for a model whose logits no description reproduces."""
    settings = (
        "pass the properties of the model as settings (eps=, activation=, rope_theta=, scale=, "
        "windows=, ...)"
    )
    hooked = [
        name or "the model"
        for name, module in model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks
    ]
    if not hooked:
        return settings
    names = ", ".join(hooked[:4]) + (", ..." if len(hooked) > 4 else "")
    return f"remove the hooks of {names}; if they change nothing, {settings}"


@torch.no_grad()
def find_matching_settings(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    roles: Mapping[str, str],
    candidates: Sequence[Settings],
    build: Build,
    *,
    constants: Constants,
) -> tuple[Settings, tuple[Comparison, ...]]:
    """Return the first candidate whose description passes all probes, and its comparisons.

    Args:
        model: The model that is described.
        tensors: The weights of the model by name.
        roles: The role of each tensor, as from `assign_roles`.
        candidates: The settings to try, with equal numbers of layers, heads and experts. The random
            weights are scaled for the first one.
        build: A function that creates the description of a candidate from tensors.
        constants: The constants that `build` folds into the weights. The model adds their
            `gain_offset` to the gains of norms (1 in Gemma).

    The returned settings have the largest verified number of tokens as their `context`. Raises
    ValueError if no candidate passes.
    """
    random_weights = RandomWeights(tensors, roles, candidates[0], constants.gain_offset)
    # Rounding may route a token to another expert, but rarely does so for both of two draws.
    seeds = range(2 if candidates[0].experts_used else 1)
    comparisons = []
    descriptions = _Descriptions(random_weights, build)
    with evaluating(model):
        context = _choose_context(model, tensors, roles, candidates[0])
        for probe in _list_probes(model, candidates[0], context):
            for seed in seeds:
                errors = list(_compute_errors(model, descriptions, probe, seed, candidates))
                if min(errors) <= probe.tolerance:
                    break
            else:
                raise ValueError(
                    f"no description of this {type(model).__name__} reproduces its logits: in the "
                    f"{probe.name} comparison of {probe.length} tokens, the smallest relative "
                    f"error is {min(errors):.2g}, expected at most {probe.tolerance:.2g}; "
                    f"{suggest_remedy(model)}"
                )
            passed = [error <= probe.tolerance for error in errors]
            candidates = list(itertools.compress(candidates, passed))
            comparisons.append(Comparison(probe.name, probe.length, min(errors), probe.tolerance))
    return replace(candidates[0], context=context), tuple(comparisons)


class _Descriptions:
    """The descriptions of candidates under the latest random weights.

    Successive probes with the same scale and seed share the weights, and the latest description if
    its settings are equal. A description may have copies of weights, so it is freed before the next
    draw and before another description is built.
    """

    def __init__(self, random_weights: RandomWeights, build: Build) -> None:
        self.random_weights = random_weights
        self._build = build
        self._drawn: tuple[Scale, int, dict[str, Tensor]] | None = None
        self._latest: tuple[Settings, Decoder] | None = None

    def draw(self, scale: Scale, seed: int) -> dict[str, Tensor]:
        """Return the random weights of a scale; draw them unless they were drawn last."""
        if self._drawn is None or self._drawn[:2] != (scale, seed):
            # The earlier weights are freed before the new weights are allocated.
            self._latest = None
            self._drawn = None
            self._drawn = scale, seed, self.random_weights.draw(scale, seed)
        return self._drawn[2]

    def build(self, weights: Mapping[str, Tensor], candidate: Settings) -> Decoder:
        """Return the description of a candidate with the latest random weights, `weights`."""
        if self._latest is None or self._latest[0] != candidate:
            self._latest = None
            self._latest = candidate, self._build(weights, candidate)
        return self._latest[1]


def _compute_errors(
    model: nn.Module,
    descriptions: _Descriptions,
    probe: Probe,
    seed: int,
    candidates: Sequence[Settings],
) -> Iterator[float]:
    """Yield the distance between the logits of each description and the model's logits."""
    weights = descriptions.draw(probe.scale, seed)
    random_weights = descriptions.random_weights
    tokens = _draw_tokens(random_weights.vocabulary, probe, seed, random_weights.device)
    if any(rotary.original_length for rotary in candidates[0].rotary):
        # Models with dynamic scaling use the angles of the longest text until the next short text.
        compute_logits(model, tokens[:, :1], weights=weights)
    with _set_windows(probe.window, model):
        expected = compute_logits(model, tokens, weights=weights, **probe.arguments)
    for candidate in candidates:
        if probe.window is not None:
            windows = tuple(window and probe.window for window in candidate.windows)
            candidate = replace(candidate, windows=windows)
        with warnings.catch_warnings():
            # Padded probes without position ids test default positions, of which the decoder warns.
            warnings.filterwarnings("ignore", "tokens follow padding, and learned positions")
            logits = descriptions.build(weights, candidate)(tokens, **probe.arguments)
        yield compute_distance(logits, expected, probe.arguments.get("attention_mask"))


def compute_distance(ours: Tensor, expected: Tensor, mask: Tensor | None = None) -> float:
    """Return the largest RMS error of a position, relative to the standard deviation of `expected`.

    Positions at which `mask` is 0 are ignored. The result is inf if logits are nan. Raises
    ValueError if the shapes differ.
    """
    if ours.shape != expected.shape:
        raise ValueError(
            f"expected logits {tuple(ours.shape)} from the model, got {tuple(expected.shape)}; "
            "describe the model that has the unembedding"
        )
    visible = torch.ones(ours.shape[:2], device=ours.device) if mask is None else mask
    ours, expected = ours[visible.bool()].float(), expected[visible.bool()].float()
    std = (expected - expected.mean()).square().mean().sqrt()
    std = std.clamp_min(torch.finfo(std.dtype).tiny)
    error = (ours - expected).square().mean(-1).sqrt().max() / std
    return float(error.nan_to_num(float("inf"), float("inf")))


def compute_logits(
    model: nn.Module,
    tokens: Tensor,
    *,
    weights: Mapping[str, Tensor] | None = None,
    **arguments: Any,
) -> Tensor:
    """Return the model's logits (batch, seq, vocabulary).

    If `weights` are passed, they replace the parameters during the call, and floating-point buffers
    except rotary frequencies are replaced by float32 copies.
    """
    if has_argument(model, "use_cache"):
        arguments["use_cache"] = False
    if weights is None:
        out = model(tokens, **arguments)
    else:
        # The rotary frequencies are left out, because the model may replace or round them.
        buffers = {
            name: buffer.float() if buffer.is_floating_point() else buffer
            for name, buffer in model.named_buffers(remove_duplicate=False)
            if not name.endswith("inv_freq")
        }
        # named_modules() lists a shared module once. If its weights were also replaced under a
        # second name, functional_call would save the random weights there as the original ones, and
        # restore them at the end.
        module_names = dict(model.named_modules())
        swapped = {
            name: tensor
            for name, tensor in {**buffers, **weights}.items()
            if name.rpartition(".")[0] in module_names
        }
        out = functional_call(model, swapped, (tokens,), arguments, tie_weights=False)
    if isinstance(out, Tensor):
        return out
    logits: Tensor = out["logits"] if "logits" in out else out[0]
    return logits


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode until exit, without autocast."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.autocast(next(model.parameters()).device.type, enabled=False):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _set_windows(size: int | None, model: nn.Module) -> Iterator[None]:
    """Set all sliding windows of a model to `size`, unless it is None; restore them on exit."""
    modules = list(model.modules())
    owners: list[Any] = [*modules, *(getattr(module, "config", None) for module in modules)]
    windows: dict[int, tuple[Any, int]] = {}  # By id, because modules share configurations.
    for owner in owners:
        if size is not None and isinstance(getattr(owner, "sliding_window", None), int):
            windows[id(owner)] = owner, owner.sliding_window
    try:
        for owner, _ in windows.values():
            owner.sliding_window = size
        yield
    finally:
        for owner, window in windows.values():
            owner.sliding_window = window


def _list_probes(model: nn.Module, settings: Settings, context: int) -> list[Probe]:
    """Return the probes of texts of up to `context` tokens; a description must pass all of them.

    Probes of one scale are adjacent, because `_Descriptions.draw` stores only the latest weights.
    """
    short = min(_SHORT_LENGTH, context)
    # Half of the tokens suffice to show which mask and which position ids the model uses.
    half = min(max(5, short // 2), short)
    probes = [
        Probe(name="small", scale=_SMALL, length=short),
        # Large scores amplify rounding errors. The logit errors of DeepSeek V3 with 3 layers reach
        # 1.1e-5, and the errors of deeper models are larger.
        Probe(name="large", scale=_LARGE, length=short, tolerance=2e-3),
        # The first token attends to masked keys if its own score is below the value of the mask.
        Probe(name="huge", scale=_HUGE, length=min(4, short), rows=2),
        Probe(name="random", length=1, rows=2),
    ]
    if context > 1:
        probes.append(Probe(name="random", length=context))
    window = getattr(getattr(model, "config", None), "sliding_window", None)
    if window in settings.windows and window is not None and window >= context and short > 4:
        # No text exceeds the model's window, and a smaller window is computed by the same code.
        probes.append(Probe(name="window", length=short, window=short // 3))
    device = next(model.parameters()).device
    takes_positions = has_argument(model, "position_ids")
    for original in {rotary.original_length for rotary in settings.rotary}:
        if original is not None and takes_positions:
            # Large position ids show the angles of long texts in a short text.
            length = min(half, original)
            for stop in (original, original + 1, 2 * original):
                position_ids = torch.arange(stop - length, stop, device=device)[None]
                arguments = {"position_ids": position_ids}
                probes.append(Probe(name="rotation", length=length, arguments=arguments))
    if has_argument(model, "attention_mask") and short > 4:
        mask = _make_padding_mask(half, device)
        arguments = {"attention_mask": mask}
        probes.append(Probe(name="padded", length=half, rows=2, arguments=arguments))
        if takes_positions:
            arguments = {**arguments, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}
            probes.append(Probe(name="positions", length=half, rows=2, arguments=arguments))
    return probes


def _choose_context(
    model: nn.Module, tensors: Mapping[str, Tensor], roles: Mapping[str, str], candidate: Settings
) -> int:
    """Return the number of tokens up to which descriptions are verified.

    This is the `context` that the caller of `describe` has passed. By default, it is the largest
    number that the model supports and that costs at most `_FORWARD_FLOPS`. The default is at most
    `_DEFAULT_CONTEXT`, and at least `_MIN_CONTEXT` if the model supports it. Raises ValueError for
    a requested context below 1 or above the number of learned positions.
    """
    config = getattr(model, "config", None)
    configured = getattr(config, "max_position_embeddings", None) or getattr(
        config, "n_positions", None
    )
    limits = [len(tensors[name]) for name, role in roles.items() if role == "position.weight"]
    if limits and isinstance(configured, int):
        # A table of learned positions may have more rows than the model has positions, as in OPT.
        limits.append(configured)
    requested = candidate.context
    if requested is not None:
        # Models with rotary positions accept more tokens than their configuration names.
        if not 1 <= requested <= min([requested, *limits]):
            limit = f" and at most {min(limits)} (learned positions)" if limits else ""
            raise ValueError(
                f"expected a context of at least 1{limit}, got {requested}; pass another context="
            )
        return requested
    # A weight with two names, such as a tied embedding, is counted once.
    parameters = sum({id(tensor): tensor.numel() for tensor in tensors.values()}.values())
    # A forward pass computes about two FLOPs per parameter and token.
    affordable = int(_FORWARD_FLOPS / (2 * max(1, parameters)))
    if isinstance(configured, int):
        limits.append(configured)
    context = min(_DEFAULT_CONTEXT, max(_MIN_CONTEXT, affordable), *limits)
    # If the number of positions is unknown, calls of the model show which lengths it accepts.
    return context if limits else _find_accepted_length(model, context)


def _find_accepted_length(model: nn.Module, length: int) -> int:
    """Return the largest of `length`, `length // 2`, `length // 4`, ... that the model accepts."""
    device = next(model.parameters()).device
    try:
        compute_logits(model, torch.zeros(1, length, dtype=torch.long, device=device))
    except (RuntimeError, ValueError, IndexError, AssertionError):
        if length == 1:
            raise
        return _find_accepted_length(model, length // 2)
    return length


def _draw_tokens(vocabulary: int, probe: Probe, seed: int, device: torch.device) -> Tensor:
    """Return random token ids (rows, length); long texts include the ids of special tokens."""
    generator = torch.Generator("cpu").manual_seed(seed)
    shape = (probe.rows, probe.length)
    tokens = torch.randint(vocabulary, shape, generator=generator, device="cpu")
    # Models reserve the first or the last ids for padding and for the end of a text.
    special = torch.tensor([0, 1, 2, 3, -1, -2], device="cpu") % vocabulary
    if probe.length > 3 * len(special):
        tokens[:, 7 : 7 + len(special)] = special
    return tokens.to(device)


def _make_padding_mask(length: int, device: torch.device) -> Tensor:
    """Return an attention mask (2, length) with padding before, between and after tokens."""
    mask = torch.ones(2, length, dtype=torch.long, device=device)
    mask[0, : length // 3] = 0
    # Padding on the left only shifts all positions, which does not change rotary scores. Padding
    # between tokens shows which positions and which mask the model uses.
    mask[0, 2 * length // 3] = 0
    mask[1, -(length // 4) :] = 0
    return mask
