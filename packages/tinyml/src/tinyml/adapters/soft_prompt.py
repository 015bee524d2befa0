"""Soft prompts: trainable vectors in front of the input of a frozen language model.

Only `length` x `width` numbers are trained, and only the answer's tokens contribute to the loss
(Lester et al., "The Power of Scale for Parameter-Efficient Prompt Tuning", 2021). Attention is
causal, so the prompt's keys and values do not depend on the tokens after it. They are computed once
and shared by all sequences of a batch (`PrefixCache`). `meta_loss` trains an initial prompt that a
few steps adapt to any of many tasks (Finn et al., "Model-Agnostic Meta-Learning", 2017).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

IGNORED = -100  # the target that torch's cross entropy leaves out


class SoftPrompt(nn.Module):
    """`length` trainable vectors of width `dim` before the embeddings of the tokens.

    `init` (length, dim) contains the initial values, such as the embeddings of a text. The default
    is normal with standard deviation 0.02.
    """

    def __init__(self, length: int, dim: int, *, init: Tensor | None = None) -> None:
        super().__init__()
        if length < 1 or dim < 1:
            raise ValueError(f"a prompt of {length} vectors of width {dim}; give 1 or more of each")
        if init is not None and init.shape != (length, dim):
            raise ValueError(f"init is {tuple(init.shape)}; a prompt of {(length, dim)} needs that")
        start = torch.randn(length, dim) * 0.02 if init is None else init.detach().clone()
        self.embeddings = nn.Parameter(start)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Map (batch, seq, dim) to (batch, length + seq, dim)."""
        prompt = self.embeddings.to(embeddings.dtype).expand(len(embeddings), -1, -1)
        return torch.cat([prompt, embeddings], dim=1)

    def targets(self, tokens: Tensor, carries_loss: Tensor) -> Tensor:
        """Return the target of each output of the prompted model: (batch, length + seq), int64.

        Output i predicts the token after position i. Only tokens at which `carries_loss` (batch,
        seq) is True are targets; all others are -100, which `F.cross_entropy` ignores.
        """
        if tokens.shape != carries_loss.shape:
            raise ValueError(
                f"tokens are {tuple(tokens.shape)}, carries_loss is {tuple(carries_loss.shape)}; "
                "expected one truth value per token"
            )
        wanted = torch.where(carries_loss, tokens, IGNORED)
        prompt = wanted.new_full((len(tokens), len(self.embeddings) - 1), IGNORED)
        end = wanted.new_full((len(tokens), 1), IGNORED)
        return torch.cat([prompt, wanted, end], dim=1)


class PrefixCache:
    """The keys and values of a prompt in a causal model: tensors with a batch dimension of 1.

    `past` may be a tuple, a dict or an object such as a transformers cache, which a model extends
    as it runs. Therefore each `expand` returns new containers.
    """

    def __init__(self, past: Any, length: int) -> None:
        if any(isinstance(leaf, nn.Parameter) for leaf in tree_leaves(past)):
            raise ValueError(
                "expected cached tensors, got an nn.Parameter, whose copies would not train it; "
                "cache parameter.view_as(parameter)"
            )
        self.past, self.length = past, length

    @staticmethod
    def of(prompt: SoftPrompt, forward: Callable[[Tensor], Any]) -> PrefixCache:
        """Run the prompt alone once; `forward` maps (1, length, dim) to keys and values."""
        return PrefixCache(forward(prompt.embeddings[None]), len(prompt.embeddings))

    def expand(self, batch: int) -> Any:
        """Return new containers for `batch` sequences that share the cached tensors.

        The rows of an expanded tensor share their memory, so torch refuses to write to them. For a
        single sequence the tensors are copied, because torch would allow writing to them.
        """
        if batch < 1:
            raise ValueError(f"a batch of {batch} sequences; give 1 or more")
        with _Expanding(batch):
            return copy.deepcopy(self.past)


class _Expanding(TorchFunctionMode):
    """A mode in which a deep copy expands each tensor to the batch instead of copying it."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self._batch = batch

    def __torch_function__(
        self,
        function: Any,
        _: Any,
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is not Tensor.__deepcopy__:
            return function(*arguments, **(options or {}))
        tensor: Tensor = arguments[0]
        if not tensor.dim() or self._batch == 1:
            return tensor.clone()
        if tensor.shape[0] != 1:
            raise ValueError(
                f"a cached tensor is {tuple(tensor.shape)}; batch first, size 1, is needed"
            )
        return tensor.expand(self._batch, *tensor.shape[1:])


def adapt(
    start: Tensor,
    loss: Callable[[Tensor], Tensor],
    *,
    steps: int,
    lr: float,
    first_order: bool = True,
) -> Tensor:
    """Return the result of `steps` gradient-descent steps on `loss` from `start`.

    With first_order=False the result is differentiable in `start` through the steps. With
    first_order=True the derivative of each step is taken to be the identity, which avoids second
    derivatives.
    """
    prompt = start
    for _ in range(steps):
        point = prompt if not first_order else prompt.detach().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(loss(point), point, create_graph=not first_order)
        prompt = prompt - lr * gradient
    return prompt


def meta_loss(
    start: Tensor,
    tasks: Iterable[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]],
    *,
    steps: int,
    lr: float,
    first_order: bool = False,
) -> Tensor:
    """Return the mean loss after adapting `start` to each task, for training of `start`.

    A task is a pair (support loss, query loss), functions of the prompt: the result is the mean
    over tasks of query(adapt(start, support)). At deployment, call `adapt` with the same steps.
    """
    losses = [
        query(adapt(start, support, steps=steps, lr=lr, first_order=first_order))
        for support, query in tasks
    ]
    if not losses:
        raise ValueError("expected at least one task, got none")
    return torch.stack(losses).mean()
