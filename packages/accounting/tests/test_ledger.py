"""Tests of `Ledger` and `fits` on resized storages, sparse tensors, plain attributes and hooks."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accounting import Ledger, fits
from reference import PolledMemory, emulate_world
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

MIB = 2**20


@pytest.mark.parametrize(
    ("reshard", "mixed"),
    [
        *((False, True), (True, False)),
        *(pytest.param(b, b, marks=pytest.mark.exhaustive) for b in (False, True)),
    ],
)
def test_peak_of_fsdp2_counts_gathered_weights_only_while_they_exist(
    reshard: bool, mixed: bool
) -> None:
    with emulate_world(8) as mesh:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options: dict[str, Any] = {"mesh": mesh} | ({"mp_policy": policy} if mixed else {})
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
        for layer in model:
            fully_shard(layer, reshard_after_forward=reshard, **options)
        fully_shard(model, **options)
        x = torch.randn(1, 512)
        model(x).sum().backward()
        model.zero_grad()
        ledger, polled = Ledger(), PolledMemory()
        ledger.hold("weights", *model.parameters())
        polled.add(model.parameters())
        with polled, ledger:
            model(x).sum().backward()
    assert ledger.peak_bytes == pytest.approx(polled.peak_bytes, rel=0.001)
    # Eight shards of an eighth of a layer, weights and gradients. Gathered are at most all layers,
    # or three of them; a gradient is whole, and its copy that is reduced.
    whole = (3 if reshard else 8) * MIB / (2 if mixed else 1)
    assert ledger.peak_bytes <= 2 * MIB + whole + 2 * MIB + 0.1 * MIB


def test_hold_without_a_label_or_with_other_objects_is_refused() -> None:
    parameters: list[Any] = list(nn.Linear(4, 4).parameters())
    ledger = Ledger()
    for arguments in (parameters, ["weights", parameters]):
        with pytest.raises(TypeError, match=r"expected a label and tensors, .* got "):
            ledger.hold(*arguments)
    ledger.hold("weights", *parameters)
    assert ledger.live_bytes == 80


def test_storage_is_counted_at_the_size_that_it_has() -> None:
    tensor = torch.zeros(256)
    # torch's MemTracker leaves an attribute behind.
    before = torch.UntypedStorage.__dict__.get("resize_")
    with Ledger() as ledger:
        tensor.untyped_storage().resize_(0)
        assert ledger.live_bytes == 0
        tensor.untyped_storage().resize_(4096)
        assert ledger.live_bytes == 4096
        tensor.resize_(4096)
        assert ledger.live_bytes == 4 * 4096
        tensor.untyped_storage().resize_(0)
        assert ledger.live_bytes == 0
    assert ledger.peak_bytes == 4 * 4096
    assert torch.UntypedStorage.__dict__.get("resize_") is before


def test_step_with_sparse_gradients_is_counted_and_not_disturbed() -> None:
    torch.manual_seed(0)
    model = nn.Embedding(500, 64, sparse=True)
    twin = copy.deepcopy(model)
    ids = torch.arange(8)
    with Ledger() as ledger:
        model(ids).sum().backward()
        # The gradient stores 8 rows and their indices; a view of the ids was made as well.
        assert ledger.live_bytes == 8 * 64 * 4 + 8 * 8 + 8 * 8
        torch.optim.SparseAdam(model.parameters()).step()
    twin(ids).sum().backward()
    torch.optim.SparseAdam(twin.parameters()).step()
    assert torch.equal(model.weight, twin.weight)


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "coo": (lambda x: x.to_sparse(), 16 * 4 + 2 * 16 * 8),
    "csr": (lambda x: x.to_sparse_csr(), 16 * 4 + 5 * 8 + 16 * 8),
    "csc": (lambda x: x.to_sparse_csc(), 16 * 4 + 5 * 8 + 16 * 8),
    "bsr": (lambda x: x.to_sparse_bsr((2, 2)), 16 * 4 + 3 * 8 + 4 * 8),
    "bsc": (lambda x: x.to_sparse_bsc((2, 2)), 16 * 4 + 3 * 8 + 4 * 8),
    "mkldnn": (lambda x: x.to_mkldnn(), 16 * 4),
    "jagged": (lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged), 2 * 16 * 4),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_every_layout_are_counted_while_they_live(layout: str) -> None:
    convert, nbytes = LAYOUTS[layout]
    x = torch.ones(4, 4)
    ledger = Ledger()
    with ledger:
        x = x + 1
        before = ledger.live_bytes
        converted = convert(x)
        # A conversion may also leave indices behind.
        assert nbytes <= ledger.live_bytes - before < 2 * nbytes
        del converted
    assert ledger.live_bytes - before <= 64


class Attributes(nn.Module):
    """A module whose forward reads tensors that are neither parameters nor buffers."""

    constant = torch.full((32,), 0.5)

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(100, 32)
        self.out = nn.Linear(32, 100)
        self.frequencies = torch.arange(16).float()
        self.rotations = torch.polar(torch.ones(16), torch.arange(16).float())
        self.real = torch.view_as_real(self.rotations)
        self.nested = {"scales": [torch.ones(32), (torch.zeros(32),)]}
        self.view = self.frequencies[:8]
        self.detached = self.out.weight.detach()
        self.unregistered = [nn.Parameter(torch.ones(32))]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) * self.frequencies.repeat(2).cos() + self.constant
        x = x + self.nested["scales"][0] + self.nested["scales"][1][0] + self.view.repeat(4)
        x = x * self.unregistered[0] + self.real.flatten() + self.rotations.real.repeat(2)
        logits: Tensor = self.out(x + self.detached.mean(0))
        return logits


def measure_real_peak(
    module: nn.Module, sample: Tensor, optimizer: torch.optim.Optimizer | None
) -> int:
    """Return the peak of a second real step, with the tensors of the module."""

    def step() -> None:
        module(sample).sum().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            module.zero_grad()

    step()
    ledger = Ledger()
    ledger.hold("weights", *module.parameters(), *module.buffers())
    ledger.hold("inputs", sample)
    ledger.hold("attributes", *(x for x in tree_leaves(vars(module)) if isinstance(x, Tensor)))
    if optimizer is not None:
        state = tree_leaves(optimizer.state_dict())
        ledger.hold("optimizer", *(leaf for leaf in state if isinstance(leaf, Tensor)))
    with ledger:
        step()
    return ledger.peak_bytes


IDS = torch.arange(16).reshape(2, 8)
CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, Any]] = {
    "attributes": (Attributes, IDS, torch.optim.SGD),
    "bf16": (
        lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).bfloat16(),
        torch.ones(128, 64, dtype=torch.bfloat16),
        torch.optim.AdamW,
    ),
    "new weight norm": (
        lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)),
        torch.ones(4, 32),
        torch.optim.SGD,
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_fits_predicts_the_peak_of_the_real_step(case: str) -> None:
    make, sample, optimizer = CASES[case]
    module = make()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    predicted = fits(module, sample, optimizer, "H100", rounding=1).peak.total
    assert all(torch.equal(before[name], x) for name, x in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    real = measure_real_peak(module, sample, optimizer(module.parameters()))
    assert predicted == pytest.approx(real, rel=0.01, abs=64)


class Applied(nn.Module):
    """A layer, followed by a function of its output and of the input."""

    def __init__(self, layer: nn.Module, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x), x)


def build_conv() -> nn.Module:
    return nn.Conv2d(8, 8, 1)


IMAGES = torch.ones(4, 8, 12, 12)
ROWS = torch.arange(4 * 12 * 12.0).reshape(4, 12, 12).sin() + 3 * torch.eye(12)
#: Modules and functions of torch, with the input of a step.
LIBRARY: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "conv transpose": (lambda: nn.ConvTranspose2d(8, 4, 3, 2), IMAGES),
    "conv bf16": (lambda: nn.Conv2d(8, 16, 3).bfloat16(), IMAGES.bfloat16()),
    "group norm": (lambda: nn.Sequential(build_conv(), nn.GroupNorm(2, 8)), IMAGES),
    "instance norm": (
        lambda: nn.Sequential(build_conv(), nn.InstanceNorm2d(8, affine=True)),
        IMAGES,
    ),
    "batch norm in eval": (lambda: nn.Sequential(build_conv(), nn.BatchNorm2d(8)).eval(), IMAGES),
    "max pool": (lambda: nn.Sequential(build_conv(), nn.AdaptiveMaxPool2d(3)), IMAGES),
    "bicubic": (
        lambda: Applied(
            build_conv(), lambda y, x: F.interpolate(y, scale_factor=2, mode="bicubic")
        ),
        IMAGES,
    ),
    "pixel shuffle": (lambda: nn.Sequential(build_conv(), nn.PixelShuffle(2)), IMAGES),
    "dropout": (lambda: nn.Sequential(build_conv(), nn.Dropout2d()), IMAGES),
    "local response norm": (lambda: nn.Sequential(build_conv(), nn.LocalResponseNorm(2)), IMAGES),
    "topk": (lambda: Applied(nn.Linear(12, 12), lambda y, x: y.topk(3)[0]), ROWS),
    "sort": (lambda: Applied(nn.Linear(12, 12), lambda y, x: y.sort()[0]), ROWS),
    "cumsum": (lambda: Applied(nn.Linear(12, 12), lambda y, x: y.cumsum(-1)), ROWS),
    "logsumexp": (lambda: Applied(nn.Linear(12, 12), lambda y, x: y.logsumexp(-1)), ROWS),
    "solve": (lambda: Applied(nn.Linear(12, 12), lambda y, x: torch.linalg.solve(y + x, x)), ROWS),
    "singular values": (
        lambda: Applied(nn.Linear(12, 12), lambda y, x: torch.linalg.svdvals(y)),
        ROWS,
    ),
    "fourier": (
        lambda: Applied(build_conv(), lambda y, x: torch.fft.irfft2(torch.fft.rfft2(y))),
        IMAGES,
    ),
    "distances": (lambda: Applied(nn.Linear(12, 12), lambda y, x: torch.cdist(y, x)), ROWS),
    "divergence": (
        lambda: Applied(nn.Linear(12, 12), lambda y, x: F.kl_div(y.log_softmax(-1), x.softmax(-1))),
        ROWS,
    ),
    "attention": (lambda: nn.TransformerEncoderLayer(12, 2, 16, dropout=0.1), ROWS),
    "embedding": (lambda: nn.Embedding(10, 4, max_norm=1.0), IDS % 10),
    "orthogonal": (lambda: torch.nn.utils.parametrizations.orthogonal(nn.Linear(12, 12)), ROWS),
}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", LIBRARY)
def test_fits_predicts_the_peak_of_modules_of_torch(case: str) -> None:
    make, sample = LIBRARY[case]
    module = make()
    predicted = fits(module, sample, torch.optim.SGD, "H100", rounding=1).peak.total
    assert predicted == measure_real_peak(module, sample, torch.optim.SGD(module.parameters()))


@pytest.mark.parametrize(("name", "ratio"), [("fold", 1.57), ("bag", 1.01)])
def test_buffers_that_fake_kernels_omit_are_as_large_as_stated(name: str, ratio: float) -> None:
    module: nn.Module = nn.EmbeddingBag(10, 4, mode="max")
    sample = torch.arange(12).reshape(4, 3) % 10
    if name == "fold":
        module = Applied(build_conv(), lambda y, x: F.fold(F.unfold(y, 3), 12, 3))
        sample = IMAGES
    predicted = fits(module, sample, torch.optim.SGD, "H100", rounding=1).peak.total
    real = measure_real_peak(module, sample, torch.optim.SGD(module.parameters()))
    assert real / predicted == pytest.approx(ratio, abs=0.005)


def test_fits_refuses_an_optimizer_that_needs_a_closure() -> None:
    with pytest.raises(ValueError, match="whose step needs no closure, got LBFGS"):
        fits(nn.Linear(8, 2), torch.ones(4, 8), torch.optim.LBFGS)


def test_fits_refuses_an_optimizer_that_is_built() -> None:
    module = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(module.parameters())
    with pytest.raises(TypeError, match="got an instance of SGD; pass its class"):
        fits(module, torch.ones(4, 8), optimizer)


def test_fits_refuses_hooks_that_a_copy_would_lose_or_share() -> None:
    x = torch.ones(4, 8)
    seen: list[Tensor] = []
    for register in ("register_forward_hook", "register_full_backward_pre_hook"):
        module = nn.Sequential(nn.Linear(8, 8))
        getattr(module[0], register)(lambda *arguments: seen.append(arguments[-1]))
        with pytest.raises(ValueError, match="0 has hooks, which a copy would share; remove them"):
            fits(module, x)
    assert not seen
    module = nn.Linear(8, 8)
    module.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ValueError, match="weight has hooks on its gradient"):
        fits(module, x)
    module = nn.Linear(8, 8)
    module.bias.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(ValueError, match="bias has hooks on its gradient"):
        fits(module, x)


def test_fits_refuses_parameters_that_it_cannot_follow() -> None:
    foreign = nn.Linear(8, 8)

    class Borrows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = foreign(x)
            return out

    with pytest.raises(ValueError, match="does not own"):
        fits(Borrows(), torch.ones(4, 8), None)
    assert foreign.weight.grad is None
    with pytest.raises(ValueError, match="sparse_coo"):
        fits(nn.Embedding(100, 32, sparse=True), IDS, torch.optim.SparseAdam)
    with emulate_world(4) as mesh:
        sharded = nn.Linear(8, 8)
        fully_shard(sharded, mesh=mesh)
        with pytest.raises(ValueError, match="expected plain dense tensors, got DTensor"):
            fits(sharded, torch.ones(4, 8))


@pytest.mark.filterwarnings("ignore")
def test_fits_refuses_operators_whose_memory_fake_tensors_hide() -> None:
    quantized = nn.Sequential(nn.Linear(8, 8), torch.ao.nn.quantized.dynamic.Linear(8, 8))
    for module, sample in ((nn.LSTM(8, 8), torch.ones(4, 2, 8)), (quantized, torch.ones(2, 8))):
        with pytest.raises(ValueError, match="packed weights or a workspace"):
            fits(module, sample)
    ragged = torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(5, 8)])
    with pytest.raises(ValueError, match="expected plain dense tensors"):
        fits(nn.Linear(8, 8), ragged)


def test_fits_does_not_depend_on_modes_of_the_caller() -> None:
    module, sample = nn.Linear(4, 4), torch.zeros(2, 4)
    expected = fits(module, sample).peak.total
    modes = (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16))
    for caller in modes:
        with caller:
            assert fits(module, sample).peak.total == expected


def test_loss_without_gradient_is_refused() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(ValueError, match="expected a loss with a gradient"):
        fits(frozen, torch.zeros(2, 4), None)
    without = nn.Module()
    without.forward = lambda sample: "text"
    with pytest.raises(ValueError, match=r"expected the module to return a tensor, .* got str"):
        fits(without, torch.zeros(2, 4), None)
    with pytest.raises(ValueError, match="expected rounding >= 1, got 0"):
        Ledger(rounding=0)


def test_peak_of_a_module_on_the_meta_device_is_that_of_the_cpu() -> None:
    peaks = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
            result = fits(layer, torch.zeros(2, 16, 64))
        peaks.append((result.peak.total, result.when))
    assert peaks[0] == peaks[1]
