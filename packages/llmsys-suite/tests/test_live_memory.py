"""Live bytes are counted exactly until they are freed, and checkpointing reduces them."""

from dataclasses import replace

import pytest
import torch
from accounting.memory.live import LiveMemory
from llmsys_suite.model import Decoder, ModelConfig
from llmsys_suite.stages.memory import thin_timeline, trace_inference, trace_training
from torch import nn

CONFIG = ModelConfig(d_model=32, d_ff=64, num_layers=6, num_heads=2, vocabulary=64, context=64)


def test_the_peak_of_a_chain_is_two_of_its_links():
    memory = LiveMemory()
    x = torch.zeros(1000)
    memory.add([x], "input")
    with memory:
        y = x + 1
        for _ in range(5):
            y = y * 2
    assert memory.peak_bytes == 3 * 4000
    assert memory.live_bytes == 2 * 4000
    del y
    assert memory.live_bytes == 4000


def test_views_are_not_counted_again():
    memory = LiveMemory()
    with memory:
        x = torch.zeros(10, 10)
        _ = x.t(), x[0], x.view(-1), x.detach()
    assert memory.peak_bytes == 400


def test_blocks_are_labeled_with_the_module_that_made_them():
    model = nn.Sequential(nn.Linear(4, 1000))
    memory = LiveMemory()
    memory.add(model.parameters(), "parameter")
    with memory, torch.no_grad():
        output = model(torch.zeros(2, 4))
    blocks = [block for block in memory.at_peak if block.operator != "parameter"]
    assert (output.nbytes, "Sequential.Linear") in [(b.nbytes, b.module) for b in blocks]


@pytest.fixture(scope="module")
def plain():
    """Return the live memory of a training step without checkpointing."""
    return trace_training(CONFIG)


def test_nothing_of_a_training_step_stays_behind(plain):
    with torch.device("meta"):
        parameters = sum(p.nbytes for p in Decoder(CONFIG).parameters())
    # Parameters, buffers and the optimizer's state are added one after the other.
    before = plain.timeline[2][1]
    after = plain.timeline[-1][1]
    assert 3 * parameters <= before < 3.1 * parameters
    # The tokens and the last gradients outlive the last operator; nothing of the forward pass does.
    assert after < before + 1.1 * parameters


def test_checkpointing_lowers_the_peak_and_training_exceeds_inference(plain):
    checkpointed = trace_training(replace(CONFIG, checkpoint=True))
    assert trace_inference(CONFIG).peak_bytes < checkpointed.peak_bytes < 0.7 * plain.peak_bytes


def test_a_thinned_timeline_keeps_the_peak(plain):
    assert max(mib for _, mib in thin_timeline(plain.timeline, 20)) * 2**20 == plain.peak_bytes
