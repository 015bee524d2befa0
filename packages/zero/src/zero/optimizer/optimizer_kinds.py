"""The split of each optimizer over ranks: known for torch's classes, verified for custom classes.

Note [Which optimizers are split by element]
Tensors are split only for the classes in `ELEMENTWISE` and for classes that the caller declares
element-wise. No trial can prove that an unknown optimizer never uses a whole tensor: it may do so
after the thousandth step. For any other class, one rank steps each whole parameter, at all stages.
A trial can only find a reason to reject an optimizer. Examples are a step on one parameter that
depends on other parameters, and a class that was declared element-wise by mistake.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from zero.optimizer.optimizer_trial import Optimizer, Trial, advise_retraction

Split = Literal["elements", "parameters"]

#: Classes whose tensors are split. Subclasses are not included: they may override any method.
ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax,
        torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adagrad, torch.optim.Adadelta,
        torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
    }
)  # fmt: skip
WHOLE_PARAMETERS: frozenset[type[Optimizer]] = frozenset({torch.optim.Adafactor, torch.optim.Muon})
REFUSED: dict[type[Optimizer], str] = {
    torch.optim.LBFGS: "it treats all parameters as one vector; use it unsharded",
    torch.optim.SparseAdam: "it needs sparse gradients, and gradients are averaged densely; use "
    "Adam, with nn.Embedding(..., sparse=False)",
}


def choose_split(
    cls: type[Optimizer],
    options: Mapping[str, Any],
    device: torch.device | None = None,
    *,
    elementwise: bool | None = None,
    group: Mapping[str, Any] | None = None,
    shapes: Iterable[Sequence[int]] = (),
    dtypes: Iterable[torch.dtype] = (),
    as_columns: bool = False,
    make: Callable[..., Optimizer] | None = None,
) -> Split:
    """Return how to split the tensors of `cls(params, **options)` over ranks.

    "elements" splits tensors at arbitrary elements, "parameters" assigns each whole parameter to
    one rank. Raise ValueError if the optimizer cannot be sharded. A trial checks classes that are
    not listed in this module, unless `elementwise` is False.

    device: the device of a trial; by default, the CPU.
    elementwise: see `ShardedOptimizer`.
    group, shapes, dtypes: the options of one parameter group, and the shapes and dtypes of its
        parameters.
    as_columns: construct the optimizer of a trial on columns of elements, as at stage 3.
    make: a function that constructs the optimizer; by default, `cls`.
    """
    if cls in REFUSED:
        raise ValueError(f"{cls.__name__} cannot be sharded: {REFUSED[cls]}")
    if cls in ELEMENTWISE and elementwise is not False:
        return "elements"
    if cls in WHOLE_PARAMETERS and not elementwise:
        return "parameters"
    if cls in WHOLE_PARAMETERS:
        remedy = advise_retraction(cls.__name__, as_columns)
        raise ValueError(f"{cls.__name__} is not element-wise: {remedy}")
    if elementwise is False:
        return "parameters"
    shape_list = [tuple(shape) for shape in shapes]
    trial = Trial(cls, make or cls, options, group or {}, as_columns)
    cuda_devices = [device.index or 0] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(cuda_devices), torch.device(device or "cpu"):
        if elementwise:
            trial.check_elements(shape_list)
        else:
            trial.check_parameters(shape_list)
        trial.check_dtypes(dtypes)
    return "elements" if elementwise else "parameters"


def read_constructor_options(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's constructor arguments, read from its group, defaults and attributes.

    Raise ValueError if the value of an argument cannot be found, or if other arguments, such as
    `**kwargs`, may have set attributes.
    """
    options: dict[str, Any] = {}
    cls = type(optimizer)
    has_further_arguments = False
    for name, parameter in list(inspect.signature(cls.__init__).parameters.items())[2:]:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            has_further_arguments = True
            continue
        if name in group:
            options[name] = group[name]
        elif name in optimizer.defaults:
            options[name] = optimizer.defaults[name]
        elif name in vars(optimizer):
            options[name] = vars(optimizer)[name]
        else:
            raise _make_unverifiable_error(
                cls, f"its argument {name} is neither an option of its groups nor an attribute"
            )
    if has_further_arguments:
        _check_further_arguments(optimizer, group, options)
    return options


def _check_further_arguments(
    optimizer: Optimizer, group: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Raise ValueError unless `group` and `options` reconstruct the optimizer's attributes.

    They do not if an argument that the signature does not name has set an attribute.
    """
    cls = type(optimizer)
    probe_parameter = nn.Parameter(torch.zeros(1, 1, device="cpu"))
    try:
        rebuilt = vars(cls([{**group, "params": [probe_parameter]}], **options))
    except Exception as error:
        raise _make_unverifiable_error(
            cls, f"constructing it from its options and attributes fails ({error})"
        ) from error
    for name, value in vars(optimizer).items():
        is_plain = isinstance(value, str | int | float)
        # Schedulers of torch add private attributes.
        is_argument = name in rebuilt or not name.startswith("_")
        if is_plain and is_argument and rebuilt.get(name) != value:
            raise _make_unverifiable_error(
                cls,
                f"its attribute {name} is {value!r}, but {rebuilt.get(name)!r} if the optimizer is "
                "constructed without the arguments that its signature does not name",
            )


def _make_unverifiable_error(cls: type[Optimizer], reason: str) -> ValueError:
    return ValueError(
        f"{cls.__name__} cannot be verified on FSDP's shards: {reason}; name each argument in the "
        "signature and store it unchanged under its name, or use ShardedOptimizer (stages 1 and "
        "2), which constructs the optimizer itself"
    )


def check_constructed(optimizer: Optimizer) -> None:
    """Raise ValueError if an optimizer has not called the constructor of its base class."""
    if not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
        raise ValueError(
            f"{type(optimizer).__name__} cannot be sharded: it wraps another optimizer and does "
            "not call torch.optim.Optimizer.__init__; use the wrapped optimizer"
        )
