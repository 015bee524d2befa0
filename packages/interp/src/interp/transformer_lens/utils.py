"""Functions of `transformer_lens.utils` that notebooks call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from interp.transformer_lens.hooked_decoder import HookedDecoder
from interp.transformer_lens.names import get_act_name

__all__ = ["get_act_name", "get_corner", "get_device", "test_prompt", "to_numpy"]


def to_numpy(values: Any) -> numpy.ndarray[Any, Any]:
    """Return a tensor, a sequence or a number as an array; bfloat16 is converted to float32."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values
    return numpy.asarray(values)


def get_corner(tensor: Tensor, n: int = 3) -> Tensor:
    """Return the first `n` entries of each dimension."""
    return tensor[(slice(n),) * tensor.ndim]


def get_device() -> torch.device:
    """Return the current accelerator of this machine, or the CPU if none is available."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def test_prompt(  # Not a test of pytest.
    prompt: str,
    answer: str | Sequence[str],
    model: HookedDecoder,
    prepend_space_to_answer: bool = True,  # noqa: PT028
    print_details: bool = True,  # noqa: PT028
    prepend_bos: bool | None = None,  # noqa: PT028
    top_k: int = 10,  # noqa: PT028
) -> None:
    """Print the rank, logit and probability of each token of an answer, and the `top_k` tokens.

    Of several answers, only the first tokens are compared. With `print_details=False`, only the
    ranks are printed.
    """
    answers = [answer] if isinstance(answer, str) else list(answer)
    if prepend_space_to_answer:
        answers = [f" {text.removeprefix(' ')}" for text in answers]
    prompt_tokens = model.to_tokens(prompt, prepend_bos)
    rows = [model.to_tokens(text, prepend_bos=False)[0] for text in answers]
    length = len(rows[0]) if len(rows) == 1 else 1
    targets = torch.stack([row[:length] for row in rows])
    tokens = torch.cat([prompt_tokens.expand(len(rows), -1), targets], 1)
    with torch.no_grad():
        logits = model(tokens)[:, -length - 1 : -1]
    probabilities = logits.softmax(-1)
    chosen = probabilities.gather(-1, targets[..., None])
    ranks = (probabilities > chosen).sum(-1)
    if print_details:
        print("Tokenized prompt:", model.to_str_tokens(prompt, prepend_bos))
        print("Tokenized answers:", [[model.to_string(token) for token in row] for row in rows])
    answer_ranks = []
    for i, step in enumerate(targets.T):
        names = [str(model.to_string(token)) for token in step]
        answer_ranks += list(zip(names, ranks[:, i].tolist(), strict=True))
        for row, (name, rank) in enumerate(answer_ranks[-len(names) :]):
            if print_details:
                text = _describe_token(logits[row, i], int(step[row]), name)
                print(f"Answer: {text}, rank {rank}")
        top_tokens = logits[0, i].topk(top_k).indices if print_details else ()
        for number, token in enumerate(top_tokens):
            name = str(model.to_string(token))
            print(f"Top {number}: {_describe_token(logits[0, i], int(token), name)}")
    print("Ranks of the answer tokens:", answer_ranks)


def _describe_token(logits: Tensor, token: int, name: str) -> str:
    return f"|{name}| logit {logits[token]:.2f}, probability {logits.softmax(-1)[token]:.2%}"
