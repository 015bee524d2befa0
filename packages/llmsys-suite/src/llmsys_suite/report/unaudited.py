"""Figures that no check of the audit compares with an independent source, by stage.

Each entry describes some figures in words and lists their fields in the results of the stage, as
`field` or `field.column`. `tests/reported_figures.py` doubles every figure of a run; the audit must
then fail, or the figure must have an entry here.
"""

from __future__ import annotations

UNAUDITED: dict[str, dict[str, tuple[str, ...]]] = {
    "plan": {
        "the memory of all variants together": ("host_peak_bytes", "all_variants_bytes"),
        "the derivation": (),
        "the division of the peak into activations, head and loss": (),
        "whether the planned and the measured peak are both wrong by less than a half": (),
        "whether the rate of a product is wrong by less than a factor of 1.6": (),
    },
    "links": {
        "times": ("rows.time_us", "rows.p99_us"),
        "ratios to the peer": ("rows.ratio_p50", "rows.ratio_p10", "rows.ratio_p90"),
        "calls in place": (
            "rows.in_place_time_us",
            "rows.in_place_p99_us",
            "rows.in_place_algbw_gbps",
            "rows.in_place_busbw_gbps",
            "rows.in_place_wrong",
        ),
        "sums of collectives other than all-reduce": (),
        "wire bytes of other collectives and algorithms, and below 1 MiB": (),
        "the number of hosts": ("rows.hosts",),
    },
    "attention": {
        "whether all times are too long, or too short by less than a factor of three": (),
        "whether ratios are wrong by less than a factor of 1.6": (),
        "the reason for the choice of a kernel": (),
    },
    "train": {
        "the number and the order of messages": (),
        "whether gradients are rounded after the second step, if no bytes are saved": (),
        "hidden and exposed communication": ("rows.hidden_ms", "rows.exposed_ms"),
        "the boundaries between phases": (),
        "work of a variant outside of its timed steps": (),
        "whether utilization is wrong by less than a factor of 1.6": (),
        "whether bytes of shards or of all stored tensors are wrong by less than a fifth": (),
        "errors below the rounding of bf16 or tf32, and whether products are in tf32": (),
        "bytes on the wire on a GPU": (),
        "the peak memory of each variant within a step": (),
        "whether DDP and FSDP2 of torch are too slow by less than a factor of 1.4": (),
        "which rounds other programs disturbed": (),
    },
    "learn": {
        "losses of single ranks between the first, one random step and the last": (),
        "whether the other steps train on the rows whose digests they record": (),
        "held-out losses before the last": (),
        "losses before the resumed step": (),
        "which of the variants has trained": (),
        "the generated text": (),
        "which part of the text has trained a vocabulary": (),
        "errors below the rounding of bf16 or tf32, and whether products are in tf32": (),
        "the moments of the last checkpoint": (),
    },
    "parallel": {
        "waiting": ("rows.waiting",),
        "the dtype of products, and errors below its rounding": (),
        "the work in a timed iteration, and the split that it belongs to": (),
    },
    "memory": {
        "the peak of inference": ("peaks.inference_peak_mib",),
        "the timeline": ("training_timeline",),
        "the largest allocations": (),
        "mixed precision": ("mixed.saved_for_backward_mib",),
        "the number of rows": ("rows",),
        "whether peaks are wrong by less than 4 %": (),
    },
    "scale": {
        "losses of all runs but one short run": (),
        "warnings of the fit": (),
        "the dtype of products, and errors below its rounding": (),
        "the interval of the extrapolation": ("extrapolated.low", "extrapolated.high"),
    },
    "inspect": {
        "the lens before the last layer, and entropies": ("lens.entropy",),
        "heads of other kinds than previous, and scores by chance": (
            "heads.chance",
            "heads.p_value",
        ),
        "the page inspect.html": (),
    },
    "compress": {
        "whether a method is too slow or too fast by less than a factor of 1.6": (),
        "whether the values of codebooks are the best ones": (),
        "the integer weights of the method that rounds activations": (),
    },
}
#: A sentence on the unaudited figures that are not results of a stage.
OF_THE_RUN = (
    "Reported, not audited: facts of the machine, seconds of stages, peaks of processes, and the "
    "sentences, pictures, column titles and units of this report, which shows the numbers of "
    "summary.json."
)


def unaudited(stage: str) -> str:
    """Return a sentence on the figures of a stage that no check covers, or an empty string."""
    figures = ", ".join(UNAUDITED.get(stage, {}))
    return f"Reported, not audited: {figures}." if figures else ""
