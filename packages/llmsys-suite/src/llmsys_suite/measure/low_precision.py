"""Errors of sums in low precision, and dtypes under autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def accumulation(terms: int = 1000, term: float = 0.01) -> list[dict[str, Any]]:
    """Sum `term` `terms` times in several dtypes of sum and term."""
    rows = []
    for total_dtype, term_dtype in (
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float32, torch.bfloat16),
    ):
        total = torch.tensor(0.0, dtype=total_dtype)
        for _ in range(terms):
            total = total + torch.tensor(term, dtype=term_dtype).to(total_dtype)
        rows.append(
            {
                "sum_in": _name(total_dtype),
                "term_in": _name(term_dtype),
                "sum": float(total),
                "relative_error": abs(float(total) - terms * term) / (terms * term),
            }
        )
    return rows


class _Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16, bias=False)
        self.norm = nn.LayerNorm(16)
        self.fc2 = nn.Linear(16, 4, bias=False)


def autocast_dtypes(device_type: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, str]:
    """Return the dtype of each part of a small network's step under autocast."""
    model = _Toy().to(device_type)
    x = torch.randn(2, 8, device=device_type)
    with torch.autocast(device_type, dtype=dtype):
        first = model.fc1(x)
        normed = model.norm(first.relu())
        logits = model.fc2(normed)
        loss = nn.functional.cross_entropy(logits, torch.tensor([0, 1], device=device_type))
    loss.backward()
    assert model.fc1.weight.grad is not None
    return {
        "parameters": _name(model.fc1.weight.dtype),
        "linear output": _name(first.dtype),
        "norm output": _name(normed.dtype),
        "logits": _name(logits.dtype),
        "loss": _name(loss.dtype),
        "gradients": _name(model.fc1.weight.grad.dtype),
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
