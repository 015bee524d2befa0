"""Half precision, mixed dtypes and devices, and blocks with state."""

from collections.abc import Callable

import pytest
import torch
from interp import AttentionOnly, LowRank, composition_scores, logit_lens, ov_circuit, qk_circuit
from interp.circuits.heads import circuit_pattern
from interp.circuits.vocabulary import copying_eigenvalues, copying_scores
from interp.patching import attribution_patching, patch_streams, path_patching
from torch import Tensor, nn

CLEAN = torch.tensor([[1, 2, 3, 4, 2, 7]])
CORRUPTED = torch.tensor([[1, 2, 9, 4, 11, 7]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_decomposed_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    half = LowRank(torch.randn(2, 3, 8, 2).to(dtype), torch.randn(2, 3, 2, 8).to(dtype))
    full = LowRank(half.a.float(), half.b.float())
    for name in ("norm", "eigenvalues"):
        ours, expected = getattr(half, name)(), getattr(full, name)()
        assert ours.dtype in (torch.float32, torch.complex64)
        torch.testing.assert_close(ours, expected)
    for ours, expected in zip(half.svd(), full.svd(), strict=True):
        torch.testing.assert_close(ours, expected)
    for kind in ("q", "k", "v"):
        torch.testing.assert_close(
            composition_scores(half, half, kind=kind), composition_scores(full, full, kind=kind)
        )
    embed, unembed = torch.randn(2, 5, 8).to(dtype)
    for function in (copying_eigenvalues, copying_scores):
        torch.testing.assert_close(
            function(half, embed, unembed), function(full, embed.float(), unembed.float())
        )


def thin(dtype: torch.dtype = torch.float32, device: str = "cpu") -> LowRank:
    return LowRank(
        torch.ones(2, 3, 6, 2, dtype=dtype, device=device),
        torch.ones(2, 3, 2, 6, dtype=dtype, device=device),
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda x: LowRank(torch.ones(6, 2), x.new_ones(2, 6)),
        lambda x: thin() @ x,
        lambda x: x @ thin(),
        lambda x: thin() @ LowRank(x, x),
        lambda x: thin().apply(x),
        lambda x: qk_circuit(torch.ones(6, 6), x, heads=2),
        lambda x: ov_circuit(torch.ones(6, 6), x, heads=2),
        lambda x: composition_scores(thin(), thin(x.dtype, str(x.device)), kind="k"),
        lambda x: copying_eigenvalues(thin(), x, x),
        lambda x: circuit_pattern(x, thin()),
        lambda x: logit_lens([torch.ones(1, 6, 6)], None, x),
    ],
)
def test_mixed_dtypes_and_devices_are_refused_with_a_remedy(
    call: Callable[[Tensor], object],
) -> None:
    with pytest.raises(
        TypeError, match=r"torch\.float\d+ and torch\.float\d+.*convert them to one dtype"
    ):
        call(torch.ones(6, 6, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"(cpu|meta) and .*move them to one device"):
        call(torch.ones(6, 6, device="meta"))


@pytest.mark.parametrize(
    "call",
    [
        lambda: thin() @ torch.ones(5, 6),
        lambda: torch.ones(6, 5) @ thin(),
        lambda: thin().apply(torch.ones(4, 5)),
    ],
)
def test_products_of_mismatched_shapes_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="do not multiply; the columns"):
        call()
    with pytest.raises(ValueError, match="batches that do not broadcast"):
        LowRank(torch.ones(2, 6, 2), torch.ones(3, 2, 6))


class Cached(nn.Module):
    """A block that appends to a cache and adds a mask of fixed length."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[Tensor] = []

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.keys.append(x)
        keys = torch.cat(self.keys, 1)
        return x + (x @ keys.mT + mask).softmax(-1) @ keys


class CachedModel(nn.Module):
    """A model that clears its blocks' caches for each prompt, as a Hugging Face model does."""

    def __init__(self, *, clears: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 4)
        self.blocks = nn.ModuleList(Cached() for _ in range(2))
        self.clears = clears

    def forward(self, tokens: Tensor) -> Tensor:
        x, length = self.embed(tokens), tokens.shape[1]
        for block in self.blocks:
            if self.clears:
                block.keys.clear()
            total = length + sum(k.shape[1] for k in block.keys)
            x = block(x, torch.zeros(length, total))
        return x


def test_blocks_with_a_cache_are_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"must not keep state .*turn caches off"):
        patch_streams(CachedModel(), "blocks.*", CLEAN, CORRUPTED, lambda x: x.sum((1, 2)))
    with pytest.raises(ValueError, match=r"keeps state"):
        attribution_patching(
            CachedModel(clears=False), ["blocks.0"], CLEAN, CORRUPTED, lambda x: x.sum()
        )
    with pytest.raises(ValueError, match=r"keeps state"):
        path_patching(CachedModel(clears=False), "blocks.0", ["blocks.1:input"], CLEAN, CORRUPTED)


class Mixing(nn.Module):
    """A block that adds to its input, in place or with batch norm."""

    def __init__(self, *, in_place: bool, norm: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.in_place, self.norm = in_place, norm

    def forward(self, x: Tensor) -> Tensor:
        added = self.norm(self.linear(x).cumsum(1).mT).mT
        if not self.in_place:
            return x + added
        x += added
        return x


class MixingModel(nn.Module):
    """An embedding and two blocks."""

    def __init__(
        self, *, in_place: bool = False, norm: Callable[[int], nn.Module] = nn.Identity
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 4)
        self.blocks = nn.Sequential(*(Mixing(in_place=in_place, norm=norm(4)) for _ in range(2)))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.blocks(self.embed(tokens))
        return out


def scan(model: nn.Module, batch: int = 64) -> Tensor:
    def metric(streams: Tensor) -> Tensor:
        return streams.square().sum((1, 2))

    return patch_streams(model, "blocks.*", CLEAN, CORRUPTED, metric, batch=batch).values


def test_blocks_that_work_in_place_have_the_same_effects() -> None:
    torch.testing.assert_close(scan(MixingModel(in_place=True)), scan(MixingModel()))


def test_blocks_that_mix_the_rows_of_a_batch_are_refused() -> None:
    model = MixingModel(norm=nn.BatchNorm1d)
    with pytest.raises(ValueError, match=r"mix the rows of a batch.*use eval\(\)"):
        scan(model)
    torch.testing.assert_close(scan(model.eval()), scan(model.eval(), batch=1))


@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_hugging_face_models_with_caches_are_patched(family: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the peer, a development dependency")
    sizes = {
        "GPT2": {"n_embd": 12, "n_layer": 2, "n_head": 3, "vocab_size": 31, "n_positions": 16},
        "Llama": {
            "hidden_size": 12,
            "intermediate_size": 20,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "vocab_size": 31,
        },
    }
    torch.manual_seed(0)
    model_class = {"GPT2": transformers.GPT2Model, "Llama": transformers.LlamaModel}[family]
    config = model_class.config_class(**sizes[family], use_cache=True)
    model = model_class(config).double().eval()
    blocks = "h.*" if family == "GPT2" else "layers.*"
    scan = patch_streams(model, blocks, CLEAN, CORRUPTED, lambda x: x[:, -1].square().sum(-1))
    # Equal tokens recover nothing in block 0; the last position of the last block recovers much.
    assert scan.recovered[0, [0, 1, 3]].abs().max() < 1e-9
    assert scan.recovered.abs().max() > 0.01


def test_metrics_of_another_shape_are_refused() -> None:
    torch.manual_seed(0)
    model = AttentionOnly(vocabulary=12, context=6, d_model=8, layers=2, heads=2)
    with pytest.raises(ValueError, match=r"the metric returned \(\) for 12 streams"):
        patch_streams(model, "blocks.*", CLEAN, CORRUPTED, lambda x: x.sum())
    with pytest.raises(ValueError, match="expected batch >= 1, got 0"):
        patch_streams(model, "blocks.*", CLEAN, CORRUPTED, lambda x: x.sum((1, 2)), batch=0)
    with pytest.raises(
        ValueError, match=r"the metric returned \(1, 6\); it must return one number"
    ):
        attribution_patching(model, ["blocks.0"], CLEAN, CORRUPTED, lambda out: out.sum(-1))
    with pytest.raises(ValueError, match="prompts of the same number and length"):
        attribution_patching(model, ["blocks.0"], CLEAN, CORRUPTED[:, :4], lambda out: out.sum())
    with pytest.raises(ValueError, match="prompts of the same number and length"):
        path_patching(model, "blocks.0", ["blocks.1:input"], CLEAN, CORRUPTED[:, :4])


def test_patching_refuses_dropout_in_front_of_the_blocks() -> None:
    model = MixingModel()
    model.embed = nn.Sequential(model.embed, nn.Dropout(0.5))
    with pytest.raises(ValueError, match=r"'blocks.0:input' differs.*dropout.*use eval\(\)"):
        scan(model)
    assert torch.equal(scan(model.eval()), scan(model.eval()))


def test_attribution_patching_refuses_dropout_behind_its_sites() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 4), nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"'output 0' differs.*dropout.*use eval\(\)"):
        attribution_patching(model, ["1"], CLEAN, CORRUPTED, lambda out: out.sum())
    model.eval()
    effects = attribution_patching(model, ["1"], CLEAN, CORRUPTED, lambda out: out.sum())["1"]
    # The model is linear behind the site, so that the estimate is exact.
    gap = model(CLEAN).sum(-1) - model(CORRUPTED).sum(-1)
    torch.testing.assert_close(effects, gap)


def test_modules_that_are_called_several_times_are_refused_as_sites() -> None:
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Embedding(12, 4), shared, nn.Tanh(), shared, nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"expected 1 calls of the module at '1', got 2"):
        attribution_patching(model, ["1"], CLEAN, CORRUPTED, lambda out: out.sum())
    with pytest.raises(ValueError, match=r"expected 1 calls of the module at '1', got 2"):
        path_patching(model, "1", ["4:input"], CLEAN, CORRUPTED)


def test_path_patching_refuses_dropout_behind_its_sender() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 4), nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"'output 0' differs.*dropout.*use eval\(\)"):
        path_patching(model, "0", ["1:input"], CLEAN, CORRUPTED)
    model.eval()
    torch.testing.assert_close(
        path_patching(model, "0", ["1:input"], CLEAN, CORRUPTED), model(CLEAN)
    )
