"""Text generation with a trained model, one token at a time."""

from __future__ import annotations

import math

import torch

from llmsys_suite.config import UsageError
from llmsys_suite.folder import RunFolder
from llmsys_suite.model import Decoder, ModelConfig
from llmsys_suite.text.tokens import ByteCodec, TokenizerCodec

MODEL = "model.safetensors"


def load_model(folder: RunFolder) -> Decoder:
    """Return the decoder that the stage `learn` trained; raise UsageError without its file."""
    from safetensors.torch import load_file

    if not (folder.path / MODEL).exists():
        raise UsageError(f"expected {folder.path} to have {MODEL}; run the stage learn")
    config = folder.config
    model = Decoder(
        ModelConfig.from_size(config.size, vocabulary=config.vocabulary, context=config.context)
    )
    model.load_state_dict(load_file(folder.path / MODEL))
    return model


def generate_text(
    model: Decoder,
    prompt: str,
    max_bytes: int,
    *,
    temperature: float = 0.7,
    seed: int = 0,
    codec: ByteCodec | TokenizerCodec | None = None,
) -> str:
    """Return the text of `max_bytes` tokens that the model generates after `prompt`.

    A token is one byte unless `codec` defines other tokens. Raises UsageError for an invalid
    argument.
    """
    if max_bytes < 1:
        raise UsageError(f"expected --max-bytes >= 1, got {max_bytes}")
    if not 0 < temperature < math.inf:
        raise UsageError(
            f"expected a temperature above 0 and below infinity, got {temperature:g}; 1 draws from "
            "the predicted distribution, and 100 draws almost uniformly"
        )
    if not -(2**63) <= seed < 2**64:
        raise UsageError(f"expected a seed from -2**63 to 2**64 - 1, got {seed}")
    codec = codec or ByteCodec()
    tokens = codec.encode(prompt)
    if not tokens:
        raise UsageError(f"expected a prompt of at least one token, got {prompt!r}")
    return codec.decode(generate(model, tokens, max_bytes, temperature, seed))


@torch.no_grad()
def generate(
    model: Decoder, prompt: list[int], max_bytes: int, temperature: float = 0.7, seed: int = 0
) -> list[int]:
    """Return `max_bytes` tokens after `prompt`, each drawn from softmax(logits / temperature)."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(max_bytes):
        window = torch.tensor([tokens[-model.config.context :]], device=device)
        logits = model(window)[0, -1].double().cpu()
        # The largest logit becomes 0, so that division by a small temperature cannot yield NaN.
        probabilities = ((logits - logits.amax()) / temperature).softmax(-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return tokens[len(prompt) :]
