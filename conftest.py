"""What every test folder shares: pytest finds this file from any of them."""

import gc
import os
from pathlib import Path

from hypothesis import settings

# One thread a process: many small operators on two cores spend their time in barriers otherwise.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where there is no GPU, Triton's kernels run in its interpreter. It reads this when it is imported,
# and any test file may be the first to import it.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A busy machine is no failure: an example may take the time it takes. `make test` draws the same
# examples everywhere, so that who changes nothing breaks nothing; `--hypothesis-profile explore`,
# as in `make test-exhaustive`, draws others each time.
settings.register_profile("explore", parent=settings(), deadline=None)
settings.register_profile("same everywhere", settings.get_profile("explore"), derandomize=True)
settings.load_profile("same everywhere")


def pytest_collection_finish():
    """Exclude everything that has been imported and collected from garbage collection."""
    # Modules and collected tests live until the end, so the garbage collector need not scan them.
    gc.freeze()
