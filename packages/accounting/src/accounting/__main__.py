"""Entry point of `python -m accounting`; see `accounting.cli.main`."""

import sys

from accounting.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
