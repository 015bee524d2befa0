"""Which implementation runs, and why; the public functions ask here and so does `explain`."""

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashattn2 import aten
from flashattn2.problem import LARGEST_HEAD_DIM, SMALLEST_HEAD_DIM, Score

BACKENDS = ("auto", "triton", "gluon", "aten", "torch")
# Those whose results have the layout of their inputs.
OF_TRITON = ("triton", "gluon")
PRECISIONS = ("ieee", "tf32x3", "tf32")


def _constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compiler.assume_constant_result`, which would import the compiler to set this mark."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class Method(NamedTuple):
    """Which implementation runs, and how: the last arguments of both operators."""

    backend: str
    precision: str
    deterministic: bool
    split_size: int = 0
    max_logits: bool = False


class Choice(NamedTuple):
    """A method, and the rule that chose it."""

    method: Method
    reason: str


def choose(
    q: Tensor, k: Tensor, v: Tensor, score: Score, *, backend: str = "auto",
    precision: str | None = None, deterministic: bool = True, packed: bool = False,
    split_size: int | None = None, max_logits: bool = False,
) -> Choice:  # fmt: skip
    """The method for ``(batch, heads, seq, dim)``; ValueError if the named backend cannot."""
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not one of {', '.join(BACKENDS)}")
    if precision is None:
        precision = _torch_s_precision()
    elif precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r} is not one of {', '.join(PRECISIONS)}")
    preferred = backend
    if backend == "auto":
        preferred = "aten" if q.device.type == "cpu" else "triton"
    obstacle = None
    if preferred == "triton":
        obstacle = _why_not_triton(q, v)
    elif preferred == "gluon":
        obstacle = _why_not_gluon(q, v, score, packed, max_logits)
    elif preferred == "aten":
        obstacle = aten.why_not(q, k, score, packed, max_logits)
    if backend == "auto":
        backend = preferred if obstacle is None else "torch"
        reason = f"{preferred} first on {q.device.type}"
        if obstacle is not None:
            reason = f"tiled PyTorch takes everything; {preferred} cannot take this: {obstacle}"
    else:
        reason = f'backend="{backend}" was asked for'
        if obstacle is not None:
            raise ValueError(
                f'backend "{backend}" cannot take this: {obstacle}; use backend="torch" or "auto"'
            )
    if split_size is not None:
        _check_split_size(split_size, backend)
    method = Method(backend, precision, deterministic, split_size or 0, max_logits)
    return Choice(method, reason)


def _check_split_size(split_size: int, backend: str) -> None:
    if not isinstance(split_size, int) or isinstance(split_size, bool) or split_size < 1:
        raise ValueError(
            f"split_size {split_size!r} is the number of keys of a split; give an int of at least "
            "1, or None to split as the GPU needs it"
        )
    if backend != "triton":
        raise ValueError(
            f'split_size {split_size} is for the Triton kernels, and backend "{backend}" would '
            "run; leave it out here"
        )


@_constant
def _torch_s_precision() -> str:
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _why_not_triton(q: Tensor, v: Tensor) -> str | None:
    if q.dtype == torch.float64:
        return "the Triton kernels have no float64"
    if (
        q.dtype == torch.bfloat16
        and q.device.type == "cpu"
        and not _is_interpreted_bfloat16_right()
    ):
        return (
            "Triton's interpreter multiplies bfloat16 bit patterns as integers; convert to float32"
        )
    for dim in (q.shape[-1], v.shape[-1]):
        if dim > LARGEST_HEAD_DIM:
            return f"head dim {dim} is above {LARGEST_HEAD_DIM}, the largest that they take"
        if dim < SMALLEST_HEAD_DIM or dim % 8:
            return (
                f"head dim {dim} is not a multiple of 8 from {SMALLEST_HEAD_DIM} "
                f"to {LARGEST_HEAD_DIM}, which the Triton kernels need"
            )
    obstacle: str | None = _why_no_triton_on(q.device)
    return obstacle


def _why_not_gluon(
    q: Tensor, v: Tensor, score: Score, packed: bool, max_logits: bool
) -> str | None:
    if packed:
        return "it takes neither packed sequences nor a cache"
    if score.softcap:
        return "it has no softcap"
    if max_logits:
        return "it does not keep the largest scores"
    if q.element_size() != 2:
        return f"it is for bfloat16 and float16, not {q.dtype}"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] not in (64, 128):
        return (
            f"it is for head dims 64 and 128, the values' too, not {q.shape[-1]} and {v.shape[-1]}"
        )
    obstacle: str | None = _why_no_gluon_on(q.device)
    return obstacle


@_constant
def _why_no_gluon_on(device: torch.device) -> str | None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
        obstacle: str | None = _why_no_triton_on(device)
        return obstacle
    return f"it is for GPUs of compute capability 9.0; got {device}"


@_constant
def _is_interpreted_bfloat16_right() -> bool:
    """Return True unless Triton's interpreter is on and computes 1 · 1 wrongly in bfloat16."""
    if importlib.util.find_spec("triton") is None:
        return True
    import numpy as np
    import triton
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    if not triton.knobs.runtime.interpret:
        return True
    one = TensorHandle(np.full((1, 1), 0x3F80, np.uint16), tl.bfloat16)
    zero = TensorHandle(np.zeros((1, 1), np.float32), tl.float32)
    product = interpreter_builder.create_dot(one, one, zero, None, 0)
    return bool(product.data.item() == 1.0)


# A graph is compiled for the machine it is compiled on.
@_constant
def _why_no_triton_on(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"compute capability {major}.{minor} is below 8.0" if major < 8 else None
    import triton

    if device.type == "cpu" and triton.knobs.runtime.interpret:
        return None
    return f"it needs CUDA tensors, or TRITON_INTERPRET=1 for the interpreter; got {device}"
