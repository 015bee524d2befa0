"""Do a run: refuse what cannot fit, then start ranks, or be one where a launcher started this."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from llmsys_suite.config import RunConfig, UsageError, check
from llmsys_suite.data import in_epochs, read_text, require_text
from llmsys_suite.environment import GIB, available_memory_bytes
from llmsys_suite.folder import RunFolder


def run(config: RunConfig) -> RunFolder:
    """Do the run and return its folder; RuntimeError if it failed, with the folder's name."""
    if execute(config):
        raise RuntimeError(f"the run failed; what was measured is in {config.out}")
    return RunFolder(config.out)


def execute(config: RunConfig) -> int:
    """Do the run; its exit status. Raises UsageError, with nothing written, if it cannot be."""
    check(config)
    text = read_text(config.data)
    require_text(text, context=config.context)
    config = in_epochs(config, text)
    _require_memory(config)
    if config.resume is not None:
        from llmsys_suite.stages.learn import require_resumable

        require_resumable(config, config.resume)
    if os.environ.get("RANK", "0") == "0":
        _require_writable(config.out)
    if "RANK" in os.environ:
        from llmsys_suite.worker import work

        return work(config)
    from llmsys_suite.launch import launch

    return launch(config)


def _require_memory(config: RunConfig) -> None:
    from llmsys_suite.stages.plan import predict

    needed = predict(config).host_peak_bytes
    available = available_memory_bytes(config.device)
    if needed > available:
        raise UsageError(
            f"size {config.size} needs {needed / GIB:.1f} GiB on this machine and "
            f"{available / GIB:.1f} GiB are free; choose a smaller --size or --world"
        )


def _require_writable(out: Path) -> None:
    """Write something there and take it away again: permissions do not say all there is to say."""
    made = [folder for folder in (out, *out.parents) if not os.path.exists(folder)]
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out) as file:
            file.write(b"?")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(
            f"{out} cannot be written ({reason}); name another folder with --out"
        ) from None
    finally:
        for folder in made:
            if os.path.isdir(folder):
                folder.rmdir()
