"""Compressed models as safetensors files.

Codes are stored packed, as in memory. A floating-point tensor is stored as a bitmap and its
elements other than +0.0 if that is smaller. Parameters and buffers need at most
`size_of(model).sparse_bytes` bytes. The names of the tensors and the formats in the metadata
describe each layer, so `load` needs only the uncompressed model.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tinyml.compressed_weight import CompressedWeight, get_compressed_weight
from tinyml.conversion import install_weight, make_dense_copy, replace_modules
from tinyml.export.atomic_file import atomic_file
from tinyml.export.shared_tensors import copy_if_shared, get_memory_key, get_state_tensors
from tinyml.layers import is_conv1d
from tinyml.quantization.fastest_linear import avoid_fused_operators
from tinyml.quantization.grid_weight import GridWeight
from tinyml.quantization.int4 import Int4Linear
from tinyml.quantization.int8 import Int8Linear
from tinyml.quantization.kmeans import Palette
from tinyml.quantization.pack import pack, unpack
from tinyml.quantization.rounded_weight import RoundedWeight
from tinyml.size import as_integers, has_value

_FORMAT = "tinyml-3"
#: The key of the checksum in the header of the file, and the placeholder of the checksum.
_CHECKSUM_KEY = b'"sha256":"'
_NO_CHECKSUM = b"0" * 64
#: The ends of the names of the bitmap and the elements of a sparse tensor.
_SPARSE = "!mask", "!values"
#: The ends of the names of the codes of a palette or grid, an `Int4Linear` and an `Int8Linear`.
_COMPRESSED = "parametrizations.weight.0.codes"
_INT4 = "grid.codes"
_INT8 = "weight_codes"


def save(model: nn.Module, path: str | Path) -> None:
    """Write every tensor of the state dict once, in its compressed form, and a checksum.

    Raises `ValueError` for models from `prepare_qat` that were not converted, for tensors on the
    meta device, and for types that safetensors does not store.
    """
    automatic: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, RoundedWeight):
            raise ValueError(
                f"expected a model without the rounded weights of prepare_qat, got {name}; call "
                "convert(model) first"
            )
        if isinstance(module, Int8Linear) and module.reference == "float":
            automatic.append(name)
    tensors: dict[str, Tensor] = {}
    names: dict[object, str] = {}
    aliases: dict[str, str] = {}
    shapes: dict[str, list[int]] = {}
    formats: dict[str, list[int]] = {}
    storages: set[int] = set()
    state = get_state_tensors(model)
    for name, tensor in state.items():
        if _is_format(name, state):
            formats[name] = tensor.tolist()
        elif tensor.numel():
            stored_name = names.setdefault(get_memory_key(tensor), name)
            if stored_name != name:
                aliases[name] = stored_name
                continue
            shapes[name] = list(tensor.shape)
            tensors.update(_compress_if_smaller(name, copy_if_shared(tensor, storages)))
    metadata = {
        "format": _FORMAT,
        "automatic": json.dumps(automatic),
        "same": json.dumps(aliases),
        "shapes": json.dumps(shapes),
        "formats": json.dumps(formats),
        "sha256": _NO_CHECKSUM.decode(),
    }
    with atomic_file(path) as part:
        try:
            save_file(tensors, part, metadata)
        except KeyError as error:
            raise ValueError(f"expected types that safetensors stores, got {error}") from error
        start, _, computed = _read_checksum(part)
        with part.open("r+b") as file:
            file.seek(start)
            file.write(computed)


def _read_checksum(path: str | Path) -> tuple[int, bytes, bytes]:
    """Return the offset of a file's checksum, the stored checksum and the computed checksum.

    The checksum is computed over the whole file, with zeros in place of the checksum.
    """
    with Path(path).open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, 2**27))
        before, separator, after = header.partition(_CHECKSUM_KEY)
        if not separator:
            raise ValueError(f"expected a file written by tinyml.save, got {path}")
        start = 8 + len(before) + len(separator)
        digest = hashlib.sha256(length.to_bytes(8, "little"))
        digest.update(before + separator + _NO_CHECKSUM + after[64:])
        while block := file.read(2**20):
            digest.update(block)
    return start, after[:64], digest.hexdigest().encode()


@torch.inference_mode(mode=False)  # inference tensors do not count their modifications
@torch.no_grad()
def load(model: nn.Module, path: str | Path) -> nn.Module:
    """Return a copy of the uncompressed `model` with all tensors of a file that `save` wrote.

    Each layer is on the device of the layer that it replaces. Weights that `model` ties and the
    file stores separately, as after merging an adapter into one of them, are not tied in the copy.
    Raises `ValueError` if the file is damaged or has another format, or if `model` is on the meta
    device. Raises `ValueError` or `RuntimeError` if the tensors do not fit the model.
    """
    if any(tensor.is_meta for tensor in itertools.chain(model.parameters(), model.buffers())):
        raise ValueError(
            f"expected a model whose tensors have values, got a {type(model).__name__} on the meta "
            "device; create the model on the device on which the weights are needed"
        )
    _, written, computed = _read_checksum(path)
    if written != computed:
        raise ValueError(
            f"expected the checksum {computed.decode()} in {path}, got "
            f"{written.decode(errors='replace')}: the file is damaged; save or copy it again"
        )
    with safe_open(path, "pt") as file:
        metadata, names = file.metadata() or {}, file.keys()
        if metadata.get("format") != _FORMAT:
            raise ValueError(
                f"expected a file of format {_FORMAT}, got {metadata.get('format')}; save it again"
            )
        stored = {name: file.get_tensor(name) for name in names}
    shapes = json.loads(metadata["shapes"])
    aliases = json.loads(metadata["same"])
    state = {name: _read_dense(name, torch.Size(shape), stored) for name, shape in shapes.items()}
    state |= {name: state[stored_name] for name, stored_name in aliases.items()}
    formats = json.loads(metadata["formats"])
    for name, value in formats.items():
        if value[-1] < 0:
            raise ValueError(
                f"expected a palette as this version writes it, got an older one of {name}; load "
                "the file with the version that wrote it, and save the dense model"
            )
        state[name] = torch.tensor(value, dtype=torch.int64, device="cpu")
    model = make_dense_copy(model)
    _tie_as_stored(model, state, aliases)
    automatic = json.loads(metadata["automatic"])
    replacements: dict[nn.Module, nn.Module] = {}
    for name, layer in list(model.named_modules()):
        codes = _find_codes(name, state)
        if codes is None or get_compressed_weight(layer) is not None:
            continue
        if codes.endswith(_COMPRESSED):
            install_weight(model, layer, _read_compressed_weight(codes, layer, state))
            continue
        replacements[layer] = _read_fastest_linear(codes, layer, state, name in automatic)
    model = replace_modules(model, replacements)
    avoid_fused_operators(model)
    # The model has trainable tensors without elements, which are not in the file.
    empty = {name: t for name, t in get_state_tensors(model).items() if not t.numel()}
    model.load_state_dict(state | empty)
    return model


def _is_format(name: str, state: dict[str, Tensor]) -> bool:
    """Return True if `name` is the extra state of a compressed weight, not of another module."""
    codes = name.removesuffix("_extra_state") + "codes"
    return codes in state and codes.endswith((_COMPRESSED, _INT4))


def _find_codes(layer: str, state: dict[str, Tensor]) -> str | None:
    """Return the name of a layer's codes, or None if its weight is stored in dense form."""
    for suffix in (_COMPRESSED, _INT4, _INT8):
        name = f"{layer}.{suffix}".lstrip(".")
        if name in state:
            return name
    return None


def _tie_as_stored(model: nn.Module, state: dict[str, Tensor], aliases: dict[str, str]) -> None:
    """Tie the parameters of `model` that the file ties, and separate all others, in place."""
    by_origin: dict[str, nn.Parameter] = {}
    used: set[nn.Parameter] = set()
    for owner, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{owner}.{key}".lstrip(".")
            stored = (_find_codes(owner, state) if key == "weight" else None) or name
            origin = aliases.get(stored, stored)
            if origin not in by_origin:
                by_origin[origin] = copy.deepcopy(parameter) if parameter in used else parameter
                used.add(parameter)
            setattr(module, key, by_origin[origin])


def _read_compressed_weight(codes: str, layer: Any, state: dict[str, Tensor]) -> CompressedWeight:
    """Return the stored palette or grid of a layer."""
    prefix = codes.removesuffix("codes")
    form = state[f"{prefix}_extra_state"].tolist()
    weight = layer.weight.detach()
    palette = state.get(f"{prefix.removesuffix('0.')}original")
    if palette is not None:
        zero_row = state.get(f"{prefix}zero_row")
        compressed: Palette | GridWeight = Palette(form, state[codes], palette, zero_row)
    else:
        scale = state[f"{prefix}scale"].to(weight)
        zero = state.get(f"{prefix}zero")
        compressed = GridWeight(form, state[codes], scale, zero, is_conv1d(layer))
    if compressed.shape != weight.shape:
        raise ValueError(
            f"expected a weight of shape {tuple(compressed.shape)} for {codes}, got "
            f"{tuple(weight.shape)}; load into a model of the same sizes as the saved one"
        )
    return compressed.to(weight.device)


def _read_fastest_linear(
    codes: str, layer: Any, state: dict[str, Tensor], may_stay_float: bool
) -> nn.Module:
    """Return the stored `Int8Linear` or `Int4Linear` that replaces a linear layer."""
    if codes.endswith(_INT8):
        replacement = Int8Linear(layer, may_stay_float=may_stay_float)
        # `.to(dtype)` does not change the type of the scale, so the types may differ.
        stored = state[f"{codes.removesuffix(_INT8)}scale"]
        replacement.scale = replacement.scale.to(stored.dtype)
        return replacement
    grid = _read_compressed_weight(codes, layer, state)
    assert isinstance(grid, GridWeight)
    return Int4Linear(grid, layer.bias)


def _compress_if_smaller(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors in the file for a tensor: itself, or its bitmap and elements."""
    if tensor.is_floating_point():
        stored = has_value(tensor)
        values = tensor[stored]
        if -(-tensor.numel() // 8) + values.nbytes < tensor.nbytes:
            return {name + _SPARSE[0]: pack(stored, 1), name + _SPARSE[1]: values}
    return {name: tensor}


def _read_dense(name: str, shape: torch.Size, stored: dict[str, Tensor]) -> Tensor:
    """Return the tensor from which `_compress_if_smaller` produced the stored tensors."""
    if name in stored:
        return stored[name]
    mask, values = (stored[name + suffix] for suffix in _SPARSE)
    # torch cannot assign to elements of every 8-bit float type.
    bits = as_integers(values)
    dense = bits.new_zeros(shape.numel())
    dense[unpack(mask, 1, shape.numel()).bool()] = bits
    return dense.view(values.dtype).view(shape)
