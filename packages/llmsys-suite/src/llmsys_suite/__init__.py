"""Plan, train, inspect, compress and audit one small language model with one command."""

from llmsys_suite.config import RunConfig, UsageError
from llmsys_suite.folder import RunFolder, claim_folder
from llmsys_suite.resolution import resolve
from llmsys_suite.start import run

__all__ = ["RunConfig", "RunFolder", "UsageError", "claim_folder", "resolve", "run"]
