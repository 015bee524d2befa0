"""Compressed gradients: bfloat16 that is added in float32, and low-rank products with residuals."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from ddp import DDP, PowerSGD
from torch import nn
from worker_pool import run_ranks

MIB = 2**20


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 8))


def gradients(compression: dict, steps: int = 1) -> tuple:
    """Return the gradients of this rank, their mean over the ranks, and bytes and calls."""
    model = DDP(net(), 2000 / MIB, **compression)
    x = torch.randn(16, 24, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(steps):
        model.zero_grad()
        local = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        model(x).square().mean().backward()
        model.finish_gradient_synchronization()
    mean = [p.grad.numpy() for p in model.parameters()]
    last = model.meter.last
    return [g.numpy() for g in local], mean, (last.gradient_bytes, last.extra_bytes, last.calls)


@pytest.mark.parametrize(
    "world", [2, 4, *(pytest.param(world, marks=pytest.mark.exhaustive) for world in (1, 3))]
)
def test_bfloat16_on_the_wire_is_added_in_float32(world: int) -> None:
    ranks = run_ranks(gradients, world, {"gradient_dtype": torch.bfloat16})
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
    assert run_ranks(sum_small_terms, 4, False) == [(260.0, [])] * 4


def test_custom_all_reduce_receives_the_rounded_buffer() -> None:
    assert [sent for _, sent in run_ranks(sum_small_terms, 2, True)] == [[torch.bfloat16]] * 2


def sum_in_wider_dtype(dtype: torch.dtype, gradient_dtype: torch.dtype) -> tuple:
    """Sum 1 on rank 0 and a small number, which rounding at every rank would lose, on others."""
    module = nn.Linear(1, 1, bias=False, dtype=dtype)
    model = DDP(module, gradient_dtype=gradient_dtype)
    # Half a unit in the last place of 1.
    value = 1.0 if dist.get_rank() == 0 else torch.finfo(dtype).eps / 2
    (dist.get_world_size() * value * model(torch.ones(1, 1, dtype=dtype))).sum().backward()
    return module.weight.grad.item(), model.meter.last.gradient_bytes


@pytest.mark.parametrize(
    ("dtype", "gradient_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float64),
    ],
)
def test_wider_gradient_dtype_is_sent_and_added(dtype, gradient_dtype) -> None:
    one_unit_more = 1 + 2 * torch.finfo(dtype).eps
    ranks = run_ranks(sum_in_wider_dtype, 4, dtype, gradient_dtype)
    assert ranks == [(one_unit_more, gradient_dtype.itemsize)] * 4


def bytes_of_other_dtype() -> int:
    """Send float16 gradients as bfloat16, which has the same size."""
    module = nn.Linear(1, 1, bias=False, dtype=torch.float16)
    model = DDP(module, gradient_dtype=torch.bfloat16)
    # bfloat16 rounds this number to 1.
    (model(torch.ones(1, 1, dtype=torch.float16)) * (1 + 2**-10)).sum().backward()
    return module.weight.grad.item()


def test_gradient_dtype_of_the_same_size_is_sent() -> None:
    assert run_ranks(bytes_of_other_dtype, 2) == [1.0, 1.0]


def test_powersgd_sends_low_rank_products() -> None:
    ranks = run_ranks(gradients, 2, {"compression": PowerSGD(1)}, 1)
    local, mean, (gradient_bytes, _, calls) = ranks[0]
    assert calls == 2 * 2
    whole, thin = 40 + 8, (40 + 24) + (8 + 40)
    assert gradient_bytes == 4 * (whole + thin)
    for at in (0, 2):
        average = (torch.from_numpy(local[at]) + torch.from_numpy(ranks[1][0][at])) / 2
        approximation = torch.from_numpy(mean[at])
        assert torch.linalg.matrix_rank(approximation) == 1
        error = (average - approximation).norm() / average.norm()
        # The error of one iteration depends on the spectrum.
        assert 0.01 < error < 1
        assert mean[at].tobytes() == ranks[1][1][at].tobytes()
    for at in (1, 3):
        average = (torch.from_numpy(local[at]) + torch.from_numpy(ranks[1][0][at])) / 2
        torch.testing.assert_close(torch.from_numpy(mean[at]), average)


def accumulated_error(rank: int, steps: int) -> float:
    """Return the relative error of the mean of `steps` compressed gradients."""
    module = nn.Linear(12, 12, bias=False)
    model = DDP(module, compression=PowerSGD(rank))
    generator = torch.Generator().manual_seed(dist.get_rank())
    target = torch.randn(12, 12, generator=generator)
    total = torch.zeros(12, 12)
    for _ in range(steps):
        model.zero_grad()
        (model(torch.eye(12)).T * target).sum().backward()
        model.finish_gradient_synchronization()
        total += module.weight.grad / steps
    mean = target.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    return float((total - mean).norm() / mean.norm())


def test_powersgd_carries_residuals_over() -> None:
    once = run_ranks(accumulated_error, 2, 3, 1)[0]
    often = run_ranks(accumulated_error, 2, 3, 30)[0]
    assert once > 0.3
    assert often < once / 4


def final_losses() -> list[float]:
    compressions = {}, {"gradient_dtype": torch.bfloat16}, {"compression": PowerSGD(2)}
    return [final_loss(compression) for compression in compressions]


def final_loss(compression: dict) -> float:
    model = DDP(net(), 2000 / MIB, **compression)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    teacher = torch.randn(24, 8, generator=torch.Generator().manual_seed(9))
    for _ in range(80):
        x = torch.randn(32, 24, generator=generator)
        loss = (model(x) - torch.tanh(x @ teacher / 5)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        model.finish_gradient_synchronization()
        optimizer.step()
    return loss.item()


def test_compressed_training_reaches_a_similar_loss() -> None:
    plain, rounded, low_rank = run_ranks(final_losses, 2)[0]
    assert rounded < 1.2 * plain
    assert low_rank < 2 * plain < 0.1


class SkippedBlock(nn.Module):
    """A model whose middle layer is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(3)]).double()

    def forward(self, x, skip: bool):
        first, middle, last = self.layers
        x = first(x).tanh()
        return last(x if skip else middle(x))


def feedback_error(history: str) -> float:
    """Return how much of the gradients is neither in the sums of `.grad` nor in the residuals."""
    compression = PowerSGD(1)
    module = SkippedBlock()
    module.layers[0].requires_grad_(history != "unfreeze")
    model = DDP(module, compression=compression, find_unused_parameters=True)
    other = DDP(SkippedBlock(), compression=compression)
    twin = copy.deepcopy(model)
    missing = {parameter: torch.zeros(16, 16).double() for parameter in module.parameters()}
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(dist.get_rank())).double()
    for step in range(4):
        model.zero_grad()
        module.layers[0].requires_grad_(history != "unfreeze" or step > 1)
        skip = history == "skip" and step % 2 == 1
        loss = model(x, skip).square().mean()
        trained = [p for p in missing if p.requires_grad]
        local = torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True)
        loss.backward()
        for parameter, gradient in zip(trained, local, strict=True):
            if gradient is not None:
                dist.all_reduce(gradient)
                missing[parameter] += gradient / dist.get_world_size() - parameter.grad
        if history == "share":
            (10 * other(x, False).square().mean()).backward()
        if history == "copy":
            (10 * twin(x, False).square().mean()).backward()
    for parameter, difference in missing.items():
        residual = compression._residuals[parameter].clone()
        dist.all_reduce(residual)
        difference -= residual / dist.get_world_size()
    return max(float(difference.abs().max()) for difference in missing.values())


def feedback_errors() -> dict[str, float]:
    return {history: feedback_error(history) for history in ("unfreeze", "share", "copy", "skip")}


def test_powersgd_loses_no_gradient() -> None:
    for errors in run_ranks(feedback_errors, 2):
        assert max(errors.values()) < 1e-12, errors


def compress_in_another_memory_order() -> None:
    """Compress gradients of a convolution in channels last, which is converted after a step."""
    plain = nn.Conv2d(8, 12, 3, bias=False)
    torch.manual_seed(dist.get_rank())
    other = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    models = [DDP(module, compression=PowerSGD(1)) for module in (plain, other)]
    other.load_state_dict(plain.state_dict())
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(1, 8, 5, 5, dtype=dtype)
        for model in models:
            model.to(dtype)
            model.zero_grad()
            model(x).square().sum().backward()
        assert other.weight.grad.stride() == other.weight.stride()
        torch.testing.assert_close(other.weight.grad, plain.weight.grad, rtol=1e-3, atol=1e-3)


def test_powersgd_accepts_any_memory_order_and_conversions() -> None:
    run_ranks(compress_in_another_memory_order, 2)


def finite_after_overflow() -> list[bool]:
    module = nn.Linear(12, 12, bias=False)
    model = DDP(module, compression=PowerSGD(1))
    finite = []
    for scale in (1.0, float("inf") if dist.get_rank() == 1 else 1.0, 1.0):
        model.zero_grad()
        (model(torch.eye(12)).sum() * scale).backward()
        finite.append(bool(module.weight.grad.isfinite().all()))
    return finite


def test_powersgd_continues_after_an_overflow() -> None:
    assert run_ranks(finite_after_overflow, 2) == [[True, False, True]] * 2


def test_pickled_powersgd_keeps_its_options() -> None:
    compression = pickle.loads(pickle.dumps(PowerSGD(2, seed=3)))
    assert repr(compression) == "PowerSGD(rank=2, seed=3)"


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e5m2])
def test_dtypes_that_would_lose_gradients_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="floating-point dtype of at least 16 bits"):
        DDP(net(), gradient_dtype=dtype)


def test_powersgd_rank_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="got rank=0"):
        PowerSGD(0)
