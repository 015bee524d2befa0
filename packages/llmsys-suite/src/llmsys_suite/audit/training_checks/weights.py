"""Checks of each variant's gradients, weights and losses, and of the tensors that it stores."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

from llmsys_suite.audit import tolerances
from llmsys_suite.audit.check import Check, Sources, compute_loss_difference
from llmsys_suite.audit.training_checks.record import Record
from llmsys_suite.measure.samples import SERVER, SINGLE, count_ranks

#: Allowed difference between two standard deviations, in standard errors.
STANDARD_ERRORS = 6.0
#: Variants that shard the moments of AdamW over the ranks, and those that shard the parameters.
SHARDED_MOMENTS = ("zero 1", "zero 2", "fsdp", "torch FSDP2")
SHARDED_PARAMETERS = ("fsdp", "torch FSDP2")
#: Variants that store a buffer of all gradients between steps.
BUFFERED = ("ddp overlapped", "ddp bucketed", "ddp shared memory", "zero 1")
#: Allowed relative difference of a shard from 1/n of the total. Small matrices are split unevenly.
UNEVEN = 0.2
#: Smallest number of steps of which at least one loss in bf16 must differ from float32. The loss of
#: a single step may be equal by chance.
LEAST_STEPS = 10


def check_initial_weights(record: Record) -> Iterator[Check]:
    """Compare the scale of the initial weights with the initialization of Glorot and Bengio."""
    glorot = Sources("standard deviations, in standard errors", "sqrt(2 / (in + out))")
    deviations = record.evidence["initial_scales"]
    yield glorot.check_distances("scale of the initial weights", deviations, STANDARD_ERRORS)


def check_probed_step(record: Record) -> Iterator[Check]:
    """Compare one SGD step of every rank with float64, and ranks bit by bit after two steps."""
    every_rank = Sources("every rank", "float64")
    for row in record.train.rows:
        name = row["variant"]
        probe = record.probes[name]
        distances = [
            (distance, f"rank {rank} {where}")
            for rank, (distance, where) in enumerate(probe["weights"])
        ]
        yield every_rank.check_distances(
            f"{name}: weight change of one SGD step", distances, tolerances.GRADIENT
        )
        if name != SINGLE:
            digests = probe["digest"]
            differ = [f"rank {rank}" for rank, d in enumerate(digests) if d != digests[0]]
            yield Sources("every rank", "rank 0").check_none(
                f"{name}: weights after two steps, bit by bit", differ
            )


def check_final_weights(record: Record) -> Iterator[Check]:
    """Compare the trained weights of all ranks bit by bit, and their changes with one process's.

    The distance of a weight's change is divided by its rounding factor, see `probe.replay`.
    """
    tolerance = tolerances.compute_weight_tolerance(
        record.config, tolerances.WEIGHT_CHANGE * math.sqrt(record.num_steps)
    )
    # Sums over the rows of several ranks round differently from a sum over all rows. Distances of 0
    # therefore fail, because they show that the weights were compared with themselves.
    do_sums_differ = record.config.world > 1 and record.config.parts == 1
    least = sys.float_info.min if do_sums_differ else 0.0
    for row in record.train.rows:
        name = row["variant"]
        if name == SINGLE:
            continue
        final = record.train.final_weights[name]
        differ = list(final["differ"])
        if final["ranks"] != record.config.world:
            differ.append("ranks are missing")
        yield Sources("every rank", "rank 0").check_none(
            f"{name}: trained weights, bit by bit", differ
        )
        distances = []
        for weight, factor in record.evidence["rounding_factors"].items():
            not_compared = math.inf, f"{weight}: not compared"
            distance, where = final["from_one_process"].get(weight, not_compared)
            distances.append((distance / factor, where))
        yield Sources("rank 0", "one process").check_distances(
            f"{name}: weight change of the training", distances, tolerance, least
        )


def check_stored_tensors(record: Record) -> Iterator[Check]:
    """Compare the bytes that every rank stores after the training with the variant's formula."""
    whole = 4 * record.evidence["model_counts"]["parameters"]
    for row in record.train.rows:
        name = row["variant"]
        ranks = count_ranks(name, record.config.world)
        parameters = whole / (ranks if name in SHARDED_PARAMETERS else 1)
        moments = 2 * whole / (ranks if name in SHARDED_MOMENTS else 1)
        buffers = whole if name in BUFFERED else 0.0
        least = parameters + moments
        if record.config.world > 1:
            least += (1 - UNEVEN) * buffers
        if name == SERVER:
            # The variant has no optimizer. Its server on rank 0 stores moments and the last pushes
            # of all workers. Both count as buffers.
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
            yield formula.check_all_equal(
                f"{name}: stored {kind}",
                [(expected, bytes_[kind], f"rank {rank}") for rank, bytes_ in enumerate(stored)],
                UNEVEN if name in sharded else padding,
            )
        largest, where = max((bytes_["all"], f"rank {rank}") for rank, bytes_ in enumerate(stored))
        yield formula.check_between(
            f"{name}: all that is stored",
            parameters + moments + buffers,
            largest,
            least,
            (1 + UNEVEN) * (parameters + moments + buffers),
            where,
        )


def check_losses(record: Record) -> Iterator[Check]:
    """Compare the losses of all variants with those of one process and of a training in float32.

    Also compare the reported losses with the samples. In bf16, the losses of each variant must
    differ from those in float32 if there are at least `LEAST_STEPS` steps.
    """
    curves = record.losses
    one_process = curves[SINGLE]
    repeated = record.evidence["trajectory"]
    tolerance = tolerances.compute_loss_tolerance(
        record.config, tolerances.LOSS * math.sqrt(len(one_process))
    )
    written_out = Sources("samples", "AdamW written out in float32")
    differences = _compute_differences(curves, repeated)
    yield written_out.check_distances("losses, trained again", differences, tolerance)
    alone = Sources("samples", "one process")
    yield alone.check_distances("all losses", _compute_differences(curves, one_process), tolerance)
    if record.config.dtype == "bf16" and len(one_process) >= LEAST_STEPS:
        unrounded = []
        for variant, curve in curves.items():
            if max(_compute_differences({variant: curve}, repeated))[0] <= tolerances.REPLAYED_LOSS:
                unrounded.append(variant)
        yield written_out.check_none("rounding of bf16 in the losses", unrounded)
    reported = []
    for row in record.train.rows:
        variant = row["variant"]
        curve = curves[variant]
        reported.append((curve[-1], row["final_loss"], f"{variant}, final loss"))
        for step, loss in enumerate(record.train.losses[variant]):
            reported.append((curve[step], loss, f"{variant} step {step}"))
    yield Sources("summary", "samples").check_all_equal("reported losses", reported, 1e-9)


def _compute_differences(
    curves: dict[str, list[float]], expected: list[float]
) -> list[tuple[float, str]]:
    """Return (`compute_loss_difference`, description) for each loss of each variant."""
    differences = []
    for variant, curve in curves.items():
        for step, (actual, reference) in enumerate(zip(curve, expected, strict=False)):
            where = f"{variant} step {step}: {actual:.9g}, {reference:.9g}"
            differences.append((compute_loss_difference(actual, reference), where))
    return differences
