"""Every design trains to the same weights, and to those of one process on the whole batch."""

import random

import ddp
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from worker_pool import run_on_shared_ranks, run_ranks

MIB = 2**20
DTYPES = (torch.float32, torch.float32, torch.float64)


class Net(nn.Module):
    """A random model with tied, frozen, unused, float64 and empty parameters."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        width = draw.randint(3, 9)
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(
            nn.Linear(width, width, bias=draw.random() < 0.7, dtype=draw.choice(DTYPES))
            for _ in range(draw.randint(1, 5))
        )
        for layer in self.layers:
            layer.requires_grad_(draw.random() < 0.7)
        self.norm = nn.LayerNorm(width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.unused = nn.ModuleList(
            nn.Linear(width, width, dtype=draw.choice(DTYPES)) for _ in range(draw.randint(1, 3))
        )
        self.wide = nn.Linear(width, width, bias=False, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        if draw.random() < 0.5:
            self.layers.append(self.layers[0])
        self.register_buffer("shift", torch.randn(width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.shift
        for layer in self.layers:
            x = x + torch.tanh(layer(x.to(layer.weight.dtype)).float())
        x = self.norm(self.frozen(x)) * self.scale + self.empty.sum()
        return self.head(self.wide(x.double()).float())


def compute_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # The steps of SGD depend on the scale of the gradients, unlike those of Adam.
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def all_reduce_in_rank_order(tensor, op=None, group=None, async_op=False):
    """Add all elements in rank order. gloo does so with two ranks only."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    tensor.copy_(sum(parts[1:], parts[0]))
    done = torch.futures.Future()
    done.set_result(tensor)
    return done if async_op else None


DESIGNS = {
    "naive": ddp.all_reduce_gradients,
    "flat": ddp.all_reduce_gradients_flat,
    "overlapped": None,
    "small buckets": 300 / MIB,
    "large buckets": 25.0,
}


def train(
    design: str, seed: int, steps: int, accumulate: int, all_reduce, device: str = "cpu"
) -> dict:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Net(seed).to(device)
    if callable(DESIGNS[design]):
        wrapped, sync = model, lambda: DESIGNS[design](model, all_reduce=all_reduce)
    else:
        wrapped = ddp.DDP(
            model, DESIGNS[design], all_reduce=all_reduce, find_unused_parameters=True
        )
        sync = wrapped.finish_gradient_synchronization
    optimizer = make_optimizer(model)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=(seed + step) % 3 > 0)
        batch = draw_batches(seed, step, world, accumulate)[rank].to(device)
        for i, tokens in enumerate(batch):
            last = i == accumulate - 1
            if isinstance(wrapped, ddp.DDP) and not last:
                with wrapped.no_sync():
                    (compute_loss(wrapped, tokens) / accumulate).backward()
            else:
                (compute_loss(wrapped, tokens) / accumulate).backward()
        sync()
        optimizer.step()
    return {name: p.detach().cpu().numpy() for name, p in model.named_parameters()}


def draw_batches(seed: int, step: int, world: int, accumulate: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + step)
    return torch.randint(11, (world, accumulate, 2, 6), generator=generator)


def train_all_designs(seeds: list[int], steps: int, accumulate: int, ordered: bool) -> list[dict]:
    all_reduce = all_reduce_in_rank_order if ordered else None
    return [{d: train(d, s, steps, accumulate, all_reduce) for d in DESIGNS} for s in seeds]


def train_in_one_process(seed: int, steps: int, accumulate: int, world: int) -> dict:
    model = Net(seed)
    optimizer = make_optimizer(model)
    for step in range(steps):
        optimizer.zero_grad()
        compute_loss(model, draw_batches(seed, step, world, accumulate).flatten(0, 2)).backward()
        optimizer.step()
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def train_all_designs_on_gpus() -> dict:
    device = f"cuda:{dist.get_rank()}"
    torch.cuda.set_device(device)
    return {design: train(design, 5, 3, 2, None, device) for design in DESIGNS}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_all_designs_give_the_same_bits_on_nccl() -> None:
    world = min(2, torch.cuda.device_count())
    ranks = run_ranks(train_all_designs_on_gpus, world, backend="nccl", timeout=120)
    for rank in ranks:
        for weights in rank.values():
            for name, weight in weights.items():
                assert weight.tobytes() == ranks[0]["naive"][name].tobytes(), name


@pytest.mark.parametrize(
    ("world", "accumulate", "num_steps"),
    [
        # With these seeds, the models have frozen, float64 and shared layers.
        (2, 1, 2),
        (3, 2, 2),
        *(
            pytest.param(world, accumulate, 3, marks=pytest.mark.exhaustive)
            for world in (1, 2, 3, 4)
            for accumulate in (1, 3)
        ),
    ],
)
def test_all_designs_give_the_same_bits_and_match_one_process(
    world: int, accumulate: int, num_steps: int
) -> None:
    last = 100 * world + 10 * accumulate + 2
    seeds = list(range(last + 1 - num_steps, last + 1))
    ranks = run_on_shared_ranks(
        train_all_designs, world, seeds, num_steps, accumulate, world > 2, timeout=120
    )
    for seed, *of_seed in zip(seeds, *ranks, strict=True):
        assert_equal_bits_and_close_to(
            train_in_one_process(seed, num_steps, accumulate, world), of_seed
        )


def assert_equal_bits_and_close_to(expected: dict, ranks: list[dict]) -> None:
    reference = ranks[0]["naive"]
    assert expected.keys() == reference.keys()
    for rank in ranks:
        for design, weights in rank.items():
            assert weights.keys() == reference.keys()
            for name, weight in weights.items():
                assert weight.tobytes() == reference[name].tobytes(), (design, name)
    for name, weight in expected.items():
        torch.testing.assert_close(
            torch.from_numpy(reference[name]), torch.from_numpy(weight), rtol=2e-4, atol=2e-5
        )
