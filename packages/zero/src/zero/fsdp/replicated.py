"""Parameters that stage 3 does not shard: every rank has them in full, as under DDP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from zero.fsdp.autograd_hooks import cast
from zero.gloo_collectives import Work
from zero.process_groups import Communicator


class ReplicatedParameters:
    """Parameters whose gradients are all-reduced when backward ends, in one tensor per dtype."""

    def __init__(self, communicator: Communicator, parameters: list[nn.Parameter]) -> None:
        self.communicator = communicator
        self.parameters = parameters

    def start_reduce(self) -> list[Callable[[], None]]:
        """Start summing the gradients; return functions that wait and assign the averages."""
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            if parameter.requires_grad:
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
        wait_functions: list[Callable[[], None]] = []
        for parameters in by_dtype.values():
            gradients = []
            for parameter in parameters:
                gradient = parameter.grad
                if gradient is None:
                    gradient = torch.zeros_like(parameter)
                gradients.append(gradient.reshape(-1))
            flat = torch.cat(gradients)
            self.communicator.divide_before_sum(flat)
            used_anywhere = self.communicator.any_across_ranks(
                [p.grad is not None for p in parameters]
            )
            work = self.communicator.all_reduce_gradient(flat)
            wait_functions.append(
                partial(self._finish_reduce, parameters, flat, work, used_anywhere)
            )
        return wait_functions

    def _finish_reduce(
        self,
        parameters: list[nn.Parameter],
        flat: Tensor,
        work: Work,
        used_anywhere: Callable[[], list[list[bool]]],
    ) -> None:
        work.wait()
        self.communicator.divide_after_sum(flat, flat.dtype)
        start = 0
        for parameter, is_used in zip(parameters, used_anywhere()[0], strict=True):
            part = flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
            if is_used and parameter.grad is None:
                parameter.grad = part.clone()
            elif is_used and parameter.grad is not None:
                parameter.grad.copy_(part)

    def keep_dtype(self, root: nn.Module) -> None:
        """Cast inputs of leaf modules with replicated parameters to the parameters' dtype."""
        replicated = set(self.parameters)
        for module in root.modules():
            parameters = [p for p in module._parameters.values() if p in replicated]
            if parameters and not list(module.children()):
                dtype = parameters[0].dtype
                module.register_forward_pre_hook(
                    lambda _, args, kwargs, dtype=dtype: cast(dtype, (args, kwargs)),
                    with_kwargs=True,
                )
