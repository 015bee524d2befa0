"""Files that other programs read: GPTQ and AWQ folders, and GGUF files."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tinyml import (
    add_lora,
    gptq,
    kmeans_quantize,
    prune_channels,
    quantize,
    save_awq,
    save_gguf,
    save_gptq,
)
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
TOKENS = torch.arange(40).view(2, 20)
WEIGHTS = {"layers": [nn.Linear], "protect": ["lm_head"]}


def build_llama(**sizes):
    torch.manual_seed(0)
    default = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    config = transformers.LlamaConfig(**default | sizes)
    return transformers.LlamaForCausalLM(config).eval().half()


def unpack_words(words, bits, order=None):
    """Return the unsigned fields of int32 words, the lowest bits first, one loop per bit field."""
    fields = 32 // bits
    values = np.zeros((*words.shape, fields), np.int64)
    unsigned = words.numpy().astype(np.int64) & 0xFFFFFFFF
    for number in range(fields):
        position = number if order is None else order[number]
        values[..., position] = (unsigned >> (bits * number)) & (2**bits - 1)
    return values.reshape(*words.shape[:-1], -1)


def read_gptq(tensors, name, bits):
    """Return a weight (out, in) as the specification of the format computes it."""
    scales = tensors[f"{name}.scales"].double().numpy()
    zeros = unpack_words(tensors[f"{name}.qzeros"], bits) + 1
    codes = unpack_words(tensors[f"{name}.qweight"].t(), bits)  # (out, in)
    groups = tensors[f"{name}.g_idx"].numpy()
    weight = np.zeros(codes.shape)
    for i in range(codes.shape[1]):
        weight[:, i] = scales[groups[i]] * (codes[:, i] - zeros[groups[i]])
    return torch.from_numpy(weight)


def read_awq(tensors, name, group_size):
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    scales = tensors[f"{name}.scales"].double().numpy()
    zeros = unpack_words(tensors[f"{name}.qzeros"], 4, order)
    codes = unpack_words(tensors[f"{name}.qweight"], 4, order)  # (in, out)
    weight = np.zeros(codes.shape)
    for i in range(len(codes)):
        weight[i] = scales[i // group_size] * (codes[i] - zeros[i // group_size])
    return torch.from_numpy(weight).t()


def check(model, folder, read):
    """Compare every tensor of a folder with the model's; return the configuration."""
    tensors = load_file(folder / "model.safetensors")
    assert len([name for name in tensors if name.endswith(".qweight")]) == 14  # 7 per block
    for name, layer in model.named_modules():
        if f"{name}.qweight" in tensors:
            assert torch.equal(read(tensors, name).half(), layer.weight.detach()), name
        elif isinstance(layer, nn.Linear):
            assert torch.equal(tensors[f"{name}.weight"], layer.weight)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, None)])
def test_gptq_folder_has_the_weights_of_the_model(bits, group_size, tmp_path):
    model = gptq(build_llama(), [TOKENS], bits, group_size=group_size, protect=["lm_head"])
    save_gptq(model, tmp_path)
    config = check(model, tmp_path, lambda tensors, name: read_gptq(tensors, name, bits))
    settings = config["quantization_config"]
    assert (settings["quant_method"], settings["bits"], settings["sym"]) == ("gptq", bits, True)
    assert settings["group_size"] == (group_size or -1)
    assert config["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq_folder_has_the_weights_of_the_model(symmetric, tmp_path):
    model = quantize(build_llama(), 4, group_size=32, symmetric=symmetric, **WEIGHTS)
    save_awq(model, tmp_path)
    config = check(model, tmp_path, lambda tensors, name: read_awq(tensors, name, 32))
    assert config["quantization_config"]["modules_to_not_convert"] == ["lm_head"]
    if not symmetric:
        save_gptq(model, tmp_path)
        check(model, tmp_path, lambda tensors, name: read_gptq(tensors, name, 4))


def test_a_group_may_be_a_whole_row(tmp_path):
    model = quantize(
        build_llama(), 4, group_size=64, protect=["lm_head", "down_proj"], layers=[nn.Linear]
    )
    save_awq(model, tmp_path)  # all other layers have 64 inputs: one scale per output
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert settings["group_size"] == 64


def test_a_tied_head_is_stored_once(tmp_path):
    model = quantize(build_llama(tie_word_embeddings=True), 4, group_size=32, **WEIGHTS)
    save_awq(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert torch.equal(tensors["model.embed_tokens.weight"], model.lm_head.weight)
    assert "lm_head.weight" not in tensors


def test_a_weight_that_the_configuration_does_not_tie_is_stored_for_each_layer(tmp_path):
    model = build_llama()
    model.lm_head.weight = model.model.embed_tokens.weight
    save_awq(quantize(model, 4, group_size=32, **WEIGHTS), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("save", [save_awq, save_gptq])
def test_generation_settings_are_saved_and_other_types_than_float16_refused(save, tmp_path):
    model = quantize(build_llama(), 4, group_size=32, **WEIGHTS)
    model.generation_config.eos_token_id = [1, 5]
    save(model, tmp_path)
    saved = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert saved.eos_token_id == [1, 5]
    for layer in (model.model.norm, model.lm_head):
        for dtype in (torch.float32, torch.bfloat16):
            layer.to(dtype)
            with pytest.raises(ValueError, match=rf"in float16, .* got .*{dtype}"):
                save(model, tmp_path / "other")
        layer.half()
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("compress", "match"),
    [
        (lambda m: quantize(m.float(), 4, group_size=32, **WEIGHTS), r"model.half\(\)"),
        (lambda m: quantize(m, 3, group_size=32, **WEIGHTS), "one number of bits"),
        (lambda m: quantize(m, 4, group_size=32), "Embedding with a GridWeight"),
        (lambda m: kmeans_quantize(m, {"model.layers.0.mlp.up_proj": 4}), "Linear with a Palette"),
        (lambda m: add_lora(quantize(m, 4, **WEIGHTS), targets=["q_proj"]), "with a LoRA"),
        (
            lambda m: torch.compile(quantize(m, 4, group_size=32, **WEIGHTS), backend="eager"),
            "before torch.compile",
        ),
        (lambda m: m, "got none"),
        (lambda m: nn.Sequential(m), "expected a transformers model"),
    ],
)
@pytest.mark.parametrize("save", [save_awq, save_gptq])
def test_what_a_folder_cannot_store_is_refused(save, compress, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        save(compress(build_llama()), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_pruned_model_that_no_configuration_describes_is_refused(tmp_path):
    small = prune_channels(build_llama(), {"model.layers.0.mlp.up_proj": 0.5}, TOKENS)
    small = quantize(small.half(), 4, **WEIGHTS)
    for save in (save_awq, save_gptq):
        with pytest.raises(ValueError, match="all layers alike"):
            save(small, tmp_path)
    assert not list(tmp_path.iterdir())


def test_layers_that_the_gptq_format_implies_are_checked(tmp_path):
    model = quantize(
        build_llama(), 4, group_size=32, layers=[nn.Linear], protect=["lm_head", "q_proj"]
    )
    with pytest.raises(ValueError, match=r"q_proj, which is not quantized"):
        save_gptq(model, tmp_path)
    with pytest.raises(ValueError, match="lm_head, which is quantized"):
        save_gptq(quantize(build_llama(), 4, group_size=32, layers=[nn.Linear]), tmp_path)
    # transformers would leave these layers dense, and fill them with random weights.
    options = {"vocab_size": 90, "hidden_size": 64, "ffn_dim": 64, "num_hidden_layers": 1}
    config = transformers.OPTConfig(**options, num_attention_heads=2, word_embed_proj_dim=32)
    model = transformers.OPTForCausalLM(config).half()
    with pytest.raises(ValueError, match=r"project_\w+, which is quantized"):
        save_gptq(quantize(model, 4, group_size=32, **WEIGHTS), tmp_path)
    small = quantize(
        model,
        4,
        group_size=32,
        layers=[nn.Linear],
        protect=["lm_head", "project_in", "project_out"],
    )
    save_gptq(small, tmp_path / "opt")


def test_layers_that_readers_of_awq_leave_dense_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"lm_head, which they leave dense because of lm_head"):
        save_awq(quantize(build_llama(), 4, group_size=32, layers=[nn.Linear]), tmp_path)
    for bias in (False, True):  # transformers leaves the layer of the last parameter dense
        model = build_llama()
        model.last = nn.Linear(64, 64, bias=bias).half()
        small = quantize(model, 4, group_size=32, **WEIGHTS)
        if bias:
            save_awq(small, tmp_path / "last")
        else:
            with pytest.raises(ValueError, match="got last, which they leave dense"):
                save_awq(small, tmp_path)
    model = build_llama()
    model.model.layers[0].mlp.up = nn.Linear(64, 64).half()
    small = quantize(model, 4, group_size=32, layers=[nn.Linear], protect=["lm_head", "mlp.up"])
    with pytest.raises(
        ValueError, match=r"mlp.up_proj, which they leave dense because of .*mlp.up"
    ):
        save_awq(small, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["last"]
    with pytest.raises(ValueError, match="pass group_size=128"):
        save_awq(quantize(build_llama(), 4, **WEIGHTS), tmp_path)


def read_gguf(path):
    """Return the keys and the raw tensors (type, shape, bytes) of a file, by the specification."""
    data = path.read_bytes()
    magic, version, count, keys = struct.unpack_from("<4sIQQ", data)
    assert (magic, version) == (b"GGUF", 3)
    at = 24

    def take(pattern):
        nonlocal at
        values = struct.unpack_from(f"<{pattern}", data, at)
        at += struct.calcsize(f"<{pattern}")
        return values[0] if len(values) == 1 else values

    def text():
        length = take("Q")
        return take(f"{length}s").decode()

    values = {}
    for _ in range(keys):
        name, kind = text(), take("I")
        item, length = take("IQ") if kind == 9 else (kind, 1)
        letter = {4: "I", 5: "i", 6: "f", 7: "?"}.get(item)
        items = [text() if item == 8 else take(letter) for _ in range(length)]
        values[name] = items if kind == 9 else items[0]
    entries = []
    for _ in range(count):
        name, dims = text(), take("I")
        shape = [take("Q") for _ in range(dims)][::-1]
        entries.append((name, shape, take("I"), take("Q")))
    start = -(-at // 32) * 32
    ends = [offset for *_, offset in entries[1:]] + [len(data) - start]
    return values, {
        name: (kind, shape, data[start + offset : start + end])
        for (name, shape, kind, offset), end in zip(entries, ends, strict=True)
    }


def dequantize_blocks(kind, data, count):
    """Return `count` weights of a tensor, block by block with Python numbers."""
    weights = []

    def half(b, at):
        return struct.unpack_from("<e", b, at)[0]

    for b in (data[i : i + kind[1]] for i in range(0, count // kind[0] * kind[1], kind[1])):
        d = half(b, 0)
        if kind == (32, 34):
            weights += [d * code for code in struct.unpack_from("32b", b, 2)]
        elif kind == (32, 18):
            weights += [d * ((b[2 + j] & 15) - 8) for j in range(16)]
            weights += [d * ((b[2 + j] >> 4) - 8) for j in range(16)]
        else:
            m, packed = half(b, 2), b[4:16]
            for j in range(8):  # get_scale_min_k4 of ggml
                if j < 4:
                    scale, least = packed[j] & 63, packed[j + 4] & 63
                else:
                    scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4
                    least = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4
                codes = b[16 + 32 * (j // 2) : 48 + 32 * (j // 2)]
                weights += [d * scale * (c >> 4 if j % 2 else c & 15) - m * least for c in codes]
    return torch.tensor(weights, dtype=torch.float64)


KINDS = {"Q8_0": (8, (32, 34)), "Q4_0": (2, (32, 18)), "Q4_K": (12, (256, 144))}


def build_network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 256), nn.Linear(256, 8))
    with torch.no_grad():
        model[0].weight[0] = 0
        model[0].weight[1].abs_()
        model[0].weight[2] = -model[0].weight[2].abs()
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_file_has_the_weights_that_are_returned(kind, tmp_path):
    model = build_network()
    metadata = {"general.architecture": "test", "test.count": np.int64(-3), "test.on": True}
    metadata["test.f"] = torch.finfo(torch.float32).max
    metadata |= {"tokens": ["a", "é"], "scores": [0.5, -1.0], "types": [1, 3], "on": [True]}
    rounded = save_gguf(
        model,
        tmp_path / "model.gguf",
        kind,
        metadata=metadata,
        names={"0.weight": "first.weight"},
    )
    keys, tensors = read_gguf(tmp_path / "model.gguf")
    assert keys == metadata | {"general.quantization_version": 2}
    number, block = KINDS[kind]
    for name, parameter in rounded.named_parameters():
        type_, shape, data = tensors["first.weight" if name == "0.weight" else name]
        assert shape == list(parameter.shape)
        if parameter.dim() == 2 and shape[1] % block[0] == 0:
            assert type_ == number
            exact = dequantize_blocks(block, data, parameter.numel()).view_as(parameter)
            torch.testing.assert_close(parameter.double(), exact, rtol=1e-6, atol=1e-7)
            dense = model.get_parameter(name)
            # Q4_0 has no code for the negative of a block's extreme.
            step = {"Q8_0": 0.6 / 127, "Q4_0": 1.02 / 8, "Q4_K": 0.6 / 7}[kind]
            largest = dense.abs().amax(1, keepdim=True)
            assert ((parameter - dense).abs() <= step * largest).all()
        else:
            assert type_ == 0
            assert data[: parameter.nbytes] == parameter.detach().numpy().tobytes()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K"])
@pytest.mark.parametrize("size", [1e-8, 1e-7, 1e10])
def test_gguf_refuses_layers_whose_scales_do_not_fit_in_float16(kind, size, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 8))
    model[0].weight.data.copy_(size * torch.randn(8, 256))
    with pytest.raises(ValueError, match=r"weights of '0' whose scales .* protect=\['0'\]"):
        save_gguf(model, tmp_path / "model.gguf", kind)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K"])
def test_gguf_stores_blocks_that_are_tiny_beside_the_layer_and_constant_ones(kind, tmp_path):
    model = nn.Sequential(nn.Linear(256, 8))
    for large in (1.0, -1.0):
        weight = torch.full((8, 256), large)
        weight[0, 32:] = -1e-30
        model[0].weight.data.copy_(weight)
        stored = save_gguf(model, tmp_path / "model.gguf", kind)[0].weight
        torch.testing.assert_close(stored, weight, rtol=0, atol=1 / 30)


def test_gguf_file_has_every_view(tmp_path):
    model = nn.Linear(32, 32)
    table = torch.randn(4, 8)
    views = {"table": table, "flat": table.view(-1), "first": table[:1], "rows": table[1:3]}
    for name, tensor in (views | {"nothing": torch.empty(0)}).items():
        model.register_buffer(name, tensor)
    save_gguf(model, tmp_path / "model.gguf", "Q8_0")
    _, tensors = read_gguf(tmp_path / "model.gguf")
    assert tensors.keys() == {"weight", "bias", *views}
    for name, tensor in views.items():
        kind, shape, data = tensors[name]
        assert (kind, shape) == (0, list(tensor.shape))
        assert data[: tensor.nbytes] == tensor.numpy().tobytes()


@pytest.mark.parametrize(("kind", "bits"), [("Q8_0", 8), ("Q4_0", 4)])
def test_quantized_weights_are_stored_exactly(kind, bits, tmp_path):
    for group_size in (32, 64):
        model = quantize(build_network().half(), bits, group_size=group_size)
        rounded = save_gguf(model, tmp_path / "model.gguf", kind)
        for number in (0, 2, 3):
            assert torch.equal(rounded[number].weight, model[number].weight)
    for wrong, match in (
        (quantize(build_network(), bits, group_size=32), r"model.half\(\)"),
        (quantize(build_network().half(), bits, group_size=16), "multiple of 32 inputs"),
        (quantize(build_network().half(), bits, group_size=32, symmetric=False), "symmetric"),
        (kmeans_quantize(build_network(), 4), "got another format"),
    ):
        with pytest.raises(ValueError, match=match):
            save_gguf(wrong, tmp_path / "wrong.gguf", kind)
    with pytest.raises(ValueError, match="inputs are a multiple of 256 for 'Q4_K', got none"):
        save_gguf(build_network()[2], tmp_path / "wrong.gguf", "Q4_K")
    with pytest.raises(ValueError, match="merge_and_unload"):
        save_gguf(add_lora(build_network()), tmp_path / "wrong.gguf", kind)
    for names, match in (
        ({"typo": "x"}, "'typo'"),
        ({"0.bias": "2.bias"}, "different name .* got '2.bias'"),
        ({"0.bias": "b" * 64}, "at most 63 bytes"),  # llama.cpp cannot read it
    ):
        with pytest.raises(ValueError, match=match):
            save_gguf(build_network(), tmp_path / "wrong.gguf", kind, names=names)
    wrong_values = 2**40, 1e300, [], [1, "a"], [1, -1], {"a": 1}
    for metadata in ({"general.alignment": 64}, *({"n": value} for value in wrong_values)):
        with pytest.raises(ValueError, match=r"alignment|metadata..n.."):
            save_gguf(build_network(), tmp_path / "wrong.gguf", kind, metadata=metadata)
    with pytest.raises(ValueError, match="at most 4 dimensions"):
        save_gguf(nn.Sequential(build_network(), nn.Conv3d(1, 1, 1)), tmp_path / "wrong.gguf", kind)
    with pytest.raises(ValueError, match="expected kind 'Q4_0'"):
        save_gguf(build_network(), tmp_path / "wrong.gguf", "Q5_0")
    assert not (tmp_path / "wrong.gguf").exists()


def test_other_libraries_read_the_same_numbers(tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    model = build_network()
    for kind in KINDS:
        rounded = save_gguf(model, tmp_path / "model.gguf", kind)
        reader = gguf.GGUFReader(tmp_path / "model.gguf")
        assert {tensor.name for tensor in reader.tensors} == set(model.state_dict())
        for tensor in reader.tensors:
            numbers = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
            assert torch.equal(numbers, rounded.get_parameter(tensor.name).detach()), kind
        if kind != "Q4_K":  # the library cannot round to it
            dense = model[0].weight.detach().numpy()
            expected = gguf.quantize(dense, gguf.GGMLQuantizationType[kind])
            stored = next(t.data for t in reader.tensors if t.name == "0.weight")
            assert (expected == stored).all()


GGUF_NAMES = {
    "model.layers": "blk", "model.embed_tokens": "token_embd", "model.norm": "output_norm",
    "lm_head": "output", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_transformers_loads_gguf_files(kind, tmp_path):
    pytest.importorskip("gguf", reason="gguf is not installed")
    torch.manual_seed(0)
    options = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    config = transformers.Qwen2Config(**options)
    model = transformers.Qwen2ForCausalLM(config).eval()
    names = {}
    for name in model.state_dict():
        names[name] = name
        for ours, theirs in GGUF_NAMES.items():
            names[name] = names[name].replace(ours, theirs)
    sizes = {
        "context_length": 128, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "vocab_size": 97,
    }  # fmt: skip
    metadata = {"general.architecture": "qwen2"} | {f"qwen2.{k}": v for k, v in sizes.items()}
    expected = save_gguf(model, tmp_path / "m.gguf", kind, metadata=metadata, names=names)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf")
    weights = loaded.state_dict()
    assert weights.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(weights[name], tensor), name
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, expected(TOKENS).logits)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # transformers and GPTQModel warn of each other's options
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("save", "bits"), [(save_gptq, 4), (save_gptq, 8), (save_awq, 4)])
def test_transformers_loads_gptq_and_awq_folders(save, bits, symmetric, tmp_path):
    for package in ("gptqmodel", "optimum", "accelerate"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    model = quantize(build_llama(), bits, group_size=32, symmetric=symmetric, **WEIGHTS)
    save(model, tmp_path)
    # The default implementations of GPTQModel are compiled at their first use.
    if save is save_gptq:
        settings = transformers.GPTQConfig(bits=bits, backend="gptq_torch")
    else:
        settings = transformers.AwqConfig(bits=4, group_size=32, backend="torch_awq")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=settings
    )
    assert "qlinear" in type(loaded.model.layers[0].mlp.up_proj).__module__
    with torch.no_grad():
        exact, outputs = model.float()(TOKENS).logits, loaded(TOKENS).logits.float()
    assert (outputs - exact).norm() < 2e-3 * exact.norm()  # it computes with 16 bits


def test_autoawq_reads_the_same_numbers(tmp_path):
    import importlib.util

    if (package := importlib.util.find_spec("awq")) is None or package.origin is None:
        pytest.skip("autoawq is not installed")
    # The package itself needs a GPU at import; this file is plain torch.
    path = Path(package.origin).parent / "utils" / "packing_utils.py"
    spec = importlib.util.spec_from_file_location("packing_utils", path)
    packing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(packing)
    model = quantize(build_llama(), 4, group_size=32, symmetric=False, **WEIGHTS)
    save_awq(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, layer in model.named_modules():
        if f"{name}.qweight" in tensors:
            parts = [tensors[f"{name}.{key}"] for key in ("qweight", "qzeros", "scales")]
            assert torch.equal(packing.dequantize_gemm(*parts, 4, 32).t(), layer.weight)
