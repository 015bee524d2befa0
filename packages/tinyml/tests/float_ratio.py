"""The time of a float layer over that of a compressed layer, as closely as a claim needs.

On a busy virtual machine, the median over 21 rounds of the processor time of one float layer over
its own was 0.94 to 1.07, and over that of a copy 0.86 to 1.10: the copy has other memory pages.
So a layer that computes in float is compared with a float layer of the same weight tensor, and
rounds are added while the claim is within the noise.
"""

import math
import statistics
import time

from torch import nn

FEWEST, MOST = 21, 301
#: Width of the interval of the median, in standard errors. It is wide because it is looked at after
#: each round.
ERRORS = 3


def measure_float_ratio(ours, linear, x, claim, products=10**8, clock=time.perf_counter):
    """Return the median time of `linear` over that of `ours`, both modules of one layer.

    It is 1 if "auto" left the layer as it was. Rounds end when the interval of the median excludes
    `claim`, or after `MOST` rounds. A round calls both for about `products` multiplications.
    """
    layer = ours[0]
    if type(layer) is nn.Linear:
        return 1.0
    repeats = max(1, products // (x.numel() * layer.out_features))

    def seconds(call):
        start = clock()
        for _ in range(repeats):
            call(x)
        return clock() - start

    seconds(ours)
    if layer.reference == "float" and layer._choose_implementation(x) == "float":
        linear[0].weight = nn.Parameter(layer._prepared["float"], requires_grad=False)
    seconds(linear)
    ratios = []
    while len(ratios) < MOST:
        if len(ratios) % 2:
            first = seconds(linear)
            ratios.append(first / seconds(ours))
        else:
            first = seconds(ours)
            ratios.append(seconds(linear) / first)
        if len(ratios) >= FEWEST and _is_excluded(sorted(ratios), claim):
            break
    return statistics.median(ratios)


def _is_excluded(ratios, claim):
    """Return True if the interval of the median of sorted `ratios` is on one side of `claim`.

    The number of ratios below the median is binomial, with a standard error of sqrt(n) / 2.
    """
    outside = int((len(ratios) - ERRORS * math.sqrt(len(ratios))) / 2)
    return ratios[outside] >= claim or ratios[-1 - outside] < claim
