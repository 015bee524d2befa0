"""The array type of all modules, and the compute of training, C = 6 N D."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: Forward and backward pass of a dense model: C = 6 N D (Kaplan et al. 2020, section 2.1).
FLOPS_PER_PARAMETER_TOKEN = 6.0

#: Smallest number of parameters, and of training tokens, that a run may have.
FEWEST = 1000.0

COLUMNS = ("parameters", "tokens", "compute", "loss")
