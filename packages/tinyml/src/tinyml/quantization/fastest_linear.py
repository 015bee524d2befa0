"""Linear layers that use the fastest implementation for the number of tokens on this machine.

A layer has two implementations: a reference and a kernel, which is used only if it is clearly
faster (see `get_timing`). Selecting an implementation costs up to 5 microseconds per call. Each
implementation prepares its own form of the weight at its first use, outside of the state dict.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from tinyml.compressed_weight import get_compressed_weight
from tinyml.conversion import (
    Replacement,
    get_tensor_versions,
    replace_modules,
    warn_of_dense_weights,
    without_autocast,
)
from tinyml.layers import (
    check_weights,
    identify_weight,
    identify_weights,
    is_conv1d,
    is_instance_of,
    is_product,
    name_computed_weights,
)
from tinyml.quantization.rounded_weight import attach_gradient
from tinyml.timing import Timing, find_stored_timing, is_captured, measure, store_timing
from tinyml.validation import Progress

#: The numbers of tokens that `explain` reports and that decide whether a layer is replaced. They
#: represent decoding, a small batch and a prompt.
DECISION_TOKENS = (1, 32, 512)
#: A selection takes 5 microseconds, which is more than 2 % of calls that are shorter than this.
_SMALL_MS = 0.25
_timings: dict[object, Timing] = {}


class FastestLinear(Replacement):
    """A replacement of a linear layer, y = x w^T + bias, whose weight and bias are not trained.

    The gradient with respect to the input is that of the dense weight: rounding is treated as the
    identity (straight-through).
    """

    bias: Tensor | None
    in_features: int
    out_features: int
    dtype: torch.dtype
    group_size: int = 0
    #: The implementation that is used unless `kernel` is clearly faster. With "float", which
    #: multiplies by the dense weight, the layer may stay in float.
    reference: str = "float"
    #: The name of the other implementation.
    kernel: ClassVar[str]
    #: The implementations by name: functions of the layer and its inputs.
    implementations: ClassVar[dict[str, Callable[[Any, Tensor], Tensor]]]

    def __init__(self, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self._prepared: dict[str, Any] = {}
        self._stamp: list[tuple[int, object]] = []
        self._selected: dict[Any, str] = {}

    @property
    def weight(self) -> Tensor:
        """Return the dense weight that the codes represent."""
        raise NotImplementedError

    def stored(self) -> tuple[Any, Any]:
        """Return the codes and their scales."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        # A microsecond is a tenth of a small layer's time, so this code does as little as possible.
        if forward_ad._current_level >= 0:  # a level is open in `torch.func.jvp`
            raise NotImplementedError(
                f"expected no forward-mode derivatives of {type(self).__name__}, whose rounding "
                "would make them zero; use reverse mode, such as torch.func.vjp"
            )
        if input.requires_grad and torch.is_grad_enabled():
            return self._compute_differentiably(input)
        return self._run_fastest(input)

    def _compute_differentiably(self, input: Tensor) -> Tensor:
        with without_autocast(input.device):  # the gradient keeps the precision of the input
            dense = F.linear(input, self.weight.to(input.dtype))
        return attach_gradient(self._run_fastest(input.detach()), dense)

    def _run_fastest(self, input: Tensor) -> Tensor:
        # Recordings and empty inputs are not timed. Inputs of too few features must raise an error.
        if is_captured() or input.numel() < self.in_features:
            return self.compute_untimed(input)
        return self.implementations[self._choose_implementation(input)](self, input)

    def compute_untimed(self, inputs: Tensor) -> Tensor:
        """Compute the outputs without timing; the base class computes them in float."""
        return self.compute_in_float(inputs)

    def is_correct(self, inputs: Tensor) -> bool:
        """Return True if the results of the kernel equal those in float up to rounding."""
        expected = self.compute_in_float(inputs).float()
        error = (self.implementations[self.kernel](self, inputs).float() - expected).norm()
        return bool(error <= 0.1 * expected.norm())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FastestLinear:
        # `.to(dtype)` and `.half()` convert the tensors but not this attribute.
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        # Modifications of inference tensors are not counted: `get_prepared` would always rebuild.
        with torch.inference_mode(mode=False):
            return cast(FastestLinear, cast(Any, super())._apply(fn, recurse))

    def _choose_implementation(self, inputs: Tensor) -> str:
        tokens = inputs.numel() // self.in_features
        key = (tokens - 1).bit_length(), inputs.dtype, inputs.device, torch.get_num_threads()
        if (name := self._selected.get(key)) is None:
            name = self._selected[key] = self.get_timing(inputs).selected
        return name

    def get_timing(self, inputs: Tensor) -> Timing:
        """Return the timing for inputs of this type and number of tokens, measured once.

        Numbers of tokens that round up to the same power of two have one timing.
        """
        tokens = inputs.numel() // self.in_features
        key = (
            type(self), self.reference, (tokens - 1).bit_length(), self.group_size,
            self.in_features, self.out_features, inputs.dtype, inputs.device,
            torch.get_num_threads(),
        )  # fmt: skip
        if key not in _timings:
            stored_key = " ".join(map(str, (type(self).__name__, *key[1:])))
            is_stored = inputs.device.type == "cpu"
            timing = find_stored_timing(stored_key) if is_stored else None
            if timing is None or timing.selected not in self.implementations:
                timing = self._measure(self.make_example(tokens, inputs))
                self._prepared = {}  # the measurement has prepared both implementations
                if is_stored:
                    store_timing(stored_key, timing)
            _timings[key] = timing
        return _timings[key]

    def _measure(self, inputs: Tensor) -> Timing:
        names = self.kernel, self.reference
        calls = {name: partial(self.implementations[name], self) for name in names}
        with without_autocast(inputs.device):  # stored times must not depend on autocast
            return measure(calls, inputs, partial(self.is_correct, inputs), self.reference)

    def has_faster_implementation(self) -> bool:
        """Return True if the layer should replace a layer in float.

        The kernel must be clearly faster than float for one of `DECISION_TOKENS`. If float
        is selected for a single token and takes less than `_SMALL_MS`, the result is False.
        """
        single = self.get_timing(self.make_example(1))
        if single.selected == "float" and single.milliseconds["float"] < _SMALL_MS:
            return False  # the selection would take more than a fiftieth of this time
        return any(
            self.get_timing(self.make_example(count)).selected != "float"
            for count in DECISION_TOKENS
        )

    def make_example(self, tokens: int, like: Tensor | None = None) -> Tensor:
        """Return random inputs with this number of tokens, of the type and device of `like`."""
        like = next(self.buffers()).new_empty(0, dtype=self.dtype) if like is None else like
        # `torch.vmap` refuses the random numbers of torch, and drawing them would change those that
        # the model draws later.
        numbers = np.random.default_rng(0).standard_normal((tokens, self.in_features), np.float32)
        return torch.as_tensor(numbers, dtype=like.dtype, device=like.device)

    def explain(self, tokens: Sequence[int] = DECISION_TOKENS) -> list[str]:
        """Return the chosen implementation and the times of all, for each number of tokens."""
        return [f"{n} tokens: computed in {self.get_timing(self.make_example(n))}" for n in tokens]

    def get_prepared(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the prepared form `name` of the weight; `make` creates it for a changed weight."""
        if is_captured():
            return make()
        # Loading a state dict and moving the module replace the tensors or change their versions.
        stamp = get_tensor_versions(*self.stored())
        if self._stamp != stamp:
            self._prepared = {}
            self._stamp = stamp
        # Another thread may replace the dictionary, so the value is not read from it again.
        value = self._prepared.get(name)
        if value is None:
            value = self._prepared[name] = make()
        return value

    def compute_in_float(self, inputs: Tensor) -> Tensor:
        """Compute the outputs in float."""
        dense = self.get_prepared("float", lambda: self.weight.contiguous())
        bias = self._buffers["bias"]
        if dense.dtype is not inputs.dtype:
            dense = dense.to(inputs.dtype)
            bias = None if bias is None else bias.to(inputs.dtype)
        return F.linear(inputs, dense, bias)

    def add_bias_and_cast(self, outputs: Tensor, inputs: Tensor) -> Tensor:
        """Return `outputs` (tokens, out) plus the bias, as (..., out) in the type of `inputs`.

        `inputs` are (..., in). The bias is added in place.
        """
        if self.bias is not None:
            outputs.add_(self.bias)
        return outputs.to(inputs.dtype).view(*inputs.shape[:-1], self.out_features)

    def __getstate__(self) -> dict[str, Any]:
        # Prepared weights are rebuilt after copying or unpickling the layer.
        return self.__dict__ | {"_prepared": {}, "_stamp": [], "_selected": {}}


def install_fastest_linears(
    model: nn.Module,
    make: Callable[[nn.Module], FastestLinear | None],
    protected: Collection[str],
    progress: Progress | None = None,
) -> nn.Module:
    """Replace the linear layers of `model` in place, except those in `protected`; return the model.

    `make(layer)` returns the replacement of a layer, or None to leave the layer unchanged. A layer
    whose replacement may use float is also unchanged if its `has_faster_implementation` returns
    False. Layers that share a weight have separate replacements. Layers that share their weight
    with a protected layer, subclasses of `nn.Linear`, and embeddings are unchanged.
    """
    protected_weights = identify_weights(model, protected)
    linears = {
        module: name
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or is_compressed_linear_or_conv1d(module))
        and identify_weight(module) not in protected_weights
        and identify_weight(module) is not None  # a computed weight is not stored in its layer
    }
    if not linears:
        raise ValueError(
            f"expected nn.Linear layers to replace in the {type(model).__name__}, got none"
            f"{' outside of protect' if protected else ''}"
            f"{name_computed_weights(model, (nn.Linear,))}"
        )
    check_weights({name: linear for linear, name in linears.items()})
    replacements: dict[nn.Module, nn.Module] = {}
    for count, (linear, name) in enumerate(linears.items(), 1):
        layer = make(linear)
        if layer is not None and (layer.reference != "float" or layer.has_faster_implementation()):
            layer.training = linear.training
            replacements[linear] = layer
        if progress is not None:
            progress(name, count, len(linears))
    model = replace_modules(model, replacements)
    avoid_fused_operators(model)
    # Subclasses of nn.Linear are not replaced, because their forward may differ.
    subclasses = {module for module in model.modules() if is_instance_of(module, (nn.Linear,))}
    warn_of_dense_weights(model, protected, subclasses - linears.keys())
    return model


def avoid_fused_operators(model: nn.Module) -> None:
    """Disable the fused operator of encoder layers that contain a `FastestLinear`.

    Without gradients, `nn.TransformerEncoderLayer` with ReLU or GELU may run a fused operator,
    which reads the dense weights and does not call the linear layers. `nn.TransformerEncoder` turns
    a padding mask into nested tensors, which only the fused operator accepts.
    """
    for module in model.modules():
        if not isinstance(module, nn.TransformerEncoderLayer | nn.TransformerEncoder):
            continue
        if any(isinstance(inner, FastestLinear) for inner in module.modules()):
            if isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False
            else:
                module.activation_relu_or_gelu = 0


def is_compressed_linear_or_conv1d(module: nn.Module) -> bool:
    """Return True for a compressed `nn.Linear`, and for a `Conv1D` whose `forward` is a product."""
    if is_conv1d(module):
        return is_product(module, module.forward)
    # Parametrizing a layer replaces its class by a subclass.
    return get_compressed_weight(module) is not None and type(module).__bases__ == (nn.Linear,)
