"""Description of any decoder module in memory by a `Decoder` that shares its weights.

The configuration of a Hugging Face model, or the attributes and structure of another module,
determine the candidate settings. `interp.decoder.verify` then compares them with the model.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from interp.decoder.config_settings import build_settings, list_layer_types
from interp.decoder.constants import build_constants
from interp.decoder.decoder import Decoder
from interp.decoder.families import FAMILIES
from interp.decoder.modules.settings import Settings
from interp.decoder.names import (
    assign_roles,
    canonicalize_weights,
    count_head_features,
    count_layers,
    iter_canonical_parts,
)
from interp.decoder.rotary import Rotary, compute_rotary_angles
from interp.decoder.source import Source, collect_weights
from interp.decoder.verify.matching import (
    compute_distance,
    compute_logits,
    evaluating,
    find_matching_settings,
    suggest_remedy,
)

#: The lock of a verification, which temporarily replaces the weights of the model. A concurrent
#: verification would take the random weights for the original weights.
_VERIFICATION = threading.Lock()


@torch.inference_mode(False)  # Weights that are copied in inference mode cannot have gradients.
@torch.no_grad()
def describe(model: nn.Module, **settings: Any) -> Decoder:
    """Return a `Decoder` that computes the same function as `model` and shares its weights.

    `settings` are fields of `Settings` that override the detected ones. For a module without a
    configuration, `rope_theta` is the base of the rotary angles. The setting `context` is the
    largest number of tokens to verify and to accept later. By default it is 1,024, or less for
    large models, and at most the model's number of positions. If this number is unknown, the
    default is halved until the model accepts texts of that length.

    The decoder is compared with the model under random weights, see `interp.decoder.verify`, and
    under the model's own weights. `Decoder.comparisons` has the errors under random weights. Some
    weights are copies, such as those into which a constant is folded. If the model later changes
    the original of a copy, calling the decoder raises RuntimeError. No other thread may call the
    model during `describe`. If `model` is a `Decoder` and no settings are passed, it is returned
    unchanged.

    Raises ValueError for an unsupported model, if no decoder reproduces the model's logits, and for
    weights that are quantized or on the meta device. Raises TypeError if `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"expected model to be a torch.nn.Module, got {type(model).__name__}; load the model "
            "first, or pass the folder of its checkpoint to load_decoder"
        )
    if isinstance(model, Decoder) and not settings:
        return model
    with _VERIFICATION:
        return _describe(model, settings)


def _describe(model: nn.Module, settings: dict[str, Any]) -> Decoder:
    tensors = collect_weights(model)
    for name, tensor in tensors.items():
        if type(tensor) not in (nn.Parameter, Tensor) or tensor.is_meta:
            raise ValueError(
                f"expected weights in memory, {name} is a {type(tensor).__name__} on "
                f"{tensor.device}; load or dequantize it"
            )
    theta = settings.pop("rope_theta", None)
    config: dict[str, Any] = {}
    model_config: Any = getattr(model, "config", None)
    if hasattr(model_config, "to_dict") and hasattr(model_config, "model_type"):
        config = model_config.to_dict()
        if theta is not None:
            raise ValueError(
                f"rope_theta = {theta} was passed, but the configuration of this "
                f"{type(model).__name__} determines the rotary angles; leave it out, or pass "
                "rotary="
            )
        _require_known(config, tensors)
        candidates = _list_model_settings(model, config)
    else:
        candidates = list(_iter_module_settings(model, tensors, theta, settings.get("heads")))
    unique: list[Settings] = []  # Passed settings may make candidates equal.
    for candidate in candidates:
        changed = replace(candidate, **settings)
        if changed not in unique:
            unique.append(changed)
    constants = build_constants(model, config)

    def build(weights: Mapping[str, Tensor], chosen: Settings) -> Decoder:
        folded = constants.fold_into(weights)
        named = canonicalize_weights(folded, d_head=chosen.d_head, heads=chosen.heads)
        return Decoder(named, chosen)

    roles = assign_roles(tensors)
    chosen, comparisons = find_matching_settings(
        model, tensors, roles, unique, build, constants=constants
    )
    decoder = build(tensors, chosen)
    _require_equal_logits(model, decoder)
    folded = constants.fold_into(tensors)
    decoder.comparisons = comparisons
    decoder.source = Source(model, tensors, _find_copied_names(tensors, folded, chosen))
    return decoder


def _require_known(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError for an unsupported family, with the properties that are unknown."""
    family = config.get("model_type")
    if family in FAMILIES:
        return
    unknown = "its norms, positions and activation are unknown"
    try:
        assign_roles(tensors)
    except ValueError as error:
        unknown = str(error)
    raise ValueError(
        f"model_type {family!r} is not one of {', '.join(FAMILIES)}: {unknown}; record() and "
        "patch() support any model, and describe() modules without a Hugging Face configuration"
    )


def _find_copied_names(
    tensors: Mapping[str, Tensor], folded: Mapping[str, Tensor], chosen: Settings
) -> set[str]:
    """Return the names of the tensors of which the decoder has copies."""
    copied = set()
    for name, _, value in iter_canonical_parts(folded, d_head=chosen.d_head, heads=chosen.heads):
        if name in tensors:
            storage = tensors[name].untyped_storage().data_ptr()
            if value.untyped_storage().data_ptr() != storage:
                copied.add(name)
    return copied


def _require_equal_logits(model: nn.Module, decoder: Decoder) -> None:
    """Raise ValueError if the logits of model and decoder differ under the model's own weights."""
    length = min(12, decoder.settings.context or 12)
    vocabulary = decoder.embed.num_embeddings
    device = decoder.embed.weight.device
    generator = torch.Generator("cpu").manual_seed(0)
    tokens = torch.randint(vocabulary, (1, length), generator=generator, device="cpu").to(device)
    with evaluating(model):
        logits, expected = decoder(tokens), compute_logits(model, tokens)
    errors = sorted(compute_distance(logits[:, [i]], expected[:, [i]]) for i in range(length))
    # Rounding may route some tokens to other experts, but not the majority of tokens.
    error = errors[length // 2 if decoder.settings.experts_used else -1]
    is_half = decoder.embed.weight.dtype in (torch.bfloat16, torch.float16)
    tolerance = 0.5 if is_half else 1e-4
    if not error <= tolerance:
        raise ValueError(
            f"no description of this {type(model).__name__} reproduces its logits: with its own "
            f"weights, the relative error is {error:.2g}, expected at most {tolerance:.2g}; "
            f"{suggest_remedy(model)}"
        )


def _list_model_settings(model: nn.Module, config: Mapping[str, Any]) -> list[Settings]:
    """Return the configuration's settings, and those with the model's angles if they differ."""
    settings = build_settings(config)
    buffers = {name.rpartition(".")[2]: buffer for name, buffer in model.named_buffers()}
    rotary_of_model = []
    kinds = list_layer_types(config, len(settings.rotary))
    for kind, rotary in zip(kinds, settings.rotary, strict=True):
        # The buffer inv_freq may contain the angles of an earlier long text.
        names = (f"{kind}_original_inv_freq", "original_inv_freq", f"{kind}_inv_freq", "inv_freq")
        buffer = next((buffers[name] for name in names if name in buffers), None)
        if rotary.angles:
            if buffer is None:
                return [settings]
            long_angles = torch.tensor(rotary.long_angles, dtype=torch.float32, device="cpu")
            rotary = replace(
                rotary,
                angles=tuple(buffer.float().tolist()),
                long_angles=tuple(long_angles.to(buffer.dtype).float().tolist()),
            )
        rotary_of_model.append(rotary)
    # The settings differ if .bfloat16() has rounded the buffer and thus the model's angles.
    return list(dict.fromkeys([settings, replace(settings, rotary=tuple(rotary_of_model))]))


def _iter_module_settings(
    model: nn.Module, tensors: Mapping[str, Tensor], theta: float | None, heads: int | None
) -> Iterator[Settings]:
    """Yield candidate settings of a module without a configuration.

    If `heads` is None, the number of heads is an attribute of a module.
    """
    names = ("num_heads", "n_heads", "n_head", "heads", "num_attention_heads")
    heads = _find_number(model, *names) if heads is None else heads
    if heads is None:
        raise ValueError(
            f"expected an attribute of this {type(model).__name__} with the number of heads, got "
            "none; set model.num_heads, or pass heads="
        )
    eps = _find_number(model, "eps", "variance_epsilon", "epsilon")
    centered = any("LayerNorm" in type(module).__name__ for module in model.modules())
    d_head = count_head_features(tensors) // heads
    layers = count_layers(tensors)
    weights = canonicalize_weights(tensors, d_head=d_head, heads=heads)
    activations = ("gelu_new", "gelu", "relu", "silu")
    thetas: list[float | None] = [1e4, 5e5, 1e6, None]
    if theta:
        thetas = [theta]
    elif "position.weight" in weights:
        thetas = [None]
    epsilons = [1e-5, 1e-6] if eps is None else [eps]
    for activation, base, epsilon in itertools.product(activations, thetas, epsilons):
        angles = () if base is None else compute_rotary_angles(d_head, base)
        yield Settings(
            heads=heads,
            d_head=d_head,
            eps=epsilon,
            centered=centered,
            activation=activation,
            scale=d_head**-0.5,
            rotary=(Rotary(angles),) * layers,
            windows=(None,) * layers,
        )


def _find_number(model: nn.Module, *names: str) -> Any:
    """Return the first number that is an attribute of a module with one of these names, or None."""
    for module, name in itertools.product(model.modules(), names):
        value = getattr(module, name, None)
        if isinstance(value, int | float):
            return value
    return None
