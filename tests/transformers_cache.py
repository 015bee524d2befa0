"""The name of the cache of transformers, which differs between its versions."""

from __future__ import annotations

import inspect

from torch import nn


def get_cache_name(model: nn.Module) -> str:
    """Return the name of a model's argument, and of its output, that is the cache.

    transformers 5.24 renamed `past_key_values` to `cache`.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
