"""An exported model computes the same logits in transformers, and its import restores it."""

import json

import pytest
import torch
from llmsys_suite import cli
from llmsys_suite.config import RunConfig, UsageError
from llmsys_suite.hugging_face import export_model, import_model
from llmsys_suite.model import Decoder, ModelConfig
from llmsys_suite.text.generation import MODEL
from run_folders import create_folder
from safetensors.torch import save_file

SHAPE = ModelConfig(d_model=16, d_ff=24, num_layers=2, num_heads=2, vocabulary=50, context=12)


@pytest.fixture
def exported(tmp_path):
    torch.manual_seed(0)
    model = Decoder(SHAPE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    export_model(model, tmp_path / "model")
    return model, tmp_path / "model"


def test_an_exported_model_comes_back_as_it_was(exported):
    model, folder = exported
    tokens = torch.randint(50, (3, 12))
    imported = import_model(folder)
    assert imported.config == SHAPE
    assert torch.equal(imported(tokens), model(tokens))
    # Without these entries, transformers would end a text at token 2.
    config = json.loads((folder / "config.json").read_text())
    assert config["eos_token_id"] is config["bos_token_id"] is None


@pytest.mark.exhaustive
def test_transformers_computes_the_same_logits_and_its_folder_is_imported(exported, tmp_path):
    transformers = pytest.importorskip("transformers")
    model, folder = exported
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokens = torch.randint(50, (3, 12))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-5, atol=1e-5)
    theirs.save_pretrained(tmp_path / "saved")
    assert torch.equal(import_model(tmp_path / "saved")(tokens), model(tokens))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "gpt2"}, "expected model_type 'llama', got 'gpt2'"),
        ({"tie_word_embeddings": True}, "expected tie_word_embeddings False, got True"),
        ({"rms_norm_eps": 1e-6}, "expected rms_norm_eps 1e-05, got 1e-06"),
        ({"num_key_value_heads": 1}, "expected num_key_value_heads 2, got 1"),
        ({"rope_scaling": {"factor": 8.0}}, "expected rope_parameters .*, got .*'factor': 8.0"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            r"expected rope_parameters .*, got .*'partial_rotary_factor': 0\.5",
        ),
        ({"rope_scaling": "linear"}, "cannot be read as a Llama model"),
        ({"rope_parameters": {"rope_theta": 5e5}}, r"expected rope_parameters .*, got .*500000\.0"),
    ],
)
def test_a_model_of_another_architecture_is_refused(exported, change, complaint):
    _, folder = exported
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UsageError, match=complaint):
        import_model(folder)


def test_missing_files_and_other_tensors_are_refused(exported, tmp_path):
    _, folder = exported
    with pytest.raises(UsageError, match="cannot be read"):
        import_model(tmp_path / "nowhere")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text("[]")
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="cannot be read as a Llama model"):
        import_model(tmp_path)
    del config["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(
        UsageError, match=r"cannot be read as a Llama model: 'max_position_embeddings'"
    ):
        import_model(tmp_path)
    save_file({"model.other.weight": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(UsageError, match="expected the tensors of its"):
        import_model(folder)


def test_files_that_do_not_fit_together_are_refused(exported):
    _, folder = exported
    config = json.loads((folder / "config.json").read_text())

    def write(**change):
        (folder / "config.json").write_text(json.dumps(config | change))

    write(intermediate_size=config["intermediate_size"] + 8)
    with pytest.raises(
        UsageError, match=r"expected the tensors of its config\.json: .*size mismatch"
    ):
        import_model(folder)
    heads = config["hidden_size"] + 1
    write(num_attention_heads=heads, num_key_value_heads=heads)
    with pytest.raises(UsageError, match="cannot be read as a Llama model"):
        import_model(folder)
    write()
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-8])
    with pytest.raises(UsageError, match="cannot be read"):
        import_model(folder)


def test_the_command_exports_the_trained_model_to_a_new_folder_only(tmp_path):
    run = create_folder(RunConfig(size="mini", context=16, out=tmp_path / "run"), {})
    trained = Decoder(ModelConfig.from_size("mini", context=16))
    save_file(trained.state_dict(), run.path / MODEL)
    arguments = ["export", str(run.path), str(tmp_path / "model")]
    cli.app(arguments, standalone_mode=False)
    tokens = torch.arange(16)[None]
    assert torch.equal(import_model(tmp_path / "model")(tokens), trained(tokens))
    with pytest.raises(UsageError, match="exists and is not empty; name another folder"):
        cli.app(arguments, standalone_mode=False)
