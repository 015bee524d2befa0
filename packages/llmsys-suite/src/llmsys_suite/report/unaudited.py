"""Figures that no check of the audit compares with an independent source, by stage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Unaudited:
    """Figures of a stage, and the errors in them that no check finds."""

    figures: str
    errors: str = "any error"


CLOCK_FACTOR = "a factor below 1.6"
ROUNDING = "errors below the rounding of bf16 or tf32"
UNAUDITED: dict[str, tuple[Unaudited, ...]] = {
    "plan": (
        Unaudited("the memory of all variants together"),
        Unaudited("the text that derives the peak memory"),
        Unaudited("the division of the peak into activations, head and loss"),
        Unaudited("the planned and the measured peak", "both wrong by less than a half"),
        Unaudited("the rate of a product", CLOCK_FACTOR),
    ),
    "links": (
        Unaudited("times"),
        Unaudited("ratios to the peer"),
        Unaudited("calls in place"),
        Unaudited("results of collectives other than all-reduce"),
        Unaudited("wire bytes of other collectives and algorithms, and of arrays below 1 MiB"),
        Unaudited("the number of hosts"),
    ),
    "attention": (
        Unaudited("times", "all too long, or all too short by a factor below three"),
        Unaudited("ratios to SDPA", CLOCK_FACTOR),
        Unaudited("the reason for the choice of a kernel"),
    ),
    "train": (
        Unaudited("the number and the order of messages, and variants that differ only in them"),
        Unaudited("the initial weights", "another seed"),
        Unaudited("gradients", "rounding after the second step that saves no bytes"),
        Unaudited("hidden and exposed communication"),
        Unaudited("the boundaries between phases"),
        Unaudited("the time of a variant", "computation between its timed steps"),
        Unaudited("utilization", CLOCK_FACTOR),
        Unaudited("bytes of shards and of all stored tensors", "less than a fifth"),
        Unaudited("gradients and weights in bf16 or tf32", ROUNDING),
        Unaudited("the use of tf32 in products"),
        Unaudited("bytes on the wire on a GPU"),
        Unaudited("bytes on the wire of FSDP", "a factor below 1.5 in every step"),
        Unaudited("the peak memory of each variant within a step"),
        Unaudited("the times of DDP and FSDP2 of torch", "too long by a factor below 1.4"),
        Unaudited(
            "the times of DDP and FSDP2 of torch if other programs disturb nearly all rounds",
            "sleep in this stage only",
        ),
        Unaudited("the rounds that other programs disturbed"),
    ),
    "learn": (
        Unaudited(
            "the losses of single ranks",
            "errors at steps other than the first, the last and one random step",
        ),
        Unaudited(
            "the rows of the training text",
            "training on rows that differ from the recorded digests, except at a random step",
        ),
        Unaudited("the held-out losses before the last"),
        Unaudited("the losses before the step from which a run was resumed"),
        Unaudited("the name of the variant that trained"),
        Unaudited("the generated text"),
        Unaudited("the part of the text on which a vocabulary was trained"),
        Unaudited("weights in bf16 or tf32", ROUNDING),
        Unaudited("the use of tf32 in products"),
        Unaudited("the moments of the last checkpoint"),
    ),
    "parallel": (
        Unaudited("waiting"),
        Unaudited("the dtype of products", "a wrong dtype, and errors below its rounding"),
        Unaudited(
            "the time of an iteration", "less work than reported, or the time of another split"
        ),
    ),
    "memory": (
        Unaudited("the peak of inference"),
        Unaudited("the timeline"),
        Unaudited("the largest allocations"),
        Unaudited("the number of rows"),
        Unaudited("the peaks of training", "less than 4 %"),
    ),
    "scale": (
        Unaudited("the losses of all runs but one short run"),
        Unaudited("the warnings of the fit"),
        Unaudited("the dtype of products", "a wrong dtype, and errors below its rounding"),
        Unaudited("the interval of the extrapolation"),
    ),
    "inspect": (
        Unaudited("the lens before the last layer, and entropies"),
        Unaudited("the scores of heads other than previous-token heads, and scores by chance"),
        Unaudited("the page inspect.html"),
    ),
    "compress": (
        Unaudited("the times of methods", CLOCK_FACTOR),
        Unaudited("the values of codebooks", "values that are not the best ones"),
        Unaudited("the integer weights of the method that rounds activations"),
    ),
}
#: A sentence on the unaudited figures that are not results of a stage.
OF_THE_RUN = (
    "Reported, not audited: facts of the machine, seconds of stages, peaks of processes, and of "
    "this report the sentences, pictures, column titles, units, folded tables, and the table of "
    "planned and measured values."
)


def unaudited(stage: str) -> str:
    """Return a sentence on the figures of a stage that no check covers, or an empty string."""
    entries = UNAUDITED.get(stage, ())
    every = Unaudited.errors
    figures = ", ".join(
        entry.figures if entry.errors == every else f"{entry.figures} ({entry.errors})"
        for entry in entries
    )
    return f"Reported, not audited: {figures}." if figures else ""
