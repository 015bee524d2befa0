"""Run the tests with the oldest torch and triton that the packages accept.

    python tests/oldest_torch.py [arguments of pytest]

The versions are the lower bounds in the packages' pyproject.toml files. The environment is
temporary.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from workspace import PACKAGES, ROOT, UV, get_source_folder, read_project

# The interpreter of triton 3.6 fails with later versions.
NUMPY = "numpy<2.4"


def list_requirements(groups: dict[str, list[str]]) -> list[str]:
    """Return what the packages and tests need, with each lower bound as the exact version."""
    needed = {NUMPY, *groups["dev"]}
    for package in PACKAGES:
        # The suite names the other packages with " @ ".
        needed.update(line for line in read_project(package)["dependencies"] if " @ " not in line)
    return sorted(line.replace(">=", "==") for line in needed)


def main() -> None:
    """Create the environment and run pytest in it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    options = ["--exclude-newer", settings["tool"]["uv"]["exclude-newer"]]
    needed = list_requirements(settings["dependency-groups"])
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / ".venv" / "bin" / "python"
        # The pins of the workspace do not apply outside of its folder.
        for command in (
            [UV, "venv", "--python", sys.executable],
            [UV, "pip", "install", "--python", python, *options, *needed],
        ):
            subprocess.run(command, cwd=folder, check=True)
        sources = os.pathsep.join(str(get_source_folder(package).parent) for package in PACKAGES)
        done = subprocess.run(
            [python, "-m", "pytest", *sys.argv[1:]],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": sources},
            check=False,
        )
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
