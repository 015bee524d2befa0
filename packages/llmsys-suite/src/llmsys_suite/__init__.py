"""One language model's whole life in one command, and an audit of what it reports."""

from llmsys_suite.config import RunConfig, UsageError, resolve
from llmsys_suite.folder import RunFolder
from llmsys_suite.start import run

__all__ = ["RunConfig", "RunFolder", "UsageError", "resolve", "run"]
