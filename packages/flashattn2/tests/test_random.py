"""Random combinations of all options compute attention; see `random_cases`."""

import pytest
import random_cases

#: The exhaustive run draws 2,500 cases for the CPU backends and as many for the kernels.
SAMPLE = [pytest.param(range(1)), *(
    pytest.param(range(max(first, 1), first + 50), marks=pytest.mark.exhaustive)
    for first in range(0, 2500, 50)
)]  # fmt: skip


@pytest.mark.parametrize("seeds", SAMPLE, ids=lambda r: f"{r.start} to {r.stop - 1}")
@pytest.mark.parametrize("kernels", [False, True], ids=["cpu", "kernels"])
def test_random_combinations_of_all_options_equal_the_reference(interpreter, kernels, seeds):
    for seed in seeds:
        case, options = random_cases.draw(seed, kernels)
        interpreter(splits=case["splits"], tma=case["tma"])
        random_cases.check(case, options)
