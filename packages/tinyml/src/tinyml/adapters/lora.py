"""Low-rank adapters: y = W x + (alpha / r) B (A x), with W frozen.

The method is that of Hu et al., "LoRA", 2021, with the names and the initialization of the peft
library. A (r, in) starts uniform and B (out, r) at zero, so the function is unchanged at first. If
both were zero, both gradients would vanish; if neither were, the initial function would change.

A and B are float32 even if the base is 16-bit, because 16 bits cannot represent the small updates
of training. The update is added to the base output in float32, and the sum is rounded once. `merge`
saves the original weight, so `unmerge` restores it exactly. `state_dict()` must contain the
original base weight, so it raises `RuntimeError` while an update is merged.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from tinyml.compressed_weight import get_compressed_weight
from tinyml.conversion import Replacement, get_tensor_versions, without_autocast
from tinyml.layers import get_weight, identify_weight, is_conv1d, is_instance_of, is_product
from tinyml.validation import check_finite, check_number, check_strided


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
        of a 16-bit weight are float32. Raise `ValueError` if the rank is less than 1, if alpha is
        not finite, or if the weight is sparse, not finite or not of `FLOAT_TYPES`.
        """
        check_strided("an adapted weight", weight)
        outputs, inputs = sizes
        rank = operator.index(rank)
        if rank < 1:
            raise ValueError(f"expected rank >= 1, got {rank}")
        check_number("alpha", rank if alpha is None else alpha)
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


class LoRA(LowRankUpdate, Replacement):
    """A frozen linear layer with a trainable update of rank `rank`.

    The update is multiplied by `alpha` / `rank`; `alpha` is `rank` by default. `dropout` applies to
    the inputs of the update in training mode. The mode is that of the layer. Raises `TypeError` for
    other layers, and if the layer does not return the product with its weight, plus its bias.
    Raises `ValueError` if `dropout` would have no effect, and for an invalid rank, alpha or weight.
    """

    def __init__(
        self, base: nn.Module, rank: int = 8, *, alpha: float | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if not is_instance_of(base, (nn.Linear,)):
            raise TypeError(
                f"expected nn.Linear, got {type(base).__name__}; the argument parameters of "
                "add_lora adapts matrices of other layers"
            )
        weight = get_weight(base)
        self.transposed = is_conv1d(base)
        if dropout and isinstance(base, NonDynamicallyQuantizableLinear):
            # nn.MultiheadAttention reads the weight of its out_proj without calling the layer.
            raise ValueError(
                f"expected dropout=0 for the out_proj of nn.MultiheadAttention, got "
                f"dropout={dropout}, which would have no effect; pass dropout=0, or exclude the "
                "layer with protect"
            )
        self.training = base.training
        self.dropout = nn.Dropout(dropout).train(base.training)
        outputs, inputs = weight.t().shape if self.transposed else weight.shape
        self.create_factors(weight, (outputs, inputs), rank, alpha)
        is_plain = "forward" not in vars(base) and type(base).forward is nn.Linear.forward
        if weight.device.type != "meta" and not is_plain:
            _check_outputs(base, base.forward)
        # Freeze the base last, so that an error above leaves it unchanged.
        self.base = base.requires_grad_(False)
        # A tuple hides the parameter from nn.Module.
        self._unmerged_weight: tuple[nn.Parameter] | None = None
        self._merged_factors: tuple[Tensor, Tensor, float] = torch.empty(0), torch.empty(0), 0.0
        self._stamp: object = None
        untyped_self: Any = self  # these torch methods are not typed
        untyped_self.register_state_dict_pre_hook(_require_unmerged)
        untyped_self.register_load_state_dict_pre_hook(_require_unmerged)

    @property
    def merged(self) -> bool:
        """Return True if the base weight includes the update."""
        return self._unmerged_weight is not None

    @property
    def update(self) -> Tensor:
        """Return the update of the base weight, in the weight's shape."""
        with without_autocast(self.lora_A.device):
            delta = self.scaling * (self.lora_B @ self.lora_A)
        return delta.t() if self.transposed else delta

    @property
    def weight(self) -> Tensor:
        """Return the weight with the update.

        Raise `RuntimeError` if the update was merged and its factors have changed since.
        """
        weight = cast(Tensor, self.base.weight)
        if not self.merged:
            return (weight + self.update).to(weight)
        self._check_unchanged()
        return weight

    def __getattr__(self, name: str) -> Any:
        # Attention code and other callers read these attributes directly.
        if name in ("bias", "in_features", "out_features"):
            return getattr(self.base, name)
        return super().__getattr__(name)

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        if self.merged:
            self._check_unchanged()
        outputs: Tensor = self.base(input)
        if self.merged:
            return outputs
        low = F.linear(self.dropout(input.to(self.lora_A.dtype)), self.lora_A)
        return (outputs + self.scaling * F.linear(low, self.lora_B)).to(outputs.dtype)

    @torch.no_grad()
    def merge(self) -> None:
        """Replace the base weight by the updated one; save the original weight for `unmerge`."""
        self.check_mergeable()
        original = cast(nn.Parameter, self.base.weight)
        self.base.weight = nn.Parameter(self.weight, requires_grad=False)
        self._unmerged_weight = (original,)
        self._merged_factors = self.lora_A.clone(), self.lora_B.clone(), self.scaling
        self._stamp = None

    @torch.no_grad()
    def _check_unchanged(self) -> None:
        """Raise `RuntimeError` if a factor or the scaling has changed since `merge`.

        Do nothing inside `torch.compile`, which cannot read the versions of tensors.
        """
        if torch.compiler.is_compiling():
            return
        stamp = get_tensor_versions(self.lora_A, self.lora_B), self.scaling
        if stamp == self._stamp:
            return
        a, b, scaling = self._merged_factors
        is_same_a = torch.equal(self.lora_A, a.to(self.lora_A))
        is_same_b = torch.equal(self.lora_B, b.to(self.lora_B))
        if not is_same_a or not is_same_b or scaling != self.scaling:
            raise RuntimeError(
                "lora_A, lora_B or scaling changed after merge; call unmerge, then merge again"
            )
        self._stamp = stamp

    @torch.no_grad()
    def check_mergeable(self) -> None:
        """Raise `RuntimeError`, `TypeError` or `ValueError` if the update cannot be merged now."""
        if get_compressed_weight(self.base) is not None:
            raise RuntimeError(
                "the base weight is compressed, and compressing the merged weight would lose a "
                "part of the update; keep the adapter unmerged, or merge before compressing"
            )
        if identify_weight(self.base) is None:
            raise RuntimeError(
                "the base weight is computed from other tensors and cannot be updated; keep the "
                "adapter unmerged"
            )
        if self.merged:
            raise RuntimeError("expected an unmerged update, got a merged one; call unmerge()")
        if self.base._forward_hooks or self.base._forward_pre_hooks:
            _check_outputs(self.base, self.base)
        check_finite("the merged weight", self.weight)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Restore the base weight bit for bit; do nothing if the update is not merged.

        If the layer was converted to another dtype since `merge`, so is the restored weight.
        """
        if self._unmerged_weight is not None:
            (original,) = self._unmerged_weight
            # The model may have moved to another device or dtype since `merge`.
            original.data = original.data.to(cast(Tensor, self.base.weight))
            self.base.weight = original
            self._unmerged_weight = None

    def get_layer_to_compress(self) -> nn.Module:
        """Return the base with the update if it is merged, otherwise the adapter itself.

        Raise `RuntimeError` if the factors have changed since `merge`.
        """
        if self.merged:
            self._stamp = None
            self._check_unchanged()
        return self.base if self.merged else self


def _check_outputs(base: nn.Module, call: Callable[[Tensor], Any]) -> None:
    """Raise `TypeError` unless `call` returns the product with the base weight, plus the bias.

    The update is added to these outputs. If a hook or the `forward` of a subclass normalizes or
    scales them, merging the update into the weight would change the function.
    """
    if not is_product(base, call):
        raise TypeError(
            "expected a layer that returns the product with its weight, got other outputs from the "
            f"forward or the hooks of {type(base).__name__}, so its update could not be merged; "
            "exclude the layer with protect, or remove its hooks"
        )


def _require_unmerged(layer: Any, *_: Any) -> None:
    """Raise `RuntimeError` if the update is merged: a state dict needs the original base weight."""
    if layer.merged:
        raise RuntimeError(
            "expected adapters that are not merged for a state dict, got merged ones; call "
            "unmerge(model) first, or merge_and_unload(model)"
        )
