"""A linear layer that multiplies whole numbers: int8 weights, inputs rounded as they come.

Notable:
- `torch._int_mm` reaches the processor's int8 dot products; on some processors without them torch
  2.4 returned wrong sums (pytorch issue 136746), so the first use compares it with exact arithmetic
  and falls back if they differ. Torch 2.11 returns memory that it never wrote where the inner size
  is 1, so small sizes never go there;
- float64 is exact for sums of int8 products below 2^53, so that is the fallback.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from tinyml.linear import Observer, grid_of


def int8_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a (m, k) int8 times b (k, n) int8, exact, int32; b.t() contiguous is fastest."""
    if min(b.shape) < 16:
        return (a.double() @ b.double()).to(torch.int32)
    if a.device.type == "cpu" and int_mm_is_exact():
        return torch._int_mm(a, b)
    if a.device.type == "cuda" and a.shape[0] > 16 and not (a.shape[1] % 8 or b.shape[1] % 8):
        return torch._int_mm(a, b)
    return (a.double() @ b.double()).to(torch.int32)


@cache
def int_mm_is_exact() -> bool:
    """Whether torch._int_mm is right on this processor for the whole range of int8."""
    generator = torch.Generator().manual_seed(0)
    for m, k, n in ((1, 16, 16), (1, 64, 17), (33, 515, 70), (64, 256, 64)):
        a = torch.randint(-128, 128, (m, k), generator=generator, dtype=torch.int8)
        b = torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int8)
        a[0], b[0] = -128, -128
        try:
            exact = (a.double() @ b.double().t()).to(torch.int32)
            if not torch.equal(torch._int_mm(a, b.t()), exact):
                return False
        except RuntimeError:
            return False
    return True


class Int8Linear(nn.Module):
    """y = (q_x q_w^T) s_x s_w + bias, with a scale for each token and one for each output.

    For inference: it has no gradient. Weights stay in (out, in) order, which torch._int_mm likes
    transposed.
    """

    weight_codes: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, observer: Observer = "minmax") -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().float()
        grid = grid_of(weight, 8, observer=observer)
        self.register_buffer("weight_codes", grid.quantize(weight).to(torch.int8))
        self.register_buffer("scale", grid.scale.view(-1))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    @property
    def weight(self) -> Tensor:
        """The dense weight that the codes stand for."""
        return self.weight_codes * self.scale[:, None]

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        tokens = inputs.reshape(-1, self.in_features).float()
        largest = tokens.abs().amax(1, keepdim=True).clamp(min=torch.finfo(tokens.dtype).tiny)
        scale = largest / 127
        codes = (tokens / scale).round_().clamp_(-127, 127).to(torch.int8)
        outputs = int8_matmul(codes, self.weight_codes.t()).float()
        outputs.mul_(scale).mul_(self.scale)
        if self.bias is not None:
            outputs.add_(self.bias)
        return outputs.to(inputs.dtype).view(*inputs.shape[:-1], self.out_features)


def with_int8_linears(model: nn.Module, observer: Observer = "minmax") -> nn.Module:
    """Replace every nn.Linear of `model`, in place; return the model."""
    if isinstance(model, nn.Linear):
        return Int8Linear(model, observer)
    made: dict[int, Int8Linear] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                made.setdefault(id(child), Int8Linear(child, observer))
                setattr(parent, name, made[id(child)])
    if not made:
        raise ValueError(f"{type(model).__name__} has no nn.Linear to replace")
    return model
