"""Calibration of GPTQ leaves out the tokens that an attention mask marks as padding."""

from types import SimpleNamespace

import pytest
import torch
from tinyml import gptq
from torch import nn


def build_model_and_batches():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 16))
    return model, list(torch.randn(4, 50, 64))


def build_model_and_padded_batch():
    """Return a model, inputs of two sequences, and the mask of the padding in the second one."""
    model, batches = build_model_and_batches()
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[1, 30:] = 0
    padded = torch.stack(batches[:2])
    padded[mask == 0] = 1e4
    return model, padded, mask


class Masked(nn.Module):
    """A model of tokens that is called with keyword arguments, as those of transformers."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, inputs, *, attention_mask=None):
        return self.layers(inputs)


def test_keyword_batches_are_calibrated_on_without_their_padding():
    model, padded, mask = build_model_and_padded_batch()
    exact = gptq(model, [padded[mask == 1]])
    batch = {"inputs": padded, "attention_mask": mask}
    masked = gptq(Masked(model), [batch])
    assert torch.equal(masked.layers(padded), exact(padded))
    unmasked = gptq(Masked(model), [{"inputs": padded}])
    assert torch.equal(unmasked.layers(padded), gptq(model, [padded])(padded))
    assert not torch.equal(unmasked.layers(padded), masked.layers(padded))


class Flattening(nn.Module):
    """A model whose inner layers receive the tokens of all sequences in one dimension."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, inputs, *, attention_mask=None):
        return self.layers(inputs.flatten(0, 1)).unflatten(0, inputs.shape[:2])


def test_padding_does_not_count_after_sequences_are_joined():
    model, padded, mask = build_model_and_padded_batch()
    exact = gptq(model, [padded[mask == 1]])
    masked = gptq(Flattening(model), [{"inputs": padded, "attention_mask": mask}])
    assert torch.equal(masked.layers(padded), exact(padded))


class SequenceFirst(nn.Module):
    """A model whose layers receive (seq, batch, width), as torch's encoders do by default."""

    batch_first = False

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, inputs, *, attention_mask=None):
        return self.layers(inputs.transpose(0, 1)).transpose(0, 1)


def test_padding_does_not_count_in_layers_with_the_sequence_first():
    model, padded, mask = build_model_and_padded_batch()
    exact = gptq(model, [padded[mask == 1]])
    masked = gptq(SequenceFirst(model), [{"inputs": padded, "attention_mask": mask}])
    torch.testing.assert_close(masked.layers(padded), exact(padded))
    square = {"inputs": padded[:, :2], "attention_mask": torch.tensor([[1, 1], [0, 1]])}
    with pytest.raises(ValueError, match=r"batch_first=False, .* a mask of shape \(2, 2\)"):
        gptq(SequenceFirst(model), [square])
    square["attention_mask"] = torch.ones(2, 2)
    gptq(SequenceFirst(model), [square])
    # The order of tokens that a model with the sequence first has joined is not known.
    joined = nn.Sequential(nn.Identity(), model)
    joined.batch_first = False
    with pytest.raises(ValueError, match=r"inputs of shape \(100, 64\) for a mask"):
        gptq(Flattening(joined), [{"inputs": padded, "attention_mask": mask}])


def test_padding_of_an_encoder_and_a_decoder_is_refused():
    model, batches = build_model_and_batches()
    model = Masked(model)
    model.config = SimpleNamespace(is_encoder_decoder=True)
    mask = torch.ones(1, 50)
    gptq(model, [{"inputs": batches[0][None], "attention_mask": mask}])
    mask[:, 40:] = 0
    with pytest.raises(ValueError, match="without padding for an encoder-decoder model"):
        gptq(model, [{"inputs": batches[0][None], "attention_mask": mask}])


@pytest.mark.parametrize("padding", [float("-inf"), -1e9, 0.0])
def test_additive_masks_are_refused(padding):
    model, inputs = Masked(nn.Linear(16, 8)), torch.randn(2, 6, 16)
    additive = torch.zeros(2, 6)
    additive[:, 4:] = padding
    with pytest.raises(ValueError, match=r"attention_mask to be 1 at tokens.*\(mask == 0\)"):
        gptq(model, [{"inputs": inputs, "attention_mask": additive}])


@pytest.mark.parametrize("shape", [(2, 1, 1, 3), (6,), (2, 1, 6, 6)])
@pytest.mark.parametrize("wrapper", [Masked, Flattening])
def test_masks_of_other_shapes_leave_out_no_token(shape, wrapper):
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(16, 8)), torch.randn(2, 3, 16)
    batch = {"inputs": inputs, "attention_mask": torch.zeros(shape)}
    masked = gptq(wrapper(model), [batch])
    assert torch.equal(masked.layers(inputs), gptq(model, [inputs])(inputs))


def test_padded_batches_of_unequal_sizes_count_as_their_sequences():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": 0}
    config = transformers.LlamaConfig(**sizes, **heads, eos_token_id=1)
    model = transformers.LlamaForCausalLM(config).eval().double()
    sequences = [torch.randint(97, (length,)) for length in (7, 12, 3)]
    exact = gptq(model, [{"input_ids": sequence[None]} for sequence in sequences], 3).state_dict()
    for side, dtype in (("right", torch.long), ("left", torch.bool), ("right", torch.float64)):
        batches = []
        for part in (sequences[:1], sequences[1:]):
            options = {"batch_first": True, "padding_side": side}
            mask = [torch.ones(len(sequence), dtype=dtype) for sequence in part]
            ids, mask = (nn.utils.rnn.pad_sequence(rows, **options) for rows in (part, mask))
            batches.append({"input_ids": ids, "attention_mask": mask})
        padded = gptq(model, batches, 3).state_dict()
        assert all(torch.equal(padded[name], tensor) for name, tensor in exact.items()), side
