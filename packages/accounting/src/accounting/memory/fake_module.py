"""A copy of a module on fake tensors, which have shapes and dtypes but no memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class FakeTensors:
    """Fake copies of real tensors; they share storages if the real tensors do."""

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        self.copies: list[Tensor] = []
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._storages: dict[int, Tensor] = {}

    def convert(self, tensor: Tensor) -> Tensor:
        """Return the fake copy of a tensor; the same tensor has the same copy."""
        if id(tensor) not in self._copies:
            # Keep the real tensor alive, because otherwise another tensor could get its id.
            self._copies[id(tensor)] = tensor, self._make_fake(tensor)
            self.copies.append(self._copies[id(tensor)][1])
        return self._copies[id(tensor)][1]

    def forget(self) -> None:
        """Drop references to the copies, so that the module alone keeps them alive."""
        self.copies.clear()
        self._copies.clear()
        self._storages.clear()

    def _make_fake(self, tensor: Tensor) -> Tensor:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        if not plain or tensor.is_quantized or tensor.is_nested:
            raise ValueError(
                f"expected plain dense tensors, got {type(tensor).__name__} of layout "
                f"{tensor.layout}; use Ledger around a real step"
            )
        with self.mode:
            flat = self._get_storage(tensor)
            elements = flat[: flat.numel() // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
            copy_of_tensor = elements.as_strided(
                tensor.shape, tensor.stride(), tensor.storage_offset()
            )
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(copy_of_tensor, requires_grad=tensor.requires_grad)
            return copy_of_tensor.requires_grad_(tensor.requires_grad and tensor.is_leaf)

    def _get_storage(self, tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in self._storages:
            # A fake tensor on the meta device would use other kernels than one on the CPU.
            device = "cpu" if tensor.device.type == "meta" else str(tensor.device)
            nbytes = tensor.untyped_storage().nbytes()
            self._storages[key] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._storages[key]


class _FakeCopies(TorchFunctionMode):
    """A mode in which `copy.deepcopy` replaces each tensor by its fake copy."""

    def __init__(self, fakes: FakeTensors) -> None:
        super().__init__()
        self.fakes = fakes

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return the fake copy of a tensor that is copied or cloned; otherwise run the function."""
        # `nn.Parameter` is copied by cloning its data.
        if func in (Tensor.__deepcopy__, Tensor.clone):
            return self.fakes.convert(args[0])
        return func(*args, **(kwargs or {}))


def copy_with(fakes: FakeTensors, module: nn.Module) -> nn.Module:
    """Return a copy of `module` in which all tensors are fake.

    Raises `ValueError` if the module cannot be copied, has tensors that are not dense, or has
    hooks.
    """
    memo = {id(tensor): fakes.convert(tensor) for tensor in module.parameters()}
    _refuse_hooks(module)
    with _FakeCopies(fakes):
        try:
            return copy.deepcopy(module, memo)
        except (TypeError, RuntimeError) as error:
            raise ValueError(
                f"{type(module).__name__} cannot be copied ({error}); use Ledger around a real step"
            ) from error


def _refuse_hooks(module: nn.Module) -> None:
    """Raise `ValueError` for hooks, which a copy of the module would lose or share with it."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"{name} has hooks on its gradient, which a copy cannot run; use Ledger around a "
                "real step"
            )
    for name, part in module.named_modules():
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        if any(getattr(part, kind) for kind in kinds):
            raise ValueError(
                f"{name or type(part).__name__} has hooks, which a copy would share; remove them, "
                "or use Ledger around a real step"
            )
