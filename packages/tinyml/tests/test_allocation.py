"""The allocation of bits and sparsity is optimal and fits the budget."""

import itertools
import math

import pytest
import torch
from tinyml import (
    allocate,
    kmeans_quantize,
    prune,
    quantize,
    round_weight,
    sensitivity,
    size_of,
)
from tinyml.pruning.sensitivity import Sensitivity
from torch import nn

BITS, SHARES = (2, 4, 8), (0.5, 0.9)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 24), nn.ReLU(), nn.Linear(24, 5)
    )


def scans(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    names = ("0", "3", "5")

    def loss(amounts):
        return {n: {a: -float(torch.rand((), generator=generator)) for a in amounts} for n in names}

    return Sensitivity(0.0, loss(BITS)), Sensitivity(0.0, loss(SHARES))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("budget", [2200, 3000, 5000, 9000])
def test_no_other_choice_that_fits_loses_less(seed, budget):
    model = network()
    bits, sparsity = scans(model, seed)
    allocation = allocate(model, budget, bits=bits, sparsity=sparsity)
    small = allocation.apply(model)
    assert size_of(small).sparse_bytes == allocation.bytes <= budget
    options = [("", 0), *(("bits", b) for b in BITS), *(("sparsity", s) for s in SHARES)]
    for choice in itertools.product(options, repeat=3):
        named = dict(zip(("0", "3", "5"), choice, strict=True))
        lost = sum(
            -(bits if kind == "bits" else sparsity).values[name][amount]
            for name, (kind, amount) in named.items()
            if kind
        )
        if lost < allocation.loss - 1e-9:
            bits_by_name = {n: a for n, (kind, a) in named.items() if kind == "bits"}
            two = {n: a for n, (kind, a) in named.items() if kind == "sparsity"}
            other = type(allocation)(bits_by_name, two, 0, 0.0).apply(model)
            # Bytes are rounded up to 1 in 4,096 of the budget for each layer.
            assert size_of(other).sparse_bytes > budget * (1 - 3 / 4096)


def test_a_scan_over_bits_is_what_quantize_does():
    model, inputs = network(), torch.randn(8, 1, 6, 6)
    target = torch.randint(5, (8,))
    metric = nn.functional.cross_entropy
    allocation = sensitivity(model, [(inputs, target)], metric, amounts=BITS, compress=round_weight)
    for bits in BITS:
        small = quantize(model, {"3": bits})
        assert allocation.values["3"][bits] == pytest.approx(
            float(metric(small(inputs), target).detach())
        )
    chosen = allocate(model, 3000, bits=allocation, larger_is_better=False)
    assert size_of(chosen.apply(model)).sparse_bytes <= 3000
    assert not chosen.sparsity


def test_what_cannot_be_is_refused():
    model = network()
    bits, _ = scans(model)
    with pytest.raises(ValueError, match="100 bytes are below"):
        allocate(model, 100, bits=bits)
    with pytest.raises(ValueError, match="a scan over bits"):
        allocate(model, 100)
    with pytest.raises(ValueError, match="'9' that the model lacks"):
        allocate(model, 5000, bits=Sensitivity(0.0, {"9": {4: 0.1}}))
    with pytest.raises(ValueError, match=r"got 4\.5 bits"):
        allocate(model, 5000, bits=Sensitivity(0.0, {"3": {4.5: 0.0}}))
    with pytest.raises(ValueError, match="without nan, got a metric of nan for '3' at 2"):
        allocate(model, 5000, bits=Sensitivity(0.0, {"3": {2: math.nan}}))
    with pytest.raises(ValueError, match=r"2\.5 bits"):
        round_weight(torch.ones(2, 2), 2.5)
    plenty = allocate(model, 10**6, bits=bits)
    assert (plenty.bits, plenty.loss) == ({}, 0.0)


@pytest.mark.parametrize(
    "compress",
    [
        lambda model: prune(model, 0.8).model,
        lambda model: kmeans_quantize(model, 3),
        lambda model: quantize(model, 8, activations="dynamic"),
    ],
    ids=["pruned", "palettes", "int8"],
)
@pytest.mark.parametrize("budget", [2200, 4000, 10**6])
def test_a_compressed_model_fits_the_budget(compress, budget):
    model = compress(network())
    bits, sparsity = scans(model)
    allocation = allocate(model, budget, bits=bits, sparsity=sparsity)
    small = allocation.apply(model)
    assert size_of(small).sparse_bytes == allocation.bytes <= budget
    assert small is not model


def test_sparsities_of_embeddings_are_applied():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8))
    batches = [(torch.arange(20), torch.randn(20, 8))]
    scan = sensitivity(
        model,
        batches,
        lambda outputs, targets: -(outputs - targets).square().mean(),
        amounts=(0.5, 0.9),
        layers=(nn.Embedding,),
    )
    allocation = allocate(model, 1.2e3, sparsity=scan)
    assert size_of(allocation.apply(model)).sparse_bytes == allocation.bytes <= 1200
