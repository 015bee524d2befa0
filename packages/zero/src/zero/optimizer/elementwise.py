"""How an optimizer may be split over ranks: known for torch's own classes, verified for others.

Note [Which optimizers are split by element]
Only the classes in `ELEMENTWISE`, and those of which the caller says so, are cut anywhere. No trial
can show that an unknown optimizer never looks at a whole tensor: it may do so after the thousandth
step. Every other class gets whole parameters, each with one owner, at all stages. A trial then only
refuses: an optimizer whose step on one parameter visibly depends on other parameters, and one that
the caller calls element-wise by mistake.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

Split = Literal["elements", "parameters"]
Optimizer = torch.optim.Optimizer

# Exactly these classes: a subclass may override anything.
ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax,
        torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adagrad, torch.optim.Adadelta,
        torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
    }
)  # fmt: skip
WHOLE_PARAMETERS: frozenset[type[Optimizer]] = frozenset({torch.optim.Adafactor, torch.optim.Muon})
REFUSED: dict[type[Optimizer], str] = {
    torch.optim.LBFGS: "it treats all parameters as one vector; use it unsharded",
    torch.optim.SparseAdam: "it needs sparse gradients, and gradients are averaged densely; use "
    "Adam, with nn.Embedding(..., sparse=False)",
}
STEPS = 50
# Gradients of one trial span these scales, so that clipping and thresholds take effect.
SCALES = (1.0, 1e-3, 30.0, 1e-6, 1e3)
# Sides of larger matrices, which some optimizers treat differently, as those with 8-bit states do.
SIDES = (64, 256)


def how_to_split(
    cls: type[Optimizer],
    options: Mapping[str, Any],
    device: torch.device | None = None,
    *,
    elementwise: bool | None = None,
    group: Mapping[str, Any] | None = None,
    shapes: Iterable[Sequence[int]] = (),
    as_columns: bool = False,
    make: Callable[..., Optimizer] | None = None,
) -> Split:
    """Return how `cls(params, **options)` is sharded, or raise ValueError with the reason.

    "elements": its tensors are cut anywhere. "parameters": each tensor is whole on one rank.

    elementwise: True if the caller says that the optimizer treats every element by itself, which a
        trial verifies; False if it treats every parameter by itself, which is not verified; None if
        the caller does not know.
    group: the options of one parameter group. shapes: the shapes of its parameters.
    as_columns: the optimizer is constructed on this rank's elements, as at stage 3.
    make: constructs the optimizer, if that is not `cls` itself.
    """
    if cls in REFUSED:
        raise ValueError(f"{cls.__name__} cannot be sharded: {REFUSED[cls]}")
    if cls in ELEMENTWISE and elementwise is not False:
        return "elements"
    if cls in WHOLE_PARAMETERS and not elementwise:
        return "parameters"
    if cls in WHOLE_PARAMETERS:
        raise ValueError(f"{cls.__name__} is not element-wise: leave out elementwise=True")
    if elementwise is False and not as_columns:
        return "parameters"
    seen = [tuple(shape) for shape in shapes]
    trial = _Trial(cls, make or cls, _moving(options), _moving(group or {}), as_columns)
    # Options may be objects without a lasting name, so that only plain ones are remembered.
    described = f"{make} {options} {group} {device} {elementwise} {as_columns} {sorted(seen)}"
    key = cls, described
    if key not in _verified:
        rng = [device.index or 0] if device is not None and device.type == "cuda" else []
        with torch.random.fork_rng(rng), torch.device(device or "cpu"):
            if elementwise:
                trial.check_elements(seen)
            else:
                trial.check_parameters(seen)
    if " at 0x" not in described:
        _verified.add(key)
    return "elements" if elementwise else "parameters"


# What passed its trial: class, and its options and shapes.
_verified: set[tuple[type[Optimizer], str]] = set()


def options_from(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that an optimizer was constructed with, from its group and attributes.

    Raise ValueError if one of them cannot be found.
    """
    options: dict[str, Any] = {}
    cls = type(optimizer)
    for name, parameter in list(inspect.signature(cls.__init__).parameters.items())[2:]:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if name in group:
            options[name] = group[name]
        elif name in optimizer.defaults:
            options[name] = optimizer.defaults[name]
        elif name in vars(optimizer):
            options[name] = vars(optimizer)[name]
        else:
            raise ValueError(
                f"{cls.__name__} cannot be verified on FSDP's shards: the value of its argument "
                f"{name} is neither an option of its groups nor an attribute; store it as one, or "
                "use ShardedOptimizer (stages 1 and 2), which constructs the optimizer itself"
            )
    return options


def _moving(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with a learning rate: one of zero, as warm-up starts with, shows nothing."""
    options = dict(options)
    if "lr" in options and not options["lr"]:
        options["lr"] = 0.01
    return options


class _Trial:
    """Steps an optimizer on random tensors, together and apart."""

    def __init__(
        self,
        cls: type[Optimizer],
        make: Callable[..., Optimizer],
        options: Mapping[str, Any],
        group: Mapping[str, Any],
        as_columns: bool,
    ) -> None:
        self.name, self.make = cls.__name__, make
        self.options, self.group, self.as_columns = options, group, as_columns
        self.random = np.random.default_rng(0)

    def check_parameters(self, seen: Sequence[tuple[int, ...]]) -> None:
        """Raise if the step on one parameter depends on the others."""
        dims = sorted({*map(len, seen)}) or [2]
        values, gradients = self._draw([_example(dim, size) for dim in dims for size in (4, 5)])
        wholes, numbers = self._run(values, gradients)
        for index, whole in enumerate(wholes):
            [alone], others = self._run(values, gradients, index, as_columns=self.as_columns)
            if numbers != others or not _same(whole, alone):
                where = " or on its shape at construction" if self.as_columns else ""
                remedy = " or with ShardedOptimizer" if self.as_columns else ""
                raise ValueError(
                    f"{self.name} cannot be sharded: its step on one parameter depends on the "
                    f"others{where}, which other ranks hold; use it unsharded{remedy}"
                )

    def check_elements(self, seen: Sequence[tuple[int, ...]]) -> None:
        """Raise if cutting tensors changes a step."""
        largest = max(map(prod, seen), default=0)
        kinds = [(6, 4), (4, 5), (20,)]
        kinds += [(side, side) for side in SIDES if largest >= side**2]
        kinds += [_example(dim, 4) for dim in sorted({*map(len, seen)}) if dim > 2]
        for shape in kinds:
            values, gradients = self._draw([shape, (4, 3)])
            wholes, numbers = self._run(values, gradients)
            pieces = [piece for value in values for piece in _cut(value)]
            cut = [[piece for gradient in step for piece in _cut(gradient)] for step in gradients]
            expected = [piece for whole in wholes for piece in _cut(whole)]
            for index, part in enumerate(expected):
                # As on one rank, which has no other pieces.
                [alone], others = self._run(pieces, cut, index)
                if numbers != others or not _same(part, alone):
                    raise ValueError(
                        f"{self.name} is not element-wise: its steps on a {shape} tensor and on "
                        "parts of it differ; leave out elementwise=True"
                    )

    def _draw(self, shapes: Sequence[tuple[int, ...]]) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Return values and, for each step, gradients."""

        def draw(scale: float) -> list[Tensor]:
            return [torch.tensor(scale * self.random.standard_normal(shape)) for shape in shapes]

        values, gradients = draw(1.0), []
        for step in range(STEPS):
            drawn = draw(SCALES[step % len(SCALES)])
            if step % 4 == 3:
                # Some elements get no gradient, as rows of an embedding do.
                kept = [torch.tensor(self.random.random(shape) < 0.5) for shape in shapes]
                drawn = [gradient * mask for gradient, mask in zip(drawn, kept, strict=True)]
            gradients.append(drawn)
        return values, gradients

    def _run(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Sequence[Tensor]],
        only: int | None = None,
        *,
        as_columns: bool = False,
    ) -> tuple[list[Tensor], dict[str, float]]:
        """Return the values after all steps, and the numbers that all parameters share.

        With `only`, one of the parameters is stepped alone.
        """
        try:
            optimizer, stepped = self._steps(values, gradients, only, as_columns)
            if not all(bool(torch.isfinite(value).all()) for value in stepped):
                raise ArithmeticError("values became infinite or NaN")
        except Exception as error:
            raise ValueError(
                f"{self.name} cannot be sharded: it fails on dense tensors with a plain "
                f"step() ({error}); if it treats each parameter by itself, pass "
                "ShardedOptimizer(..., elementwise=False)"
            ) from error
        return stepped, _numbers({**vars(optimizer), **optimizer.param_groups[0]})

    def _steps(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Sequence[Tensor]],
        only: int | None,
        as_columns: bool,
    ) -> tuple[Optimizer, list[Tensor]]:
        chosen = list(range(len(values))) if only is None else [only]
        wholes = [values[index].clone() for index in chosen]
        if as_columns:
            # As at stage 3: constructed on elements, of all parameters, and whole in a step.
            parameters = [nn.Parameter(_column(value)) for value in values]
            stepped = [parameters[index] for index in chosen]
        else:
            parameters = stepped = [nn.Parameter(value) for value in wholes]
        optimizer = self.make([{**self.group, "params": parameters}], **self.options)
        for step in gradients:
            for parameter, value, index in zip(stepped, wholes, chosen, strict=True):
                parameter.data = value
                parameter.grad = step[index].clone()
            optimizer.step()
            for position, parameter in enumerate(stepped):
                wholes[position] = parameter.data
                if as_columns:
                    parameter.grad = None
                    parameter.data = _column(values[chosen[position]])
        return optimizer, wholes


def _numbers(entries: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among an optimizer's options and attributes.

    An optimizer that sums over its parameters, such as Prodigy, often keeps the sum there, long
    before it changes a step.
    """
    found: dict[str, float] = {}
    for name, value in entries.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            found[name] = value.item()
        elif isinstance(value, int | float):
            found[name] = value
    return found


def _cut(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first elements and the others, at no multiple of a row."""
    flat = tensor.flatten()
    return flat[:7], flat[7:]


def _example(dim: int, size: int) -> tuple[int, ...]:
    """Return a small shape of so many dimensions."""
    return (size + 2, size, *[2] * (dim - 2))[:dim]


def _column(tensor: Tensor) -> Tensor:
    """Return a few elements in the form of FSDP's shards."""
    values = tensor.flatten()[:3].clone()
    return values.view(len(values), *[1] * (tensor.dim() - 1))


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=1e-9, atol=1e-12)
