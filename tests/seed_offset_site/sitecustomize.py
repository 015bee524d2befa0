"""Apply the seed offset of the parent process when this interpreter starts, see seed_offset.py."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import seed_offset

seed_offset.install_from_environment()
