from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from interp import AttentionOnly, patch, record, record_patterns
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Pair = namedtuple("Pair", "mask hidden")


@dataclass(frozen=True, slots=True)
class Output:
    """An output of a model, as custom models define it."""

    loss: Tensor | None
    hidden: Tensor


class Returns(nn.Module):
    """A module that returns its input in a container."""

    def __init__(self, pack: object) -> None:
        super().__init__()
        self.pack = pack

    def forward(self, x: Tensor | None = None, *, hidden: Tensor | None = None) -> object:
        return self.pack(x if hidden is None else hidden)  # type: ignore[operator]


def count_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.fixture
def model() -> AttentionOnly:
    torch.manual_seed(0)
    return AttentionOnly(vocabulary=7, context=6, d_model=8, layers=3, heads=2).double()


TOKENS = torch.tensor([[1, 2, 3, 4], [6, 5, 4, 3]])


def test_records_equal_activations_and_stars_match_one_part_of_a_name(
    model: AttentionOnly,
) -> None:
    with record(model, "blocks.*", "blocks.**.pattern", "unembed:input", "unembed") as seen:
        logits = model(TOKENS)
    names = [f"blocks.{i}{part}" for i in range(3) for part in (".attention.pattern", "")]
    assert list(seen) == [*names, "unembed:input", "unembed"]
    assert torch.equal(seen["unembed"], logits)
    assert torch.equal(seen["blocks.2"], seen["unembed:input"])
    assert torch.equal(
        seen["blocks.0"] + model.blocks[1].attention(seen["blocks.0"]), seen["blocks.1"]
    )
    assert not any(tensor.requires_grad for tensor in seen.values())
    assert count_hooks(model) == 0


def test_a_patched_value_takes_effect_downstream_and_only_inside_the_block(
    model: AttentionOnly,
) -> None:
    clean = model(TOKENS)
    with record(model, "blocks.1") as seen:
        model(TOKENS[:1])
    with patch(model, {"blocks.1": seen["blocks.1"]}):
        patched = model(TOKENS)
    torch.testing.assert_close(patched, clean[:1].expand_as(clean))
    with patch(model, {"blocks.*.attention": torch.zeros_like}), record(model, "blocks.2") as after:
        model(TOKENS)
    torch.testing.assert_close(
        after["blocks.2"], model.embed(TOKENS) + model.position(torch.arange(4))
    )
    with patch(model, {"unembed:input": lambda x: 2 * x}):
        assert torch.equal(model(TOKENS), 2 * clean)
    assert torch.equal(model(TOKENS), clean)
    assert count_hooks(model) == 0


def test_gradients_flow_through_records_and_patches(model: AttentionOnly) -> None:
    stream = torch.zeros(2, 4, 8, dtype=torch.float64, requires_grad=True)
    with (
        patch(model, {"blocks.0": lambda x: x + stream}),
        record(model, "blocks.2", detach=False) as seen,
    ):
        model(TOKENS)
    seen["blocks.2"].sum().backward()
    assert stream.grad is not None
    assert stream.grad.abs().min() > 0


@pytest.mark.parametrize(
    "pack",
    [
        lambda x: x,
        lambda x: (x, None),
        lambda x: [None, x],
        lambda x: {"loss": None, "hidden": x},
        lambda x: Pair(None, x),
        lambda x: Output(None, x),
        lambda x: {0: None, 1: x},
        lambda x: defaultdict(int, hidden=x),
    ],
)
def test_first_tensor_of_packed_outputs_is_recorded(pack: object) -> None:
    model, x = Returns(pack), torch.ones(3)
    with patch(model, {"": torch.zeros_like}), record(model, "") as seen:
        out = model(x)
    assert type(out) is type(pack(x))  # type: ignore[operator]
    assert not isinstance(out, defaultdict) or out["absent"] == 0
    assert torch.equal(seen[""], torch.zeros(3))
    with record(model, ":input") as seen, patch(model, {":input": -x}):
        model(hidden=x)
    assert torch.equal(seen[":input"], x)


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, partial(defaultdict, int)])
def test_patches_do_not_change_mappings_of_the_model(kind: Callable[..., Any]) -> None:
    stored = kind(hidden=torch.ones(3))
    model = Returns(lambda x: stored)
    with patch(model, {"": torch.zeros_like}):
        out = model(torch.ones(3))
    assert type(out) is type(stored)
    assert torch.equal(out["hidden"], torch.zeros(3))
    assert torch.equal(stored["hidden"], torch.ones(3))


def test_other_mappings_are_recorded_and_not_patched() -> None:
    model, x = Returns(lambda x: MappingProxyType({"hidden": x})), torch.ones(3)
    with record(model, "") as seen:
        model(x)
    assert torch.equal(seen[""], x)
    with (
        pytest.raises(TypeError, match=r"expected a dict .* got a mappingproxy"),
        patch(model, {"": torch.zeros_like}),
    ):
        model(x)


@pytest.mark.parametrize("inference", [False, True])
def test_hooks_are_removed_after_an_exception(model: AttentionOnly, inference: bool) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        torch.inference_mode(inference),
        record(model, "**"),
        patch(model, {"blocks.0": lambda x: x / (1 // 0)}),
    ):
        model(TOKENS)
    assert count_hooks(model) == 0


class Checkpointed(nn.Module):
    """A module whose backward pass calls it again."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def test_backward_inside_the_block_recomputes_checkpoints_with_the_patch() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    gradients = []
    for model, site in ((inner, "1"), (Checkpointed(inner), "inner.1")):
        with patch(model, {site: lambda old: old.square()}):
            model(x).sum().backward()
        gradients.append([parameter.grad for parameter in inner.parameters()])
        inner.zero_grad()
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain)


@torch.inference_mode()
def test_records_in_inference_mode_are_copies(model: AttentionOnly) -> None:
    with record(model, "blocks.0", detach=False) as seen:
        model(TOKENS)
    expected = seen["blocks.0"].clone()
    with patch(model, {"blocks.0": torch.Tensor.zero_}):
        model(TOKENS)
    assert torch.equal(seen["blocks.0"], expected)


def test_records_do_not_change_if_the_model_works_in_place() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Identity(), nn.ReLU(inplace=True))
    x = -torch.ones(2, 3)
    for context in (torch.no_grad, torch.inference_mode):
        with context(), record(model, "0") as seen:
            model(x)
        assert torch.equal(seen["0"], model[0](x))
    # Tensors of the graph are not copied.
    model[0].requires_grad_(False)
    with (
        pytest.raises(RuntimeError, match=r"tensors of 0 were changed in place.*detach=True"),
        record(model, "0", detach=False),
    ):
        model(x)


@pytest.mark.parametrize("site", ["inner:input", "inner"])
def test_functions_may_change_their_argument_in_place(site: str) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x)

    def ablate(activation: Tensor) -> Tensor:
        activation[:, 0] = 0
        return activation

    model, x = Residual(), torch.ones(2, 3)
    with patch(model, {site: ablate}):
        out = model(x)
    # The residual path reads the tensor that the replaced module received or returned.
    assert torch.equal(out, torch.tensor([[1.0, 2.0, 2.0]]).expand(2, 3))
    assert torch.equal(x, torch.ones(2, 3))


def test_second_name_of_a_shared_module_is_refused() -> None:
    model = nn.Module()
    model.first = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model.second = nn.Sequential(nn.Linear(3, 3), model.first[1])
    for site in ("second.1", "second.*", "second.1:input", "*ond.1"):
        for context in (record(model, site), patch(model, {site: torch.zeros_like})):
            with pytest.raises(ValueError, match=r"'second\.1' is the same .*; pass 'first\.1'"):
                context.__enter__()
    with record(model, "**") as seen:
        model.second(torch.ones(3))
    assert set(seen) == {"second", "second.0", "first.1"}


def test_a_model_that_works_in_place_does_not_change_the_new_values_of_a_patch() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            residual = self.first(x)
            out = self.second(residual)
            out += residual
            return out

    model, x = InPlace(), torch.randn(2, 4)
    new = torch.randn(2, 4)
    before = new.clone()
    for replacement in (new, lambda old: new):
        with torch.no_grad(), patch(model, {"second": replacement}):
            first, second = model(x), model(x)
        assert torch.equal(new, before)
        torch.testing.assert_close(first, new + model.first(x))
        assert torch.equal(first, second)


def test_closed_generators_and_nested_records_leave_no_hooks(model: AttentionOnly) -> None:
    tokens = TOKENS[[0, 1, 0]]

    def layers() -> Iterator[Tensor]:
        with (
            record(model, "blocks.*") as seen,
            patch(model, {"embed": torch.zeros_like}),
            record_patterns(model),
        ):
            model(tokens)
            yield from seen.values()

    generator = layers()
    assert next(generator).shape == (3, 4, 8)
    assert count_hooks(model) > 0
    generator.close()
    assert count_hooks(model) == 0
    expected = model(tokens)
    first, second = record(model, "blocks.0"), record(model, "blocks.*")
    single = first.__enter__()
    both = second.__enter__()
    model(tokens)
    first.__exit__(None, None, None)  # not in the order of entry
    model(tokens[:1])
    second.__exit__(None, None, None)
    assert single["blocks.0"].shape[0] == 3
    assert both["blocks.0"].shape[0] == 1
    assert count_hooks(model) == 0
    assert torch.equal(model(tokens), expected)


class TwoAttentions(nn.Module):
    """Attention to itself and then to another sequence, in one module."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        x = nn.functional.scaled_dot_product_attention(x, x, x)
        return nn.functional.scaled_dot_product_attention(x, other, other)


def test_two_patterns_in_one_call_of_a_module_are_refused() -> None:
    x, other = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    module = TwoAttentions()
    with record_patterns(module), pytest.raises(ValueError, match="got two in one call"):
        module(x, other)
