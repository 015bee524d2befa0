"""Fixtures: without a GPU, the Triton kernels run in Triton's interpreter on CPU tensors."""

import functools
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

# Helper modules are importable by name.
sys.path.append(str(Path(__file__).parent))

# Triton reads this when a kernel is defined, so it is set before any test file is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


@pytest.fixture
def interpreter(monkeypatch):
    """Use small tiles in the interpreter, so that short sequences need many of them.

    Returns a function that sets the choices of a GPU: the splits, and TMA or pointers.
    """
    from flashattn2 import dispatch
    from flashattn2.kernels import configs, launch
    from triton.runtime import interpreter as of_triton

    if torch.cuda.is_available():
        pytest.skip("the interpreter is off if there is a GPU; test_gpu.py runs the kernels")
    monkeypatch.setattr(dispatch, "ALLOW_INTERPRETED_BFLOAT16", True)
    builder = of_triton.InterpreterBuilder
    monkeypatch.setattr(builder, "create_dot", _dot_as_a_gpu_does)
    monkeypatch.setattr(builder, "cast_impl", _cast_as_a_gpu_does(builder.cast_impl))
    # Overflow checks only matter in debug mode, and take two fifths of the time.
    unchecked = of_triton.InterpreterOptions(sanitize_overflow=False)
    monkeypatch.setattr(of_triton.interpreter_builder, "options", unchecked)
    # Every call inside a kernel would patch triton.language again, which takes half of the time.
    patch_once = functools.cache(of_triton._patch_lang)

    def call(function, *args, **kwargs):
        patch_once(function.fn)
        return function.rewrite()(*args, **kwargs)

    monkeypatch.setattr(of_triton.InterpretedFunction, "__call__", call)

    def use(*, splits=1, tma=True):
        def choose(*arguments):
            return configs.TileConfig(16, 32, 4, 1), "tma" in arguments[4]

        monkeypatch.setattr(launch, "choose_tile", choose)
        monkeypatch.setattr(launch, "count_splits", lambda *_: splits)
        paths = launch.HOPPER if tma else launch.AMPERE
        monkeypatch.setattr(launch, "get_device", lambda _: launch.Device(227 * 1024, 1, paths))

    use()
    return use


def _dot_as_a_gpu_does(self, a, b, d, *precision):
    """Compute a product by consecutive float32 multiply-adds, with equal bits for q k and k q.

    The interpreter multiplies bfloat16 bit patterns as integers, and sums in an order that depends
    on the layout, so recomputed scores would differ from those of the forward pass.
    """
    from triton.runtime.interpreter import TensorHandle

    # A product of two float32 numbers is exact in float64, and is rounded only in the sum.
    left, right = _as_float32(a).astype(np.float64), _as_float32(b).astype(np.float64)
    total = d.data.astype(np.float32)
    for product in left.T[:, :, None] * right[:, None, :]:
        np.add(total, product, out=total, casting="same_kind")
    return TensorHandle(total, d.dtype.scalar)


def _cast_as_a_gpu_does(cast_impl):
    """Return a cast that rounds to the nearest bfloat16, where the interpreter truncates."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def cast(self, handle, to):
        if handle.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return cast_impl(self, handle, to)
        # torch rounds as a GPU does.
        wide = torch.from_numpy(np.ascontiguousarray(handle.data, dtype=np.float32))
        bits = wide.bfloat16().view(torch.int16).numpy().view(np.uint16)
        return TensorHandle(bits, tl.bfloat16)

    return cast


def _as_float32(handle):
    import triton.language as tl

    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def pytest_collection_modifyitems(items):
    """Ignore warnings that torch 2.11 and triton 3.6 raise in their code."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for message in ("Conversion of an array with ndim > 0", ".torch.jit.script"):
                mark = pytest.mark.filterwarnings(f"ignore:{message}:DeprecationWarning")
                item.add_marker(mark)
