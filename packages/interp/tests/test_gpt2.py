import json
from pathlib import Path

import pytest
import torch
from interp import Decoder, load_decoder, patch, record
from safetensors.torch import load_file, save_file

CONFIG = {
    "model_type": "gpt2",
    "vocab_size": 31,
    "n_positions": 9,
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 3,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 30]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a random checkpoint with Hugging Face's names and layouts."""
    torch.manual_seed(0)
    d = CONFIG["n_embd"]
    shapes = {"wte.weight": (31, d), "wpe.weight": (9, d), "ln_f.weight": (d,), "ln_f.bias": (d,)}
    for i in range(2):
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"h.{i}.{norm}.weight": (d,), f"h.{i}.{norm}.bias": (d,)}
        for name, size in (("attn.c_attn", (d, 3 * d)), ("attn.c_proj", (d, d))):
            shapes |= {f"h.{i}.{name}.weight": size, f"h.{i}.{name}.bias": size[1:]}
        for name, size in (("mlp.c_fc", (d, 4 * d)), ("mlp.c_proj", (4 * d, d))):
            shapes |= {f"h.{i}.{name}.weight": size, f"h.{i}.{name}.bias": size[1:]}
        shapes[f"h.{i}.attn.bias"] = (1, 1, 9, 9)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({k: torch.randn(v) * 0.5 for k, v in shapes.items()}, tmp_path / "model.safetensors")
    return tmp_path


def test_logits_equal_hugging_face(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the peer, a development dependency")
    config = transformers.GPT2Config(**{k: v for k, v in CONFIG.items() if k != "model_type"})
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.5)
        theirs.save_pretrained(tmp_path)
        expected = theirs(TOKENS).logits
    ours = load_decoder(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(ours(TOKENS), expected, atol=1e-12, rtol=1e-12)
    # Modules of Hugging Face, which return tuples, are recorded too.
    with (
        torch.no_grad(),
        record(theirs, "transformer.h.*") as seen,
        record(ours, "blocks.*") as same,
    ):
        ours(TOKENS)
        theirs(TOKENS)
    for theirs_stream, our_stream in zip(seen.values(), same.values(), strict=True):
        torch.testing.assert_close(our_stream, theirs_stream, atol=1e-12, rtol=1e-12)
    with torch.no_grad(), patch(theirs, {"": lambda logits: 2 * logits}):
        torch.testing.assert_close(theirs(TOKENS).logits, 2 * expected)


def test_every_tensor_is_loaded_into_its_module(folder: Path) -> None:
    model, state = load_decoder(folder), load_file(folder / "model.safetensors")
    assert model.unembed.weight is model.embed.weight
    assert torch.equal(model.embed.weight, state["wte.weight"])
    q, k, v = state["h.1.attn.c_attn.weight"].T.chunk(3)
    attention = model.blocks[1].attention
    for linear, weight in ((attention.q, q), (attention.k, k), (attention.v, v)):
        assert torch.equal(linear.weight, weight)
        assert linear.weight.is_contiguous()
    assert torch.equal(model.blocks[0].mlp.down.weight, state["h.0.mlp.c_proj.weight"].T)
    assert model.qk().shape == model.ov().shape == (2, 3, 12, 12)
    torch.testing.assert_close(model.qk()[1, 2].dense(), q[8:].T @ k[8:])
    assert load_decoder(folder, dtype=torch.bfloat16)(TOKENS).dtype == torch.bfloat16
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": "h.1.ln_2.bias"}, r"layer 1 has no norm2\.bias, others have"),
        ({"add": "h.2.ln_1.bias"}, r"holds 3 layers, its config\.json says 2"),
        ({"config": {"model_type": "llama"}}, "fit nowhere in the decoder"),
        ({"config": {"n_embd": 16, "n_head": 4}}, "are not 4 heads of 4"),
        ({"config": {"activation_function": "mish"}}, "activation 'mish' is not one of"),
    ],
)
def test_mismatched_checkpoints_are_refused(folder: Path, change: dict, message: str) -> None:
    state = load_file(folder / "model.safetensors")
    state.pop(change.get("drop"), None)
    if "add" in change:
        state[change["add"]] = torch.zeros(12)
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | change.get("config", {})))
    with pytest.raises(ValueError, match=f"(?s){message}"):
        load_decoder(folder)


def test_missing_files_and_long_inputs_are_refused(folder: Path) -> None:
    model = load_decoder(folder)
    assert isinstance(model, Decoder)
    with pytest.raises(ValueError, match=r"at most 9 tokens, .* got 10"):
        model(torch.zeros(1, 10, dtype=torch.long))
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_decoder(folder)
