"""Models and numbers that all compressing functions refuse.

Refusals of a single function are tested in the file of that function.
"""

import functools
import re

import numpy as np
import pytest
import torch
from tinyml import (
    IntegerModel,
    LoRA,
    Masks,
    SoftPrompt,
    add_lora,
    convert,
    gptq,
    kmeans,
    kmeans_quantize,
    prepare_qat,
    prune,
    prune_channels,
    quantize,
    save,
    save_gguf,
    save_lora,
    sensitivity,
    size_of,
    sort_channels,
)
from tinyml.quantization.fastest_linear import FastestLinear
from torch import nn
from torch.nn.utils import prune as torch_prune

COMPRESS = {
    "prune": lambda model: prune(model, 0.5),
    "kmeans_quantize": lambda model: kmeans_quantize(model, 4),
    "quantize": lambda model: quantize(model, 8),
    "add_lora": lambda model: add_lora(model, rank=2),
}


@pytest.mark.parametrize("name", COMPRESS)
def test_a_model_with_nothing_to_compress_is_refused_by_name(name):
    with pytest.raises(ValueError, match=r"ReLU|Sequential"):
        COMPRESS[name](nn.Sequential(nn.ReLU()))


@pytest.mark.parametrize("activations", ["float", "dynamic"])
def test_a_single_type_of_layers_counts_as_a_list(activations):
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 1))
    listed, single = (
        quantize(model, activations=activations, layers=layers).state_dict()
        for layers in ([nn.Linear], nn.Linear)
    )
    assert str(listed) == str(single)
    assert "1.weight" in single


def build_convnet():
    layers = [nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 8), nn.Linear(8, 16)]
    return nn.Sequential(*layers).eval()


IMAGES = torch.zeros(3, 2, 4, 4)
FINITE_ONLY = {
    "prune": lambda m: prune(m, 0.5),
    "prune channels": lambda m: prune_channels(m, 0.5, IMAGES),
    "sort channels": lambda m: sort_channels(m, IMAGES),
    "sensitivity": lambda m: sensitivity(m, [(IMAGES, IMAGES)], lambda a, b: a.sum()),
    "kmeans_quantize": lambda m: kmeans_quantize(m, 4),
    "quantize": lambda m: quantize(m, 8),
    "dynamic": lambda m: quantize(m, activations="dynamic"),
    "auto": lambda m: quantize(m, activations="auto"),
    "gptq": lambda m: gptq(m, [IMAGES], 4),
    "prepare_qat": lambda m: prepare_qat(m, 4),
    "IntegerModel": lambda m: IntegerModel(m, [IMAGES]),
    "add_lora": lambda m: add_lora(m, 2),
}


@pytest.mark.parametrize(
    "bad",
    [
        float("nan"),
        pytest.param(float("inf"), marks=pytest.mark.exhaustive),
        pytest.param(float("-inf"), marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("name", FINITE_ONLY)
def test_weights_that_are_not_numbers_are_refused_and_the_model_is_left_as_it_was(name, bad):
    model = build_convnet()
    with torch.no_grad():
        model[3].weight[1, 2] = bad
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"(?i)nan|finite"):
        FINITE_ONLY[name](model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    after = model.state_dict()
    assert after.keys() == before.keys()
    for key, tensor in after.items():
        torch.testing.assert_close(tensor, before[key], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float8_e4m3fn) for name in FINITE_ONLY),
        *((name, torch.int8) for name in ("quantize", "IntegerModel")),
        ("quantize", torch.complex64),
        *(
            pytest.param(name, dtype, marks=pytest.mark.exhaustive)
            for name in FINITE_ONLY
            for dtype in (torch.complex64, torch.int8)
        ),
    ],
)
def test_weights_of_unsupported_types_are_refused_by_name(name, dtype):
    model = build_convnet()
    weight = model[3].weight.detach().to(dtype)
    model[3].weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(ValueError, match=r"float16, bfloat16, float32 or float64|not a float type"):
        FINITE_ONLY[name](model)


WRAPPED = {
    "compiled": lambda m: torch.compile(m, backend="eager"),
    "with a compiled layer": lambda m: nn.Sequential(m[0], torch.compile(m[1], backend="eager")),
    "parallel": nn.DataParallel,
}
TAKES_PLAIN_MODELS = {
    "quantize": lambda m, path: quantize(m, activations="dynamic"),
    "prune": lambda m, path: prune(m, 0.5),
    "add_lora": lambda m, path: add_lora(m, 2),
    "save": save,
    "save_gguf": lambda m, path: save_gguf(m, path, "Q8_0"),
    "save_lora": save_lora,
    "convert": lambda m, path: convert(m),
}


@pytest.mark.parametrize("wrap", WRAPPED)
@pytest.mark.parametrize("name", TAKES_PLAIN_MODELS)
def test_compiled_and_parallel_models_are_refused(name, wrap, tmp_path):
    # A compiled layer ran after its replacement, and files had names with a prefix.
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    if name == "save_lora":
        add_lora(model, 2)
    with pytest.raises(ValueError, match=r"before torch.compile and data parallelism, got"):
        TAKES_PLAIN_MODELS[name](WRAPPED[wrap](model), tmp_path / "file")
    assert not (tmp_path / "file").exists()
    if name == "add_lora":
        assert all(parameter.requires_grad for parameter in model.parameters())


SCRIPTED = {
    "scripted": lambda: torch.jit.script(nn.ReLU()),
    "traced": lambda: torch.jit.trace(nn.Linear(32, 32), torch.zeros(1, 32)),
}
REPLACES_WEIGHTS = {
    "prune": lambda m: prune(m, 0.5),
    "kmeans_quantize": lambda m: kmeans_quantize(m, 4),
    "quantize": lambda m: quantize(m, 8),
    "gptq": lambda m: gptq(m, [torch.ones(2, 32)]),
    "prepare_qat": lambda m: prepare_qat(m, 4),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize("kind", SCRIPTED)
@pytest.mark.parametrize("name", REPLACES_WEIGHTS)
def test_torchscript_is_refused_with_the_name_of_the_module(name, kind):
    model = nn.Sequential(nn.Linear(32, 32), nn.Sequential(SCRIPTED[kind]()), nn.Linear(32, 32))
    with pytest.raises(
        ValueError, match=r"got a scripted or traced module at 1\.0; .*script or trace the re"
    ):
        REPLACES_WEIGHTS[name](model)


def test_an_assignment_to_a_compressed_weight_is_refused_instead_of_ignored():
    model = nn.Sequential(nn.Linear(8, 8))
    for small in (quantize(model, 4), kmeans_quantize(model, 2)):
        small[0].parametrizations.weight.original.data.mul_(3)  # a trained palette
        before = small[0].weight.clone()
        with pytest.raises(RuntimeError, match="no assignment to a compressed weight"):
            small[0].weight = torch.zeros(8, 8)
        assert torch.equal(small[0].weight, before)
    rounded = prepare_qat(model, 4)
    rounded[0].weight = torch.ones(8, 8)  # the trained weight
    assert torch.equal(rounded[0].weight, torch.ones(8, 8))


def test_adapters_beside_replaced_layers_are_added_only_if_those_are_protected():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    mixed = quantize(model, activations="dynamic", protect=["1"])
    with pytest.raises(ValueError, match=r"got Int8Linear at 0; quantize with activations='flo"):
        add_lora(mixed, 2)
    assert mixed[1].weight.requires_grad
    assert isinstance(add_lora(mixed, 2, protect=["0"])[1], LoRA)


BY_LAYER = {
    "kmeans_quantize": lambda m, name: kmeans_quantize(m, {name: 4}),
    "quantize": lambda m, name: quantize(m, {name: 4}),
    "prune": lambda m, name: prune(m, {name: 0.5}),
    "prune_channels": lambda m, name: prune_channels(m, {name: 0.5}, torch.zeros(1, 4)),
    "add_lora": lambda m, name: add_lora(m, 2, targets=["0", name]),
    "masks": lambda m, name: Masks({f"{name}.weight": torch.ones(4, 4)}).apply(m),
}


@pytest.mark.parametrize("name", BY_LAYER)
def test_a_layer_that_is_not_there_is_refused(name):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    before = str(model)
    with pytest.raises((ValueError, AttributeError), match="typo"):
        BY_LAYER[name](model, "typo")
    assert str(model) == before


def test_the_second_name_of_a_shared_weight_is_refused_with_the_first():
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    with pytest.raises(ValueError, match=r"names among \['embed'\], got 'head'.*first layer"):
        kmeans_quantize(model, {"head": 4})


def test_masks_of_another_model_change_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = model[0].weight.clone()
    masks = Masks({"0.weight": torch.zeros(4, 4), "1.weight": torch.zeros(5, 4)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for use in (lambda: masks.apply(model), lambda: masks.keep(model, optimizer)):
        with pytest.raises(ValueError, match="apply the masks to the result of prune"):
            use()
    optimizer.step()
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("name", ["prune", "kmeans_quantize", "dynamic", "gptq", "sensitivity"])
def test_a_model_whose_layers_were_replaced_is_refused(name):
    replaced = quantize(build_convnet(), activations="dynamic")
    with pytest.raises(ValueError, match=r"layers were not replaced, got Int8Linear layers; start"):
        FINITE_ONLY[name](replaced)


FORMATS = {
    "palette": (lambda m: kmeans_quantize(m, 2), lambda m: kmeans_quantize(m, 1)),
    "zero": (lambda m: quantize(m, 8), lambda m: quantize(m, 8, symmetric=False)),
    "bits": (lambda m: prepare_qat(m, 4), lambda m: prepare_qat(m, 8)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_state_dict_of_another_format_is_refused(name):
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight.data.copy_(torch.linspace(-127, 127, 16).view(4, 4))
    saved, other = (make(model) for make in FORMATS[name])
    with pytest.raises(RuntimeError):
        other.load_state_dict(saved.state_dict())
    recompressed = FORMATS[name][0](model)
    recompressed.load_state_dict(saved.state_dict())
    assert torch.equal(recompressed[0].weight, saved[0].weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 0}, "expected an int as group_size that divides .*, got 0"),
        ({"group_size": 3}, "expected an int as group_size that divides .*, got 3"),
        ({"group_size": "4"}, "expected an int as group_size that divides .*, got '4'"),
        ({"group_size": 4.0}, "expected an int as group_size that divides .*, got 4.0"),
    ],
)
def test_invalid_group_sizes_are_refused(options, message):
    model = nn.Sequential(nn.Linear(8, 8))
    for compress in (quantize, prepare_qat, lambda m, **o: gptq(m, [torch.ones(2, 8)], **o)):
        with pytest.raises(ValueError, match=message):
            compress(model, **options)


NUMBERS = {
    "sparsity": lambda model, value: prune(model, value),
    "sparsity of a layer": lambda model, value: prune(model, {"0": value}),
    "sparsity of units": lambda model, value: prune_channels(model, value, torch.ones(2, 8)),
    "damping": lambda model, value: gptq(model, [torch.ones(2, 8)], damping=value),
    "alpha": lambda model, value: add_lora(model, 2, alpha=value),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_another_type_are_refused_by_name(name):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    message = rf"expected a number as {name.split()[0]}, got '0\.5' \(str\)"
    with pytest.raises(TypeError, match=message):
        NUMBERS[name](model, "0.5")
    assert NUMBERS[name](model, np.float32(0.5)) is not None


@pytest.mark.parametrize("layers", [nn.Linear(2, 2), [3], "Linear"])
def test_kinds_of_layers_that_are_not_types_are_refused(layers):
    model = nn.Sequential(nn.Linear(8, 8))
    for compress in (quantize, kmeans_quantize, prepare_qat):
        with pytest.raises(TypeError, match=r"expected types of layers, such as nn\.Linear, got "):
            compress(model, 4, layers=layers)


@pytest.mark.parametrize("bits", [0, 17, -3, 2.5, True, np.int64(4)])
def test_bits_out_of_range_are_refused_with_the_value(bits):
    model = nn.Sequential(nn.Linear(4, 4))
    message = rf"expected an int from .*got {re.escape(repr(bits))}$"
    for compress in (kmeans_quantize, quantize):
        with pytest.raises(ValueError, match=message):
            compress(model, bits)


def test_symmetric_grids_of_one_bit_are_refused():
    model, inputs = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    for compress in (quantize, lambda m, bits, **o: gptq(m, [inputs], bits, **o)):
        with pytest.raises(ValueError, match="2 to 8 as bits of a grid with symmetric=True, got 1"):
            compress(model, 1)
        assert len(compress(model, 1, symmetric=False)[0].weight.unique()) > 1


STORED = {
    "grid of 4 bits": lambda model: quantize(model, 4),
    "grid of 3 bits": lambda model: quantize(model, 3),
    "groups": lambda model: quantize(model, 4, group_size=4),
    "int8 products": lambda model: quantize(model, activations="dynamic"),
    "4 bits for speed": lambda model: quantize(model, 4, activations="auto"),
    "palette of 4 bits": lambda model: kmeans_quantize(model, 4),
    "palette of 2 bits": lambda model: kmeans_quantize(model, 2),
    "training": lambda model: prepare_qat(model, 4),
    "adapter": lambda model: add_lora(quantize(model, 4), 2),
}


def build_two_layers(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Sequential(nn.Linear(32, 32)))


@functools.cache
def get_state_of_two_layers(how):
    """Return a state dict that several tests read and none changes."""
    model = build_two_layers(1) if how == "float" else STORED[how](build_two_layers(1))
    return model.state_dict()


@pytest.fixture
def _gains(monkeypatch):
    """No layer is too small for 4 bits to pay."""
    monkeypatch.setattr(FastestLinear, "has_faster_implementation", lambda layer: True)


@pytest.mark.usefixtures("_gains")
@pytest.mark.parametrize("into", STORED)
def test_a_state_dict_of_another_compression_is_refused(into):
    model, inputs = STORED[into](build_two_layers(0)), torch.randn(3, 32)
    for how in ("float", *STORED):
        if how != into:
            with pytest.raises(RuntimeError):
                model.load_state_dict(get_state_of_two_layers(how))
    saved = STORED[into](build_two_layers(1))
    model.load_state_dict(saved.state_dict())
    assert torch.equal(model(inputs), saved(inputs))


def pass_sparse_layer(function):
    """Return `function` on a model with a hidden layer whose weight is sparse, and dense inputs."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    model[0].weight = nn.Parameter(model[0].weight.detach().to_sparse(), requires_grad=False)
    return function(model, torch.randn(3, 8))


def pass_sparse_inputs(function):
    """Return `function` on a dense model and sparse inputs."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    return function(model, torch.randn(3, 8).to_sparse())


WITH_INPUTS = {
    "gptq": lambda model, x: gptq(model, [x]),
    "IntegerModel": lambda model, x: IntegerModel(model, [x]),
    "prune_channels": lambda model, x: prune_channels(model, 0.5, x),
    "sort_channels": sort_channels,
}


@pytest.mark.parametrize(
    ("make", "function"),
    [(pass_sparse_inputs, function) for function in WITH_INPUTS.values()]
    + [(pass_sparse_layer, function) for function in WITH_INPUTS.values()]
    + [(pass_sparse_layer, lambda model, _, function=f: function(model)) for f in COMPRESS.values()]
    + [
        (pass_sparse_layer, lambda model, _: prepare_qat(model)),
        (pass_sparse_layer, lambda model, _: quantize(model, activations="dynamic")),
        (pass_sparse_layer, lambda model, _: add_lora(model, 2, parameters=["0.weight"])),
        (pass_sparse_layer, lambda model, _: LoRA(model[0], 2)),
        (pass_sparse_layer, lambda model, x: sensitivity(model, [(x, x)], lambda *_: 0.0)),
        (pass_sparse_layer, lambda model, _: size_of(model)),
        (pass_sparse_layer, lambda model, _: save(model, "never")),
        (pass_sparse_layer, lambda model, _: save_gguf(model, "never", "Q8_0")),
        (pass_sparse_inputs, lambda _, x: kmeans(x, 4)),
        (pass_sparse_inputs, lambda _, x: SoftPrompt(2, 8)(x[None])),
        (pass_sparse_inputs, lambda model, x: IntegerModel(model, [x.to_dense()])(x)),
    ],
)
def test_sparse_tensors_are_refused_with_the_reason(make, function):
    with pytest.raises(ValueError, match="without sparse tensors, got a tensor of layout"):
        make(function)


@pytest.mark.parametrize("name", ["prune", "kmeans_quantize", "quantize", "prune channels"])
def test_weights_that_a_hook_computes_are_refused(name):
    model = build_convnet()
    torch_prune.l1_unstructured(model[3], "weight", 0.5)
    with pytest.raises(ValueError, match=r"got a computed tensor 'weight' in 3; call .*remove"):
        FINITE_ONLY[name](model)
    torch_prune.remove(model[3], "weight")
    assert FINITE_ONLY[name](model) is not None


@pytest.mark.parametrize("scope", ["group", "global"])
def test_a_fraction_may_be_a_tensor(scope):
    model, half = build_convnet(), torch.tensor(0.5)
    assert torch.equal(prune(model, half).masks["3.weight"], prune(model, 0.5).masks["3.weight"])
    pruned = prune_channels(model, half, IMAGES, scope=scope)
    assert pruned[0].weight.shape == prune_channels(model, 0.5, IMAGES, scope=scope)[0].weight.shape
