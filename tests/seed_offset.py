"""Shift every random seed that a test sets, to find tests that pass by the luck of one draw.

`pytest --seed-offset 3` adds 3 to each seed that is passed to `random`, NumPy or PyTorch. A test
that then fails depends on one draw: it should construct its case, or assert a statistic over
several seeds. Python processes that a test starts apply the offset, too: they find the module
`sitecustomize` in `tests/seed_offset_site` and read the variable `LLMSYS_SEED_OFFSET`.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

VARIABLE = "LLMSYS_SEED_OFFSET"
#: The folder that Python processes import `sitecustomize` from.
SITE = str(Path(__file__).parent / "seed_offset_site")


def install(offset: int) -> None:
    """Add `offset` to integer seeds from now on, in this process. Return at once if it is 0.

    A worker of xdist is started with the environment of the option, and then receives the option.
    The second call has no effect.
    """
    if offset == 0 or random.Random.__name__ == "ShiftedRandom":
        return
    os.environ[VARIABLE] = str(offset)
    if SITE not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join([SITE, os.environ.get("PYTHONPATH", "")])

    def shift(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def shifted(seed: Any = None, *args: Any, **kwargs: Any) -> Any:
            return function(shift_seed(seed, offset), *args, **kwargs)

        return shifted

    class ShiftedRandom(random.Random):
        def seed(self, a: Any = None, version: int = 2) -> None:
            super().seed(shift_seed(a, offset), version)

    class ShiftedGenerator(torch.Generator):
        def manual_seed(self, seed: int) -> torch.Generator:
            return super().manual_seed(shift_seed(seed, offset))

    random.seed = shift(random.seed)
    random.Random = ShiftedRandom  # type: ignore[misc]
    np.random.seed = shift(np.random.seed)
    np.random.default_rng = shift(np.random.default_rng)
    torch.manual_seed = torch.random.manual_seed = shift(torch.manual_seed)
    torch.Generator = ShiftedGenerator  # type: ignore[misc]


def install_from_environment() -> None:
    """Apply the offset of the process that started this one, if it has one."""
    install(int(os.environ.get(VARIABLE, "0")))


def shift_seed(seed: Any, offset: int) -> Any:
    """Return `seed + offset` for integers and sequences of them, and other seeds unchanged."""
    if isinstance(seed, bool):
        return seed
    if isinstance(seed, int | np.integer):
        return int(seed) + offset
    if isinstance(seed, list | tuple):
        return [shift_seed(part, offset) for part in seed]
    return seed
