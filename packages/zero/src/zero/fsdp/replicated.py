"""What stage 3 does not shard: parameters that every rank holds whole, as under DDP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from zero.direct import Work
from zero.fsdp.marks import cast
from zero.wire import Wire


class Replicated:
    """Parameters whose gradients are all-reduced, one flat tensor a dtype, when backward ends."""

    def __init__(self, wire: Wire, parameters: list[nn.Parameter]) -> None:
        self.wire = wire
        self.parameters = parameters

    def start(self) -> list[Callable[[], None]]:
        """Begin to sum the gradients; call what is returned to have their averages in `.grad`."""
        kinds: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            if parameter.requires_grad:
                kinds.setdefault(parameter.dtype, []).append(parameter)
        waits: list[Callable[[], None]] = []
        for parameters in kinds.values():
            flat = torch.cat(
                [
                    (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1)
                    for p in parameters
                ]
            )
            anywhere = self.wire.any([p.grad is not None for p in parameters])
            work = self.wire.all_reduce_gradient(flat)
            waits.append(partial(self._finish, parameters, flat, work, anywhere))
        return waits

    def _finish(
        self,
        parameters: list[nn.Parameter],
        flat: Tensor,
        work: Work,
        anywhere: Callable[[], list[bool]],
    ) -> None:
        work.wait()
        flat /= self.wire.copies
        start = 0
        for parameter, some in zip(parameters, anywhere(), strict=True):
            part = flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
            if some and parameter.grad is None:
                parameter.grad = part.clone()
            elif some and parameter.grad is not None:
                parameter.grad.copy_(part)

    def keep_dtype(self, root: nn.Module) -> None:
        """Let modules whose own parameters these are compute in the parameters' dtype."""
        mine = set(self.parameters)
        for module in root.modules():
            own = [p for p in module._parameters.values() if p in mine]
            if own and not list(module.children()):
                dtype = own[0].dtype
                module.register_forward_pre_hook(
                    lambda _, args, kwargs, dtype=dtype: cast(dtype, (args, kwargs)),
                    with_kwargs=True,
                )
