"""Settings of zero's tests."""

import sys
from pathlib import Path

from worker_pool import PRELOADED

sys.path.insert(0, str(Path(__file__).parent))

# The server that forks ranks imports zero once, so that not every rank has to import it.
PRELOADED.append("zero")
