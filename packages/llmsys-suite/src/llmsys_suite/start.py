"""Do a run: refuse what cannot fit, then start ranks, or be one where a launcher started this."""

from __future__ import annotations

import os

from llmsys_suite.config import RunConfig, UsageError
from llmsys_suite.environment import GIB, available_memory_bytes
from llmsys_suite.folder import RunFolder
from llmsys_suite.text import read_text, require_tokens


def run(config: RunConfig) -> RunFolder:
    """Do the run and return its folder; RuntimeError if it failed, with the folder's name."""
    if execute(config):
        raise RuntimeError(f"the run failed; what was measured is in {config.out}")
    return RunFolder(config.out)


def execute(config: RunConfig) -> int:
    """Do the run; its exit status. Raises UsageError, with nothing written, if it cannot be."""
    _require_data(config)
    _require_memory(config)
    if "RANK" in os.environ:
        from llmsys_suite.worker import work

        return work(config)
    from llmsys_suite.launch import launch

    return launch(config)


def _require_memory(config: RunConfig) -> None:
    from llmsys_suite.stages.plan import predict

    needed = predict(config)["host_peak_bytes"]
    available = available_memory_bytes(config.device)
    if needed > available:
        raise UsageError(
            f"size {config.size} needs {needed / GIB:.1f} GiB on this machine and "
            f"{available / GIB:.1f} GiB are free; choose a smaller --size or --world"
        )


def _require_data(config: RunConfig) -> None:
    require_tokens(
        read_text(config.data),
        rows=config.rows,
        context=config.context,
        steps=config.warmup + config.steps,
        world=config.world,
    )
