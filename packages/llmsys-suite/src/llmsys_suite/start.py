"""The start of a run: checks that it is possible, and the start of its ranks."""

from __future__ import annotations

import os
from pathlib import Path

from llmsys_suite.config import RunConfig, UsageError
from llmsys_suite.environment import GIB, read_available_memory_bytes
from llmsys_suite.folder import RunFolder, claim_folder
from llmsys_suite.resolution import check
from llmsys_suite.text.data import read_text, require_text
from llmsys_suite.text.tokens import require_tokenizer


def run(config: RunConfig) -> RunFolder:
    """Execute the run and return its folder; under torchrun, execute it as one of the ranks.

    Raises:
        UsageError: the run is not possible. Nothing was written, except that under torchrun rank 0
            may have created the run folder.
        RuntimeError: the run, or a check of its audit, failed; the message names the run folder.
        KeyboardInterrupt: Ctrl-C or SIGTERM ended the run.

    Under torchrun, a failed stage and an interrupt end this process instead of raising an error.
    """
    from llmsys_suite.ranks.launch import INTERRUPTED

    status, out = execute(config)
    if status == INTERRUPTED:
        raise KeyboardInterrupt(f"the measurements so far are in {out}")
    if status:
        raise RuntimeError(f"the run or a check of its audit failed; its measurements are in {out}")
    return RunFolder(out)


def execute(config: RunConfig) -> tuple[int, Path]:
    """Execute the run; return its exit status and its folder.

    Raises:
        UsageError: the run is not possible; see `run`.
    """
    check(config)
    require_text(read_text(config.data), context=config.context)
    if config.device == "cuda" and "RANK" in os.environ:
        from llmsys_suite.ranks.worker import select_device

        # Select the device before memory is queried, so that each rank queries its own GPU.
        select_device(config)
    require_tokenizer(config)
    _require_memory(config)
    if config.resume is not None:
        from llmsys_suite.learning.state import require_resumable

        require_resumable(config, config.resume)
    if "RANK" in os.environ:
        from llmsys_suite.ranks.worker import run_rank

        return run_rank(config)
    from llmsys_suite.ranks.launch import launch

    config = claim_folder(config)
    assert config.out is not None
    return launch(config), config.out


#: Stages that do not allocate the model.
WITHOUT_MODEL = {"links", "memory", "report"}


def _require_memory(config: RunConfig) -> None:
    from llmsys_suite.stages.plan import predict

    if {*config.stages} <= WITHOUT_MODEL:
        return
    needed = predict(config).host_peak_bytes
    available = read_available_memory_bytes(config.device)
    if needed > available:
        # Each GPU serves one rank, so fewer ranks would not free memory on it.
        remedy = "a smaller --size" + ("" if config.device == "cuda" else " or --world")
        raise UsageError(
            f"size {config.size} needs {needed / GIB:.1f} GiB of {config.device} memory, and "
            f"{available / GIB:.1f} GiB are free; choose {remedy}"
        )
