"""Checks of `memory`: counted peaks against the peaks that `accounting` predicts."""

from __future__ import annotations

from collections.abc import Iterator

import accounting

from llmsys_suite import results
from llmsys_suite.audit.check import Check, Sources, compare_rows
from llmsys_suite.config import get_size
from llmsys_suite.folder import RunFolder

MIB = 2**20
#: Number of rows of every counted step, independently of the stage's constant.
ROWS = 4
#: Allowed relative difference between counted and predicted peak bytes. Measured: at most 0.03
#: for sixty shapes and contexts. It is smaller than 0.049, the difference of MB from MiB.
PEAK_TOLERANCE = 0.04


def check_records(folder: RunFolder, result: results.Memory) -> Iterator[Check]:
    """Compare each context's training peaks with predictions, and its stream with a formula."""
    config = folder.config
    counted = [row["context"] for row in result.peaks]
    contexts = (config.context // 2, config.context, 2 * config.context)
    yield compare_rows("contexts", contexts, counted)
    definition = Sources("reported", "the definition of the stage")
    yield definition.check_equal("rows", ROWS, result.rows)
    size = get_size(config.size)
    described = size.to_transformer(vocabulary=config.vocabulary)
    peaks = []
    stream = []
    for row in result.peaks:
        where = f"{row['context']} tokens"
        for key, recompute in (("training", "none"), ("checkpointed", "full")):
            predicted = accounting.peak_memory(
                described,
                accounting.Plan(recompute=recompute),
                batch=ROWS,
                seq=row["context"],
                flash=False,
                fused_norm=False,
                foreach=False,
            ).total
            peaks.append((predicted / MIB, row[f"{key}_peak_mib"], f"{where}, {key}"))
        stream_mib = 4 * ROWS * row["context"] * size.d_model / MIB
        stream.append((stream_mib, row["residual_stream_mib"], where))
    predictions = Sources("counted", "accounting")
    yield predictions.check_all_equal("peaks of training", peaks, PEAK_TOLERANCE)
    numbers = Sources("reported", "4 bytes per number")
    yield numbers.check_all_equal("residual stream", stream, 1e-9)
