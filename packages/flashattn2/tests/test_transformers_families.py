"""Every family of transformers has the logits of eager attention, with padding, or is refused."""

import pytest

transformers = pytest.importorskip("transformers", reason="the models are transformers' own")

import decoder_families  # noqa: E402
import torch  # noqa: E402
from flashattn2.integrations.transformers import register  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SAMPLE = """
    bart bert bloom deepseek_v2 falcon gemma2 gpt_oss inkling_text jamba megatron-bert opt qwen3_moe
    recurrent_gemma
"""
# Refused families and the reason.  All other families that can be built must be equal.
READS_MASK = "reads the attention mask itself"
OWN_CLASSES = "takes its attention from a table of its own classes"
MASK_READERS = """
    axk2 big_bird bloom codegen deepseek_v32 doge dots3_note_text glm_moe_dsa gpt_neox_japanese
    hy_v4 megatron-bert mpt mvp rembert roformer trocr xglm
"""
REFUSED = {
    **dict.fromkeys(MASK_READERS.split(), READS_MASK),
    **dict.fromkeys(("falcon", "gpt_neo", "gptj"), OWN_CLASSES),
    **dict.fromkeys(("inkling_text", "inkling2_text"), "does not support position_bias"),
}
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
if VERSION >= (5, 24):
    for rewritten in ("codegen", "gptj"):
        del REFUSED[rewritten]


# Families whose masks never separate packed sequences, and families without checkpoints.
PACKED_IN_ONE_SEQUENCE = """
    afmoe bart bert bert-generation bigbird_pegasus biogpt blenderbot blenderbot-small camembert
    data2vec-text electra ernie gpt_oss marian mbart opt pegasus plbart roberta
    roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl xmod
"""
WITHOUT_CHECKPOINTS = "cpmant ctrl gpt_neox_japanese jetmoe openai-gpt xlm xlnet"
LEFT_PADDED = ("left padding", "generation", "static cache", "beam search", "autocast", "compiled")
REFUSED_SCENARIOS = {
    **{("recurrent_gemma", name): "read the padding before a sequence" for name in LEFT_PADDED},
    ("llama4_text", "packed"): "packed sequences with chunks",
    **{(f, "packed"): "position_ids restart within" for f in PACKED_IN_ONE_SEQUENCE.split()},
    **{
        (f, scenario): "does not support activation checkpointing"
        for f in WITHOUT_CHECKPOINTS.split()
        for scenario in ("checkpoints", "reentrant checkpoints")
    },
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    register()
    transformers.logging.set_verbosity_error()


def check(family, scenarios):
    try:
        outcomes = decoder_families.run_scenarios(family, scenarios)
    except decoder_families.CannotBuildError as error:
        pytest.skip(f"no tiny model of it: {str(error)[:80]}")
    for scenario, outcome in outcomes.items():
        reason = REFUSED_SCENARIOS.get((family, scenario)) or REFUSED.get(family)
        if reason is None:
            assert outcome == "equal" or outcome.startswith("eager fails"), (scenario, outcome)
        else:
            assert reason in outcome, (scenario, outcome)
    if family not in REFUSED:
        assert "equal" in outcomes.values(), outcomes


@pytest.mark.parametrize("family", SAMPLE.split())
def test_a_sample_of_families(family):
    check(family, decoder_families.PADDING)


def test_every_scenario_of_one_family():
    check("cohere2", [name for name in decoder_families.SCENARIOS if name != "compiled"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", decoder_families.FAMILIES)
def test_every_family(family):
    check(family, decoder_families.SCENARIOS)


@pytest.mark.parametrize(
    "name",
    [
        "MegatronBert",
        "MPNet",
        "RoFormer",
        "BigBird",
        "ConvBert",
        "Nystromformer",
        "Longformer",
        "LayoutLM",
        "Bert",
    ],
)
def test_encoders_hide_padding_or_are_refused(name):
    sizes = {
        "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "pad_token_id": 0, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    config_name = f"{name}Config"
    config = getattr(transformers, config_name)(**sizes)
    ids = torch.randint(3, 99, (1, 12))
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    states = []
    for implementation in ("eager", "linear_memory"):
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config, attn_implementation=implementation)
        try:
            states.append(model.eval()(ids, attention_mask=mask)[0][:, :8])
        except ValueError as error:
            assert implementation == "linear_memory"
            reason = f"the model of {name}Config {READS_MASK}"
            if name == "LayoutLM":
                reason = "expected LayoutLMSelfAttention to pass a mask made by flashattn2"
            assert reason in str(error)  # noqa: PT017
            assert name != "Bert"
            return
    torch.testing.assert_close(states[1], states[0], atol=2e-5, rtol=2e-4)
