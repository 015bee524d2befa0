"""A trial of an optimizer of an unknown class, before its parameters are split over ranks.

The optimizer steps several random tensors together, and then each tensor, or each piece of a
tensor, alone. See Note [Which optimizers are split by element] in `optimizer_kinds.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zero.fsdp.shard import as_column

Optimizer = torch.optim.Optimizer

STEPS = 50
#: Scales of the gradients of a trial, so that clipping and thresholds take effect.
SCALES = (1.0, 1e-3, 30.0, 1e-6, 1e3)
#: Sizes of square matrices that some optimizers treat differently from small matrices.
SIDES = (64, 256)


class Trial:
    """Comparisons of an optimizer's steps on whole tensors with steps on one tensor or piece alone.

    make: a function that constructs the optimizer. `options` are its arguments, and `group` the
        options of the parameter group.
    as_columns: True at stage 3, where an optimizer that is not element-wise is constructed on
        columns of elements, and steps whole tensors.
    """

    def __init__(
        self,
        cls: type[Optimizer],
        make: Callable[..., Optimizer],
        options: Mapping[str, Any],
        group: Mapping[str, Any],
        as_columns: bool,
    ) -> None:
        self.name = cls.__name__
        self.make = make
        self.options = _replace_zero_learning_rate(options)
        self.group = _replace_zero_learning_rate(group)
        self.as_columns = as_columns
        self.random = np.random.default_rng(0)

    def check_parameters(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Raise ValueError if the step on one parameter depends on other parameters.

        The parameters of the trial have the numbers of dimensions of `shapes`.
        """
        dims = sorted({len(shape) for shape in shapes}) or [2]
        values, gradients = self._draw([_make_shape(dim, size) for dim in dims for size in (4, 5)])
        wholes, numbers = self._run(values, gradients)
        for index, whole in enumerate(wholes):
            [alone], others = self._run(values, gradients, index, as_columns=self.as_columns)
            if numbers != others or not _is_close(whole, alone):
                reason = " or on its shape at construction" if self.as_columns else ""
                remedy = " or with ShardedOptimizer" if self.as_columns else ""
                raise ValueError(
                    f"{self.name} cannot be sharded: its step on one parameter depends on other "
                    f"parameters{reason}, which are on other ranks; use it unsharded{remedy}"
                )

    def check_elements(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Raise ValueError if steps on pieces of a tensor differ from steps on the tensor."""
        largest = max((prod(shape) for shape in shapes), default=0)
        dims = sorted({len(shape) for shape in shapes if len(shape) > 2})
        tried: list[tuple[int, ...]] = [(6, 4), (4, 5), (20,)]
        tried += [(side, side) for side in SIDES if largest >= side**2]
        tried += [_make_shape(dim, 4) for dim in dims]
        for shape in tried:
            values, gradients = self._draw([shape, (4, 3)])
            wholes, numbers = self._run(values, gradients)
            split_values = _split_all(values)
            split_gradients = [_split_all(step) for step in gradients]
            for index, part in enumerate(_split_all(wholes)):
                # Step one piece alone, because a rank has only one of the pieces.
                [alone], others = self._run(split_values, split_gradients, index, is_split=True)
                if numbers != others or not _is_close(part, alone):
                    raise ValueError(
                        f"{self.name} is not element-wise: its steps on a {shape} tensor and on "
                        f"parts of it differ; {advise_retraction(self.name, self.as_columns)}"
                    )

    def check_dtypes(self, dtypes: Iterable[torch.dtype]) -> None:
        """Raise ValueError if a step in one of these floating-point dtypes draws random numbers.

        The other checks use float64, but an optimizer may round stochastically only in bfloat16.
        """
        values, gradients = self._draw([(6, 4)])
        # Parameters of one byte per element are frozen, because torch has no arithmetic for them.
        for dtype in {d for d in dtypes if d.is_floating_point and d.itemsize > 1}:
            generators = _get_rng_states()
            # The second step uses state from the first one. The values are not checked, because
            # they may become infinite in float16.
            self._run_steps(
                [value.to(dtype) for value in values],
                [[gradient.to(dtype) for gradient in step] for step in gradients[:2]],
            )
            self._check_random_states(generators)

    def _draw(self, shapes: Sequence[tuple[int, ...]]) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Return random values of parameters of these shapes, and their gradients for each step."""

        def draw(scale: float) -> list[Tensor]:
            return [torch.tensor(scale * self.random.standard_normal(shape)) for shape in shapes]

        values = draw(1.0)
        gradients = []
        for step in range(STEPS):
            drawn = draw(SCALES[step % len(SCALES)])
            if step % 4 == 3:
                # Some elements have no gradient, such as unused rows of an embedding.
                masks = [torch.tensor(self.random.random(shape) < 0.5) for shape in shapes]
                drawn = [gradient * mask for gradient, mask in zip(drawn, masks, strict=True)]
            gradients.append(drawn)
        return values, gradients

    def _run(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Sequence[Tensor]],
        only: int | None = None,
        *,
        as_columns: bool = False,
        is_split: bool = False,
    ) -> tuple[list[Tensor], dict[str, float]]:
        """Return the values after all steps, and the numbers that the optimizer stores.

        Raise ValueError if a step fails, draws random numbers, produces infinity or NaN, or stores
        state that cannot be sharded.

        only: the index of the only parameter to step; None to step all of them.
        is_split: True if the parameters are pieces of tensors; their state must then be in pieces.
        """
        generators = _get_rng_states()
        try:
            optimizer, stepped = self._run_steps(values, gradients, only, as_columns)
            if not all(bool(torch.isfinite(value).all()) for value in stepped):
                raise ArithmeticError("values became infinite or NaN")
        except Exception as error:
            raise ValueError(
                f"{self.name} cannot be sharded: it fails on dense tensors with a plain "
                f"step() ({error}); if it treats each parameter by itself, {self._advise_skip()}"
            ) from error
        check_state(optimizer)
        if is_split:
            self._check_state_is_joinable(optimizer)
        self._check_random_states(generators)
        return stepped, _collect_numbers({**vars(optimizer), **optimizer.param_groups[0]})

    def _check_random_states(self, generators: Sequence[Tensor]) -> None:
        """Raise ValueError if random numbers were drawn, so that the generator states changed."""
        if any(not torch.equal(*pair) for pair in zip(generators, _get_rng_states(), strict=True)):
            raise ValueError(
                f"{self.name} cannot be sharded: it draws random numbers, which ranks would draw "
                "in another order than one process; if this is intended, seed each rank "
                f"differently, and {self._advise_skip()}"
            )

    def _advise_skip(self) -> str:
        """Return the advice for an optimizer that may be sharded although its trial fails."""
        if self.as_columns:
            return "replace FSDP with ShardedOptimizer(..., elementwise=False) (stages 1 and 2)"
        return "pass ShardedOptimizer(..., elementwise=False)"

    def _check_state_is_joinable(self, optimizer: Optimizer) -> None:
        """Raise ValueError if the optimizer state of a tensor's pieces cannot be concatenated."""
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                stored = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
                has_dims = any(leaf.dim() for leaf in stored)
                if has_dims and not (stored[0] is value and value.shape == parameter.shape):
                    raise ValueError(
                        f"{self.name} cannot be split by element: its state {key!r} is neither a "
                        "tensor of its parameter's shape nor a number without dimensions, so a "
                        "checkpoint could not concatenate the pieces; "
                        f"{advise_retraction(self.name, self.as_columns)}"
                    )

    def _run_steps(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Sequence[Tensor]],
        only: int | None = None,
        as_columns: bool = False,
    ) -> tuple[Optimizer, list[Tensor]]:
        """Return the optimizer and its parameters' values after one step per row of `gradients`."""
        chosen = list(range(len(values))) if only is None else [only]
        wholes = [values[index].clone() for index in chosen]
        if as_columns:
            # At stage 3 an optimizer is constructed on elements and steps whole tensors.
            parameters = [nn.Parameter(_get_first_elements(value)) for value in values]
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
                    parameter.data = _get_first_elements(values[chosen[position]])
        return optimizer, wholes


def check_state(optimizer: Optimizer) -> None:
    """Raise ValueError if an optimizer stores state that does not belong to a parameter."""
    shared = [key for key in optimizer.state if not isinstance(key, Tensor)]
    if shared:
        raise ValueError(
            f"{type(optimizer).__name__} cannot be sharded: its state {shared[0]!r} does not "
            "belong to a parameter, so a sharded checkpoint would not contain it; use it unsharded"
        )


def _replace_zero_learning_rate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, with a learning rate of 0.01 instead of zero; None is not replaced.

    A schedule with warm-up may start at zero, and the trial would then detect no dependence.
    """
    options = dict(options)
    if options.get("lr") == 0:
        options["lr"] = 0.01
    return options


def advise_retraction(name: str, is_stage_3: bool) -> str:
    """Return the advice for an optimizer that was declared element-wise by mistake."""
    return f"remove {name} from elementwise_optimizers" if is_stage_3 else "omit elementwise=True"


def _get_rng_states() -> list[Tensor]:
    """Return the states of torch's default generators."""
    states = [torch.get_rng_state()]
    return states + torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else states


def _collect_numbers(entries: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers and tensors of one element among the options and attributes, by name.

    An optimizer that sums over its parameters, such as Prodigy, often stores the sum in an option
    or attribute many steps before the sum affects an update.
    """
    numbers: dict[str, float] = {}
    for name, value in entries.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            numbers[name] = value.item()
        elif isinstance(value, int | float):
            numbers[name] = value
    return numbers


def _split_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return two pieces of each flattened tensor: the first 7 elements, and all later elements."""
    pieces = []
    for tensor in tensors:
        flat = tensor.flatten()
        pieces += [flat[:7], flat[7:]]
    return pieces


def _make_shape(dim: int, size: int) -> tuple[int, ...]:
    """Return a small shape with `dim` dimensions; `size` distinguishes two such shapes."""
    return (size + 2, size, *[2] * (dim - 2))[:dim]


def _get_first_elements(tensor: Tensor) -> Tensor:
    """Return the first three elements in the shape of an FSDP shard: (3, 1, ..., 1)."""
    return as_column(tensor.flatten()[:3].clone(), tensor.dim())


def _is_close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=1e-9, atol=1e-12)
