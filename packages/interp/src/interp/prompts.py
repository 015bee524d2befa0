"""Prompts of all functions; metrics and means over several pairs of prompts for patching."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from interp.text import Texts, Tokenizer, encode

#: A function from final residual streams (n, seq, d_model) to one number per stream, (n,).
Metric = Callable[[Tensor], Tensor]
#: One metric for all pairs of prompts, or one per pair.
Metrics = Metric | Sequence[Metric]
#: Token ids (pairs, seq), or the keyword arguments of the model: input_ids, attention_mask, ...
Prompt = Tensor | Mapping[str, Any]
Result = TypeVar("Result", bound=Any)

_NO_PADDING = (
    "pad on the left and read the last positions, or pass one metric per pair that reads positions "
    "of its own prompt"
)


def as_prompt(
    prompt: Prompt | Texts, tokenizer: Tokenizer | None = None, device: torch.device | None = None
) -> Prompt:
    """Return a prompt unchanged, and texts as the result of `encode`.

    Raises TypeError for texts without a tokenizer, and for other values.
    """
    if isinstance(prompt, Tensor | Mapping):
        return prompt
    if tokenizer is None:
        raise TypeError(
            "expected token ids (n, seq) or the keyword arguments of a model, got a "
            f"{type(prompt).__name__}; for text, pass encode(tokenizer, texts), or tokenizer= to "
            "functions that have this argument; for ids, pass torch.tensor(ids)"
        )
    return encode(tokenizer, prompt, device=device)


def get_tokens(prompt: Prompt) -> Tensor:
    """Return the token ids of a prompt, (n, seq).

    Raises TypeError if `prompt` is not a `Prompt`, and ValueError if it has a cache or no
    `input_ids`.
    """
    prompt = as_prompt(prompt)
    if isinstance(prompt, Tensor):
        return prompt
    for name, value in prompt.items():
        if hasattr(value, "get_seq_length"):
            raise ValueError(f"the prompt has a cache, {name}=; pass the whole text instead")
    tokens = prompt.get("input_ids")
    if not isinstance(tokens, Tensor):
        keys = ", ".join(map(str, prompt)) or "nothing"
        raise ValueError(f"expected a prompt with input_ids, got {keys}; pass input_ids=")
    return tokens


def get_mask(prompt: Prompt) -> Tensor:
    """Return booleans (n, seq), False at padding; all are True without an `attention_mask`.

    Raises ValueError for a mask that is not (n, seq), has other numbers than 0 and 1, or has a row
    without a token.
    """
    if isinstance(prompt, Tensor) or prompt.get("attention_mask") is None:
        return torch.ones_like(get_tokens(prompt), dtype=torch.bool)
    mask = prompt["attention_mask"]
    ids = prompt.get("input_ids")
    if mask.ndim != 2 or (ids is not None and mask.shape != ids.shape):
        raise ValueError(
            f"attention_mask is {tuple(mask.shape)}; pass the mask of the tokens, (n, seq), which "
            "is 0 at padding"
        )
    require_zeros_and_ones(mask)
    is_token: Tensor = mask != 0
    return is_token


def require_zeros_and_ones(mask: Tensor) -> None:
    """Raise ValueError unless a mask consists of zeros and ones, with at least one 1 per row."""
    is_valid = ((mask == 0) | (mask == 1)).all() & (mask != 0).any(-1).all()
    if not bool(is_valid):
        raise ValueError(
            f"attention_mask has values from {float(mask.min()):.3g} to {float(mask.max()):.3g}; "
            "each row must be 1 at its tokens and 0 at padding: convert an additive mask with "
            "(mask == 0).long()"
        )


def require_hidden_padding(pattern: Tensor, mask: Tensor) -> None:
    """Raise ValueError if a token attends to padding.

    `pattern` is (batch, heads, seq, seq), and `mask` (batch, seq) is False at padding.
    """
    mask = mask.to(pattern.device)
    weights = pattern.amax(1).where(mask[:, :, None] & ~mask[:, None, :], 0)
    # Models that mask scores with a finite number leave tiny weights.
    if float(weights.max()) > 1e-6:
        raise ValueError(
            f"tokens attend to padding, with weights of up to {float(weights.max()):.2g}: the "
            "model was called without the mask or with other padding; call model(**prompt)"
        )


def split_pairs(
    model: nn.Module,
    clean: Prompt | Texts,
    corrupted: Prompt | Texts,
    metric: Metrics,
    tokenizer: Tokenizer | None = None,
) -> list[tuple[Prompt, Prompt, Metric]]:
    """Return (clean, corrupted, metric) for each pair in a batch of prompts.

    Raises ValueError for prompts that do not correspond (see `encode_pairs`), and for a wrong
    number of metrics. Also raises ValueError for padding at the end if all pairs have the same
    metric. The returned metrics raise ValueError if they read padding.
    """
    clean, corrupted = encode_pairs(model, clean, corrupted, tokenizer)
    mask = get_mask(clean)
    if isinstance(metric, Sequence):
        metrics = list(metric)
        if len(metrics) != len(mask):
            raise ValueError(
                f"got {len(metrics)} metrics for {len(mask)} pairs; pass one, or one per pair"
            )
    else:
        # `measure_tokens` cannot detect an accuracy at padding, which may be 0 even without nan.
        if not bool(mask[:, -1].all()):
            raise ValueError(f"a prompt ends with padding; {_NO_PADDING}")
        metrics = [metric] * len(mask)
    pairs: list[tuple[Prompt, Prompt, Metric]] = []
    for i, pair_metric in enumerate(metrics):
        checked_metric = partial(measure_tokens, pair_metric, mask[i : i + 1])
        pairs.append((_select_prompt(clean, i), _select_prompt(corrupted, i), checked_metric))
    return pairs


def measure_tokens(metric: Callable[[Tensor], Tensor], mask: Tensor, values: Tensor) -> Tensor:
    """Return the metric of `values` (n, seq, features), such as streams or logits.

    Raises ValueError if the metric reads padding, where `mask` (n or 1, seq) is False.
    """
    if not bool(mask.all()):
        before, after = _measure_with_nan(metric, values[: len(mask)], ~mask[..., None])
        if not torch.allclose(before, after, equal_nan=True):
            raise ValueError(f"the metric reads padding; {_NO_PADDING}")
    return metric(values)


def _measure_with_nan(
    metric: Callable[[Tensor], Tensor], values: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the metric of `values`, and the metric of `values` with nan where `hidden` is True."""
    values = values.detach()
    with torch.no_grad():
        before = metric(values.clone())  # Metrics may change their argument in place.
        after = metric(values.masked_fill(hidden, float("nan")))
    return torch.as_tensor(before).double(), torch.as_tensor(after).double()


def encode_pairs(
    model: nn.Module, clean: Prompt | Texts, corrupted: Prompt | Texts, tokenizer: Tokenizer | None
) -> tuple[Prompt, Prompt]:
    """Return two prompts whose positions correspond; texts are encoded on the model's device.

    Raises ValueError unless the prompts of each pair have equal lengths and equal padding.
    """
    device = next((parameter.device for parameter in model.parameters()), None)
    clean = as_prompt(clean, tokenizer, device)
    corrupted = as_prompt(corrupted, tokenizer, device)
    clean_shape = tuple(get_tokens(clean).shape)
    corrupted_shape = tuple(get_tokens(corrupted).shape)
    if clean_shape != corrupted_shape or len(clean_shape) != 2 or 0 in clean_shape:
        raise ValueError(
            f"prompts are {clean_shape} and {corrupted_shape}; both must be (1, seq) or (pairs, "
            "seq) of one shape, because the positions of a pair correspond: pass prompts with "
            "equal numbers of tokens"
        )
    differs = (get_mask(clean) != get_mask(corrupted)).any(-1)
    if bool(differs.any()):
        raise ValueError(
            f"the prompts of pair {int(differs.nonzero()[0])} have different padding, so their "
            "positions do not correspond; pass prompts with equal numbers of tokens"
        )
    return clean, corrupted


def _select_prompt(prompt: Prompt, index: int) -> Prompt:
    """Return one prompt of a batch as keyword arguments, with a batch dimension of 1."""
    num_prompts = len(get_tokens(prompt))
    arguments = {"input_ids": prompt} if isinstance(prompt, Tensor) else dict(prompt)
    # Arguments with another number of rows, such as one row of position ids, belong to all prompts.
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.shape[:1] == (num_prompts,):
            arguments[name] = value[index : index + 1]
    return arguments


@dataclass(frozen=True, eq=False, kw_only=True)
class MeanOverPairs:
    """Base class of results for one pair of prompts, and of means over several pairs."""

    #: The result of each pair of prompts; () for the result of a single pair.
    pairs: tuple[Any, ...] = ()

    @property
    def standard_error(self) -> Tensor:
        """The standard error of `values` over pairs of prompts, with the shape of `values`.

        Raises ValueError for the result of a single pair.
        """
        return self.standard_error_of(lambda result: result.values)

    def standard_error_of(self, quantity: Callable[[Any], Tensor]) -> Tensor:
        """Return the standard error of `quantity(result)`, with the shape of the quantity.

        `quantity` is a function of a result, such as `lambda result: result.recovered`. The
        standard error of this ratio cannot be computed from `standard_error`, because numerator and
        denominator vary together. The jackknife is used instead: the quantity is recomputed once
        per pair, without this pair. For a mean, the estimate is the usual standard error.

        Raises ValueError for the result of a single pair. Source: Efron 1982, "The Jackknife, the
        Bootstrap and Other Resampling Plans".
        """
        num_pairs = len(self.pairs)
        if num_pairs < 2:
            raise ValueError(
                "expected results of at least 2 pairs of prompts, got 1; pass prompts (pairs, seq)"
            )
        leave_one_out = []
        for i in range(num_pairs):
            other_pairs = [*self.pairs[:i], *self.pairs[i + 1 :]]
            leave_one_out.append(quantity(average_over_pairs(other_pairs)))
        variance = torch.stack(leave_one_out).var(0, correction=0)
        error: Tensor = ((num_pairs - 1) * variance).sqrt()
        return error


def average_over_pairs(results: Sequence[Result]) -> Result:
    """Return a result with the means of all floats and floating-point tensors of several results.

    `results` become the `pairs` of the new result. The remaining fields are copied from the first
    result. A single result is returned unchanged. Means of tensors in half precision are float32.
    """
    if len(results) == 1:
        return results[0]
    numbers: dict[str, Any] = {"pairs": tuple(results)}
    for field in fields(results[0]):
        values = [getattr(result, field.name) for result in results]
        if isinstance(values[0], float):
            numbers[field.name] = sum(values) / len(values)
        elif isinstance(values[0], Tensor) and values[0].is_floating_point():
            # A mean in half precision would lose the spread that `standard_error_of` measures.
            dtype = torch.promote_types(values[0].dtype, torch.float32)
            numbers[field.name] = torch.stack(values).mean(0, dtype=dtype)
    return replace(results[0], **numbers)


def has_argument(model: nn.Module, argument: str) -> bool:
    """Return True if the model's `forward` has an argument with the name `argument`."""
    return argument in inspect.signature(model.forward).parameters


def forward(model: nn.Module, prompt: Prompt) -> Any:
    """Return the model's output for a prompt, with `use_cache=False` if `forward` accepts it."""
    prompt = as_prompt(prompt)
    arguments = {} if isinstance(prompt, Tensor) else dict(prompt)
    if has_argument(model, "use_cache"):
        arguments["use_cache"] = False
    # The first argument of a model need not be called input_ids.
    return model(prompt, **arguments) if isinstance(prompt, Tensor) else model(**arguments)


def measure(metric: Metric, streams: Tensor) -> Tensor:
    """Evaluate the metric on n final residual streams; return one number per stream, (n,).

    Booleans and integers are converted to floating point. Raises ValueError if the metric returns
    another shape, or if its number for the first stream depends on the second stream.
    """
    # Metrics may change their argument in place, and callers use the streams again.
    result = metric(streams.clone())
    if not isinstance(result, Tensor) or result.shape != (len(streams),):
        shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(
            f"the metric returned {shape} for {len(streams)} streams {tuple(streams.shape)}; it "
            f"must return one number per stream, ({len(streams)},)"
        )
    if len(streams) > 1:
        is_second = torch.tensor([False, True], device=streams.device)
        before, after = _measure_with_nan(metric, streams[:2], is_second[:, None, None])
        if not torch.allclose(before[0], after[0], equal_nan=True):
            raise ValueError(
                "the metric of one stream depends on the other streams of its batch, which are "
                "unrelated patches; reduce over the dimensions of positions and features only"
            )
    # Means over pairs and differences need floating-point numbers: an accuracy is a boolean.
    wide = torch.promote_types(streams.dtype, torch.float32)
    return result if result.is_floating_point() else result.to(wide)
