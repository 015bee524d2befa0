"""Random training programs with `DDP` on several ranks train like one process in float64.

Hypothesis generates models, options and sequences of actions: accumulation, several losses,
clipping, freezing, checkpoints, forward passes without a backward pass, copies, new parameters and
uneven inputs. After every step, gradients and weights equal those of one process.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from ddp import DDP
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from worker_pool import run_ranks

models = st.fixed_dictionaries(
    {
        "width": st.integers(2, 5),
        "depth": st.integers(1, 4),
        "tied": st.booleans(),
        "complex": st.booleans(),
        "sparse": st.booleans(),
        "checkpoint": st.sampled_from([None, None, "reentrant", "plain"]),
        "frozen": st.booleans(),
    }
)
options = st.fixed_dictionaries(
    {
        "bucket_size_mb": st.sampled_from([None, 1e-4, 1e-3, 25.0]),
        "gradient_as_bucket_view": st.booleans(),
        "forward_sync_buffers": st.booleans(),
        "find_unused_parameters": st.booleans(),
        "average": st.sampled_from(["ranks", "ranks", "sum", "weight"]),
    }
)
steps = st.tuples(
    st.just("step"),
    st.integers(0, 2),  # passes under no_sync
    st.integers(1, 2),  # synchronized passes
    st.sampled_from(["none", "zero", "before"]),  # how gradients are zeroed
    st.booleans(),  # clip
)
actions = st.one_of(
    steps,
    steps,
    st.tuples(st.just("freeze"), st.integers(0, 3)),
    st.tuples(st.just("unfreeze"), st.integers(0, 3)),
    st.tuples(
        st.sampled_from(["evaluate", "forward_on_one_rank", "assign", "data", "copy", "local"])
    ),
)
programs = st.tuples(
    st.integers(0, 10**6), models, options, st.lists(actions, min_size=2, max_size=6), st.booleans()
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
        self.how = drawn["checkpoint"]
        self.double()

    def train(self, mode: bool = True):
        return self  # batch statistics differ between ranks and one process

    def forward(self, tokens: torch.Tensor, route: int) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            if self.how and x.requires_grad:
                x = x + checkpoint(layer, x, use_reentrant=self.how == "reentrant").tanh()
            else:
                x = x + layer(x).tanh()
        if hasattr(self, "phase"):
            x = (x * self.phase).abs()
        x = self.norm(x + self.experts[route % len(self.experts)](x))
        return self.head(x).logsumexp(-1)


class Run:
    """One program on this rank."""

    def __init__(self, seed: int, drawn: dict, chosen: dict) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.weight = 1.0
        self.routed = chosen["find_unused_parameters"]
        # With find_unused_parameters, ranks use different experts, and the third is never used.
        self.module = Net(seed, drawn, 3 if self.routed else 1)
        self.twin = copy.deepcopy(self.module)
        self.average = chosen["average"]
        average = self.average if self.average != "weight" else lambda: self.weight
        self.model = DDP(self.module, **{**chosen, "average": average})
        self.draw = torch.Generator().manual_seed(seed)
        self.make_optimizers()
        self.sparse, self.alone = drawn["sparse"], False

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

    def passes(self, unsynchronized: int, synchronized: int) -> None:
        group: list[tuple[float, torch.Tensor]] = []
        for number in range(unsynchronized + synchronized):
            batches = self.batches()
            tokens, route = batches[self.rank]
            self.weight = float(len(tokens))
            if number < unsynchronized:
                with self.model.no_sync():
                    self.model(tokens, route).mean().backward()
            else:
                self.model(tokens, route).mean().backward()
            group += [(float(len(t)), self.twin(t, r).mean()) for t, r in batches]
            if number >= unsynchronized:
                self.backward_of_the_twin(group)
                group = []

    def backward_of_the_twin(self, group: list[tuple[float, torch.Tensor]]) -> None:
        if self.average == "weight":
            total = sum(w * loss for w, loss in group) / sum(w for w, _ in group)
        else:
            total = sum(loss for _, loss in group) / (self.world if self.average == "ranks" else 1)
        total.backward()

    def do(self, action: str, *details) -> None:
        if action in ("freeze", "unfreeze", "assign", "data", "copy"):
            self.rendezvous()
        getattr(self, action)(*details)

    def step(self, unsynchronized: int, synchronized: int, zeroing: str, clip: bool) -> None:
        both = (self.module, self.twin)
        if zeroing != "before" or (self.average == "weight" and unsynchronized):
            for module in both:
                module.zero_grad(set_to_none=zeroing == "none")
        self.passes(unsynchronized, synchronized)
        self.compare(gradients=True)
        if clip and not self.sparse:
            for module in both:
                torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
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
        self.alone = True
        if self.rank == 0:
            self.model(torch.arange(3), 0)

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
        weight = self.model
        self.model = copy.deepcopy(weight)
        self.module = self.model.module
        self.twin = copy.deepcopy(self.twin)
        self.make_optimizers()

    def local(self) -> None:
        x = torch.arange(3)
        torch.autograd.grad(self.model(x, 0).sum(), [self.module.norm.bias])

    def finish(self, uneven: bool) -> None:
        self.rendezvous()
        if not uneven or self.average == "weight" or self.sparse:
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
            (sum(losses) / (self.world if self.average == "ranks" else 1)).backward()
            self.optimizers[1].step()
        self.compare()

    def compare(self, *, gradients: bool = False) -> None:
        theirs = dict(self.twin.named_parameters())
        for name, ours in self.module.named_parameters():
            actual, expected = ours, theirs[name]
            if gradients:
                actual = dense_or_zero(ours.grad)
                expected = dense_or_zero(theirs[name].grad)
                # A missing gradient counts as zero.
                if not actual.any() and not expected.any():
                    continue
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11, msg=name)


def dense_or_zero(gradient: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros(()) if gradient is None else gradient.to_dense()


def run_programs(drawn: list) -> int:
    for seed, model, chosen, actions_, uneven in drawn:
        run = Run(seed, model, chosen)
        for action in actions_:
            try:
                run.do(*action)
            except Exception as error:
                error.add_note(f"{action} of {(seed, model, chosen, actions_)}")
                raise
        run.finish(uneven)
    return len(drawn)


def check(drawn: list, world: int) -> None:
    assert run_ranks(run_programs, world, drawn, timeout=300) == [len(drawn)] * world


# Shrinking is disabled, because each hanging program takes its whole timeout.
PROFILE = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)


@pytest.mark.filterwarnings("default")
@settings(PROFILE, max_examples=2)
@given(st.lists(programs, min_size=12, max_size=12))
def test_random_programs_train_like_one_process(drawn: list) -> None:
    check(drawn, 2)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("world", [2, 3, 4])
@settings(PROFILE, max_examples=34)
@given(drawn=st.lists(programs, min_size=30, max_size=30))
def test_a_thousand_random_programs_train_like_one_process(drawn: list, world: int) -> None:
    check(drawn, world)
