"""Low-rank updates of single parameters, such as the fused experts of a layer.

The update of a matrix (out, in) is (alpha / r) B A. A stack of matrices (experts, out, in) has one
update per expert. A parametrization adds the update when the parameter is read. The factors have
the shapes of peft's: A (experts * r, in), with experts as the outer index, and B (out, r *
experts), with ranks as the outer index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tinyml.adapters.lora import LowRankUpdate
from tinyml.compressed_weight import refuse_save_pretrained
from tinyml.conversion import remove_parametrizations, without_autocast
from tinyml.validation import check_finite, suggest_name


class ParameterLoRA(LowRankUpdate, nn.Module):
    """A trainable update of rank `rank` of a frozen parameter, as a parametrization."""

    def __init__(
        self, weight: Tensor, rank: int, alpha: float | None = None, *, inputs_first: bool = False
    ) -> None:
        super().__init__()
        if weight.dim() not in (2, 3):
            raise ValueError(f"expected a parameter of 2 or 3 dimensions, got {weight.dim()}")
        self.inputs_first = inputs_first
        first, second = weight.shape[-2:]
        experts = weight.shape[0] if weight.dim() == 3 else 1
        sizes = (second, first) if inputs_first else (first, second)
        self.create_factors(weight, sizes, rank, alpha, experts)
        self._updated: Tensor | None = None
        cast(Any, self).register_state_dict_pre_hook(refuse_save_pretrained)

    def update(self, weight: Tensor) -> Tensor:
        """Return the update of the parameter, in the shape of `weight`."""
        a = self.lora_A.unflatten(0, (-1, self.rank))  # (experts, rank, in)
        b = self.lora_B.unflatten(1, (self.rank, -1))  # (out, rank, experts)
        with without_autocast(a.device):
            delta = self.scaling * torch.einsum("ore,eri->eoi", b, a)
        return (delta.mT if self.inputs_first else delta).reshape(weight.shape)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight with the update."""
        if self._updated is not None:
            return self._updated
        return (weight + self.update(weight)).to(weight)

    def compute_once(self, owner: nn.Module, _: Any) -> None:
        """Compute the updated weight before `owner` runs, which may read it once per expert."""
        parametrizations = cast(Any, owner).parametrizations.values()
        listed = next(listed for listed in parametrizations if listed[-1] is self)
        self.discard()
        self._updated = self.forward(listed.original)

    def discard(self, *_: Any) -> None:
        """Discard the updated weight after the owner has run.

        torch does not call this hook if an interrupt ends the owner's forward pass.
        """
        self._updated = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_updated": None}  # a copy computes the updated weight again


def match_parameters(model: nn.Module, suffixes: Iterable[str]) -> list[tuple[str, str]]:
    """Return (module, parameter) for each parameter whose name matches an entry of `suffixes`.

    A name matches if it equals the entry, or ends with a dot and the entry. Parameters of one
    module are in the order of their registration. Raise `ValueError` if an entry matches none.
    """
    entries = set(suffixes)
    known = [name for name, _ in model.named_parameters()]
    for entry in entries:
        if not any(f".{name}".endswith(f".{entry}") for name in known):
            raise ValueError(
                f"expected ends of the names of parameters, got {entry!r}"
                f"{suggest_name(entry, known)}"
            )
    matches = [n for n in known if any(f".{n}".endswith(f".{entry}") for entry in entries)]
    return [(module, key) for module, _, key in (name.rpartition(".") for name in matches)]


def make_parameter_adapter(
    model: nn.Module, module: str, key: str, rank: int, alpha: float
) -> ParameterLoRA:
    """Return an adapter for the parameter `key` of the module `module`, without installing it."""
    owner = model.get_submodule(module)
    if not module or hasattr(owner, "parametrizations"):
        raise ValueError(
            "expected a parameter of a module inside the model, without parametrizations, got "
            f"{key!r} of {module or 'the model'}"
        )
    weight = owner.get_parameter(key)
    # Expert layers in transformers that store weights as (experts, in, out) have this attribute.
    inputs_first = weight.dim() == 3 and bool(getattr(owner, "is_transposed", False))
    try:
        return ParameterLoRA(weight.detach(), rank, alpha, inputs_first=inputs_first)
    except ValueError as error:
        raise ValueError(f"{module}.{key}: {error}") from error


def install_parameter_adapters(
    model: nn.Module, adapters: Mapping[tuple[str, str], ParameterLoRA]
) -> None:
    """Install adapters, which are given by (module name, parameter name), in place."""
    for (module, key), adapter in adapters.items():
        owner = model.get_submodule(module)
        parametrize.register_parametrization(owner, key, adapter, unsafe=True)
        owner.register_forward_pre_hook(adapter.compute_once)
        owner.register_forward_hook(adapter.discard, always_call=True)


def find_parameter_adapters(model: nn.Module) -> dict[str, ParameterLoRA]:
    """Return the adapters of parameters by the name of the parameter, in the model's order."""
    adapters: dict[str, ParameterLoRA] = {}
    for name, module in model.named_modules():
        for key, listed in getattr(module, "parametrizations", {}).items():
            if isinstance(listed[-1], ParameterLoRA):
                adapters[f"{name}.{key}".lstrip(".")] = listed[-1]
    return adapters


@torch.no_grad()
def check_updated_parameters(model: nn.Module) -> None:
    """Raise `ValueError` if an adapted parameter with its update contains NaN or infinity."""
    for name, adapter in find_parameter_adapters(model).items():
        adapter.discard()
        module, _, key = name.rpartition(".")
        check_finite(f"{name} with its update", getattr(model.get_submodule(module), key))


@torch.no_grad()
def unload_parameters(model: nn.Module) -> None:
    """Replace adapted parameters by plain ones that include the update, under their old names."""
    names = [name.rpartition(".") for name in find_parameter_adapters(model)]
    for module in dict.fromkeys(module for module, _, _ in names):
        owner: Any = model.get_submodule(module)
        updated = {key: getattr(owner, key).clone() for m, _, key in names if m == module}
        for hooks in (owner._forward_pre_hooks, owner._forward_hooks):
            for number, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", None), ParameterLoRA):
                    del hooks[number]
        remove_parametrizations(owner)
        for key, tensor in updated.items():
            owner.register_parameter(key, nn.Parameter(tensor, requires_grad=False))
