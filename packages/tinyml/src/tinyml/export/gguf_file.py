"""GGUF files with weights in the block formats of llama.cpp.

A row is divided into blocks; each format stores a block in a fixed number of bytes:

    Q8_0   32 weights: float16 d, int8 q[32]                                      w = d q
    Q4_0   32 weights: float16 d, 16 bytes of codes                               w = d (q - 8)
    Q4_K  256 weights: float16 d and m, 12 bytes of 6-bit scales s and minima t   w = d s q - m t
          of 8 groups of 32, 128 bytes of codes

In each 16 bytes of 4-bit codes (32 for Q4_K), the low halves are the codes of 16 (32) weights, and
the high halves are those of the next 16 (32). For Q8_0 and Q4_0, dense weights are rounded as in
llama.cpp's reference.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tinyml.adapters.insertion import require_no_adapters
from tinyml.compressed_weight import get_compressed_weight
from tinyml.conversion import make_dense, make_dense_copy, make_plain_copy
from tinyml.export.atomic_file import atomic_file
from tinyml.export.shared_tensors import get_memory_key, get_state_tensors
from tinyml.layers import find_layers, get_weight, is_conv1d
from tinyml.quantization.grid import widen
from tinyml.quantization.grid_weight import GridWeight
from tinyml.validation import check_finite

Kind = Literal["Q8_0", "Q4_0", "Q4_K"]
Value = str | bool | int | float | Sequence[str | bool | int | float]
Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[Any]
#: A tensor in the file: the number of its type, its shape and its bytes.
_Entry = tuple[int, tuple[int, ...], bytes]
#: For each format, its type number in the file, the weights per block and the bytes per block.
_BLOCKS: dict[str, tuple[int, int, int]] = {
    "Q4_0": (2, 32, 18), "Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144),
}  # fmt: skip
#: The type number in the file of each dtype of dense tensors.
_DENSE = {
    torch.float32: 0, torch.float16: 1, torch.int8: 24, torch.int16: 25, torch.int32: 26,
    torch.int64: 27, torch.float64: 28, torch.bfloat16: 30,
}  # fmt: skip
_ALIGNMENT = 32
_LONGEST_NAME = 63
_MAX_DIMENSIONS = 4
_LARGEST = torch.finfo(torch.float32).max


@torch.no_grad()
def save_gguf(
    model: nn.Module,
    path: str | Path,
    kind: Kind,
    *,
    metadata: Mapping[str, Value] | None = None,
    names: Mapping[str, str] | None = None,
    protect: Sequence[str] = (),
) -> nn.Module:
    """Write `model` with linear weights as blocks of `kind`; return a copy with these weights.

    The weights of the copy are dense and have the types of `model`, so 16-bit weights in it are
    rounded once more.

    Dense weights of `nn.Linear` layers are rounded. Weights that were quantized symmetrically to 8
    bits ("Q8_0") or 4 bits ("Q4_0") are stored exactly. Their groups must have a multiple of 32
    inputs, and their scales must be float16 numbers. Raises `ValueError` for linear weights that
    are compressed otherwise, and if weights are so large or small that rounding the scales to
    float16 changes a weight by more than half a step.

    All other tensors are stored dense and unchanged. These include the weights of layers that
    `protect` names, and of layers whose number of inputs is not a multiple of the block size.

    `metadata` contains the keys that the reader of the file needs, such as "general.architecture",
    and `names` maps parameter names to names in the file. llama.cpp needs the keys and names of its
    architectures, and for some of them, such as "llama", rows of queries and keys in another order.
    Values may be lists, such as the tokens of a tokenizer.
    """
    if kind not in _BLOCKS:
        raise ValueError(f"expected kind {', '.join(map(repr, _BLOCKS))}, got {kind!r}")
    rounded = make_plain_copy(model)
    require_no_adapters(rounded)
    _, width, _ = _BLOCKS[kind]
    blocks: dict[str, Bytes] = {}
    for name, layer in find_layers(rounded, (nn.Linear,), protect).items():
        weight = get_weight(layer)
        if is_conv1d(layer) or weight.shape[1] % width:
            continue
        check_finite(f"{name}.weight", weight)
        stored = get_compressed_weight(layer)
        if stored is None:
            packed = _round_to_blocks(name, weight, kind)
        else:
            packed = _pack_stored_blocks(name, stored, kind)
        make_dense(rounded, layer)
        get_weight(layer).copy_(torch.from_numpy(dequantize(packed, kind)).view_as(weight))
        blocks[name] = packed
    if not blocks:
        raise ValueError(
            f"expected nn.Linear layers whose inputs are a multiple of {width} for {kind!r}, "
            "got none"
        )
    rounded = make_dense_copy(rounded)
    by_memory: dict[object, Bytes] = {
        get_memory_key(get_weight(rounded.get_submodule(name))): packed
        for name, packed in blocks.items()
    }
    tensors = _make_file_entries(get_state_tensors(rounded), by_memory, kind, names or {})
    keys: dict[str, Value] = {"general.architecture": "unknown", "general.quantization_version": 2}
    keys |= metadata or {}
    if keys.get("general.alignment", _ALIGNMENT) != _ALIGNMENT:
        raise ValueError(
            f"expected general.alignment={_ALIGNMENT}, the alignment of the tensors, got "
            f"{keys['general.alignment']!r}"
        )
    with atomic_file(path) as part:
        part.write_bytes(_encode_file(keys, tensors))
    return rounded


def _make_file_entries(
    state: Mapping[str, Tensor],
    blocks: Mapping[object, Bytes],
    kind: Kind,
    names: Mapping[str, str],
) -> dict[str, _Entry]:
    """Return the entries of the file by name: blocks, and all other tensors unchanged.

    `blocks` contains the packed forms of dense weights by the results of `get_memory_key`.
    """
    unknown = sorted(names.keys() - state.keys())
    if unknown:
        raise ValueError(f"expected names of the state dict in names, got {unknown[0]!r}")
    entries: dict[str, _Entry] = {}
    written: set[object] = set()
    for name, tensor in state.items():
        memory = get_memory_key(tensor)
        if memory in written or not tensor.numel():
            continue  # a tied weight is stored once, and a tensor without elements is not stored
        written.add(memory)
        key = names.get(name, name)
        if key in entries or len(key.encode()) > _LONGEST_NAME:
            raise ValueError(
                f"expected a different name of at most {_LONGEST_NAME} bytes for each tensor, "
                f"because llama.cpp reads no others, got {key!r}; pass other names in names"
            )
        if tensor.dim() > _MAX_DIMENSIONS:
            raise ValueError(
                f"expected at most {_MAX_DIMENSIONS} dimensions, because llama.cpp reads no more, "
                f"got {name} of shape {tuple(tensor.shape)}"
            )
        if memory in blocks:
            entries[key] = _BLOCKS[kind][0], tuple(tensor.shape), blocks[memory].tobytes()
        elif tensor.dtype in _DENSE:
            data = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
            entries[key] = _DENSE[tensor.dtype], tuple(tensor.shape) or (1,), data
        else:
            raise ValueError(f"expected tensors of {list(_DENSE)}, got {name} of {tensor.dtype}")
    return entries


def _pack_stored_blocks(name: str, stored: nn.Module, kind: Kind) -> Bytes:
    """Return the blocks of a compressed weight whose codes and scales `kind` stores exactly."""
    bits = {"Q8_0": 8, "Q4_0": 4}.get(kind)
    fits = isinstance(stored, GridWeight) and stored.bits == bits and not stored.rows[1] % 32
    if not isinstance(stored, GridWeight) or not fits or stored.zero is not None:
        raise ValueError(
            "expected dense weights, or 8 bits for 'Q8_0' and 4 bits for 'Q4_0' with symmetric "
            f"groups of a multiple of 32 inputs, got another format for {kind!r} in {name}"
        )
    scale = stored.scale.half()
    if not torch.equal(scale.to(stored.scale), stored.scale):
        raise ValueError(
            f"expected scales of {name} that are float16 numbers, got others; quantize model.half()"
        )
    codes = stored.unpack_signed_codes().view(-1, 32).cpu().numpy()
    scale = scale.view(-1).repeat_interleave(stored.rows[1] // 32)
    return _pack_small_blocks(scale.cpu().numpy(), codes, kind)


def _round_to_blocks(name: str, weight: Tensor, kind: Kind) -> Bytes:
    """Return the blocks of `kind` for the dense weight of the layer `name`."""
    rows = widen(weight.detach()).cpu().numpy()
    if kind == "Q4_K":
        return _pack_large_blocks(name, rows.reshape(-1, 8, 32))
    rows = rows.reshape(-1, 32)
    if kind == "Q8_0":
        scale = np.abs(rows).max(1) / np.float32(127)
        codes = _divide(rows, scale[:, None])
        codes = np.copysign(np.floor(np.abs(codes) + np.float32(0.5)), codes)
    else:
        extreme = np.take_along_axis(rows, np.abs(rows).argmax(1)[:, None], 1)[:, 0]
        scale = extreme / np.float32(-8)
        codes = np.trunc(_divide(rows, scale[:, None]) + np.float32(8.5)).clip(0, 15) - 8
    largest_code = 127 if kind == "Q8_0" else 8
    half = _to_float16(name, scale, largest_code, np.abs(scale).max() / 2)
    return _pack_small_blocks(half, codes.astype(np.int16), kind)


def _pack_small_blocks(scale: Numbers, codes: Numbers, kind: Kind) -> Bytes:
    """Return the blocks of Q4_0 or Q8_0: a scale, followed by 32 signed codes."""
    packed: Bytes = codes.astype(np.int8).view(np.uint8)
    if kind == "Q4_0":
        unsigned: Bytes = (codes + 8).astype(np.uint8)
        packed = np.bitwise_or(unsigned[:, :16], unsigned[:, 16:] << 4, dtype=np.uint8)
    return np.concatenate([scale.reshape(-1, 1).view(np.uint8), packed], 1)


def _pack_large_blocks(name: str, rows: Numbers) -> Bytes:
    """Return Q4_K blocks of weights (blocks, 8 groups, 32), from each group's extremes."""
    low = np.minimum(rows.min(2), 0)
    step = (rows.max(2) - low) / 15
    half_step = np.abs(rows).max() / 30
    d = _to_float16(name, step.max(1) / 63, 63 * 15, half_step)
    m = _to_float16(name, -low.min(1) / 63, 63, half_step)
    d_wide, m_wide = d.astype(np.float32)[:, None], m.astype(np.float32)[:, None]
    scales = np.rint(_divide(step, d_wide)).clip(0, 63).astype(np.uint8)
    minima = np.rint(_divide(-low, m_wide)).clip(0, 63).astype(np.uint8)
    shifted = rows + (m_wide * minima)[:, :, None]
    codes = np.rint(_divide(shifted, (d_wide * scales)[:, :, None])).clip(0, 15).astype(np.uint8)
    # Each block stores eight 6-bit scales and minima in 12 bytes. Byte i of the first four has
    # scale i and, above it, the high 2 bits of scale i + 4; the next four bytes do so for minima.
    # Byte i of the last four has the low 4 bits of scale i + 4 and, above them, of minimum i + 4.
    scale_bytes = scales[:, :4] | scales[:, 4:] >> 4 << 6
    minimum_bytes = minima[:, :4] | minima[:, 4:] >> 4 << 6
    low_bits = scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4
    pairs = codes.reshape(-1, 4, 2, 32)
    packed = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    factors = [part.reshape(-1, 1).view(np.uint8) for part in (d, m)]
    return np.concatenate([*factors, scale_bytes, minimum_bytes, low_bits, packed], 1)


def dequantize(blocks: Bytes, kind: Kind) -> Numbers:
    """Return the float32 weights of blocks (n, bytes per block), as a flat array."""
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        return (d * blocks[:, 2:].view(np.int8)).reshape(-1)
    if kind == "Q4_0":
        codes = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], 1).astype(np.float32)
        return (d * (codes - 8)).reshape(-1)
    m = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    scale_bytes, minimum_bytes, low_bits = np.split(blocks[:, 4:16], 3, axis=1)
    last_scales = low_bits & 15 | scale_bytes >> 6 << 4
    last_minima = low_bits >> 4 | minimum_bytes >> 6 << 4
    scales = np.concatenate([scale_bytes & 63, last_scales], 1).astype(np.float32)
    minima = np.concatenate([minimum_bytes & 63, last_minima], 1).astype(np.float32)
    packed = blocks[:, 16:].reshape(-1, 4, 1, 32)
    codes = np.concatenate([packed & 15, packed >> 4], 2).reshape(-1, 8, 32).astype(np.float32)
    return ((d * scales)[:, :, None] * codes - (m * minima)[:, :, None]).reshape(-1)


def _to_float16(name: str, scale: Numbers, largest_code: int, tolerance: float) -> Numbers:
    """Return the scales of the layer `name` in float16.

    `tolerance` is half a step of the layer's largest weights. Raise `ValueError` if float16 changes
    the product of a scale and the largest code by more than `tolerance`. This happens to scales
    above 65504, and to the scales of tiny weights, which become zero.
    """
    with np.errstate(over="ignore"):
        half = scale.astype(np.float16)
    error = largest_code * np.abs(half.astype(np.float32) - scale).max()
    if not error <= tolerance:
        raise ValueError(
            f"expected weights of {name!r} whose scales fit in float16, got scales of at most "
            f"{np.abs(scale).max():.3g}; store the layer unchanged with protect=[{name!r}]"
        )
    return half


def _divide(values: Numbers, scale: Numbers) -> Numbers:
    """Return values times 1 / scale, as llama.cpp computes it, or 0 for a scale of 0."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    return (values * inverse).astype(np.float32)


def _encode_file(keys: Mapping[str, Value], tensors: Mapping[str, _Entry]) -> bytes:
    """Return a GGUF file of version 3, whose tensors start at multiples of 32 bytes."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(keys))]
    parts += [_encode_string(key) + _encode_value(key, value) for key, value in keys.items()]
    offset = 0
    for name, (kind, shape, data) in tensors.items():
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        parts.append(_encode_string(name) + sizes + struct.pack("<IQ", kind, offset))
        offset += len(data) + -len(data) % _ALIGNMENT
    header = b"".join(parts)
    padded = [data + bytes(-len(data) % _ALIGNMENT) for _, _, data in tensors.values()]
    return header + bytes(-len(header) % _ALIGNMENT) + b"".join(padded)


def _encode_string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _encode_value(key: str, value: Value) -> bytes:
    """Return the type and the bytes of a value of the metadata."""
    if isinstance(value, list | tuple):
        items = [_encode_value(key, item) for item in value]
        types = {item[:4] for item in items}
        if len(types) == 1:  # the type of an array's elements is stored once
            values = b"".join(item[4:] for item in items)
            return struct.pack("<I", 9) + types.pop() + struct.pack("<Q", len(items)) + values
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _encode_string(value)
    if isinstance(value, float | np.floating) and not _LARGEST < abs(value) < np.inf:
        return struct.pack("<If", 6, value)
    if isinstance(value, int | np.integer) and -(2**31) <= value < 2**32:
        return struct.pack("<Ii", 5, value) if value < 0 else struct.pack("<II", 4, value)
    raise ValueError(
        "expected a string, a bool, a float32, a 32-bit integer, or a list of values of one "
        f"of these types and of one sign, as metadata[{key!r}], got {value!r:.200}"
    )
