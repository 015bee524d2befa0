"""Evaluation of a model: its held-out loss, and text that it generates."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from llmsys_suite.ranks.rank import Run
from llmsys_suite.text.generation import generate
from llmsys_suite.text.tokens import load_codec
from llmsys_suite.variants.initial_weights import build_model_with

HELDOUT_ROWS = 64
#: Numbers of tokens in the prompt and in the generated text.
PROMPT_TOKENS, WRITTEN_TOKENS = 64, 240


@torch.no_grad()
def compute_heldout_loss(run: Run, model: torch.nn.Module) -> float:
    """Return the held-out loss in nats per token, in float32; each rank evaluates some rows."""
    rows = run.corpus.build_heldout_batch(rows=HELDOUT_ROWS, context=run.config.context)
    tokens, targets = (x[run.rank :: run.world].to(run.device) for x in rows)
    with run.in_float32():
        logits = model(tokens).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
    dist.all_reduce(loss)
    return float(loss) / rows[0].numel()


@torch.no_grad()
def sample(run: Run, weights: dict[str, Tensor]) -> dict[str, str]:
    """Return a held-out prompt and the text generated after it; {} on ranks other than 0."""
    if run.rank:
        return {}
    model = build_model_with(run, run.model, weights)
    prompt = run.corpus.heldout[:PROMPT_TOKENS].tolist()
    codec = load_codec(run.config, run.out)
    written = generate(model, prompt, WRITTEN_TOKENS)
    return {"prompt": codec.decode(prompt), "written": codec.decode(written)}
