"""Mixed precision with torch's `_MixedPrecision`: low-precision passes, full-precision weights."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from ddp import DDP
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from worker_pool import run_ranks, try_ranks

BF16, HALF = torch.bfloat16, torch.float16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.recurrent = nn.LSTM(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, tokens: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        assert shift.dtype == self.head.weight.dtype == self.norm.weight.dtype
        x, _ = self.recurrent(self.norm(self.embed(tokens)))
        return self.head(x + shift) * self.scale


def inputs(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randint(11, (2, 4, 3), generator=draw), torch.randn(2, 8, generator=draw)


def train_in_low_precision(param_dtype, reduce_dtype) -> bool:
    rank, module = dist.get_rank(), Net()
    alone = copy.deepcopy(module)
    alone.scale = alone.scale.to(BF16)
    model = DDP(module, mixed_precision=_MixedPrecision(param_dtype, reduce_dtype, BF16))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (module, alone)]
    sent_dtype = reduce_dtype or param_dtype
    for step in range(3):
        tokens, shift = inputs(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        output = model(tokens[rank], shift=shift[rank])
        output.float().square().mean().backward()
        gradients = []
        for tokens_of_rank, shift_of_rank in zip(tokens, shift, strict=True):
            low = copy.deepcopy(alone).to(param_dtype)
            low.scale = alone.scale
            low(tokens_of_rank, shift_of_rank.to(param_dtype)).float().square().mean().backward()
            gradients.append([p.grad.float() for p in low.parameters()])
        for p, first, second in zip(alone.parameters(), *gradients, strict=True):
            mean = (first / 2).to(sent_dtype).float() + (second / 2).to(sent_dtype).float()
            p.grad = mean.to(sent_dtype).float()
        for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
            assert ours.dtype == ours.grad.dtype == torch.float32
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-2, atol=1e-3)
        for optimizer in optimizers:
            optimizer.step()
        alone.load_state_dict(module.state_dict())
    assert output.dtype == param_dtype
    assert (module.scale.dtype, module.count.dtype) == (BF16, torch.int64)
    assert model.meter.last.gradient_bytes == sent_dtype.itemsize * sum(
        p.numel() for p in module.parameters()
    )
    with torch.no_grad():
        assert model(tokens[0], shift[0]).dtype == param_dtype
    torch.save(model, io.BytesIO())
    copy.deepcopy(model)(tokens[rank], shift[rank]).float().sum().backward()
    return True


@pytest.mark.parametrize(("param_dtype", "reduce_dtype"), [(BF16, None), (BF16, torch.float32)])
def test_passes_use_param_dtype_and_weights_keep_theirs(param_dtype, reduce_dtype) -> None:
    assert run_ranks(train_in_low_precision, 2, param_dtype, reduce_dtype) == [True] * 2


def train_with_reduce_dtype_only() -> bool:
    module = nn.Linear(3, 2)
    model = DDP(module, mixed_precision=_MixedPrecision(reduce_dtype=BF16))
    x = torch.full((1, 3), 1.0 + 2**-10)
    model(x).sum().backward()
    assert model(x).dtype == torch.float32
    # The gradient was rounded to bfloat16 when it was sent.
    torch.testing.assert_close(module.weight.grad, torch.ones(2, 3), rtol=0, atol=0)
    return True


def test_unset_dtypes_keep_their_precision() -> None:
    assert run_ranks(train_with_reduce_dtype_only, 2) == [True] * 2


def pass_invalid_options() -> list[str]:
    errors = []
    for options in (
        {"mixed_precision": BF16},
        {"mixed_precision": _MixedPrecision(BF16), "gradient_dtype": HALF},
    ):
        try:
            DDP(nn.Linear(2, 2), **options)
        except (TypeError, ValueError) as error:
            errors.append(str(error))
    return errors


def test_invalid_mixed_precision_is_refused() -> None:
    (outcome,) = try_ranks(pass_invalid_options, 1)
    no_dtypes, two_methods = outcome.value
    assert "got torch.bfloat16; pass torch.nn.parallel.distributed" in no_dtypes
    assert "are two dtypes to send the same gradients in; pass one" in two_methods
