"""Checks of gradients, weights and losses of every variant, and of the tensors that it stores."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

from llmsys_suite.audit.check import Check, Sources
from llmsys_suite.audit.tolerances import (
    GRADIENT,
    LOSS,
    LOSS_SCALE,
    REPLAYED_LOSS,
    WEIGHT_CHANGE,
    loss_tolerance,
    weight_tolerance,
)
from llmsys_suite.audit.training_checks.record import Record
from llmsys_suite.measure.samples import SERVER, SINGLE, ranks_of

#: Allowed deviation of a standard deviation, in standard errors.
STANDARD_ERRORS = 6.0
#: Variants that shard the moments of AdamW over the ranks, and those that shard the parameters.
SHARDED_MOMENTS = ("zero 1", "zero 2", "fsdp", "torch FSDP2")
SHARDED_PARAMETERS = ("fsdp", "torch FSDP2")
#: Variants that store a buffer of all gradients between steps.
BUFFERED = ("ddp overlapped", "ddp bucketed", "ddp shared memory", "zero 1")
#: Allowed difference of a shard from 1/n of the total: rows of small matrices split unevenly.
UNEVEN = 0.2
#: Number of losses from which the audit expects one in bf16 that differs from float32. One loss
#: alone may be equal by chance.
LEAST_STEPS = 10


def check_initial_weights(record: Record) -> Iterator[Check]:
    """Compare the scale of the initial weights with the initialization of Glorot and Bengio."""
    scales = [(away, where) for away, where in record.evidence["initial_scales"]]
    glorot = Sources("standard deviations, in standard errors", "sqrt(2 / (in + out))")
    yield glorot.all_near("scale of the initial weights", scales, STANDARD_ERRORS)


def check_probed_step(record: Record) -> Iterator[Check]:
    """Compare one SGD step of every rank with float64, and ranks bit by bit after two steps."""
    every_rank = Sources("every rank", "float64")
    for row in record.train.rows:
        name = row["variant"]
        probe = record.probes[name]
        ranks = [(away, f"rank {r} {where}") for r, (away, where) in enumerate(probe["weights"])]
        yield every_rank.all_near(f"{name}: weight change of one SGD step", ranks, GRADIENT)
        if name != SINGLE:
            first, *others = probe["digest"]
            differ = [f"rank {rank}" for rank, d in enumerate(others, start=1) if d != first]
            yield Sources("every rank", "rank 0").none(
                f"{name}: weights after two steps, bit by bit", differ
            )


def check_final_weights(record: Record) -> Iterator[Check]:
    """Compare the trained weights of all ranks bit by bit, and with those of one process."""
    tolerance = weight_tolerance(record.config, WEIGHT_CHANGE * math.sqrt(record.num_steps))
    # Sums over the rows of several ranks round differently from a sum over all rows. A distance of
    # 0 therefore fails: the weights were compared with themselves.
    sums_differ = record.config.world > 1 and record.config.parts == 1
    least = sys.float_info.min if sums_differ else 0.0
    for row in record.train.rows:
        name = row["variant"]
        if name == SINGLE:
            continue
        final = record.train.final_weights[name]
        missing = ["ranks are missing"] * (final["ranks"] != record.config.world)
        yield Sources("every rank", "rank 0").none(
            f"{name}: trained weights, bit by bit", final["differ"] + missing
        )
        distances = []
        for weight, factor in record.evidence["rounding_factors"].items():
            not_compared = math.inf, f"{weight}: not compared"
            distance, where = final["from_one_process"].get(weight, not_compared)
            distances.append((distance / factor, where))
        yield Sources("rank 0", "one process").all_near(
            f"{name}: weight change of the training", distances, tolerance, least
        )


def check_stored_tensors(record: Record) -> Iterator[Check]:
    """Compare the bytes that every rank stores after the training with the variant's formula."""
    whole = 4 * record.evidence["model_counts"]["parameters"]
    for row in record.train.rows:
        name = row["variant"]
        ranks = ranks_of(name, record.config.world)
        parameters = whole / (ranks if name in SHARDED_PARAMETERS else 1)
        moments = 2 * whole / (ranks if name in SHARDED_MOMENTS else 1)
        buffers = whole if name in BUFFERED else 0.0
        least = parameters + moments
        if record.config.world > 1:
            least += (1 - UNEVEN) * buffers
        if name == SERVER:
            # The server, on the first rank, stores moments and the last pushes of all workers.
            moments = 0.0
            buffers = 12 * whole
            least = parameters
        # zero pads its flat buffer of parameters to a multiple of the number of ranks.
        padding = 4 * (ranks - 1) / whole if name in SHARDED_MOMENTS else 0.0
        stored = record.train.final_weights[name]["stored"]
        formula = Sources("tensors reachable from the variant", "its formula")
        for kind, expected, sharded in (
            ("parameters", parameters, SHARDED_PARAMETERS),
            ("moments", moments, SHARDED_MOMENTS),
        ):
            yield formula.all_equal(
                f"{name}: stored {kind}",
                [(expected, bytes_[kind], f"rank {rank}") for rank, bytes_ in enumerate(stored)],
                UNEVEN if name in sharded else padding,
            )
        largest, where = max((bytes_["all"], f"rank {rank}") for rank, bytes_ in enumerate(stored))
        yield formula.between(
            f"{name}: all that is stored",
            parameters + moments + buffers,
            largest,
            least,
            (1 + UNEVEN) * (parameters + moments + buffers),
            where,
        )


def check_losses(record: Record) -> Iterator[Check]:
    """Compare losses with one process and the reference, and reported losses with the samples."""
    curves = record.losses
    alone = curves[SINGLE]
    tolerance = loss_tolerance(record.config, LOSS * math.sqrt(len(alone)))
    for name, source, expected in (
        ("losses, trained again", "AdamW written out in float32", record.evidence["trajectory"]),
        ("all losses", "one process", alone),
    ):
        differences = [
            (_relative_difference(ours, theirs), f"{variant} step {step}: {ours:.9g}, {theirs:.9g}")
            for variant, curve in curves.items()
            for step, (ours, theirs) in enumerate(zip(curve, expected, strict=False))
        ]
        yield Sources("samples", source).all_near(name, differences, tolerance)
    if record.config.dtype == "bf16" and len(alone) >= LEAST_STEPS:
        exact = [
            name
            for name, curve in curves.items()
            if max(map(_relative_difference, curve, record.evidence["trajectory"])) <= REPLAYED_LOSS
        ]
        rounded = Sources("samples", "AdamW written out in float32")
        yield rounded.none("rounding of bf16 in the losses", exact)
    reported = [
        (curve[step], value, f"{variant} step {step}")
        for variant, curve in curves.items()
        for step, value in enumerate(record.train.losses[variant])
    ]
    reported += [
        (curves[row["variant"]][-1], row["final_loss"], f"{row['variant']}, final loss")
        for row in record.train.rows
    ]
    yield Sources("summary", "samples").all_equal("reported losses", reported, 1e-9)


def _relative_difference(ours: float, theirs: float) -> float:
    """Return the difference of two losses, relative as in `Sources.equal` with `LOSS_SCALE`."""
    return abs(ours - theirs) / max(theirs, LOSS_SCALE)
