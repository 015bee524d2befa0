"""Every optimizer of the wheel `pytorch_optimizer`, sharded and in one process: equal, or refused.

The wheel is an independent judge. A class that one process cannot step with a plain `step()` has no
reference; it must fail at every stage too.
"""

import re
import sys
from collections import Counter
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from worker_pool import try_ranks

sys.path.insert(0, str(Path(__file__).parent))

from zero import FSDP, ShardedOptimizer
from zero_training import assert_alike

#: Shapes of the parameters, and those of classes that support matrices or low-rank pairs only.
SHAPES = {"filters": (6, 3, 3, 3), "wide": (12, 20), "tall": (40, 6), "vector": (7,), "one": (1,)}
MATRICES = {"wide": (12, 20), "tall": (40, 6)}
SHAPES_OF = {
    **dict.fromkeys(("DeMo", "DistributedMuon", "SpectralSphere"), MATRICES),
    "LoRARite": {"down": (4, 20), "up": (12, 4)},
}
#: Scales of the gradients of successive steps.
SCALES = (1.0, 1e-3, 30.0, 1e-5, 1e3)
STEPS = 10


def wrap(cls, params):
    return cls(torch.optim.SGD(params, lr=0.01))


def group_matrices(params):
    """Give matrices to Muon, and all other parameters to AdamW, as its documentation says."""
    params = list(params)
    return [
        {"params": [p for p in params if p.dim() == 2], "use_muon": True},
        {"params": [p for p in params if p.dim() != 2], "use_muon": False},
    ]


def wrap_and_train(cls, params):
    optimizer = wrap(cls, params)
    optimizer.train()
    return optimizer


def pass_base(cls, params):
    return cls(params, base_optimizer=torch.optim.SGD, lr=0.01)


#: Functions that construct the optimizers that need arguments besides the parameters.
CONSTRUCTORS = {
    **dict.fromkeys(("Lookahead", "OrthoGrad", "TRAC"), wrap),
    "ScheduleFreeWrapper": wrap_and_train,
    **dict.fromkeys(("PCGrad", "SafeFP16Optimizer"), wrap),
    **dict.fromkeys(("SAM", "LookSAM", "FriendlySAM"), pass_base),
    "WSAM": lambda cls, model: cls(model, model.parameters(), torch.optim.SGD, lr=0.01),
    "BSAM": lambda cls, params: cls(params, num_data=10),
    "Ranger21": lambda cls, params: cls(params, num_iterations=20),
}
#: Classes whose groups have an option for matrices.
GROUPED = {"AdaGO", "AdaMuon", "DistributedMuon", "Muon", "MuonClip", "NorMuon"}
#: Classes whose step needs a closure.
WITH_CLOSURE = {"AliG", "BSAM", "SAM", "LookSAM", "FriendlySAM", "LBFGS", "WSAM"}
#: Classes whose step differentiates the gradients.
SECOND_ORDER = {"AdaHessian", "SophiaH"}
#: Classes that are constructed from a module.
OF_MODULE = {"AdaLOMO", "AdamMini", "LOMO", "WSAM"}
#: Classes that compute in float32 only.
SINGLE = {"FAdam"}
#: The errors that refuse an optimizer.
REASON = (
    "cannot be (sharded|verified)|combines this rank's elements with a plain tensor|"
    "needs elements of a gradient or parameter that other ranks have"
)
DEADLINE = 300.0


class Weights(nn.Module):
    """Parameters of several shapes, whose gradients are chosen."""

    def __init__(self, dtype, shapes):
        super().__init__()
        self.shapes = shapes
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            setattr(self, name, nn.Parameter(values.to(dtype)))

    def forward(self, step, rank):
        generator = torch.Generator().manual_seed(100 * step + rank)
        loss = 0.0
        for name, shape in self.shapes.items():
            chosen = torch.randn(shape, generator=generator, dtype=torch.float64)
            weight = getattr(self, name)
            loss = loss + (weight * chosen).sum() + 0.05 * weight.square().sum()
        return SCALES[step % len(SCALES)] * loss


def list_optimizer_names():
    pytorch_optimizer = pytest.importorskip("pytorch_optimizer", reason="published optimizers")
    return sorted(
        name
        for name, cls in vars(pytorch_optimizer).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    )


def construct(name, params, **options):
    import pytorch_optimizer

    cls = getattr(pytorch_optimizer, name)
    return CONSTRUCTORS.get(name, lambda cls, params: cls(params, **options))(cls, params)


def build_groups(name, model):
    if name in OF_MODULE:
        return model
    return group_matrices(model.parameters()) if name in GROUPED else model.parameters()


def build(name, dtype):
    return Weights(dtype, SHAPES_OF.get(name, SHAPES))


def take_step(name, optimizer, backward):
    optimizer.zero_grad()
    if name in WITH_CLOSURE:

        @torch.enable_grad()
        def closure():
            optimizer.zero_grad()
            return backward()

        optimizer.step(closure)
    else:
        backward()
        optimizer.step()


def train_in_one_process(name, dtype):
    """Return the model after the steps of an unsharded optimizer on all ranks' gradients."""
    model = build(name, dtype)
    torch.manual_seed(0)
    optimizer = construct(name, build_groups(name, model))
    world = dist.get_world_size()
    for number in range(STEPS):

        def backward(number=number):
            losses = [model(number, rank) / world for rank in range(world)]
            # Round as the ranks do, because SOAP's eigenvectors amplify rounding errors.
            for loss in losses:
                loss.backward(create_graph=name in SECOND_ORDER)
            return sum(losses).item()

        take_step(name, optimizer, backward)
    return model


def train_sharded(stage, name, dtype):
    """Return the model after the steps of a sharded optimizer."""
    model = build(name, dtype)
    if stage == 3:
        model = FSDP(model)
        torch.manual_seed(0)
        optimizer = construct(name, build_groups(name, model))
    else:
        torch.manual_seed(0)
        cls = partial(construct, name)
        if name not in CONSTRUCTORS:
            import pytorch_optimizer

            cls = getattr(pytorch_optimizer, name)
        groups = model.parameters() if name in OF_MODULE else build_groups(name, model)
        optimizer = ShardedOptimizer(groups, cls, shard_gradients=stage == 2)
    for number in range(STEPS):

        def backward(number=number):
            loss = model(number, dist.get_rank())
            loss.backward(create_graph=name in SECOND_ORDER)
            return loss.item()

        take_step(name, optimizer, backward)
    return model


def judge(stage, name):
    """Return "right", "wrong: ...", "refused: ..." or "no reference: ..."."""
    dtype = torch.float32 if name in SINGLE else torch.float64
    reference = ""
    try:
        twin = train_in_one_process(name, dtype)
        if any(not p.isfinite().all() for p in twin.parameters()):
            reference = "it diverges"
    except Exception as error:
        reference = f"{type(error).__name__}: {error}"
    try:
        model = train_sharded(stage, name, dtype)
    except Exception as error:
        if reference:
            return f"no reference: {reference}; sharded: {error}"
        return f"refused: {type(error).__name__}: {error}"
    if reference:
        return f"wrong: it steps, but in one process: {reference}"
    try:
        tolerance = 1e-9 if dtype == torch.float64 else 1e-5
        assert_alike(model, twin, rtol=tolerance, atol=tolerance)
    except AssertionError as error:
        return f"wrong: {error}"
    return "right"


def judge_all(stage, names, folder):
    """Write the verdict of each name to a file; the ranks may fail at any name."""
    for name in names:
        path = Path(folder, f"{name}.{dist.get_rank()}")
        path.write_text("started")
        verdict = judge(stage, name)
        path.write_text(verdict)
        if verdict.startswith("refused") and "shard" not in verdict:
            # The other rank may wait in a collective.
            raise RuntimeError(verdict)


def collect_verdicts(stage, names, folder):
    """Return the verdict of each rank by name, with new processes after a failure."""
    verdict_of = {}
    remaining = list(names)
    while remaining:
        try_ranks(judge_all, 2, stage, remaining, str(folder), timeout=DEADLINE)
        started = [name for name in remaining if list(Path(folder).glob(f"{name}.[01]"))]
        assert started, f"no rank started {remaining[0]}"
        for name in started:
            files = [Path(folder, f"{name}.{rank}") for rank in range(2)]
            verdict_of[name] = [file.read_text() if file.exists() else "absent" for file in files]
            remaining.remove(name)
    return verdict_of


#: The number of classes with each verdict at each stage, in the README's version of the package.
VERSION = "4.1.0"
COUNTS = {
    1: {"right": 95, "refused": 39, "no reference": 5},
    3: {"right": 83, "refused": 51, "no reference": 5},
}


def test_the_readme_has_the_counts_of_published_optimizers():
    text = " ".join((Path(__file__).parent.parent / "README.md").read_text().split())
    supported = [counts["right"] for counts in COUNTS.values()]
    for sentence in (
        f"All {sum(COUNTS[1].values())} classes of version {VERSION} of the `pytorch_optimizer`",
        f"{supported[0]} classes step as in one process at stage 1, and {supported[1]} at stage 3.",
        f"{COUNTS[1]['no reference']} classes fail in one process too",
    ):
        assert sentence in text


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", COUNTS)
def test_published_optimizers_equal_one_process_or_are_refused(stage, tmp_path):
    verdict_of = collect_verdicts(stage, list_optimizer_names(), tmp_path)
    counts = Counter()
    for name, by_rank in verdict_of.items():
        assert len({verdict.split(":")[0] for verdict in by_rank}) == 1, (name, by_rank)
        kind = by_rank[0].split(":")[0]
        assert kind in ("right", "refused", "no reference"), (name, by_rank)
        if kind == "refused":
            # The constructor of DeMo fails on a rank whose shard of a parameter is empty.
            assert name == "DeMo" or re.search(REASON, by_rank[0]), (name, by_rank)
        counts[kind] += 1
    if version("pytorch_optimizer") == VERSION:
        assert counts == COUNTS[stage]
    assert counts["right"] > len(verdict_of) / 2
