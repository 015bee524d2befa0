"""The factors of a low-rank update (alpha / r) B A, with the names and initialization of peft."""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor, nn

from tinyml.validation import check_finite, check_strided


class LowRankUpdate:
    """A base class of modules with factors `lora_A` and `lora_B` and their scaling alpha / r.

    A state dict contains the scaling, because the update depends on it as well.
    """

    rank: int
    scaling: float
    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def create_factors(
        self,
        weight: Tensor,
        sizes: tuple[int, int],
        rank: int,
        alpha: float | None,
        matrices: int = 1,
    ) -> None:
        """Create A (matrices * rank, in), uniform, and B (out, rank * matrices), zero.

        `sizes` are (out, in) of each matrix in `weight`; `alpha` is `rank` by default. The factors
        of a 16-bit weight are float32. Raise `ValueError` if the rank is not between 1 and the
        smaller size, if alpha is not finite, or if the weight is sparse, not finite or not of
        `FLOAT_TYPES`.
        """
        check_strided("an adapted weight", weight)
        outputs, inputs = sizes
        rank = operator.index(rank)
        if not 1 <= rank <= min(sizes):
            raise ValueError(f"expected 1 <= rank <= {min(sizes)}, got {rank}")
        if alpha is not None and not math.isfinite(alpha):
            raise ValueError(f"expected a finite alpha, got {alpha}")
        if weight.device.type != "meta":
            check_finite("the adapted weight", weight)
        self.rank = rank
        self.scaling = float(rank if alpha is None else alpha) / rank
        dtype = torch.float32 if weight.dtype.itemsize < 4 else weight.dtype
        self.lora_A = nn.Parameter(weight.new_empty(matrices * rank, inputs, dtype=dtype))
        self.lora_B = nn.Parameter(weight.new_zeros(outputs, rank * matrices, dtype=dtype))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def get_extra_state(self) -> Tensor:
        """Return the scaling alpha / r of the update."""
        return torch.tensor(self.scaling, dtype=torch.float64, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Load the scaling alpha / r of the update."""
        self.scaling = float(state)
