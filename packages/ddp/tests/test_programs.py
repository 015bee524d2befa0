"""Random training programs with `DDP` on several ranks train like one process in float64.

Seeds determine models, options and sequences of actions: accumulation, several losses, skipped
steps, clipping, freezing, checkpoints, shared layers, compilation, copies, new parameters and
uneven inputs. After every step, gradients and weights equal those of one process.
"""

import copy
import os
import random
from contextlib import nullcontext
from functools import cache

import pytest
import torch
import torch.distributed as dist
from ddp import DDP
from torch import nn
from torch.utils.checkpoint import checkpoint
from worker_pool import run_ranks

#: The usual tests run the programs with seeds from 1 to this number.
NUM_USUAL = 100
#: Programs with seeds that are multiples of this number are compiled, which takes several times as
#: long as other programs.
COMPILED_EVERY = 200
#: In this program Dynamo raised an error when it traced the allocation of new buckets.
COMPILED_SEED = 27_089_578_054_600

ACTIONS = (
    "evaluate",
    "forward_on_one_rank",
    "assign",
    "data",
    "copy",
    "local",
    "freeze",
    "unfreeze",
)


def draw_program(seed: int, max_actions: int) -> dict:
    """Return a random model, its options, one step and up to `max_actions` further actions."""
    draw = random.Random(seed)
    is_compiled = seed % COMPILED_EVERY == 0
    is_shared = draw.random() < 0.3
    # A shared layer in a reentrant checkpoint needs static_graph=True. A compiled layer needs no
    # checkpoint.
    checkpoints = (
        [None] if is_compiled else [None, None, "plain", None if is_shared else "reentrant"]
    )
    model = {
        "width": draw.randint(2, 5),
        "depth": draw.randint(1, 4),
        "tied": draw.random() < 0.5,
        "shared": is_shared,
        "complex": draw.random() < 0.5 and not is_compiled,
        "sparse": draw.random() < 0.3 and not is_compiled,
        "checkpoint": draw.choice(checkpoints),
        "frozen": draw.random() < 0.3,
        "compiled": draw.choice(["layer", "module", "wrapper"]) if is_compiled else None,
    }
    options = {
        "bucket_size_mb": draw.choice([None, 1e-4, 1e-3, 25.0]),
        "gradient_as_bucket_view": draw.random() < 0.7,
        "sync_buffers": draw.random() < 0.7,
        "find_unused_parameters": draw.random() < 0.5,
    }
    actions = [draw_step(draw)]
    for _ in range(draw.randint(0, max_actions)):
        action = draw.choice(ACTIONS)
        if draw.random() < 0.6:
            actions.append(draw_step(draw))
        elif action in ("freeze", "unfreeze"):
            actions.append((action, draw.randint(0, 3)))
        else:
            actions.append((action,))
    is_uneven = draw.random() < 0.3
    return {
        "seed": seed,
        "model": model,
        "options": options,
        "actions": actions,
        "uneven": is_uneven,
    }


def draw_step(draw: random.Random) -> tuple:
    """Return a step: for each pass, the parts that run inside `no_sync()`, and how it ends."""
    passes = [draw.choice(["both", "forward"]) for _ in range(draw.choice([0, 0, 1, 2]))]
    passes += [draw.choice(["", "", "backward"]) for _ in range(draw.choice([1, 1, 2]))]
    return (
        "step",
        passes,
        draw.choice(["none", "zero", "before"]),  # how gradients are zeroed
        draw.choice(["step", "step", "clip and step", "skip"]),
    )


class Net(nn.Module):
    def __init__(self, seed: int, drawn: dict, experts: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        width = drawn["width"]
        self.embed = nn.Embedding(9, width, sparse=drawn["sparse"])
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(drawn["depth"]))
        self.experts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(experts))
        self.norm = nn.BatchNorm1d(width, track_running_stats=True)
        self.norm.eval()
        self.head = nn.Linear(width, 9, bias=False)
        if drawn["tied"] and not drawn["sparse"]:
            self.head.weight = self.embed.weight
        if drawn["frozen"]:
            self.layers[0].requires_grad_(False)
        if drawn["complex"]:
            self.phase = nn.Parameter(torch.randn(width, dtype=torch.complex128))
        self.shared = drawn["shared"]
        self.how = drawn["checkpoint"]
        self.double()

    def train(self, mode: bool = True):
        return self  # batch statistics differ between ranks and one process

    def forward(self, tokens: torch.Tensor, route: int) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in [*self.layers, self.layers[0]] if self.shared else self.layers:
            if self.how and x.requires_grad:
                x = x + checkpoint(layer, x, use_reentrant=self.how == "reentrant").tanh()
            else:
                x = x + layer(x).tanh()
        if hasattr(self, "phase"):
            x = (x * self.phase).abs()
        x = self.norm(x + self.experts[route % len(self.experts)](x))
        return self.head(x).logsumexp(-1)


class Run:
    """The run of one training program on this rank, and its twin in one process."""

    def __init__(self, seed: int, drawn: dict, chosen: dict) -> None:
        self.rank = dist.get_rank()
        self.compiled = drawn["compiled"]
        self.world = dist.get_world_size()
        self.routed = chosen["find_unused_parameters"]
        self.syncs_buffers = chosen["sync_buffers"]
        # With find_unused_parameters, ranks use different experts, and the third is never used.
        self.module = Net(seed, drawn, 3 if self.routed else 1)
        self.twin = copy.deepcopy(self.module)
        self.options = chosen
        self.model = self.compile(DDP(self.module, **chosen))
        self.draw = torch.Generator().manual_seed(seed)
        self.make_optimizers()
        self.sparse, self.alone = drawn["sparse"], False

    def compile(self, model: DDP) -> DDP:
        """Compile the first layer, the module or the wrapper."""
        parts = {"layer": self.module.layers[0], "module": self.module, "wrapper": model}
        if self.compiled:
            torch._dynamo.reset()
            parts[self.compiled].compile(backend="eager")
        return model

    def make_optimizers(self) -> None:
        self.optimizers = [
            torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.0) for m in (self.module, self.twin)
        ]

    def integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.draw))

    def batches(self) -> list[tuple[torch.Tensor, int]]:
        route = self.integer(0, 1)
        return [
            (
                torch.randint(9, (self.integer(1, 5),), generator=self.draw),
                self.integer(0, 1) if self.routed else route,
            )
            for _ in range(self.world)
        ]

    def passes(self, insides: list[str]) -> None:
        losses: list[torch.Tensor] = []
        for inside in insides:
            batches = self.batches()
            tokens, route = batches[self.rank]
            with self.model.no_sync() if inside in ("both", "forward") else nullcontext():
                loss = self.model(tokens, route).mean()
            with self.model.no_sync() if inside in ("both", "backward") else nullcontext():
                loss.backward()
            losses += [self.twin(t, r).mean() for t, r in batches]
            if inside not in ("both", "forward"):
                (sum(losses) / self.world).backward()
                losses = []

    def do(self, action: str, *details) -> None:
        if action in ("freeze", "unfreeze", "assign", "data", "copy"):
            self.rendezvous()
        getattr(self, action)(*details)

    def step(self, passes: list[str], zeroing: str, end: str) -> None:
        both = (self.module, self.twin)
        if zeroing != "before":
            for module in both:
                module.zero_grad(set_to_none=zeroing == "none")
        self.passes(passes)
        self.compare(gradients=True)
        if end == "clip and step" and not self.sparse:
            for module in both:
                torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        if end != "skip":
            for optimizer in self.optimizers:
                optimizer.step()
            self.compare()

    def rendezvous(self) -> None:
        """Run a forward pass on every rank, in which changed parameters are detected."""
        if self.alone:
            self.model(torch.arange(3), 0)
        self.alone = False

    def freeze(self, at: int) -> None:
        for module in (self.module, self.twin):
            layer = module.layers[at % len(module.layers)].requires_grad_(False)
            layer.zero_grad()

    def unfreeze(self, at: int) -> None:
        for module in (self.module, self.twin):
            module.layers[at % len(module.layers)].requires_grad_(True)

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(torch.arange(3), 0)

    def forward_on_one_rank(self) -> None:
        # A forward pass of the wrapper that copies buffers must run on every rank.
        self.alone = not self.syncs_buffers
        if self.rank == 0:
            model = self.model if self.alone else self.module
            model(torch.arange(3), 0)

    def assign(self) -> None:
        for module in (self.module, self.twin):
            state = {k: 0.9 * v.detach() for k, v in module.state_dict().items()}
            trained = {n: p.requires_grad for n, p in module.named_parameters()}
            module.load_state_dict(state, assign=True)
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(trained.get(name, True))
        self.make_optimizers()

    def data(self) -> None:
        for module in (self.module, self.twin):
            for parameter in module.parameters():
                parameter.data = parameter.data * 0.9

    def copy(self) -> None:
        for module in (self.module, self.twin):
            module.zero_grad()
        self.module = copy.deepcopy(self.model).module
        self.model = DDP(self.module, **self.options)
        self.twin = copy.deepcopy(self.twin)
        self.make_optimizers()

    def local(self) -> None:
        x = torch.arange(3)
        torch.autograd.grad(self.model(x, 0).sum(), [self.module.norm.bias])

    def finish(self, uneven: bool) -> None:
        self.rendezvous()
        if not uneven:
            return
        for module in (self.module, self.twin):
            module.zero_grad()
        counts = [self.integer(1, 3) for _ in range(self.world)]
        inputs = [self.batches() for _ in range(max(counts))]
        with self.model.join():
            for number in range(counts[self.rank]):
                self.module.zero_grad()
                self.model(*inputs[number][self.rank]).mean().backward()
                self.optimizers[0].step()
        for number, batches in enumerate(inputs):
            self.twin.zero_grad()
            active = [batch for batch, n in zip(batches, counts, strict=True) if n > number]
            losses = [self.twin(*batch).mean() for batch in active]
            (sum(losses) / self.world).backward()
            self.optimizers[1].step()
        self.compare()

    def compare(self, *, gradients: bool = False) -> None:
        theirs = dict(self.twin.named_parameters())
        for name, ours in self.module.named_parameters():
            actual, expected = ours, theirs[name]
            if gradients:
                actual = make_dense(ours.grad)
                expected = make_dense(theirs[name].grad)
                # A missing gradient counts as zero.
                if not actual.any() and not expected.any():
                    continue
            # torch.testing.assert_close takes four times as long.
            assert torch.allclose(actual, expected, rtol=1e-9, atol=1e-11), name


def make_dense(gradient: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros(()) if gradient is None else gradient.to_dense()


def run_program(program: dict) -> None:
    try:
        run = Run(program["seed"], program["model"], program["options"])
        for action in program["actions"]:
            run.do(*action)
        run.finish(program["uneven"])
    except Exception as error:
        error.add_note(f"program {program}")
        raise


def run_programs(seeds: range, max_actions: int) -> int:
    for seed in seeds:
        run_program(draw_program(seed, max_actions))
    return len(seeds)


def draw_compiled_program() -> dict:
    """Return a program with a compiled wrapper whose parameters are replaced."""
    program = draw_program(COMPILED_SEED, 4)
    # Dynamo compiles the passes of this step one by one, and the error did not depend on it.
    assert program["actions"].pop(2)[0] == "step"
    return program


def run_usual_programs() -> int:
    """Run short programs and a longer one, which is compiled."""
    count = run_programs(range(1, NUM_USUAL + 1), 1)
    run_program(draw_compiled_program())
    return count


@cache
def get_outcomes_of_usual_programs() -> list[int]:
    return run_ranks(run_usual_programs, 2, timeout=300)


@pytest.mark.filterwarnings("default")
def test_random_programs_train_like_one_process() -> None:
    assert get_outcomes_of_usual_programs() == [NUM_USUAL] * 2


@pytest.mark.filterwarnings("default")
def test_parameters_of_a_compiled_wrapper_may_be_replaced() -> None:
    program = draw_compiled_program()
    assert program["model"]["compiled"] == "wrapper"
    assert ("assign",) in program["actions"][1:-1]
    assert len(get_outcomes_of_usual_programs()) == 2


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ten_thousand_random_programs_train_like_one_process(world: int) -> None:
    # New programs in each run; a failure prints the program with its seed.
    first = 10**4 * int.from_bytes(os.urandom(4))
    for start in range(first, first + 3400, 200):
        seeds = range(start, start + 200)
        assert run_ranks(run_programs, world, seeds, 4, timeout=900) == [200] * world
