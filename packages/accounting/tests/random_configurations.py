"""Random configurations of every model type of transformers, counted on the meta device."""

import random
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from accounting import Transformer
from accounting.model.family_tables import ENCODERS

#: Automatic classes whose modules are compared: language models with and without a head, encoders
#: with cross-attention, and vision-language models.
MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
DEPTHS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "depth"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers"),
)
#: Fields that select another architecture or no part of a model.
FIXED = ("_", "add_cross", "is_decoder", "is_encoder", "layer_types", "num_labels", "output_")
SIZES = ("size", "dim", "rank", "num_", "head", "window")


def list_classes(family: str) -> list[str]:
    """Return the classes of transformers that build a model type."""
    from transformers.models.auto import modeling_auto

    listed: dict[str, None] = {}
    for mapping in MAPPINGS:
        names = getattr(modeling_auto, mapping).get(family, ())
        listed |= dict.fromkeys([names] if isinstance(names, str) else names)
    return list(listed)


def find_default_class(family: str) -> str | None:
    """Return the class that a configuration without `architectures` describes, or None.

    It is the bare model of an encoder, and a language model with its head otherwise.
    """
    from transformers.models.auto import modeling_auto

    mappings = MAPPINGS[-1:] if family in ENCODERS else (MAPPINGS[0], MAPPINGS[2])
    for mapping in mappings:
        names = getattr(modeling_auto, mapping).get(family, ())
        for name in [names] if isinstance(names, str) else names:
            return str(name)
    return None


def draw_fields(fields: dict[str, Any], rng: random.Random, nested: bool = False) -> dict[str, Any]:
    """Return random values for about a third of the integers and switches of a configuration."""
    chosen: dict[str, Any] = {}
    for name, value in fields.items():
        if name.startswith(FIXED) or "token" in name or name == "model_type":
            continue
        if isinstance(value, dict) and value.get("model_type") and not nested:
            inner = draw_fields(value, rng, nested=True)
            chosen[name] = inner | {"model_type": value["model_type"]}
        elif name in DEPTHS and isinstance(value, int):
            chosen[name] = rng.choice((1, 2, 3, 4))
        elif rng.random() < 0.65:
            continue
        elif isinstance(value, bool):
            chosen[name] = rng.random() < 0.5
        elif isinstance(value, int):
            small = (0, 1, 2, 3) if value == 0 else (1, 2, 3, 4, 6, 8, 16, value, 2 * value)
            chosen[name] = rng.choice((64, 96, 128, 192, 256, 384) if value > 64 else small)
        elif value is None and any(part in name for part in SIZES):
            chosen[name] = rng.choice((None, 2, 4, 16, 32, 64))
    return chosen


def build_module(name: str, family: str, sizes: dict[str, Any]) -> torch.nn.Module | None:
    """Return a module of a class on the meta device, or None if transformers refuses the sizes."""
    import transformers
    from transformers.initialization import no_init_weights

    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(), no_init_weights(), torch.device("meta"):
            warnings.simplefilter("ignore")
            config = transformers.AutoConfig.for_model(family, **sizes)
            module: torch.nn.Module = getattr(transformers, name)(config)
            # Without initialization, transformers does not tie weights either.
            module.tie_weights()  # type: ignore[operator]
    except Exception:
        return None
    return module


def count_language_model_parameters(module: torch.nn.Module) -> int:
    """Return the number of parameters of a multimodal module's language model with its head."""
    parameters: dict[int, torch.nn.Parameter] = {}
    inner: torch.nn.Module | None = module
    while inner is not None:
        head = inner.get_output_embeddings()  # type: ignore[operator]
        parameters |= {id(p): p for p in head.parameters()} if head is not None else {}
        innermost = inner
        parts = (getattr(inner, name, None) for name in ("language_model", "text_model", "model"))
        inner = next((part for part in parts if hasattr(part, "get_output_embeddings")), None)
    parameters |= {id(p): p for p in innermost.parameters()}
    return sum(parameter.numel() for parameter in parameters.values())


def count_parameters(module: torch.nn.Module) -> int:
    """Return the number of parameters of a module; a shared parameter counts once."""
    return sum(parameter.numel() for parameter in module.parameters())


def count_outcomes(
    family: str, draws: int, seed: int = 0, needed: Mapping[str, Any] = {}
) -> Counter[str]:
    """Count random configurations that are exact, refused, or without their other parts.

    A configuration is read with all fields, and with the drawn fields only. It is read without
    `architectures` too, and compared with the default class. `needed` are fields without which no
    module is built. Raises `AssertionError` for a wrong count.
    """
    import transformers

    counts: Counter[str] = Counter()
    names = list_classes(family)
    try:
        fields = transformers.AutoConfig.for_model(family).to_dict()
    except Exception:
        return counts
    rng = random.Random(f"{family} {seed}")
    for _ in range(draws if names else 0):
        sizes, name = draw_fields(fields, rng) | dict(needed), rng.choice(names)
        module = build_module(name, family, sizes)
        if module is None:
            continue
        counts["built"] += 1
        all_fields = module.config.to_dict()  # type: ignore[operator, union-attr]
        cases: list[tuple[torch.nn.Module, dict[str, Any]]] = [
            (module, all_fields | {"architectures": [name]}),
            (module, sizes | {"model_type": family, "architectures": [name]}),
        ]
        default = find_default_class(family)
        whole = module if name == default else default and build_module(default, family, sizes)
        if whole:
            cases.append((whole, all_fields | {"architectures": None}))
            cases.append((whole, sizes | {"model_type": family}))
        for reference, content in cases:
            counts["configurations"] += 1
            try:
                model = Transformer.from_hf(content)
            except ValueError as error:
                counts["refused"] += 1
                counts["type refused"] += "model_type" in str(error)
                continue
            is_part = "without its other parts" in model.name
            known = (
                count_language_model_parameters(reference)
                if is_part
                else count_parameters(reference)
            )
            assert model.size == known, (type(reference).__name__, model.size, known, content)
            counts["without other parts" if is_part else "exact"] += 1
        if counts["type refused"] > 8 and counts["type refused"] >= 2 * counts["built"]:
            break
    return counts
