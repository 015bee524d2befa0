"""The induction circuit of a trained model, detected and ablated."""

from dataclasses import dataclass

import torch
from interp import AttentionOnly, composition_scores, detect_heads, patch, record
from interp.circuits.vocabulary import copying_scores
from interp.detect import DetectedHead
from interp.patching import drop_heads
from torch import Tensor


@dataclass(frozen=True)
class Circuit:
    """Two heads and the evidence that they form a circuit.

    Accuracies and losses are those on repeats.
    """

    previous: DetectedHead
    induction: DetectedHead
    accuracy: float
    accuracy_without_previous: float
    loss: float
    loss_without_previous: float
    loss_without_induction: float
    #: The sum of the eigenvalues of the induction head's W_U W_OV W_E, divided by the sum of their
    #: absolute values.
    copying: float
    #: The fraction of tokens whose score, through the keys that the previous-token head writes, is
    #: largest for a key after the same token.
    matching: float
    k_composition: float
    #: The largest K-composition score of the induction head with another head of layer 0.
    k_composition_others: float


def compute_accuracy_on_repeats(logits: Tensor, tokens: Tensor, repeated: Tensor) -> float:
    correct = logits[:, :-1].argmax(-1) == tokens[:, 1:]
    return correct[repeated[:, 1:]].float().mean().item()


def compute_loss_on_repeats(logits: Tensor, tokens: Tensor, repeated: Tensor) -> float:
    predicted, correct = logits[:, :-1][repeated[:, 1:]], tokens[:, 1:][repeated[:, 1:]]
    return torch.nn.functional.cross_entropy(predicted, correct).item()


def is_textbook_circuit(circuit: Circuit) -> bool:
    """Return True if the circuit has the properties in Elhage et al. 2021 and in ARENA's exercises.

    The previous-token head is in layer 0 and the induction head in layer 1, and their K-composition
    is the largest. The loss increases without either head. The induction head copies, and it
    attends to keys after its own token.
    """
    return (
        (circuit.previous.layer, circuit.induction.layer) == (0, 1)
        and circuit.accuracy_without_previous < 0.2
        and circuit.loss_without_previous > circuit.loss + 1
        and circuit.loss_without_induction > circuit.loss + 0.1
        and circuit.copying > 0.8
        and circuit.matching > 0.8
        and circuit.k_composition > 1.5 * circuit.k_composition_others
    )


@torch.no_grad()
def find_circuit(model: AttentionOnly, tokens: Tensor, repeated: Tensor) -> Circuit:
    """Detect the previous-token head on the first copy, where the circuit needs it, and ablate it.

    The induction head is detected on the later copies.
    """
    with record(model, "blocks.*.attention.pattern") as seen:
        accuracy = compute_accuracy_on_repeats(model(tokens), tokens, repeated)
    previous = detect_heads(list(seen.values())[:1], tokens, queries=~repeated).best("previous")
    induction = detect_heads(seen, tokens, queries=repeated).best("induction")
    losses = [compute_loss_on_repeats(model(tokens), tokens, repeated)]
    for head in (previous, induction):
        dropped = drop_heads(head.head, heads=model.layers[0].attention.heads)
        with patch(model, {f"blocks.{head.layer}.attention.o:input": dropped}):
            losses.append(compute_loss_on_repeats(model(tokens), tokens, repeated))
            if head is previous:
                ablated = compute_accuracy_on_repeats(model(tokens), tokens, repeated)
    ov, qk = model.ov(), model.qk()
    embed = model.embed.weight
    copying = copying_scores(ov, embed, model.unembed.weight)[induction.layer, induction.head]
    # Every token but BOS, which is not repeated.
    read = qk[induction.layer, induction.head] @ ov[0, previous.head]
    matches = (embed[1:] @ read @ embed[1:].T).dense().argmax(1) == torch.arange(len(embed) - 1)
    scores = composition_scores(ov, qk, kind="k")
    composed = scores[0, :, induction.layer, induction.head].tolist()
    with_previous = composed.pop(previous.head)
    return Circuit(
        previous,
        induction,
        accuracy,
        ablated,
        *losses,
        float(copying),
        float(matches.float().mean()),
        with_previous,
        max(composed),
    )
