"""Comparison of a pruned model with a dense model whose weights that read removed units are zero.

The models are compared at several batch sizes and lengths, because an example may be too short to
show a difference: one token attends to itself however its heads are split, and a window has no
effect on a shorter input. Sizes that the dense model rejects are skipped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tinyml.conversion import evaluation_mode
from tinyml.exported import list_tensors
from tinyml.quantization.grid import widen

_LONGEST = 1025  # the largest length, unless the example is longer
_BATCHES = (1, 3)
#: A function that calls a model with fixed arguments.
_Call = Callable[[nn.Module], Any]


@torch.no_grad()
def check_equal(
    small: nn.Module, dense: nn.Module, inputs: tuple[Any, ...], sizes: Sequence[int]
) -> None:
    """Raise `ValueError` unless both models have the same outputs on variants of `inputs`.

    `sizes` are the old values of the attributes that were changed. Some variants are longer than
    these values, because an attribute may also be an attention window. If the dense model does not
    run in float64 on the CPU, the outputs are compared for `inputs` only.
    """
    small, dense, inputs, is_double = _as_double(small, dense, inputs)
    with evaluation_mode(small), evaluation_mode(dense):
        example = _make_call(inputs)
        outputs = list_tensors(example(dense))
        _check_call(small, example, outputs, is_double)
        # Indices out of bounds are an error on a CPU, but make a GPU unusable for the process.
        for calls in _iter_variants(inputs, outputs, sizes) if is_double else ():
            for call in calls:
                try:
                    expected = list_tensors(call(dense))
                except Exception:  # the model's own code may raise anything
                    continue
                _check_call(small, call, expected, is_double)
                break


def _as_double(
    small: nn.Module, dense: nn.Module, inputs: tuple[Any, ...]
) -> tuple[nn.Module, nn.Module, tuple[Any, ...], bool]:
    """Return float64 copies of the models and inputs on the CPU, and True.

    If the dense model does not run in float64 on the CPU, return the arguments and False.
    """
    try:
        other = copy.deepcopy(dense).to("cpu", torch.float64)
        moved = tree_map_only(Tensor, _to_double, inputs)
        with evaluation_mode(other):
            other(*moved)
        return copy.deepcopy(small).to("cpu", torch.float64), other, moved, True
    except Exception:  # code that is written for one device or type
        return small, dense, inputs, False


def _to_double(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64 if tensor.is_floating_point() else None)


def _make_call(inputs: tuple[Any, ...], has_batch: Sequence[bool] = ()) -> _Call:
    """Return a call with `inputs`, which are copied because the model may write into them.

    The call raises `ValueError` if an output for which `has_batch` is True has another batch size
    than `inputs`, for example because `x.view(-1, 288)` divided one sample among several rows.
    """

    def call(model: nn.Module) -> Any:
        outputs = model(*tree_map_only(Tensor, Tensor.clone, inputs))
        batch = list_tensors(inputs)[0].shape[:1] if has_batch else ()
        for output, is_checked in zip(list_tensors(outputs), has_batch, strict=False):
            if is_checked and output.shape[:1] != batch:
                raise ValueError(f"expected the batch size {batch}, got {output.shape[:1]}")
        return outputs

    return call


def _make_cached_call(tokens: Tensor) -> _Call:
    """Return a call that computes the last position from the cache of the earlier positions."""

    def call(model: nn.Module) -> Any:
        output = model(tokens[:, :-1], use_cache=True)
        # transformers 5.24 renamed `past_key_values` to `cache`.
        name = "cache" if hasattr(output, "cache") else "past_key_values"
        past = getattr(output, name)
        if past is None:
            raise ValueError("no cache")
        return model(tokens[:, -1:], **{name: past}, use_cache=True)

    return call


def _iter_variants(
    inputs: tuple[Any, ...], outputs: Sequence[Tensor], sizes: Sequence[int]
) -> Iterator[list[_Call]]:
    """Yield lists of alternative calls; the first that the dense model accepts is compared.

    `outputs` are those for `inputs`.
    """
    first = next(iter(list_tensors(inputs)), None)
    if first is None or not first.dim():
        return
    longer_inputs = [[inputs]]
    single = _resize(inputs, 0, 1)[1] if first.dim() > 1 else inputs
    for dim in range(1 if first.dim() > 1 else 0, first.dim()):
        old_length = first.shape[dim]
        if old_length in first.shape[1:dim]:
            continue  # dimensions of one size are resized together
        lengths = {old_length + 1, *(min(2 * n + 1, _LONGEST) for n in (old_length, *sizes))}
        alternatives: list[tuple[Any, ...]] = []
        for length in sorted(lengths, reverse=True):
            if length > old_length:
                alternatives += _resize(single, dim, length) + _resize(inputs, dim, length)
        longer_inputs.append(alternatives)
        # With one position, an output of shape (batch * positions, ...) also has the batch size.
        is_known = first.dim() > 1 and old_length > 1
        has_batch = [is_known and out.shape[:1] == first.shape[:1] for out in outputs]
        yield [_make_call(variant, has_batch) for variant in alternatives]
    for batch in _BATCHES:
        yield [_make_call(variant) for variant in _resize(inputs, 0, batch)]
        if first.dim() == 2 and not first.is_floating_point():
            for alternatives in longer_inputs:
                resized = [_resize(variant, 0, batch)[0] for variant in alternatives]
                yield [_make_cached_call(list_tensors(variant)[0]) for variant in resized]


def _resize(inputs: tuple[Any, ...], dim: int, size: int) -> list[tuple[Any, ...]]:
    """Return two variants of `inputs` in which dimension `dim` of the first tensor has `size`.

    All tensors are repeated or cut along the axes whose size is that of `dim` in the first tensor.
    The batch is the first dimension of a tensor, and a length is any other dimension. In the first
    variant, the repetitions of the first tensor differ, because equal tokens hide how attention
    mixes them. The second repeats exactly, because the model may not accept other values.
    """
    first = list_tensors(inputs)[0]
    old_size = first.shape[dim]
    positions = torch.arange(size, device="cpu")

    def resize(tensor: Tensor) -> Tensor:
        for axis in range(tensor.dim()):
            if tensor.shape[axis] == old_size and (axis == 0) == (dim == 0):
                tensor = tensor.index_select(axis, positions % old_size)
        return tensor

    def resize_and_vary(tensor: Tensor) -> Tensor:
        resized = resize(tensor)
        if tensor is not first or tensor.dtype == torch.bool:
            return resized
        repetition = (positions // old_size).view(-1, *[1] * (tensor.dim() - 1 - dim))
        if not tensor.is_floating_point():
            return resized + repetition
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(resized.shape, generator=generator, device="cpu")
        return resized + noise.to(resized) * repetition.sign() * (tensor.std(correction=0) or 1.0)

    return [tree_map_only(Tensor, function, inputs) for function in (resize_and_vary, resize)]


def _check_call(small: nn.Module, call: _Call, expected: list[Tensor], is_double: bool) -> None:
    """Raise `ValueError` unless the outputs of `call(small)` are close to `expected`."""
    try:
        outputs = list_tensors(call(small))
    except Exception as error:  # the model's own code may raise anything
        raise _make_size_error(small, str(error)) from error
    is_close = len(outputs) == len(expected) and all(
        _is_close(ours, theirs, is_double) for ours, theirs in zip(outputs, expected, strict=True)
    )
    if not is_close:
        shape = tuple(expected[0].shape) if expected else ()
        raise _make_size_error(
            small, f"outputs of shape {shape} are not those of the model with zeros"
        )


def _make_size_error(model: nn.Module, why: str) -> ValueError:
    return ValueError(
        f"{type(model).__name__} does not compute the same after pruning ({why}); if its forward "
        "contains a size as a number, read it from the tensor's shape, or protect the layers that "
        "write these units; remove values that are computed but not returned"
    )


def _is_close(ours: Tensor, expected: Tensor, is_double: bool) -> bool:
    if ours.shape != expected.shape or ours.dtype != expected.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(ours, expected)
    # Parts of a model may compute in float32 although its parameters have 64 bits.
    if is_double:
        tolerance = 1e-5
    elif torch.finfo(expected.dtype).bits > 16:
        tolerance = 1e-3
    else:
        tolerance = 0.1
    same = (ours == expected) | (ours.isnan() & expected.isnan())
    distance = widen(ours - expected).masked_fill(same, 0).norm()  # norms overflow in float16
    size = widen(expected).masked_fill(same & ~expected.isfinite(), 0).norm()
    return bool(distance <= tolerance * size)
