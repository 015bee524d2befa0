"""Validation of a call's arguments before data moves, and flat views of its tensors."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, wraps
from operator import index
from typing import Any, ParamSpec, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import increment_version

from collectives.algorithms import dispatch
from collectives.communicator import Communicator
from collectives.shared_memory.fingerprint import MAX_DIMS, Call, digest_shapes

P = ParamSpec("P")
Collective = Callable[P, dist.Work | None]

# A training loop repeats the same few calls, and packing a call costs time.
_cached_call = lru_cache(maxsize=1024)(Call)


def skip_non_members(function: Collective[P]) -> Collective[P]:
    """Return a wrapper that warns and returns None on ranks outside the group, as torch does.

    torch.compile cannot trace a collective, so the wrapper breaks the graph.
    """
    position = list(inspect.signature(function).parameters).index("group")

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> dist.Work | None:
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        group = args[position] if len(args) > position else kwargs.get("group")
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            warnings.warn(
                f"Running {function.__name__} on global rank {dist.get_rank()} which does not "
                "belong to the given group.",
                stacklevel=2,
            )
            return None
        return function(*args, **kwargs)

    return call


def is_forwarded(name: str, tensor: Tensor, algorithm: str) -> bool:
    """Return True if torch's function runs the call: with "auto", for tensors on another device.

    Raise TypeError if `tensor` is not a tensor; `name` is the name of the called function.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name} expected a tensor, got {type(tensor).__name__}; pass torch.as_tensor of a "
            "number or an array, and one tensor per call"
        )
    return not tensor.is_cpu and algorithm == "auto"


def describe_call(
    comm: Communicator,
    kind: str,
    tensor: Tensor,
    algorithm: str,
    *,
    op: str = "",
    root: int = 0,
    outputs: Sequence[Tensor] = (),
    shape: tuple[int, ...] | None = None,
    shapes: tuple[tuple[object, ...], ...] = (),
    coalesced: int = 1,
) -> Call:
    """Validate a call and return the `Call` that the ranks compare.

    For autograd, the outputs count as changed from now on.

    Args:
        tensor: a tensor that has the call's dtype, and its shape unless `shape` is passed.
        outputs: the tensors that the call writes to; ignored on ranks where it writes none.
        shapes: the shapes of several tensors, all of which must be the same on all ranks.
        coalesced: the number of tensors that are coalesced into this call.
    """
    dispatch.validate(comm, kind, algorithm, tensor.dtype, op)
    # The root of a broadcast writes nothing, and neither do the other ranks of a reduce.
    if kind == ("broadcast" if comm.rank == root else "reduce"):
        outputs = ()
    check_tensors(kind, tensor, outputs)
    # Autograd must notice if this call overwrites a tensor that it saved for a backward pass.
    # Tensors that were created in inference mode have no version.
    increment_version([output for output in outputs if not output.is_inference()])
    if shape is None:
        shape = get_compared_shape(comm, tensor)
    if len(shape) > MAX_DIMS and not shapes:
        # A packed call has room for `MAX_DIMS` dimensions only, so a digest is compared.
        shapes = (tuple(shape),)
    digest = digest_shapes(shapes) if shapes else 0
    return _cached_call(kind, tuple(shape), tensor.dtype, op, root, algorithm, coalesced, digest)


def get_compared_shape(comm: Communicator, tensor: Tensor) -> tuple[int, ...]:
    """Return the shape that must be the same on all ranks."""
    return tensor.shape if comm.compare_shapes else (tensor.numel(),)


def check_tensors(kind: str, tensor: Tensor, outputs: Sequence[Tensor]) -> None:
    """Raise an error unless the tensors are dense and on the CPU, and outputs can be written to."""
    if not tensor.is_cpu:
        raise TypeError(
            f"{kind} expected a tensor on the CPU, got one on {tensor.device}; use the function of "
            "torch.distributed"
        )
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        raise RuntimeError(f"{kind} cannot run inside FakeTensorMode; make the call outside of it")
    check_memory(kind, tensor, tensor)
    for output in outputs:
        check_memory(kind, output, tensor)
        # Contiguous tensors do not overlap, and the check costs time.
        if not output.is_contiguous() and _may_share_elements(output):
            raise ValueError(
                f"{kind} would write several results to one address of an expanded or overlapping "
                f"tensor of shape {tuple(output.shape)} and strides {output.stride()}; pass a clone"
            )
    if torch._C._len_torch_dispatch_stack():
        # A dispatch mode that refuses views raises its error here, before the call begins. Other
        # ranks would take a later error for the failure of this rank.
        for argument in (tensor, *outputs):
            flatten(argument)


def _may_share_elements(tensor: Tensor) -> bool:
    """Return True unless the strides show that every element has a different address."""
    last_offset = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= last_offset:
                return True
            last_offset += (size - 1) * stride
    return False


def check_memory(kind: str, tensor: Tensor, like: Tensor) -> None:
    """Raise TypeError unless the tensor is dense and on the device of `like`.

    Quantized tensors, and tensors that wrap another tensor, are refused too.
    """
    if tensor.device != like.device:
        raise TypeError(
            f"{kind} expected tensors on one device, got {tensor.device} and {like.device}; move "
            "them to the same device"
        )
    if tensor.layout != torch.strided or tensor.is_nested:
        layout = "a nested tensor" if tensor.is_nested else tensor.layout
        raise TypeError(f"{kind} expected a dense tensor, got {layout}; use to_dense() or unbind()")
    if tensor.is_quantized:
        # The integers would be copied without their scale.
        raise TypeError(f"{kind} expected a tensor that is not quantized; use int_repr()")
    # Subclasses (DTensor, AsyncCollectiveTensor, FakeTensor) and tensors inside torch.func wrap
    # another tensor or have no memory.
    is_plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    if not is_plain or is_functorch_wrapped_tensor(tensor):
        raise TypeError(
            f"{kind} expected a tensor with its own memory, got a wrapper of type "
            f"{type(tensor).__name__}; pass the tensor that it contains, such as to_local() of a "
            "DTensor, and make the call outside of torch.func"
        )


def flatten(tensor: Tensor) -> Tensor:
    """Return the tensor in one dimension and detached, as a view if possible, otherwise as a copy.

    Tensors that are not contiguous are copied, and so are lazy conjugates and negatives.
    """
    is_lazy = tensor.is_conj() or tensor.is_neg()
    if tensor.dim() == 1 and tensor.stride(0) == 1 and not (is_lazy or tensor.requires_grad):
        return tensor
    dense = tensor.detach().contiguous()
    # The memory of a lazy conjugate or negative contains the values before that operation.
    if is_lazy:
        dense = dense.resolve_conj().resolve_neg()
    # `view` is not sufficient: a tensor of one element may keep a stride other than 1.
    return dense.as_strided((dense.numel(),), (1,))


def separate(tensor: Tensor, outputs: Sequence[Tensor]) -> Tensor:
    """Return the tensor, or a copy of it if its memory may overlap that of an output.

    Without the copy, a step of an algorithm could overwrite elements that a later step reads.
    """
    return tensor.clone() if may_overlap(tensor, outputs) else tensor


def may_overlap(tensor: Tensor, outputs: Sequence[Tensor]) -> bool:
    """Return True if the tensor's range of bytes overlaps that of an output.

    Tensors of one NumPy array may overlap in different storages, so storages are not compared.
    """
    start, stop = _compute_byte_range(tensor)
    for output in outputs:
        output_start, output_stop = _compute_byte_range(output)
        if start < output_stop and output_start < stop:
            return True
    return False


def _compute_byte_range(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the byte after its last element."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    last_offset = sum((size - 1) * stride for size, stride in strides)
    return start, start + (last_offset + 1) * tensor.element_size()


def copy_back(tensor: Tensor, flat: Tensor) -> None:
    """Copy `flat` to the tensor that `flatten` received, unless it is a view of that tensor."""
    if flat is not tensor and flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def check_pair(
    long_name: str, long: Tensor, short_name: str, short: Tensor, world_size: int
) -> None:
    """Raise an error unless `long` has the dtype of `short` and `world_size` times its elements."""
    check_same_dtype(long_name, long, short_name, short)
    if long.numel() != short.numel() * world_size:
        raise ValueError(
            f"expected {short.numel() * world_size} elements in {long_name}, {short.numel()} as in "
            f"{short_name} for each of {world_size} ranks, got {long.numel()}; resize one of them"
        )


def check_same_dtype(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise TypeError unless two tensors have the same dtype."""
    if tensor.dtype != other.dtype:
        raise TypeError(
            f"expected one dtype for {name} and {other_name}, got {tensor.dtype} and "
            f"{other.dtype}; cast one of them"
        )


def get_root_rank(comm: Communicator, src: int | None, group: Any, group_src: int | None) -> int:
    """Return the root's rank in the group, from `src`, its global rank, or from `group_src`."""
    if (src is None) == (group_src is None):
        raise ValueError(
            "expected the root as either src (global rank) or group_src (rank in the group), got "
            f"src={src} and group_src={group_src}"
        )
    if group_src is None:
        group_src = src if group is None else dist.get_group_rank(group, src)  # type: ignore[arg-type]
    assert group_src is not None
    if not 0 <= group_src < comm.world_size:
        raise ValueError(
            f"expected a root between 0 and {comm.world_size - 1}, a rank of the group, "
            f"got {group_src}"
        )
    return group_src


def split_sizes(sizes: Iterable[SupportsIndex] | None) -> list[int]:
    """Return split sizes, which may be a tensor or an array, as a list of integers; [] if None."""
    return [] if sizes is None else [index(size) for size in sizes]


def split_lengths(name: str, tensor: Tensor, sizes: list[int], world_size: int) -> list[int]:
    """Return the number of elements per rank, from the number of rows per rank.

    If `sizes` is empty, every rank gets the same number of rows.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % world_size:
            raise ValueError(
                f"expected the number of rows of {name} to be a multiple of {world_size} ranks, "
                f"got {rows}; pass {name}_split_sizes"
            )
        sizes = [rows // world_size] * world_size
    if len(sizes) != world_size or sum(sizes) != rows or min(sizes) < 0:
        raise ValueError(
            f"expected {name}_split_sizes of {world_size} nonnegative numbers that sum to {rows} "
            f"rows, got {sizes}"
        )
    elements_per_row = tensor.numel() // rows if rows else 0
    return [size * elements_per_row for size in sizes]
