"""Figures that no check of the audit compares with an independent source, by stage."""

from __future__ import annotations

CLOCK_FACTOR = "a factor below 1.6"
ROUNDING = "errors below the rounding of bf16 or tf32"
#: Unaudited figures of each stage. Parentheses limit an entry to the errors that they name.
UNAUDITED: dict[str, tuple[str, ...]] = {
    "plan": (
        "the memory of the ranks of a host, and of all variants together",
        "the text that derives the peak memory",
        "the division of the peak into activations, head and loss",
        "the planned and the measured peak (both wrong by less than a half)",
        f"the rate of a product ({CLOCK_FACTOR})",
    ),
    "links": (
        "times",
        "ratios to the peer",
        "calls in place",
        "results of collectives other than all-reduce",
        "wire bytes of other collectives and algorithms, and of arrays below 1 MiB",
        "the number of hosts",
        "the shared-memory and hierarchical algorithms (missing rows)",
    ),
    "attention": (
        "times (all too long, or all too short by a factor below three)",
        f"ratios to SDPA ({CLOCK_FACTOR})",
        "the reason for the choice of a kernel",
    ),
    "train": (
        "the number and the order of messages, and variants that differ only in them",
        "the initial weights (another seed)",
        "gradients and moments (rounding after the second step that saves no bytes)",
        "weight changes of parameters whose gradients are rounding errors (any change)",
        "hidden and exposed communication",
        "the boundaries between phases",
        "the time of a variant "
        "(computation between its timed steps, and errors that both clocks of a step have)",
        f"utilization ({CLOCK_FACTOR})",
        "bytes of shards and of all stored tensors (less than a fifth)",
        f"gradients and weights in bf16 or tf32 ({ROUNDING})",
        "the use of tf32 in products",
        "bytes on the wire on a GPU",
        "bytes on the wire of FSDP (too many by a factor below 1.5 in every step)",
        "the peak memory of each variant within a step",
        "the times of variants other than DDP and FSDP2 of torch "
        "(sleep, or work that does not change the result)",
        "the times of DDP and FSDP2 of torch (too long by a factor below 1.4)",
        "the times of DDP and FSDP2 of torch if other programs disturb nearly all rounds "
        "(sleep in this stage only)",
        "the times of DDP and FSDP2 of torch if their ranks wait for a core "
        "(ranks that share one core, or another program that runs during their steps)",
        "the rounds that other programs disturbed",
    ),
    "learn": (
        "the losses of single ranks "
        "(errors at steps other than the first, the last and one random step)",
        "the rows of the training text "
        "(training on rows that differ from the recorded digests, except at a random step)",
        "the held-out losses between the first and the last",
        "the losses before the step from which a run was resumed",
        "the name of the variant that trained",
        "the generated text",
        "the part of the text on which a vocabulary was trained",
        f"weights in bf16 or tf32 ({ROUNDING})",
        "the use of tf32 in products",
        "the moments of the last checkpoint, and moments that change between the audited steps",
        "gradients of the random step in bf16 (a tenth of a tensor below 3 % of the norm of all)",
        "moments of the random step (any error if the loss is near 0)",
    ),
    "parallel": (
        "waiting",
        "the dtype of products (a wrong dtype, and errors below its rounding)",
        "the time of an iteration (other work than reported, or the time of another split)",
    ),
    "memory": (
        "the peak of inference",
        "the timeline",
        "the largest allocations",
        "the peaks of training (less than 4 %)",
    ),
    "scale": (
        "the losses of all runs but one short run",
        "the warnings of the fit",
        "the dtype of products (a wrong dtype, and errors below its rounding)",
        "the interval of the extrapolation",
    ),
    "inspect": (
        "the lens before the last layer, and entropies",
        "the scores of heads other than previous-token heads, and scores by chance",
        "the page inspect.html",
    ),
    "compress": (
        f"the times of methods ({CLOCK_FACTOR})",
        "the values of codebooks (a local optimum of k-means that is not the best one)",
        "the integer weights of the method that rounds activations",
    ),
}
#: A sentence on the unaudited figures that are not results of a stage.
OF_THE_RUN = (
    "Reported, not audited: facts of the machine, seconds of stages, peaks of processes, and this "
    "report, which shows the figures of summary.json."
)


#: A sentence that replaces all others of this file in the report of a run without an audit.
NOT_AUDITED = "not audited: no check has compared the figures of this run; add the stage audit."


def describe_unaudited(stage: str) -> str:
    """Return a sentence on the figures of a stage that no check covers, or an empty string."""
    figures = ", ".join(UNAUDITED.get(stage, ()))
    return f"Reported, not audited: {figures}." if figures else ""
