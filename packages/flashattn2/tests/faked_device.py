"""A device that this machine lacks: tensors report it and are computed on the CPU."""

import contextlib
from unittest import mock

import torch
from flashattn2.kvcache.operators import append_op, decode_op
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_aten = torch.ops.aten
#: Operators whose Python code sees the faked tensors.
OPERATORS = {
    torch.ops.flashattn2.decode.default: decode_op,
    torch.ops.flashattn2.append.default: append_op,
}


class FakedTensor(torch.Tensor):
    """A tensor that reports a device and wraps its values on the CPU."""

    @staticmethod
    def __new__(cls, values, device):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=device,
        )

    def __init__(self, values, device):
        self.on_cpu = values

    def data_ptr(self):
        return self.on_cpu.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} ran outside of faked_device")


@contextlib.contextmanager
def faked_device(name):
    """Compute on the CPU for a GPU without Triton; with the name "cpu", do nothing.

    Like MPS, the GPU has neither float64 nor device-side assertions.  It is named "cuda" because
    torch has guards for no other device that is absent.
    """
    torch._C._ensureCUDADeviceGuardSet()
    with contextlib.ExitStack() as stack:
        if name != "cpu":
            for target in ("torch.cuda._lazy_init", "importlib.util.find_spec"):
                stack.enter_context(mock.patch(target, return_value=None))
        yield stack.enter_context(FakedDevice(name))


class FakedDevice(TorchDispatchMode):
    """The mode of `faked_device`."""

    def __init__(self, device):
        super().__init__()
        self.device = torch.device(device)

    def to_device(self, x):
        """Return a copy of a CPU tensor on the faked device."""
        return x if self.device.type == "cpu" else FakedTensor(x.clone(), self.device)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in OPERATORS:
            with self:
                return OPERATORS[func]._init_fn(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        target = kwargs.get("device")
        is_faked = any(isinstance(x, FakedTensor) for x in leaves) and target is None
        if target is not None and torch.device(target).type == self.device.type != "cpu":
            kwargs["device"] = "cpu"
            is_faked = True
        if is_faked and func is _aten._assert_async.msg:
            raise NotImplementedError(f"{func} is not implemented for {self.device}")
        args, kwargs = tree_map(_unwrap, (args, kwargs))
        result = func(*args, **kwargs)
        return tree_map(self._wrap, result) if is_faked else result

    def _wrap(self, x):
        if not isinstance(x, torch.Tensor):
            return x
        if x.dtype == torch.float64:
            raise TypeError(f"{self.device} has no float64")
        return FakedTensor(x, self.device)


def _unwrap(x):
    return x.on_cpu if isinstance(x, FakedTensor) else x
