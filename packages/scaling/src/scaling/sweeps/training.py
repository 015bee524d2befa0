"""Many small training runs at once: each rate and seed of a batch size is a slice of a tensor.

Parameters have shape (seed, rate, …) and data (seed, example, input), so one matrix product
computes all rates of a seed. Gradients are written by hand, without autograd's overhead on tiny
tensors. Suffixes name dimensions: S seeds, R rates, B examples, D inputs, H hidden units.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from scaling.sweeps.sweep import Setting
from scaling.units import Array

#: Hidden units of the MLP and of its teacher.
WIDTH = 64

#: A run counts as diverged if its log loss exceeds this.
DIVERGED = 80.0

#: Adam's defaults in torch.
BETAS = (0.9, 0.999)
EPSILON = 1e-8


def train(
    task: str,
    optimizer: str,
    setting: Setting,
    rates: Array,
    batch_sizes: Sequence[int],
    seed: int,
    device: str,
) -> Array:
    """Return the logs of the final losses, (batch sizes, seeds, rates); inf for diverged runs."""
    seeds = setting.seeds
    dimension = setting.dimension
    rate = torch.tensor(rates, device=device)
    # Without noise, a step of SGD on regression is linear in the error. Therefore the size of the
    # error can be stored separately as a logarithm.
    can_rescale = optimizer == "sgd" and not setting.noise
    losses = []
    for batch in batch_sizes:
        # Starts and teachers are the same at every batch size, but the data differ.
        random = torch.Generator(device).manual_seed(seed)
        model_class = _Linear if task == "linear" else _MLP
        model: _Linear | _MLP = model_class(seeds, len(rates), dimension, random)
        random.manual_seed((seed + 1) * 1_000_003 + batch)
        rule = (_SGD if optimizer == "sgd" else _Adam)(model.parameters, rate)
        for _ in range(setting.steps):
            x = draw_normal(seeds, batch, dimension, random=random)
            errors = draw_normal(seeds, batch, 1, random=random)
            gradients = model.compute_gradients(x, setting.noise * errors)
            for p, update in zip(model.parameters, rule.compute_updates(gradients), strict=True):
                p -= update
            if can_rescale and isinstance(model, _Linear):
                model.rescale()
        loss = model.compute_log_loss()
        diverged = loss.isnan() | (loss > DIVERGED)
        losses.append(loss.masked_fill(diverged, np.inf).cpu().numpy())
    return np.stack(losses)


def draw_normal(*shape: int, random: torch.Generator) -> Tensor:
    """Return normal numbers in float64, because losses fall by a hundred orders of magnitude."""
    return torch.randn(*shape, generator=random, device=random.device).double()


class _Linear:
    """Regression on x ~ N(0, I), stored as the error w - w* (S, R, D); at first |w - w*|^2 = D."""

    def __init__(self, seeds: int, rates: int, dimension: int, random: torch.Generator) -> None:
        start = draw_normal(seeds, 1, dimension, random=random)
        start *= dimension**0.5 / start.norm(dim=-1, keepdim=True)
        self.parameters = [start.repeat(1, rates, 1)]
        self.log_size = start.new_zeros(seeds, rates)

    def rescale(self) -> None:
        """Normalize the error and add its log norm to `log_size`.

        Otherwise the norm would underflow, for example after 400 steps that multiply it by 0.06.
        """
        size_SR1 = self.parameters[0].norm(dim=-1, keepdim=True)
        self.parameters[0] /= size_SR1
        self.log_size += size_SR1.squeeze(-1).log()

    def compute_gradients(self, x_SBD: Tensor, noise_SB1: Tensor) -> list[Tensor]:
        error_SBR = x_SBD @ self.parameters[0].mT - noise_SB1
        return [error_SBR.mT @ x_SBD / x_SBD.shape[1]]

    def compute_log_loss(self) -> Tensor:
        return 2 * self.log_size + (self.parameters[0].square().sum(-1) / 2).log()


class _MLP:
    """A ReLU network without biases that learns another network of the same width."""

    def __init__(self, seeds: int, rates: int, dimension: int, random: torch.Generator) -> None:
        def draw_layers() -> tuple[Tensor, Tensor]:
            inner = draw_normal(seeds, 1, WIDTH, dimension, random=random)
            outer = draw_normal(seeds, 1, WIDTH, random=random)
            return inner * (2 / dimension) ** 0.5, outer / WIDTH**0.5

        self.teacher = draw_layers()
        self.parameters = [p.repeat(1, rates, *[1] * (p.dim() - 2)) for p in draw_layers()]
        self.test = draw_normal(seeds, 512, dimension, random=random)

    def compute_gradients(self, x_SBD: Tensor, noise_SB1: Tensor) -> list[Tensor]:
        inner, outer = self.parameters
        hidden_SBRH, out_SBR = _forward(inner, outer, x_SBD)
        error_SBR = (out_SBR - _forward(*self.teacher, x_SBD)[1] - noise_SB1) / x_SBD.shape[1]
        # d out / d inner = outer * [hidden > 0] x and d out / d outer = inner . [hidden > 0] x.
        gated_error_SBRH = (hidden_SBRH > 0) * error_SBR[..., None]
        common_SRHD = (gated_error_SBRH.flatten(2).mT @ x_SBD).view_as(inner)
        return [outer[..., None] * common_SRHD, (inner * common_SRHD).sum(-1)]

    def compute_log_loss(self) -> Tensor:
        target = _forward(*self.teacher, self.test)[1]
        inner, outer = self.parameters
        return ((_forward(inner, outer, self.test)[1] - target).square().mean(1) / 2).log()


def _forward(inner_SRHD: Tensor, outer_SRH: Tensor, x_SBD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the hidden activations (S, B, R, H) and the output (S, B, R)."""
    hidden = (x_SBD @ inner_SRHD.flatten(1, 2).mT).clamp_(min=0)
    hidden = hidden.view(*hidden.shape[:2], *outer_SRH.shape[1:])
    return hidden, (hidden * outer_SRH[:, None]).sum(-1)


class _SGD:
    def __init__(self, parameters: list[Tensor], rates: Tensor) -> None:
        # The shape broadcasts to (S, R, …).
        self.rates = [rates.view(1, -1, *[1] * (p.dim() - 2)) for p in parameters]

    def compute_updates(self, gradients: list[Tensor]) -> Iterator[Tensor]:
        return (rate * g for rate, g in zip(self.rates, gradients, strict=True))


class _Adam(_SGD):
    def __init__(self, parameters: list[Tensor], rates: Tensor) -> None:
        super().__init__(parameters, rates)
        self.first = [torch.zeros_like(p) for p in parameters]
        self.second = [torch.zeros_like(p) for p in parameters]
        self.count = 0

    def compute_updates(self, gradients: list[Tensor]) -> Iterator[Tensor]:
        self.count += 1
        corrections = [1 - beta**self.count for beta in BETAS]
        for i, g in enumerate(gradients):
            self.first[i].lerp_(g, 1 - BETAS[0])
            self.second[i].mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
            size = (self.second[i] / corrections[1]).sqrt_().add_(EPSILON)
            yield self.rates[i] / corrections[0] * self.first[i] / size
