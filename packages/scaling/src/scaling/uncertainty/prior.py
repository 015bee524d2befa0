"""The prior of the two exponents of a law, from published laws and tables.

Note [Prior of the exponents]
Few or noisy runs leave the exponents alpha and beta of E + A / N^alpha + B / D^beta almost
undetermined. Their logarithms therefore have a normal prior: their average is log(1/3) with a
standard deviation of 0.6, and their difference is zero with a standard deviation of 0.5. In
published laws and tables the two differ by a factor of about e^0.5. The prior has no weight without
noise, and hardly any for tables that determine the exponents themselves. For other tables it bounds
the intervals, which could otherwise change by a factor of two if a few runs are dropped.
"""

import numpy as np

#: Prior mean of both exponents.
PRIOR_EXPONENT = 1 / 3

#: Maps the deviations of (log alpha, log beta) from the prior mean to units of standard deviations.
#: The first row gives the average, the second the difference.
PRIOR_PRECISION_ROOT = np.array([[0.5, 0.5], [-1.0, 1.0]]) / np.array([[0.6], [0.5]])
