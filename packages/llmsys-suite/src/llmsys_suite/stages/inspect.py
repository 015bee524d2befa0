"""Analysis of the trained model: its predictions after each layer, and kinds of heads."""

from __future__ import annotations

from dataclasses import asdict

import interp
import torch
from interp.lens import Lens
from torch import Tensor

from llmsys_suite.model import Decoder
from llmsys_suite.ranks.rank import Run
from llmsys_suite.results import Inspect, Rows

KINDS = ("previous", "duplicate", "induction", "first")


@torch.no_grad()
def run(run: Run) -> Inspect | None:
    """Analyze the trained model in float32; return None on ranks without the model or a folder."""
    if run.trained is None or run.folder is None:
        return None
    with run.in_float32():
        return examine(run)


def examine(run: Run) -> Inspect:
    """Return the logit lens and the best head of each kind; write inspect.html."""
    assert run.folder is not None
    model = run.trained
    assert isinstance(model, Decoder)
    context = min(64, model.config.context)
    batch = run.corpus.build_heldout_batch(rows=4, context=context)
    tokens, targets = (t.to(run.device) for t in batch)
    sites = ["embedding", *(f"blocks.{i}" for i in range(len(model.blocks)))]
    with interp.record(model, *sites) as recorded:
        model(tokens)
    streams = {site: recorded[site] for site in sites}
    lens = interp.logit_lens(streams, model.norm, model.head, targets=targets)
    repeated_tokens = draw_repeated_rows(context, model.config.vocabulary).to(run.device)
    heads = interp.detect_heads(record_attention_patterns(model, repeated_tokens), repeated_tokens)
    patterns = record_attention_patterns(model, tokens)
    interp.view(
        run.folder.path / "inspect.html",
        tokens=tokens,
        patterns=patterns,
        heads=interp.detect_heads(patterns, tokens),
        lens=lens,
        vocabulary=[chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in range(256)],
        title="What the trained model does",
    )
    # A head whose score is noise is marked as found by chance.
    best = [asdict(head) | {"by_chance": head.is_noise} for head in map(heads.best, KINDS)]
    return Inspect(lens=build_lens_rows(lens), heads=best)


def build_lens_rows(lens: Lens) -> Rows:
    """Return a row per layer: mean loss and mean entropy, in nats, of the prediction after it."""
    assert lens.target_log_probability is not None
    return [
        {"after": name, "target_loss": float(-target.mean()), "entropy": float(entropy.mean())}
        for name, target, entropy in zip(
            lens.names, lens.target_log_probability, lens.entropy, strict=True
        )
    ]


def record_attention_patterns(model: Decoder, tokens: Tensor) -> list[Tensor]:
    """Return the attention pattern of each layer, of shape (batch, heads, seq, seq)."""
    with interp.record_patterns(model) as patterns:
        model(tokens)
    return [patterns[f"blocks.{i}.attention"] for i in range(len(model.blocks))]


def draw_repeated_rows(context: int, vocabulary: int) -> Tensor:
    """Return four rows of context // 2 different random tokens, each followed by its copy.

    Only a model that copies from the context can predict the second half.
    """
    generator = torch.Generator().manual_seed(0)
    half = torch.stack([torch.randperm(vocabulary, generator=generator) for _ in range(4)])
    return half[:, : context // 2].repeat(1, 2)
