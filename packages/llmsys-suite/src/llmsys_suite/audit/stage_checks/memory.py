"""Checks of `memory`: counted peaks against the peaks that accounting predicts."""

from __future__ import annotations

from collections.abc import Iterator

import accounting

from llmsys_suite import results
from llmsys_suite.audit.check import Check, Sources, same_rows
from llmsys_suite.config import RunConfig, size_of
from llmsys_suite.ranks.rank import Run
from llmsys_suite.stages import memory

MIB = 2**20
#: Allowed difference between two methods of counting live bytes.
PEAK_BYTES = 0.10


def checks(run: Run, result: results.Memory) -> Iterator[Check]:
    """Compare the peaks and the residual stream of every size."""
    config = run.config
    expected = [(size, n) for size, lengths in memory.contexts(config).items() for n in lengths]
    counted = [(size, row["context"]) for size, m in result.models.items() for row in m["peaks"]]
    yield same_rows("sizes and contexts", expected, counted)
    off: list[tuple[float, float, str]] = []
    for size, model in result.models.items():
        off += _predicted(size, model["peaks"], config)
        number_mib = 4 * memory.ROWS * size_of(size).d_model / MIB
        stream = [
            (row["context"] * number_mib, row["residual_stream_mib"], "") for row in model["peaks"]
        ]
        numbers = Sources("reported", "4 bytes per number")
        yield numbers.all_equal(f"{size}: residual stream", stream, 1e-9)
    yield Sources("counted", "accounting").all_equal("peaks of training", off, PEAK_BYTES)


def _predicted(
    size: str, peaks: results.Rows, config: RunConfig
) -> Iterator[tuple[float, float, str]]:
    """Yield the predicted and the counted peak of each context, plain and checkpointed."""
    described = size_of(size).described(vocabulary=memory.vocabulary_of(size, config))
    for row in peaks:
        for key, recompute in (("training", "none"), ("checkpointed", "full")):
            predicted = accounting.peak_memory(
                described,
                accounting.Plan(recompute=recompute),
                batch=memory.ROWS,
                seq=row["context"],
                flash=False,
                fused_norm=False,
                foreach=False,
            ).total
            where = f"{size}, {row['context']} tokens, {key}"
            yield predicted / MIB, row[f"{key}_peak_mib"], where
