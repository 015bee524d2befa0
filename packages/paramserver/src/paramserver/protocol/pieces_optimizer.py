"""The optimizer of one server, which stores pieces of the parameters.

An optimizer that uses whole tensors, norms or groups would give different updates for pieces. Such
an optimizer raises an error before training starts.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from paramserver.optimizers import OptimizerFactory, Updater, format_group_options
from paramserver.partition import Piece

#: Optimizers that update each element independently of the other elements of its tensor.
_ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop,
    torch.optim.Rprop, torch.optim.ASGD,
)  # fmt: skip


def build_pieces_updater(
    factory: OptimizerFactory,
    targets: Sequence[nn.Parameter],
    pieces: Sequence[Piece],
    parameters: Mapping[str, Tensor],
    *,
    servers: int,
    fragments: int,
) -> Updater:
    """Return the updater of the pieces that a server stores in the memory of `targets`.

    Raises:
        ValueError: the updates would differ from the updates of whole parameters, or `groups`
            matches no parameter.
    """
    updater = Updater(factory, targets, [piece.name for piece in pieces], parameters)
    updater.spec.check_groups(parameters)
    is_local = any(hasattr(parameter, "to_local") for parameter in parameters.values())
    if updater.spec.max_norm is not None and (is_local or fragments > 1):
        part = "a rank's shards" if is_local else f"{fragments} fragments"
        raise ValueError(
            "expected updates of all parameters with max_norm, because it limits their common "
            f"norm, got {part}; pass one fragment and parameters that FSDP has not sharded, or "
            "pass max_norm=None and call torch.nn.utils.clip_grad_norm_ on each worker before "
            "`push`, which limits the norm of each worker's gradients"
        )
    _require_elementwise(pieces, parameters, updater.optimizer)
    if is_local or servers > 1 or fragments > 1:
        _require_no_hooks(updater.optimizer)
    is_part = len(pieces) < len(parameters) or any(p.view_shape != p.shape for p in pieces)
    if is_part and not updater.spec.groups:
        _require_options_of_whole(updater, parameters.values())
    return updater


def _require_no_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raise `ValueError` if hooks or a replaced `step` may require all gradients."""
    # A scheduler replaces `step` with a wrapper that has this attribute and only counts calls.
    is_replaced = "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
    hooks = (*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks)
    if is_replaced or hooks:
        raise ValueError(
            "expected an optimizer without step hooks and with the `step` of its class, because "
            "each update uses a part of the gradients and other code may need all of them; pass "
            "servers=1 and one fragment, or change the gradients on each worker before `push`"
        )


def _require_options_of_whole(updater: Updater, parameters: Iterable[Tensor]) -> None:
    """Raise `ValueError` if the factory makes several groups or other options for the model."""
    # Expanded scalars have the shapes of the parameters without their memory.
    whole = [nn.Parameter(p.detach().new_zeros(()).expand(p.shape)) for p in parameters]
    optimizer = updater.spec.optimizer(whole)
    groups = optimizer.param_groups
    # Unlike the group's options, the defaults are not changed by a schedule.
    options = format_group_options(updater.optimizer.defaults)
    expected = format_group_options(optimizer.defaults)
    if len(groups) > 1 or options != expected:
        raise ValueError(
            "expected one parameter group, with the same options for every part of the parameters, "
            f"because each server stores a part, got {', '.join(options)} for a part and "
            f"{', '.join(expected)} in {len(groups)} groups for all of them; pass options that do "
            "not depend on the parameters, or OptimizerSpec(groups=...), which groups parameters "
            "by name and shape"
        )


def _require_elementwise(
    pieces: Sequence[Piece], parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """Raise `ValueError` if a tensor is split and the optimizer may need all of its elements."""
    kind = type(optimizer)
    # torch wraps the `step` of a class when the first optimizer of the class is created.
    steps = {inspect.unwrap(elementwise.step) for elementwise in _ELEMENTWISE}
    if inspect.unwrap(kind.step) in steps or getattr(kind, "elementwise", False):
        return
    for piece in pieces:
        if piece.view_shape != parameters[piece.name].shape:
            raise ValueError(
                f"expected an elementwise optimizer, because {piece.name} is split, got "
                f"{kind.__name__}; pass servers=1 and one fragment, or "
                f"set {kind.__name__}.elementwise = True if it uses no other elements of a tensor"
            )
