"""What every compressing function refuses, whatever it does: models and numbers it cannot serve.

The refusals of one idea alone stand beside it, in its own test file.
"""

import pytest
import torch
from tinyml import add_lora, kmeans_quantize, prune, quantize
from torch import nn

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


@pytest.mark.parametrize("name", ["kmeans_quantize", "quantize"])
def test_weights_that_are_not_numbers_are_refused_and_the_model_is_left_as_it_was(name):
    model = nn.Sequential(nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight[1, 2] = float("nan")
    before = model[0].weight.clone()
    with pytest.raises(ValueError, match=r"(?i)nan|finite"):
        COMPRESS[name](model)
    torch.testing.assert_close(model[0].weight, before, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("bits", [0, 17, -3])
def test_bits_out_of_range_are_refused_with_the_value(bits):
    model = nn.Sequential(nn.Linear(4, 4))
    for compress in (kmeans_quantize, quantize):
        with pytest.raises(ValueError, match=str(bits)):
            compress(model, bits)
