"""Every function of torch on a sharded gradient or parameter: the whole result, or an error."""

import inspect
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from worker_pool import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

from zero.gradients.reductions import PartialGradient
from zero_training import build_pair, compute_mean_square

#: Values that describe the tensor that this rank stores, or change what a tensor is.
NOT_COMPARED = {
    "__class__", "__cuda_array_interface__", "__delattr__", "__dict__", "__dir__", "__dlpack__",
    "__dlpack_device__", "__doc__", "__format__", "__getattribute__", "__hash__", "__init__",
    "__init_subclass__", "__len__", "__module__", "__new__", "__reduce__", "__reduce_ex__",
    "__repr__", "__setattr__", "__setstate__", "__sizeof__", "__str__", "__subclasshook__",
    "__torch_dispatch__", "__torch_function__", "__weakref__", "_base", "_cdata", "_dimI", "_dimV",
    "_version", "align_as", "align_to", "apply_", "as_subclass", "backward", "const_data_ptr",
    "data_ptr", "dense_dim", "detach_", "device", "dim", "dtype", "element_size", "empty_like",
    "empty_permuted", "get_device", "grad", "grad_fn", "is_contiguous", "is_inference", "is_leaf",
    "is_pinned", "is_same_size", "is_set_to", "is_shared", "is_signed", "itemsize", "layout",
    "map2_", "map_", "module_load", "names", "nbytes", "ndim", "ndimension", "new",
    "new_empty", "new_empty_strided", "output_nr", "pin_memory", "record_stream",
    "refine_names", "register_hook", "register_post_accumulate_grad_hook", "reinforce", "rename",
    "rename_", "requires_grad", "requires_grad_", "resize", "resize_", "resize_as", "resize_as_",
    "retain_grad", "retains_grad", "set_", "shape", "share_memory_", "size", "sparse_dim",
    "storage", "storage_offset", "stride", "unflatten", "untyped_storage", "_is_view",
    "_reduce_ex_internal", "has_torch_function_unary", "has_torch_function_variadic",
}  # fmt: skip
#: Functions that copy this rank's elements, because torch does not pass them to subclasses: see the
#: README's limits.
COPIES_ELEMENTS = {"torch.tensor", "Tensor.new_tensor"}
ARGUMENTS = {
    "alone": lambda x: ((), {}),
    "itself": lambda x: ((x.clone(),), {}),
    "number": lambda x: ((2,), {}),
    "dimension": lambda x: ((), {"dim": 0}),
    "two numbers": lambda x: ((-0.1, 0.1), {}),
    "condition": lambda x: ((x > 0, 0.5), {}),
}


def list_functions():
    """Return the methods of tensors, and the functions of torch that take one tensor or more."""
    named = {}
    for space in (torch.Tensor, torch, torch.linalg, torch.special, F, nn.init):
        for name in dir(space):
            function = getattr(space, name, None)
            is_class = inspect.isclass(function) or inspect.ismodule(function)
            if name in NOT_COMPARED or not callable(function) or is_class:
                continue
            if space is torch.Tensor or not name.startswith("_"):
                named[f"{space.__name__}.{name}"] = function
    return named


def get_outcome(function, value, arguments):
    """Return a function's result and its argument afterwards, both in full; None if it fails."""
    torch.manual_seed(0)
    value = value.clone()
    args, kwargs = arguments(value)
    try:
        result = function(value, *args, **kwargs)
    except Exception:
        return None
    return get_whole(result), get_whole(value)


def get_whole(value):
    if isinstance(value, PartialGradient) or (
        type(value).__name__ == "Shard" and hasattr(value, "full_tensor")
    ):
        return value.full_tensor().detach()
    if isinstance(value, list | tuple):
        return tuple(get_whole(entry) for entry in value)
    return value.detach() if isinstance(value, torch.Tensor) else value


def differ(ours, theirs):
    """Return True if two results differ."""
    if isinstance(theirs, tuple):
        return not isinstance(ours, tuple) or any(map(differ, ours, theirs))
    if not isinstance(theirs, torch.Tensor | int | float):
        return False
    if not isinstance(theirs, torch.Tensor):
        return ours != theirs
    if not isinstance(ours, torch.Tensor) or ours.dtype != theirs.dtype:
        return True
    if theirs.layout != torch.strided:
        ours, theirs = ours.to_dense(), theirs.to_dense()
    is_alike = ours.shape == theirs.shape
    return not (is_alike and torch.allclose(ours, theirs, rtol=1e-9, equal_nan=True))


def compare(stage):
    model, _, twin, _ = build_pair(stage)
    inputs = torch.linspace(-1, 1, 20, dtype=torch.float64).view(4, 5)
    for module in (model, twin):
        compute_mean_square(module, inputs).backward()
    wrong = []
    tested = 0
    ours = list(model.parameters())
    theirs = list(twin.parameters())
    tensors = {"gradient": (ours[0].grad, theirs[0].grad), "vector": (ours[1].grad, theirs[1].grad)}
    with torch.no_grad():
        for label, (part, full) in tensors.items():
            for name, function in list_functions().items():
                if name in COPIES_ELEMENTS:
                    continue
                for form, arguments in ARGUMENTS.items():
                    expected = get_outcome(function, full, arguments)
                    if expected is None:
                        continue
                    actual = get_outcome(function, part, arguments)
                    tested += actual is not None
                    if actual is not None and differ(actual, expected):
                        wrong.append((label, name, form))
    return wrong, tested


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.filterwarnings("ignore")
def test_every_function_of_torch_is_right_on_sharded_gradients_or_raises(stage):
    for wrong, tested in run_ranks(compare, 2, stage, timeout=900.0):
        assert not wrong
        assert tested > 200
