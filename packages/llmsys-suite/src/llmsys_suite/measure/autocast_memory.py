"""Bytes that a forward pass saves for the backward pass, with and without autocast."""

from __future__ import annotations

from unittest import mock

import torch
from accounting.memory.live import LiveMemory
from torch._subclasses.fake_tensor import FakeTensorMode

from llmsys_suite.model import Decoder, ModelConfig, plain_attention


def saved_bytes(config: ModelConfig, rows: int, *, autocast: bool) -> int:
    """Return the bytes that a forward pass saves for the backward pass.

    The dtype is float32, or bf16 under autocast. Fake tensors follow the rules of a GPU on any
    machine. Under autocast, activations are smaller, but a bf16 copy of each weight that a product
    has read is saved as well.
    """
    # The initialization is disabled, because it reads values, which fake tensors do not have.
    with (
        FakeTensorMode(),
        torch.device("cuda"),
        mock.patch("torch.nn.init.trunc_normal_", lambda weight, **_: weight),
    ):
        model = Decoder(config, plain_attention)
        tokens = torch.zeros(rows, config.context, dtype=torch.long)
        memory = LiveMemory()
        memory.add([*model.parameters(), *model.buffers(), tokens], "model or batch")
        stored_bytes = memory.live_bytes
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_enabled("cuda", autocast)
        try:
            with memory:
                loss = model.loss(tokens, tokens)
                live_bytes = memory.live_bytes
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.clear_autocast_cache()
        del loss  # frees the graph and its saved tensors
    return live_bytes - stored_bytes
