"""Validation of the tensors of an attention call."""

import torch
from torch import Tensor

#: Tensor types without overridden behavior.  A subclass may override any property or method.
PLAIN_TYPES = (Tensor, torch.nn.Parameter)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise an error unless q, k, v match as `(batch, heads, seq, dim)` or `(batch, seq, dim)`."""
    check_tensors(q=q, k=k, v=v)
    if q.dim() not in (3, 4):
        raise ValueError(
            f"expected q to be (batch, heads, seq, dim) or (batch, seq, dim), got {q.dim()} "
            f"dimensions, shape {tuple(q.shape)}"
        )
    check_matching(q, k, v)
    if q.shape[0] != k.shape[0]:
        raise ValueError(
            f"expected one batch size, got batch {q.shape[0]} for q and {k.shape[0]} for k; "
            "expand() repeats a tensor without a copy"
        )
    if q.dim() == 4:
        check_heads(q.shape[1], k.shape[1])


def check_varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
    """Raise an error unless the tensors are `(total, heads, dim)` with matching `cu_seqlens`.

    The values of the boundaries are checked by the operators: see `check_boundaries`.
    """
    if q.dim() != 3:
        raise ValueError(f"expected q to be (total, heads, dim), got shape {tuple(q.shape)}")
    check_matching(q, k, v)
    check_heads(q.shape[1], k.shape[1])
    check_int32("cu_seqlens_q", cu_q, ("sequences + 1",), q)
    check_int32("cu_seqlens_k", cu_k, ("sequences + 1",), q)
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            f"expected the same number of sequences, got {cu_q.shape[0] - 1} in cu_seqlens_q and "
            f"{cu_k.shape[0] - 1} in cu_seqlens_k"
        )


def check_int32(name: str, x: Tensor, shape: tuple[int | str, ...], q: Tensor) -> None:
    """Raise an error unless `x` is an int32 tensor of shape `shape` on q's device.

    A string in `shape` matches any positive size.
    """
    check_tensors(**{name: x})
    matches = x.dim() == len(shape) and all(
        size > 0 if isinstance(expected, str) else size == expected
        for size, expected in zip(x.shape, shape, strict=True)
    )
    if x.dtype != torch.int32 or not matches:
        expected_shape = str(shape).replace("'", "")
        raise ValueError(
            f"expected {name} to be int32 of shape {expected_shape}, got {x.dtype} of shape "
            f"{tuple(x.shape)}"
        )
    check_device(name, x, q)


def check_boundaries(name: str, cu: Tensor, total: int, on_cpu: bool = False) -> None:
    """Raise ValueError unless `cu` starts at 0, never decreases and ends at `total`.

    On a GPU, the check is a device-side assertion unless `on_cpu` is True.  The operators call this
    function, because only operators can read values in a compiled graph.
    """
    rule = f"{name} must start at 0, never decrease, and end at {total}, the number of rows"
    is_valid = (cu[0] == 0) & (cu[-1] == total) & (cu[1:] >= cu[:-1]).all()
    if on_cpu or cu.device.type == "cpu":
        if not is_valid:
            raise ValueError(f"{rule}, got {cu.cpu().tolist()}")
    else:
        torch._assert_async(is_valid, rule)


def check_sinks(sinks: Tensor | None, heads: int, q: Tensor) -> None:
    """Raise an error unless `sinks` is None or has one floating-point number per query head.

    Infinite sinks raise ValueError only on a CPU, outside of compiled graphs and transforms.
    """
    if sinks is None:
        return
    check_tensors(sinks=sinks)
    if sinks.shape != (heads,) or not sinks.is_floating_point():
        raise ValueError(
            f"expected sinks to be a floating-point tensor of shape ({heads},), one number per "
            f"query head, got {sinks.dtype} of shape {tuple(sinks.shape)}"
        )
    check_device("sinks", sinks, q)
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return
    if type(sinks) in PLAIN_TYPES and sinks.is_cpu and sinks.isinf().any():
        raise ValueError(
            f"expected finite sinks, got {sinks.tolist()}; for a head without a sink, pass a "
            "large negative number such as -1e4"
        )


def is_jit_tracing() -> bool:
    """Return True inside `torch.jit.trace`, whose traces are valid for one length only."""
    return not torch.compiler.is_compiling() and torch.jit.is_tracing()


def check_tensors(**tensors: Tensor) -> None:
    """Raise an error for arguments that are not strided tensors, and inside `torch.jit.trace`."""
    if is_jit_tracing():
        raise NotImplementedError(
            "torch.jit.trace is not supported, because the trace would be valid only for the "
            "lengths of its example; use torch.export or torch.compile"
        )
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
            raise TypeError(
                f"expected {name} to be a torch.Tensor, got {kind}; convert a list or a NumPy "
                "array with torch.as_tensor(...)"
            )
        if x.layout != torch.strided:
            raise ValueError(
                f"expected {name} to be a dense tensor, got layout {x.layout}; convert it with "
                "to_dense(), or pass nested sequences to flash_attention_varlen with their offsets "
                "as cu_seqlens"
            )


def check_device(name: str, x: Tensor, q: Tensor) -> None:
    """Raise ValueError unless `x` is on the device of q."""
    if x.device != q.device:
        raise ValueError(
            f"expected {name} on the device of q, {q.device}, got {x.device}; "
            f"pass {name}.to(q.device)"
        )


def check_heads(heads: int, kv_heads: int) -> None:
    """Raise ValueError unless `heads` is a multiple of `kv_heads`."""
    is_multiple = heads % kv_heads == 0 if kv_heads else heads == 0
    if not is_multiple:
        raise ValueError(
            f"expected heads % kv_heads == 0, as in grouped-query attention, got {heads} query "
            f"heads and {kv_heads} key heads"
        )


def check_matching(q: Tensor, k: Tensor, v: Tensor, k_name: str = "k", v_name: str = "v") -> None:
    """Raise ValueError unless dtypes, devices and shapes match and are supported.

    The callers compare the batch and head dimensions of q with those of k.
    """
    for name, x in ((k_name, k), (v_name, v)):
        if (x.dtype, x.device, x.dim()) != (q.dtype, q.device, q.dim()):
            raise ValueError(
                f"expected {name} to have the dtype, device and number of dimensions of q, "
                f"{q.dtype} on {q.device} with shape {tuple(q.shape)}, got {x.dtype} on {x.device} "
                f"with shape {tuple(x.shape)}; {name}.to(q) or q.to({name}) "
                "converts the dtype and device, but not the shape"
            )
    if q.dtype not in DTYPES:
        raise ValueError(
            f"expected float64, float32, bfloat16 or float16, got dtype {q.dtype}; convert q, "
            f"{k_name} and {v_name}"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"expected q and {k_name} to have the same head dim, got head dim {q.shape[-1]} for q "
            f"and {k.shape[-1]} for {k_name} (that of {v_name} may differ)"
        )
    if 0 in (q.shape[-1], v.shape[-1]):
        raise ValueError("expected a head dim of at least 1, got head dim 0")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"expected {k_name} and {v_name} to have the same shape except for the head dim, got "
            f"shape {tuple(k.shape)} and {tuple(v.shape)}"
        )
