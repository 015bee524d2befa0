"""Settings of zero's tests."""

import sys
from pathlib import Path

from worker_pool import PRELOADED

sys.path.insert(0, str(Path(__file__).parent))

import shared_ranks

# The server that forks ranks imports zero once, so that not every rank has to import it.
PRELOADED.append("zero")


def pytest_collection_finish(session):
    """Count the selected tests of each file."""
    shared_ranks.selected.update(item.path for item in session.items)
