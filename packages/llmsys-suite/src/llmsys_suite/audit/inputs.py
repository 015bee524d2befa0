"""Inputs of the audit's computations: batches of the independent sampler, and weights."""

from __future__ import annotations

import torch
from safetensors.torch import load_file
from torch import Tensor

from llmsys_suite.audit import reference
from llmsys_suite.audit.check import Check, Sources
from llmsys_suite.config import RunConfig, get_size
from llmsys_suite.model import Decoder
from llmsys_suite.ranks.rank import Run
from llmsys_suite.text.generation import MODEL


def move_to_device(run: Run, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return tokens and targets on the device of the run."""
    return batch[0].to(run.device), batch[1].to(run.device)


def get_num_heads(config: RunConfig) -> int:
    """Return the number of heads of the configured size, independently of the run's model."""
    return get_size(config.size).num_heads


def draw_global_batch(
    text: reference.Tokens, config: RunConfig, step: int
) -> tuple[Tensor, Tensor]:
    """Return the rows of all ranks in a step of `train`, from the independent sampler."""
    return reference.draw_batch(text, config.rows, config.context, config.seed, step)


def get_float64_parameters(model: Decoder) -> dict[str, Tensor]:
    """Return the parameters by name, in float64."""
    return {name: p.detach().double() for name, p in model.named_parameters()}


def compare_with_file(run: Run, model: Decoder) -> Check:
    """Return a check that `model` has the weights of the file that `learn` wrote, bit by bit."""
    stored = load_file(run.out / MODEL)
    different = [n for n, p in model.named_parameters() if not torch.equal(stored[n], p.cpu())]
    weights = Sources("weights of the analyzed model", "the model file")
    return weights.check_none("trained model", different)
