"""Gradients that are sent in another dtype: bfloat16 that is added in float32, or a wider dtype."""

import pytest
import torch
import torch.distributed as dist
from ddp import DDP
from torch import nn
from worker_pool import run_on_shared_ranks

MIB = 2**20


def build_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 8))


def measure_gradients() -> tuple:
    """Return the gradients of this rank, their mean over the ranks, and bytes and calls."""
    model = DDP(build_net(), 2000 / MIB, gradient_dtype=torch.bfloat16)
    x = torch.randn(16, 24, generator=torch.Generator().manual_seed(dist.get_rank()))
    local = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    model(x).square().mean().backward()
    mean = [p.grad.numpy() for p in model.parameters()]
    last = model.meter.last
    return [g.numpy() for g in local], mean, (last.gradient_bytes, last.extra_bytes, last.calls)


@pytest.mark.parametrize(
    "world", [2, 4, *(pytest.param(world, marks=pytest.mark.exhaustive) for world in (1, 3))]
)
def test_bfloat16_on_the_wire_is_added_in_float32(world: int) -> None:
    ranks = run_on_shared_ranks(measure_gradients, world)
    numel = sum(g.size for g in ranks[0][0])
    for at in range(4):
        scaled = [torch.from_numpy(local[at]) / world for local, _, _ in ranks]
        rounded = [gradient.bfloat16().float() for gradient in scaled]
        exact = torch.stack(rounded).sum(0).bfloat16().float()
        for _, mean, _ in ranks:
            # The order of three or four float32 terms may change the rounding by one bfloat16 unit.
            torch.testing.assert_close(torch.from_numpy(mean[at]), exact, rtol=2**-8, atol=0)
            if world <= 2:
                assert torch.from_numpy(mean[at]).equal(exact)
            assert mean[at].tobytes() == ranks[0][1][at].tobytes()
    for *_, (gradient_bytes, extra_bytes, calls) in ranks:
        assert gradient_bytes == 2 * numel
        assert extra_bytes < 100
        assert calls == 2 * 2


def sum_small_terms(use_custom: bool) -> tuple:
    """Sum 256 on rank 0 and 1 on the other ranks; in bfloat16, 256 + 1 = 256."""
    module = nn.Linear(1, 1, bias=False)
    received = []

    def all_reduce(tensor, **kwargs):
        received.append(tensor.dtype)
        return dist.all_reduce(tensor, **kwargs)

    model = DDP(
        module, gradient_dtype=torch.bfloat16, all_reduce=all_reduce if use_custom else None
    )
    value = 256.0 if dist.get_rank() == 0 else 1.0
    # Each gradient is divided by the world size of 4.
    model(torch.tensor([[4 * value]])).sum().backward()
    model.finish_gradient_synchronization()
    return module.weight.grad.item(), received


def test_small_terms_survive_the_sum_in_float32() -> None:
    # 259 is halfway between 258 and 260, and rounds to 260.
    assert run_on_shared_ranks(sum_small_terms, 4, False) == [(260.0, [])] * 4


def test_custom_all_reduce_receives_the_rounded_buffer() -> None:
    for value, sent in run_on_shared_ranks(sum_small_terms, 2, True):
        assert sent == [torch.bfloat16]
        assert value == pytest.approx(2 * (256 + 1), abs=2)  # gloo adds in bfloat16


def sum_in_wider_dtype(dtype: torch.dtype, gradient_dtype: torch.dtype) -> tuple:
    """Sum 1 on rank 0 and small numbers on the other ranks, which a sum in `dtype` would lose."""
    module = nn.Linear(1, 1, bias=False, dtype=dtype)
    model = DDP(module, gradient_dtype=gradient_dtype)
    # Half a unit in the last place of 1.
    value = 1.0 if dist.get_rank() == 0 else torch.finfo(dtype).eps / 2
    (dist.get_world_size() * value * model(torch.ones(1, 1, dtype=dtype))).sum().backward()
    return module.weight.grad.item(), model.meter.last.gradient_bytes


WIDER = [
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.float64),
]


@pytest.mark.parametrize(("dtype", "gradient_dtype"), WIDER)
def test_wider_gradient_dtype_is_sent_and_added(dtype, gradient_dtype) -> None:
    one_unit_more = 1 + 2 * torch.finfo(dtype).eps
    ranks = run_on_shared_ranks(sum_in_wider_dtype, 4, dtype, gradient_dtype)
    assert ranks == [(one_unit_more, gradient_dtype.itemsize)] * 4


def send_in_other_dtype() -> int:
    """Send float16 gradients as bfloat16, which has the same size."""
    module = nn.Linear(1, 1, bias=False, dtype=torch.float16)
    model = DDP(module, gradient_dtype=torch.bfloat16)
    # bfloat16 rounds this number to 1.
    (model(torch.ones(1, 1, dtype=torch.float16)) * (1 + 2**-10)).sum().backward()
    return module.weight.grad.item()


def test_gradient_dtype_of_the_same_size_is_sent() -> None:
    assert run_on_shared_ranks(send_in_other_dtype, 2) == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e5m2])
def test_dtypes_that_would_lose_gradients_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="floating-point dtype of at least 16 bits"):
        DDP(build_net(), gradient_dtype=dtype)
