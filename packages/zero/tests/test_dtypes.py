"""Every dtype and memory format is sharded, sent, saved and loaded as in one process."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from worker_pool import case_folder, run_on_shared_ranks
from zero import FSDP, Communicator, ShardedOptimizer, load_checkpoint, save_checkpoint
from zero.parameter_checks import is_trainable_dtype
from zero_training import assert_alike, build_pair, train

DTYPES = [
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "float8_e4m3fn",
    "float8_e5m2",
]


class Odd(nn.Linear):
    """A layer with a frozen parameter and buffers per dtype, with different bits per rank."""

    def __init__(self, bits):
        super().__init__(5, 5)
        whole = torch.arange(bits, bits + 24) % 2
        for name in DTYPES:
            dtype = getattr(torch, name)
            codes = nn.Parameter(whole.view(6, 4).to(dtype), requires_grad=False)
            self.register_parameter(f"codes_{name}", codes)
            self.register_buffer(f"mask_{name}", whole.view(4, 6).T.to(dtype))
            self.register_buffer(f"number_{name}", whole[1].to(dtype))

    def forward(self, x):
        scales = torch.linspace(0.01, 0.02, len(DTYPES))
        for name, scale in zip(DTYPES, scales, strict=True):
            codes, mask = self.get_parameter(f"codes_{name}"), self.get_buffer(f"mask_{name}")
            known = (codes.to(torch.complex128) + mask.to(torch.complex128)).real
            x = x + scale * known.sum() * torch.tanh(x)
        return super().forward(x)


class Everything(nn.Module):
    """A complex parameter, layers of unusual dtypes, channels_last and transposed weights."""

    def __init__(self, bits=0):
        super().__init__()
        self.odd = Odd(bits)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(4, 5).T)
        self.turn = Turn()
        self.out = nn.Linear(4, 3)
        self.out.weight = nn.Parameter(torch.randn(4, 3).T)

    def forward(self, x):
        x = self.odd(x)
        image = x.repeat(1, 10).view(-1, 2, 5, 5).contiguous(memory_format=torch.channels_last)
        return self.out(self.turn(x) @ self.transposed) + self.conv(image).mean((2, 3))


class Turn(nn.Linear):
    def __init__(self):
        super().__init__(5, 5, bias=False)
        self.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.complex128))

    def forward(self, x):
        return (x.to(torch.complex128) @ self.weight).abs()


def build(bits=0):
    torch.manual_seed(0)
    model = Everything(bits)
    return model._apply(lambda t: t.double() if t.dtype == torch.float32 and t.dim() else t)


def train_everything(stage):
    folder = case_folder()
    shard = {"shard": (nn.Linear, nn.Conv2d)} if stage == 3 else {}
    # At stage 3 all ranks get rank 0's values; the codes are in no optimizer.
    bits = dist.get_rank() if stage == 3 else 0
    trained = build_pair(stage, build=lambda: build(0), **shard)
    if stage == 3:
        other = FSDP(build(bits), **shard)
        for (name, ours), theirs in zip(
            other.gather_full_params().items(), build(0).parameters(), strict=True
        ):
            assert torch.equal(ours.to(torch.complex128), theirs.to(torch.complex128)), name
        for ours, theirs in zip(other.buffers(), build(0).buffers(), strict=True):
            assert torch.equal(ours.to(torch.complex128), theirs.to(torch.complex128))
    assert train(*trained, lambda m, x: m(x).square().mean(), steps=2, clip=0.5)
    model, optimizer, twin, _ = trained
    save_checkpoint(f"{folder}/{stage}", model, optimizer)
    model, optimizer, *_ = build_pair(3, build=lambda: build(1), shard=(nn.Linear, nn.Conv2d))
    load_checkpoint(f"{folder}/{stage}", model, optimizer)
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.to(torch.complex128), theirs.to(torch.complex128))
    return assert_alike(model, twin)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.exhaustive), 2, 3])
def test_every_dtype_and_memory_format_trains_and_is_saved(stage):
    assert all(run_on_shared_ranks(train_everything, 2, stage))


def move_and_sum():
    communicator, rank = Communicator(), dist.get_rank()
    for name in DTYPES:
        dtype = getattr(torch, name)
        mine = torch.tensor([rank, 1, 0, rank % 2]).to(dtype)
        everyones = torch.zeros(4 * communicator.world, dtype=dtype)
        communicator.all_gather(everyones, mine).wait()
        expected = torch.cat(
            [torch.tensor([r, 1, 0, r % 2]).to(dtype) for r in range(communicator.world)]
        )
        assert torch.equal(everyones.to(torch.complex128), expected.to(torch.complex128)), name
        sent = mine.clone()
        communicator.broadcast(sent, 1).wait()
        assert torch.equal(sent.to(torch.complex128), expected[4:8].to(torch.complex128)), name
        if not is_trainable_dtype(dtype):
            continue
        total = torch.tensor(
            [sum(range(communicator.world)), communicator.world, 0, communicator.world // 2]
        )
        for call in (communicator.all_reduce, lambda t: communicator.reduce(t, 0)):
            summed = mine.clone()
            call(summed).wait()
            if call == communicator.all_reduce or rank == 0:
                assert torch.equal(summed.to(torch.complex128), total.to(torch.complex128)), name
        output = mine[:1].clone()
        communicator.reduce_scatter(output, torch.arange(communicator.world).to(dtype)).wait()
        assert output.to(torch.complex128).item() == communicator.world * rank, name
    return True


def test_collectives_support_every_dtype():
    assert all(run_on_shared_ranks(move_and_sum, 3))


class Scaled(nn.Module):
    """A parameter times a constant."""

    def __init__(self):
        super().__init__()
        self.values = nn.Parameter(torch.ones(7, dtype=torch.float16))

    def forward(self, scale):
        return (self.values * scale).sum()


def average_large_halves(stage):
    """Average float16 gradients whose sum over ranks exceeds the largest float16."""
    model = nn.ModuleList([Scaled(), Scaled()])
    if stage == 3:
        model = FSDP(model, shard=("0", "1"))
    else:
        options = {"lr": 0.1, "shard_gradients": stage == 2}
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, **options)
        assert optimizer.param_groups
    modules = model.module if stage == 3 else model
    # Exact in float16, also after a division by a power of two.
    scales = [40960.0, 32768.0, 57344.0]
    sum(module(scales[dist.get_rank()]) for module in modules).backward()
    average = sum(scales) / 3
    for parameter in modules.parameters():
        gradient = parameter.grad
        full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        assert full.dtype == torch.float16
        torch.testing.assert_close(
            full.double(), torch.full((7,), average).double(), rtol=1e-3, atol=0
        )
    return True


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_averages_of_large_halves_do_not_overflow(stage):
    assert all(run_on_shared_ranks(average_large_halves, 3, stage))


def refuse_dtypes_of_gradients():
    layer = nn.Linear(3, 3, dtype=torch.bfloat16)
    if not hasattr(layer.weight, "grad_dtype"):
        return True
    layer.weight.grad_dtype = torch.float32
    message = "as parameter .*, got grad_dtype=torch.float32 and dtype torch.bfloat16"
    with pytest.raises(ValueError, match=message):
        FSDP(layer)
    with pytest.raises(ValueError, match=message):
        ShardedOptimizer(layer.parameters(), torch.optim.SGD, lr=0.1)
    return True


def test_parameters_with_gradients_of_another_dtype_are_refused():
    assert all(run_on_shared_ranks(refuse_dtypes_of_gradients, 2))


def refuse_dtypes_without_arithmetic():
    for dtype in (torch.float8_e4m3fn, torch.complex32):
        parameter = nn.Parameter(torch.ones(7).to(dtype))
        message = f"as parameter .*, got the dtype {dtype}, which has no arithmetic"
        with pytest.raises(ValueError, match=message):
            ShardedOptimizer([parameter], torch.optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match=message):
            FSDP(nn.ParameterList([parameter]))
    return True


def test_trainable_parameters_of_dtypes_without_arithmetic_are_refused():
    assert all(run_on_shared_ranks(refuse_dtypes_without_arithmetic, 2))
