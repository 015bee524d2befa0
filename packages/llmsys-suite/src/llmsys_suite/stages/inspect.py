"""The trained model inside: predictions after each layer, kinds of heads, and attribution."""

from __future__ import annotations

import interp
import torch
from interp.circuits import induction as circuits
from interp.patching import drop_heads
from torch import Tensor

from llmsys_suite.model import Decoder, MultiHeadAttention, rotate
from llmsys_suite.ranks.rank import Run
from llmsys_suite.results import Inspect

INDUCTION_STEPS = 500
DRAWN = 24
KINDS = ("previous", "duplicate", "induction", "first")


@torch.no_grad()
def run(run: Run) -> Inspect | None:
    """Return logit lens and attribution on held-out text, and the kinds of heads.

    The training is too short for induction heads, so the last rank trains another model on
    repeated tokens.
    """
    mine = induction() if run.rank == run.world - 1 else {}
    grown = run.gather(mine)[-1]
    if run.trained is None or run.folder is None:
        return None
    with run.in_float32():
        return examine(run, grown)


def induction() -> dict[str, float]:
    """Train an induction circuit, ablate it, and restore its parts alone.

    Return the accuracy on later copies of the whole model, without its previous-token head, without
    any head of the first layer, and with that head alone in the first layer.
    """
    with torch.enable_grad():
        model, losses = circuits.train_induction(circuits.InductionTask(steps=INDUCTION_STEPS))
    task = circuits.InductionTask()
    tokens, copies = circuits.repeated_tokens(
        64,
        task.length,
        task.vocabulary,
        periods=task.periods,
        generator=torch.Generator().manual_seed(1),
    )
    circuit = circuits.confirm_circuit(model, tokens, copies)
    heads = range(task.heads)
    others = [head for head in heads if head != circuit.previous.head]

    def without(cut: list[int]) -> float:
        dropped = drop_heads(*cut, heads=task.heads)
        with interp.patch(model, {"blocks.0.attention.o:input": dropped}):
            right = model(tokens)[:, :-1].argmax(-1) == tokens[:, 1:]
        return float(right[copies[:, 1:]].float().mean())

    return {
        "steps": len(losses),
        "whole": circuit.accuracy,
        "ablated": circuit.accuracy_without_previous,
        "all_cut": without([*heads]),
        "restored": without(others),
    }


def examine(run: Run, induction: dict[str, float]) -> Inspect:
    """Return the heads, lens and attribution of the trained model."""
    assert run.folder is not None
    model = run.trained
    assert isinstance(model, Decoder)
    context = min(64, model.config.context)
    tokens, targets = (t.to(run.device) for t in run.corpus.heldout_batch(rows=4, context=context))
    sites = ["embedding", *(f"blocks.{i}" for i in range(len(model.blocks)))]
    parts = [
        f"blocks.{i}.{part}" for i in range(len(model.blocks)) for part in ("attention", "ffn")
    ]
    with interp.record(model, *sites, *parts) as seen:
        model(tokens)
    lens = interp.logit_lens({s: seen[s] for s in sites}, model.norm, model.head, targets=targets)
    credit = interp.attribution(
        {"embedding": seen["embedding"], **{part: seen[part] for part in parts}},
        model.norm,
        model.head,
        targets,
        final=seen[sites[-1]],
    )
    repeated_tokens = repeated(context, model.config.vocabulary).to(run.device)
    heads = interp.detect_heads(attention_patterns(model, repeated_tokens), repeated_tokens)
    assert lens.target_log_probability is not None
    page = interp.view(
        run.folder.path / "inspect.html",
        tokens=tokens,
        patterns=attention_patterns(model, tokens),
        heads=interp.detect_heads(attention_patterns(model, tokens), tokens),
        lens=lens,
        attributions=credit,
        vocabulary=[chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in range(256)],
        title="What the trained model does",
    )
    best = {kind: heads.best(kind) for kind in KINDS}
    cut = best["previous"]
    drawn = attention_patterns(model, tokens)
    return Inspect(
        page=page.name,
        # In hundredths: held-out text, its first row's first tokens.
        patterns={
            f"{kind}: {head.layer}.{head.head}": (
                100 * drawn[head.layer][0, head.head, :DRAWN, :DRAWN]
            )
            .int()
            .tolist()
            for kind, head in best.items()
        },
        lens=[
            {
                "after": name,
                "target_loss": float(-lens.target_log_probability[i].mean()),
                "entropy": float(lens.entropy[i].mean()),
            }
            for i, name in enumerate(lens.names)
        ],
        heads=[
            {
                "kind": kind,
                "layer": head.layer,
                "head": head.head,
                "score": head.score,
                "chance": head.chance,
                "by_chance": head.is_noise,
            }
            for kind, head in best.items()
        ],
        attribution=[
            {"component": name, "mean_logit": float(term.mean())}
            for name, term in credit.named().items()
        ],
        ablation={
            "layer": cut.layer,
            "head": cut.head,
            "loss": loss_without(model, cut.layer, cut.head, tokens, targets),
        },
        induction=induction,
    )


def loss_without(model: Decoder, layer: int, head: int, tokens: Tensor, targets: Tensor) -> float:
    """Return the loss with the output of one head set to zero."""
    cut = drop_heads(head, heads=model.config.num_heads)
    with interp.patch(model, {f"blocks.{layer}.attention.out:input": cut}):
        return float(model.loss(tokens, targets))


def attention_patterns(model: Decoder, tokens: Tensor) -> list[Tensor]:
    """Return each layer's pattern (batch, heads, seq, seq), from the inputs of queries and keys."""
    inputs = [f"blocks.{i}.attention:input" for i in range(len(model.blocks))]
    with interp.record(model, *inputs) as seen:
        model(tokens)
    rope = model.rope[:, : tokens.shape[1]]
    return [
        _pattern(block.attention, seen[site], rope)
        for site, block in zip(inputs, model.layers(), strict=True)
    ]


def _pattern(attention: MultiHeadAttention, x_BTD: Tensor, rope: Tensor) -> Tensor:
    q, k = (
        rotate(project(x_BTD).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2), rope)
        for project in (attention.q, attention.k)
    )
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
    pattern: Tensor = scores.masked_fill(future, float("-inf")).softmax(-1)
    return pattern


def repeated(context: int, vocabulary: int) -> Tensor:
    """Return random tokens twice: only a head that copies from context predicts the second half."""
    generator = torch.Generator().manual_seed(0)
    half = torch.stack([torch.randperm(vocabulary, generator=generator) for _ in range(4)])
    return half[:, : context // 2].repeat(1, 2)
