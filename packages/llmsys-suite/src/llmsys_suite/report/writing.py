"""What a trained model writes: one byte after another, drawn from its own probabilities."""

from __future__ import annotations

import math

import torch

from llmsys_suite.config import UsageError
from llmsys_suite.folder import RunFolder
from llmsys_suite.model import Decoder, ModelConfig

MODEL = "model.safetensors"


def model_of(folder: RunFolder) -> Decoder:
    """Return the decoder that the stage `learn` trained; raise `UsageError` if there is none."""
    from safetensors.torch import load_file

    if not (folder.path / MODEL).exists():
        raise UsageError(f"{folder.path} holds no trained model; run the stage learn")
    config = folder.config
    model = Decoder(ModelConfig.named(config.size, context=config.context))
    model.load_state_dict(load_file(folder.path / MODEL))
    return model


def written_after(
    model: Decoder, prompt: str, letters: int, *, warmth: float = 0.7, seed: int = 0
) -> str:
    """So many bytes more, as text; UsageError for an empty prompt or a warmth that is none."""
    if not (letters > 0 and 0 < warmth < math.inf):
        raise UsageError(f"letters {letters} and warmth {warmth:g} must be positive")
    if not prompt:
        raise UsageError("an empty prompt gives the model nothing to begin from")
    return text(write(model, list(prompt.encode(errors="surrogateescape")), letters, warmth, seed))


@torch.no_grad()
def write(
    model: Decoder, prompt: list[int], letters: int, warmth: float = 0.7, seed: int = 0
) -> list[int]:
    """Draw one token after another."""
    device = next(model.parameters()).device
    generator, written = torch.Generator().manual_seed(seed), list(prompt)
    for _ in range(letters):
        seen = torch.tensor([written[-model.config.context :]], device=device)
        chances = (model(seen)[0, -1].float().cpu() / warmth).softmax(-1)
        written.append(int(torch.multinomial(chances, 1, generator=generator)))
    return written[len(prompt) :]


def text(tokens: list[int]) -> str:
    """Return bytes as text, with a middle dot for each byte that is not printable."""
    return "".join(chr(t) if t == 10 or 32 <= t < 127 else "·" for t in tokens)
