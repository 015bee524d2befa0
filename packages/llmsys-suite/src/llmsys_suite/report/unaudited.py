"""Figures that no check of the audit compares with an independent source, by stage."""

from __future__ import annotations

ANY_ERROR = "any error"
CLOCK_FACTOR = "a factor below 1.6"
ROUNDING = "errors below the rounding of bf16 or tf32"
WRONG_DTYPE = "a wrong dtype, and errors below its rounding"
#: The figures of each stage, with the errors in them that no check finds.
UNAUDITED: dict[str, dict[str, str]] = {
    "plan": {
        "the memory of all variants together": ANY_ERROR,
        "the text that derives the peak memory": ANY_ERROR,
        "the division of the peak into activations, head and loss": ANY_ERROR,
        "the planned and the measured peak": "both wrong by less than a half",
        "the rate of a product": CLOCK_FACTOR,
    },
    "links": {
        "times": ANY_ERROR,
        "ratios to the peer": ANY_ERROR,
        "calls in place": ANY_ERROR,
        "results of collectives other than all-reduce": ANY_ERROR,
        "wire bytes of other collectives and algorithms, and of arrays below 1 MiB": ANY_ERROR,
        "the number of hosts": ANY_ERROR,
    },
    "attention": {
        "times": "all too long, or all too short by a factor below three",
        "ratios to SDPA": CLOCK_FACTOR,
        "the reason for the choice of a kernel": ANY_ERROR,
    },
    "train": {
        "the number and the order of messages, and variants that differ only in them": ANY_ERROR,
        "the initial weights": "another seed",
        "gradients": "rounding after the second step that saves no bytes",
        "hidden and exposed communication": ANY_ERROR,
        "the boundaries between phases": ANY_ERROR,
        "the time of a variant": "computation between its timed steps",
        "utilization": CLOCK_FACTOR,
        "bytes of shards and of all stored tensors": "less than a fifth",
        "gradients and weights in bf16 or tf32": ROUNDING,
        "the use of tf32 in products": ANY_ERROR,
        "bytes on the wire on a GPU": ANY_ERROR,
        "bytes on the wire of FSDP": "a factor below 1.5 in every step",
        "the peak memory of each variant within a step": ANY_ERROR,
        "the times of DDP and FSDP2 of torch": "too long by a factor below 1.4",
        "the rounds that other programs disturbed": ANY_ERROR,
    },
    "learn": {
        "the losses of single ranks": "errors at steps other than the first, the last and one "
        "random step",
        "the rows of the training text": "training on rows that differ from the recorded digests, "
        "except at a random step",
        "the held-out losses before the last": ANY_ERROR,
        "the losses before the step from which a run was resumed": ANY_ERROR,
        "the name of the variant that trained": ANY_ERROR,
        "the generated text": ANY_ERROR,
        "the part of the text on which a vocabulary was trained": ANY_ERROR,
        "weights in bf16 or tf32": ROUNDING,
        "the use of tf32 in products": ANY_ERROR,
        "the moments of the last checkpoint": ANY_ERROR,
    },
    "parallel": {
        "waiting": ANY_ERROR,
        "the dtype of products": WRONG_DTYPE,
        "the time of an iteration": "less work than reported, or the time of another split",
    },
    "memory": {
        "the peak of inference": ANY_ERROR,
        "the timeline": ANY_ERROR,
        "the largest allocations": ANY_ERROR,
        "the number of rows": ANY_ERROR,
        "the peaks of training": "less than 4 %",
    },
    "scale": {
        "the losses of all runs but one short run": ANY_ERROR,
        "the warnings of the fit": ANY_ERROR,
        "the dtype of products": WRONG_DTYPE,
        "the interval of the extrapolation": ANY_ERROR,
    },
    "inspect": {
        "the lens before the last layer, and entropies": ANY_ERROR,
        "the scores of heads other than previous-token heads, and scores by chance": ANY_ERROR,
        "the page inspect.html": ANY_ERROR,
    },
    "compress": {
        "the times of methods": CLOCK_FACTOR,
        "the values of codebooks": "values that are not the best ones",
        "the integer weights of the method that rounds activations": ANY_ERROR,
    },
}
#: A sentence on the unaudited figures that are not results of a stage.
OF_THE_RUN = (
    "Reported, not audited: facts of the machine, seconds of stages, peaks of processes, and "
    "everything in this report that summary.json does not contain."
)


def unaudited(stage: str) -> str:
    """Return a sentence on the figures of a stage that no check covers, or an empty string."""
    figures = ", ".join(
        name if errors == ANY_ERROR else f"{name} ({errors})"
        for name, errors in UNAUDITED.get(stage, {}).items()
    )
    return f"Reported, not audited: {figures}." if figures else ""
