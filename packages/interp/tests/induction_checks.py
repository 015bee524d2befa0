"""The induction circuit of a trained model, detected and ablated."""

from dataclasses import dataclass

import torch
from interp import AttentionOnly, composition_scores, detect_heads, patch, record
from interp.detect import DetectedHead
from interp.patching import drop_heads
from torch import Tensor


@dataclass(frozen=True)
class Circuit:
    """Two heads and the evidence that they form a circuit; accuracies are those on repeats."""

    previous: DetectedHead
    induction: DetectedHead
    accuracy: float
    accuracy_without_previous: float
    k_composition: float
    #: The largest K-composition score of the induction head with another head of layer 0.
    k_composition_others: float


def accuracy_on_repeats(logits: Tensor, tokens: Tensor, repeated: Tensor) -> float:
    correct = logits[:, :-1].argmax(-1) == tokens[:, 1:]
    return correct[repeated[:, 1:]].float().mean().item()


@torch.no_grad()
def find_circuit(model: AttentionOnly, tokens: Tensor, repeated: Tensor) -> Circuit:
    """Detect the previous-token head on the first copy, where the circuit needs it, and ablate it.

    The induction head is detected on the later copies.
    """
    with record(model, "blocks.*.attention.pattern") as seen:
        accuracy = accuracy_on_repeats(model(tokens), tokens, repeated)
    previous = detect_heads(list(seen.values())[:1], tokens, queries=~repeated).best("previous")
    induction = detect_heads(seen, tokens, queries=repeated).best("induction")
    dropped = drop_heads(previous.head, heads=model.layers[0].attention.heads)
    with patch(model, {"blocks.0.attention.o:input": dropped}):
        ablated = accuracy_on_repeats(model(tokens), tokens, repeated)
    scores = composition_scores(model.ov(), model.qk(), kind="k")
    composed = scores[0, :, induction.layer, induction.head].tolist()
    with_previous = composed.pop(previous.head)
    return Circuit(previous, induction, accuracy, ablated, with_previous, max(composed))
