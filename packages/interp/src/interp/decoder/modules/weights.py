"""Modules that share the memory of tensors with canonical names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor, nn

from interp.decoder.modules.settings import Settings

Module = TypeVar("Module", bound=nn.Module)


class UnsetLinear(nn.Linear):
    """A linear layer that skips the initialization of its weights, which are replaced later."""

    def reset_parameters(self) -> None:
        """Leave the weights unset."""


class Weights:
    """Tensors by canonical name, with a record of the names that were used."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return f"{name}.weight" in self.tensors

    def build_parameter(self, name: str) -> nn.Parameter:
        """Return a parameter that shares the memory of a tensor; raise ValueError without it."""
        if name not in self.tensors:
            names = ", ".join(sorted(self.tensors))
            raise ValueError(f"expected a tensor {name}, got only {names}; add it")
        self.used.add(name)
        return nn.Parameter(self.tensors[name].detach(), requires_grad=False)

    def build_linear(self, name: str) -> nn.Linear:
        """Return an `nn.Linear` that shares the named weight and, if it exists, the named bias."""
        out_features, in_features = self.build_parameter(f"{name}.weight").shape
        linear = UnsetLinear(in_features, out_features, bias=False, device="meta")
        return self.share_memory(name, linear)

    def build_embedding(self, name: str) -> nn.Embedding:
        """Return an `nn.Embedding` that shares the named weight."""
        return nn.Embedding.from_pretrained(self.build_parameter(f"{name}.weight"))

    def build_norm(self, name: str, settings: Settings) -> nn.Module:
        """Return the norm with this name, or an `nn.Identity` if no weight has the name."""
        if name not in self:
            return nn.Identity()
        size = len(self.build_parameter(f"{name}.weight"))
        if settings.centered:
            layer = nn.LayerNorm(size, eps=settings.eps, bias=False, device="meta")
            return self.share_memory(name, layer)
        rms_norm = nn.RMSNorm(size, eps=settings.eps, device="meta")
        # A bias stays unused, so `Decoder` raises an error for it.
        rms_norm.weight = self.build_parameter(f"{name}.weight")
        return rms_norm

    def build_stream_norm(self, name: str, settings: Settings) -> nn.Module:
        """Return a norm of the residual stream, without weights if `settings.bare_norms`."""
        if not settings.bare_norms:
            return self.build_norm(name, settings)
        d_model = self.tensors["embed.weight"].shape[1]
        if settings.centered:
            return nn.LayerNorm(d_model, eps=settings.eps, elementwise_affine=False)
        return nn.RMSNorm(d_model, eps=settings.eps, elementwise_affine=False)

    def share_memory(self, name: str, module: Module) -> Module:
        """Set the named weight and bias, if they exist, in the module; return the module."""
        for kind in ("weight", "bias"):
            if f"{name}.{kind}" in self.tensors:
                module.register_parameter(kind, self.build_parameter(f"{name}.{kind}"))
        return module
