"""The initial weights, which are the same in every variant."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from llmsys_suite.model import Attention, Decoder, ModelConfig
from llmsys_suite.ranks.rank import Run


def build_seeded_model(
    run: Run, config: ModelConfig, seed: int | None = None, attention: Attention | None = None
) -> Decoder:
    """Return a new model on the run's device, with weights drawn from `seed` or the run's seed."""
    drawn = draw(replace(config, checkpoint=False), run.config.seed if seed is None else seed)
    model = copy.deepcopy(drawn).to(run.device)
    model.config = config
    if attention is not None:
        for block in model.list_blocks():
            block.attention.attend = attention
    return model


def build_model_with(run: Run, config: ModelConfig, weights: dict[str, Tensor]) -> Decoder:
    """Return a new model on the run's device, with a copy of `weights`."""
    model = build_seeded_model(run, config)
    model.load_state_dict(weights)
    return model


def draw_initial_weights(run: Run) -> dict[str, Tensor]:
    """Return the initial weights of every variant, by name."""
    return {name: p.detach() for name, p in build_seeded_model(run, run.model).named_parameters()}


@lru_cache(maxsize=1)
def draw(config: ModelConfig, seed: int) -> Decoder:
    """Return a model with weights drawn from `seed`, cached because drawing is slow.

    Callers must copy the model before they change it.
    """
    torch.manual_seed(seed)
    return Decoder(config)
