"""Selection of a backend.  The public functions and `explain` share these rules."""

import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor

from flashattn2.backends import aten
from flashattn2.compilation import constant_in_graphs
from flashattn2.spec import AttentionSpec

BACKENDS = ("auto", "triton", "gluon", "aten", "torch")
#: Backends with Triton or Gluon kernels.  Their results have the memory layout of the inputs.
KERNEL_BACKENDS = ("triton", "gluon")
SMALLEST_HEAD_DIM = 16
LARGEST_HEAD_DIM = 256
#: True if Triton's interpreter may run bfloat16.  It computes bfloat16 products incorrectly; the
#: tests correct the product and set this to True.
ALLOW_INTERPRETED_BFLOAT16 = False
#: The smallest length for which the Gluon kernels were measured to be faster than the Triton
#: kernels.  At length 512 their backward pass was slower; no length in between was measured.
LEAST_GLUON_LENGTH = 2048


class BackendChoice(NamedTuple):
    """The selected backend and its options: the last arguments of `forward` and `backward`."""

    backend: str
    precision: str
    deterministic: bool


def select_backend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    backend: str = "auto",
    deterministic: bool = True,
    packed: bool = False,
) -> tuple[BackendChoice, str]:
    """Return the backend choice for `(batch, heads, seq, dim)` tensors, and the reason for it.

    Raise ValueError if the named backend is unknown or does not support the input.
    """
    if backend not in BACKENDS:
        raise ValueError(f"expected backend to be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "auto":
        preferred = "aten" if q.device.type == "cpu" else "triton"
        if _is_gluon_faster(q, k, v, spec, packed):
            preferred = "gluon"
        obstacle = _find_obstacle(preferred, q, k, v, spec, packed)
        backend = preferred if obstacle is None else "torch"
        reason = f"{preferred} is the preferred backend on {q.device.type}"
        if obstacle is not None:
            reason = (
                f"tiled PyTorch supports every call; the preferred backend {preferred} does not "
                f"support this one: {obstacle}"
            )
    else:
        obstacle = _find_obstacle(backend, q, k, v, spec, packed)
        reason = f'backend="{backend}" was requested'
        if obstacle is not None:
            raise ValueError(
                f'backend "{backend}" does not support this call: {obstacle}; pass '
                'backend="torch" or "auto"'
            )
    return BackendChoice(backend, _get_float32_precision(), deterministic), reason


def _is_gluon_faster(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, packed: bool) -> bool:
    """Return True if the Gluon kernels support the input and should be faster than Triton's.

    With few tiles the Triton kernels are faster, because they split the loop of a tile among SMs.
    """
    if _find_gluon_obstacle(q, v, spec, packed) is not None:
        return False
    shortest = min(q.shape[2], k.shape[2])
    tiles = q.shape[0] * k.shape[1] * (shortest // 128)
    return bool(shortest >= LEAST_GLUON_LENGTH and tiles >= _count_sms(q.device))


def _find_obstacle(
    backend: str, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, packed: bool
) -> str | None:
    """Return the reason why a backend does not support the input, or None if it does."""
    if backend == "triton":
        return _find_triton_obstacle(q, v)
    if backend == "gluon":
        return _find_gluon_obstacle(q, v, spec, packed)
    if backend == "aten":
        return aten.find_obstacle(q, k, spec, packed)
    return None


@constant_in_graphs
def _get_float32_precision() -> str:
    """Return the precision of float32 products that torch's setting selects: "ieee" or "tf32"."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _find_triton_obstacle(q: Tensor, v: Tensor) -> str | None:
    """Return the reason why the Triton kernels do not support the input, or None if they do."""
    if q.dtype == torch.float64:
        return "expected float32, bfloat16 or float16, got torch.float64"
    if q.dtype == torch.bfloat16 and q.device.type == "cpu" and not ALLOW_INTERPRETED_BFLOAT16:
        return (
            "Triton's interpreter multiplies bfloat16 bit patterns as integers; convert to float32"
        )
    for dim in (q.shape[-1], v.shape[-1]):
        if dim > LARGEST_HEAD_DIM:
            return f"expected head_dim <= {LARGEST_HEAD_DIM}, got head dim {dim}"
        if dim < SMALLEST_HEAD_DIM or dim % 8:
            return (
                f"expected a multiple of 8 from {SMALLEST_HEAD_DIM} to {LARGEST_HEAD_DIM}, got "
                f"head dim {dim}"
            )
    obstacle: str | None = _find_triton_device_obstacle(q.device)
    return obstacle


def _find_gluon_obstacle(q: Tensor, v: Tensor, spec: AttentionSpec, packed: bool) -> str | None:
    """Return the reason why the Gluon kernels do not support the input, or None if they do."""
    if packed:
        return "it has packed sequences or a cache"
    if spec.softcap:
        return "it has a softcap"
    if q.element_size() != 2:
        return f"expected bfloat16 or float16, got {q.dtype}"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] not in (64, 128):
        return (
            f"expected head dims of 64 or 128, equal for q and v, got {q.shape[-1]} and "
            f"{v.shape[-1]}"
        )
    obstacle: str | None = _find_gluon_device_obstacle(q.device)
    return obstacle


# The following results are constants in a compiled graph, because it is compiled for one machine.
@constant_in_graphs
def _find_gluon_device_obstacle(device: torch.device) -> str | None:
    """Return the reason why Gluon kernels cannot run on a device, or None if they can."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
        obstacle: str | None = _find_triton_device_obstacle(device)
        return obstacle
    return f"expected an NVIDIA GPU of compute capability 9.0, got {device}"


@constant_in_graphs
def _count_sms(device: torch.device) -> int:
    """Return the number of streaming multiprocessors (SMs) of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@constant_in_graphs
def _find_triton_device_obstacle(device: torch.device) -> str | None:
    """Return the reason why Triton kernels cannot run on a device, or None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if torch.version.hip is not None:
        return "the kernels were never compiled for ROCm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return None if major >= 8 else f"compute capability {major}.{minor} is below 8.0"
    import triton

    if device.type == "cpu" and triton.knobs.runtime.interpret:
        return None
    return f"expected CUDA tensors, or TRITON_INTERPRET=1 for the interpreter, got {device}"
