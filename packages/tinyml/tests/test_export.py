"""A file holds what the model holds, gives it back bit for bit, and appears whole."""

import json
import struct

import pytest
import torch
from tinyml import (
    convert,
    gptq,
    kmeans_quantize,
    load,
    prepare_qat,
    prune,
    quantize,
    save,
    size_of,
)
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        self.body = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 24))
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.norm(x + self.body(x)))


def build_model():
    torch.manual_seed(0)
    return Tied()


TOKENS = torch.arange(40).view(2, 20)
COMPRESSIONS = {
    "plain": lambda m: m,
    "pruned": lambda m: prune(m, 0.8).model,
    "palette": lambda m: kmeans_quantize(m, 3),
    "4 bits": lambda m: quantize(m, 4),
    "asymmetric groups": lambda m: quantize(m, 2, group_size=8, symmetric=False),
    "some layers": lambda m: quantize(m, {"body.0": 4}),
    "int8": lambda m: quantize(m, activations="dynamic"),
    "gptq": lambda m: gptq(m, [TOKENS], 4),
    "trained": lambda m: convert(prepare_qat(m, 4)),
}
# "gptq" and "trained" store their weights as "4 bits" does.
CASES = [
    pytest.param(name, marks=pytest.mark.exhaustive) if name in ("gptq", "trained") else name
    for name in COMPRESSIONS
]


class Views(nn.Module):
    """Buffers that share parts of their memory, and buffers without elements."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        table = torch.randn(4, 8)
        views = {
            "rows": table[1:3], "table": table, "flat": table.view(-1), "transposed": table.t(),
            "first": table[:1], "nothing": torch.empty(0), "none": torch.empty(0, 3),
        }  # fmt: skip
        for name, tensor in views.items():
            self.register_buffer(name, tensor)


class WithState(nn.Module):
    """A linear layer in a module with an extra state."""

    def __init__(self, state):
        super().__init__()
        self.layer, self.state = nn.Linear(32, 32), state

    def forward(self, x):
        return self.layer(x)

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


@pytest.mark.parametrize("state", [7, [3, -2], [[1, 2], [3, 4]], 1.5])
def test_the_extra_state_of_other_modules_is_restored(state, tmp_path):
    saved = quantize(WithState(torch.tensor(state)), 4)
    save(saved, tmp_path / "model")
    back = load(WithState(torch.tensor(0)), tmp_path / "model")
    assert torch.equal(back.state, saved.state)
    assert torch.equal(back.layer.weight, saved.layer.weight)
    assert quantize(WithState({"any": "object"}), 4).state == {"any": "object"}


def test_views_are_stored_separately(tmp_path):
    torch.manual_seed(0)
    source, target = Views(), Views()
    save(source, tmp_path / "model.safetensors")
    loaded = load(target, tmp_path / "model.safetensors")
    for name, tensor in source.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_layers_are_restored_on_the_device_of_the_model(name, tmp_path):
    small = COMPRESSIONS[name](build_model())
    save(small, tmp_path / "model.safetensors")
    loaded = load(build_model().cuda(), tmp_path / "model.safetensors")
    assert all(x.is_cuda for x in (*loaded.parameters(), *loaded.buffers()))
    close = {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(loaded(TOKENS.cuda()).cpu(), small(TOKENS), **close)


@pytest.mark.parametrize("name", CASES)
def test_a_loaded_model_equals_the_saved_one_bit_for_bit(name, tmp_path):
    compressed = COMPRESSIONS[name](build_model())
    path = tmp_path / "model.safetensors"
    save(compressed, path)
    for plain in (Tied(), kmeans_quantize(Tied(), 3)):
        back = load(plain, path)
        with torch.no_grad():
            assert torch.equal(back(TOKENS), compressed(TOKENS))
    assert size_of(back).bytes == size_of(compressed).bytes
    content = path.read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    assert len(content) - header <= size_of(compressed).sparse_bytes
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    json.loads(content[8:header])


@pytest.mark.parametrize("name", CASES)
def test_weights_that_the_model_ties_and_the_file_does_not_are_loaded_separately(name, tmp_path):
    untied = build_model()
    untied.head.weight = nn.Parameter(untied.head.weight.detach().flip(0) * 0.5)
    compressed = COMPRESSIONS[name](untied)
    save(compressed, tmp_path / "model.safetensors")
    back = load(Tied(), tmp_path / "model.safetensors")
    with torch.no_grad():
        assert torch.equal(back(TOKENS), compressed(TOKENS))


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save(build_model(), path)
    before = path.read_bytes()

    def full(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("tinyml.export.safetensors_file.save_file", full)
    with pytest.raises(OSError, match="no space"):
        save(quantize(build_model(), 4), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_symbolic_link_is_followed(tmp_path):
    path, link = tmp_path / "model.safetensors", tmp_path / "latest.safetensors"
    link.symlink_to(path)
    save(build_model(), link)
    assert link.is_symlink()
    assert not path.is_symlink()
    load(build_model(), path)
    circle = tmp_path / "circle.safetensors"
    circle.symlink_to(circle)
    save(build_model(), circle)
    load(build_model(), circle)


def test_the_wrong_model_or_file_says_so(tmp_path):
    path = tmp_path / "model.safetensors"
    save(quantize(build_model(), 4), path)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        load(nn.Linear(2, 2), path)
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"expected a file written by tinyml\.save"):
        load(Tied(), tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"call convert\(model\) first"):
        save(prepare_qat(build_model(), 4), path)


@pytest.mark.parametrize(
    "name",
    [
        "4 bits",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("plain", "pruned", "palette", "int8")
        ),
    ],
)
def test_any_flipped_bit_and_any_lost_byte_is_refused(name, tmp_path):
    torch.manual_seed(0)
    small = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    path = tmp_path / "model.safetensors"
    save(COMPRESSIONS[name](small), path)
    content = path.read_bytes()
    load(small, path)
    for index in range(len(content)):
        damaged = bytearray(content)
        damaged[index] ^= 1 << index % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"the file is damaged|written by tinyml\.save"):
            load(small, path)
    for damaged in (b"", content[:5], content[:200], content[:-1], content + b"0"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"the file is damaged|written by tinyml\.save"):
            load(small, path)


ALONE = {
    "4 bits": lambda m: quantize(m, 4),
    "palette": lambda m: kmeans_quantize(m, 2),
    "int8": lambda m: quantize(m, activations="dynamic"),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_model_of_one_layer_has_a_file_too(name, tmp_path):
    torch.manual_seed(0)
    compressed, inputs = ALONE[name](nn.Linear(16, 16)), torch.randn(3, 16)
    save(compressed, tmp_path / "one")
    assert torch.equal(load(nn.Linear(16, 16), tmp_path / "one")(inputs), compressed(inputs))


@pytest.mark.parametrize("name", ALONE)
def test_a_weight_of_another_shape_is_refused(name, tmp_path):
    small = ALONE[name](nn.Linear(16, 16, bias=False))
    save(small, tmp_path / "one")
    other = nn.Linear(8, 32, bias=False)  # as many weights
    with pytest.raises((ValueError, RuntimeError), match="shape"):
        load(other, tmp_path / "one")
    with pytest.raises(RuntimeError, match=r"size mismatch|with the format"):
        ALONE[name](other).load_state_dict(small.state_dict())


def test_a_transposed_view_is_another_weight(tmp_path):
    def pair():
        first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        second.weight = nn.Parameter(first.weight.detach().t())
        return nn.Sequential(first, second)

    model, inputs = pair(), torch.randn(3, 8)
    save(model, tmp_path / "pair")
    assert torch.equal(load(pair(), tmp_path / "pair")(inputs), model(inputs))


def test_negative_zero_survives_a_sparse_file(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].weight[0, 0] = -0.0
        model[0].weight[1, 1] = 1.0
    save(model, tmp_path / "model.safetensors")
    back = load(nn.Sequential(nn.Linear(64, 64)), tmp_path / "model.safetensors")
    assert torch.equal(back[0].weight.view(torch.int32), model[0].weight.view(torch.int32))
    masked = prune(nn.Sequential(nn.Linear(64, 64)), 0.9).model
    assert not masked[0].weight.signbit()[masked[0].weight == 0].any()


def test_views_of_one_memory_keep_their_own_values(tmp_path):
    """A view of another dtype, and one that conjugates or negates, has other values."""

    def model():
        module = nn.Module()
        c = torch.tensor([1 - 2j, 3 + 4j])
        a = torch.tensor([1.5, -2.0])
        views = {"a": a, "bits": a.view(torch.int32), "c": c, "conjugate": c.conj()}
        for name, view in (views | {"part": c.imag, "negated": c.conj().imag}).items():
            module.register_buffer(name, view)
        module.layer = nn.Linear(2, 2)
        return module

    saved, loaded = model(), nn.Module()
    for name, buffer in saved.named_buffers():
        loaded.register_buffer(name, torch.zeros_like(buffer).resolve_conj().resolve_neg())
    loaded.layer = nn.Linear(2, 2)
    save(saved, tmp_path / "model")
    for name, buffer in load(loaded, tmp_path / "model").named_buffers():
        assert torch.equal(buffer, saved.get_buffer(name)), name


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu])
@pytest.mark.parametrize("sparse", [True, False])
def test_8_bit_floats_are_saved(dtype, sparse, tmp_path):
    def model(codes):
        module = nn.Module()
        module.register_buffer("weight", codes.to(torch.uint8).view(dtype))
        return module

    codes = torch.arange(256) * (torch.arange(256) % (9 if sparse else 1) == 0)
    save(model(codes), tmp_path / "model.safetensors")
    back = load(model(codes * 0), tmp_path / "model.safetensors")
    assert torch.equal(back.weight.view(torch.uint8), codes.to(torch.uint8))
    assert size_of(model(codes)).sparse_bytes == (60 if sparse else 256)


class ExtraState(nn.Linear):
    def get_extra_state(self):
        return {"step": 1}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ExtraState(2, 2), "'_extra_state', which is <class 'dict'>"),
        (nn.Linear(2, 2, device="meta"), "'weight', which is a tensor on the meta device"),
        (nn.Linear(2, 2, dtype=torch.complex128), "types that safetensors stores, got .*128"),
    ],
)
def test_values_that_a_file_cannot_store_are_named(model, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        save(model, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_model_on_the_meta_device_is_refused(tmp_path):
    save(prune(nn.Linear(8, 4), 0.5).model, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=r"got a Linear on the meta device; create the model"):
        load(nn.Linear(8, 4, device="meta"), tmp_path / "m.safetensors")
