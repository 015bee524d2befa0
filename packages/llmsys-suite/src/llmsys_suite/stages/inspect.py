"""Analysis of the trained model: predictions after each layer, kinds of heads, attribution."""

from __future__ import annotations

from dataclasses import asdict

import interp
import torch
from interp.detect import HeadScores
from interp.lens import Lens
from interp.patching import drop_heads
from torch import Tensor

from llmsys_suite.model import Decoder
from llmsys_suite.ranks.rank import Run
from llmsys_suite.results import Inspect, Rows

KINDS = ("previous", "duplicate", "induction", "first")


@torch.no_grad()
def run(run: Run) -> Inspect | None:
    """Analyze the trained model in float32 on rank 0; see `examine`."""
    if run.trained is None or run.folder is None:
        return None
    with run.in_float32():
        return examine(run)


def examine(run: Run) -> Inspect:
    """Return logit lens, kinds of heads, attribution and an ablation; write inspect.html."""
    assert run.folder is not None
    model = run.trained
    assert isinstance(model, Decoder)
    context = min(64, model.config.context)
    tokens, targets = (t.to(run.device) for t in run.corpus.heldout_batch(rows=4, context=context))
    blocks = range(len(model.blocks))
    sites = ["embedding", *(f"blocks.{i}" for i in blocks)]
    parts = [f"blocks.{i}.{part}" for i in blocks for part in ("attention", "ffn")]
    with interp.record(model, *sites, *parts) as seen:
        model(tokens)
    lens = interp.logit_lens({s: seen[s] for s in sites}, model.norm, model.head, targets=targets)
    written = {name: seen[name] for name in ("embedding", *parts)}
    credit = interp.attribution(written, model.norm, model.head, targets, final=seen[sites[-1]])
    repeated_tokens = repeated(context, model.config.vocabulary).to(run.device)
    heads = interp.detect_heads(attention_patterns(model, repeated_tokens), repeated_tokens)
    patterns = attention_patterns(model, tokens)
    interp.view(
        run.folder.path / "inspect.html",
        tokens=tokens,
        patterns=patterns,
        heads=interp.detect_heads(patterns, tokens),
        lens=lens,
        attributions=credit,
        vocabulary=[chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in range(256)],
        title="What the trained model does",
    )
    cut = heads.best("previous")
    loss = loss_without(model, cut.layer, cut.head, tokens, targets)
    return Inspect(
        lens=lens_rows(lens),
        heads=head_rows(heads),
        attribution=[
            {"component": name, "mean_logit": float(term.mean())}
            for name, term in credit.named().items()
        ],
        ablation={"layer": cut.layer, "head": cut.head, "loss": loss},
    )


def lens_rows(lens: Lens) -> Rows:
    """Return the loss and the entropy, in nats, of the prediction after each layer."""
    assert lens.target_log_probability is not None
    return [
        {"after": name, "target_loss": float(-target.mean()), "entropy": float(entropy.mean())}
        for name, target, entropy in zip(
            lens.names, lens.target_log_probability, lens.entropy, strict=True
        )
    ]


def head_rows(heads: HeadScores) -> Rows:
    """Return each kind's best head: its score, the score expected by chance, and if it is noise."""
    best = map(heads.best, KINDS)
    return [asdict(head) | {"by_chance": head.is_noise} for head in best]


def loss_without(model: Decoder, layer: int, head: int, tokens: Tensor, targets: Tensor) -> float:
    """Return the loss with the output of one head set to zero."""
    cut = drop_heads(head, heads=model.config.num_heads)
    with interp.patch(model, {f"blocks.{layer}.attention.out:input": cut}):
        return float(model.loss(tokens, targets))


def attention_patterns(model: Decoder, tokens: Tensor) -> list[Tensor]:
    """Return the attention pattern of each layer, of shape (batch, heads, seq, seq)."""
    with interp.record_patterns(model) as patterns:
        model(tokens)
    return [patterns[f"blocks.{i}.attention"] for i in range(len(model.blocks))]


def repeated(context: int, vocabulary: int) -> Tensor:
    """Return four rows of random tokens, each followed by a copy of itself.

    Only a head that copies from the context can predict the second half.
    """
    generator = torch.Generator().manual_seed(0)
    half = torch.stack([torch.randperm(vocabulary, generator=generator) for _ in range(4)])
    return half[:, : context // 2].repeat(1, 2)
