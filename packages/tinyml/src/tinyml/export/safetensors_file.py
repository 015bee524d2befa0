"""Compressed models as safetensors files.

Weights are stored packed, as in memory. A pruned weight is stored as a bitmap and its nonzero
elements if that is smaller; `size_of(model).sparse_bytes` is the size of the data. The storage of
each weight is described in the file's metadata, so `load` needs only the uncompressed model.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tinyml.compressed_weight import CompressedWeight, compress_layer, compressed_weight
from tinyml.conversion import dense_copy
from tinyml.export.atomic_file import atomic_file
from tinyml.export.shared_tensors import memory_of, separate, state_tensors
from tinyml.quantization.fastest_linear import FastestLinear, avoid_fused_operators
from tinyml.quantization.grid_weight import GridWeight
from tinyml.quantization.int4 import Int4Linear
from tinyml.quantization.int8 import Int8Linear
from tinyml.quantization.kmeans import Palette
from tinyml.quantization.pack import pack, unpack
from tinyml.size import as_integers, has_value
from tinyml.state_dict_check import check_before_loading

_FORMAT = "tinyml-2"
_CHECKSUM = b'"sha256":"', b"0" * 64
_SPARSE = "!mask", "!values"
_FORMAT_OF_WEIGHT = "parametrizations.weight.0._extra_state"  # also in the metadata


def save(model: nn.Module, path: str | Path) -> None:
    """Write every tensor of `model` once, in its compressed form, and a checksum of the file."""
    tensors: dict[str, Tensor] = {}
    names: dict[object, str] = {}
    aliases: dict[str, str] = {}
    shapes: dict[str, list[int]] = {}
    storages: set[int] = set()
    for name, tensor in state_tensors(model).items():
        if not tensor.numel() or name.endswith(_FORMAT_OF_WEIGHT):
            continue
        key = memory_of(tensor)
        if key in names:
            aliases[name] = names[key]
            continue
        names[key] = name
        shapes[name] = list(tensor.shape)
        tensors.update(_sparse_if_smaller(name, separate(tensor, storages)))
    metadata = {
        "format": _FORMAT,
        "layers": json.dumps(_describe(model)),
        "same": json.dumps(aliases),
        "shapes": json.dumps(shapes),
        "sha256": _CHECKSUM[1].decode(),
    }
    with atomic_file(path) as part:
        try:
            save_file(tensors, part, metadata)
        except KeyError as error:
            raise ValueError(f"expected types that safetensors stores, got {error}") from error
        start, _, computed = _checksum(part)
        with part.open("r+b") as file:
            file.seek(start)
            file.write(computed)


def _checksum(path: str | Path) -> tuple[int, bytes, bytes]:
    """Return the offset of a file's checksum, the stored checksum and the computed checksum.

    The checksum is computed over the whole file, with zeros in place of the checksum. Raise
    `ValueError` if the file was not written by `save`.
    """
    with Path(path).open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, 2**27))
        before, separator, after = header.partition(_CHECKSUM[0])
        if not separator:
            raise ValueError(f"expected a file written by tinyml.save, got {path}")
        start = 8 + len(before) + len(separator)
        digest = hashlib.sha256(length.to_bytes(8, "little"))
        digest.update(before + separator + _CHECKSUM[1] + after[64:])
        while block := file.read(2**20):
            digest.update(block)
    return start, after[:64], digest.hexdigest().encode()


@torch.no_grad()
def load(model: nn.Module, path: str | Path) -> nn.Module:
    """Return an uncompressed copy of `model` with the compressed weights of a file.

    Each layer is on the device of the layer that it replaces. Weights that `model` ties and the
    file stores separately, as after merging an adapter into one of them, are not tied in the copy.
    """
    _, written, computed = _checksum(path)
    if written != computed:
        raise ValueError(
            f"expected the checksum {computed.decode()} in {path}, got "
            f"{written.decode(errors='replace')}: the file is damaged; save or copy it again"
        )
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != _FORMAT:
            raise ValueError(
                f"expected a file of format {_FORMAT}, got {metadata.get('format')}; save it again"
            )
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    model = dense_copy(model)
    shapes = json.loads(metadata["shapes"])
    state = {name: _dense(name, torch.Size(shape), stored) for name, shape in shapes.items()}
    state |= {name: state[first] for name, first in json.loads(metadata["same"]).items()}
    restored: dict[str, nn.Module] = {}
    layers = json.loads(metadata["layers"])
    _untie(model, layers, json.loads(metadata["same"]))
    for name, how in layers.items():
        try:
            layer = model.get_submodule(name)
        except AttributeError as error:
            raise ValueError(
                f"the file has a layer {name!r} that the model lacks; load into the model it was "
                "made from"
            ) from error
        device = next((t.device for t in layer.state_dict().values()), None)
        layer = _as_stored(model, name, layer, how, state, restored).to(device)
        parent, _, child = name.rpartition(".")
        if name:
            setattr(model.get_submodule(parent), child, layer)
        else:  # the model itself is the layer
            model = layer
    avoid_fused_operators(model)
    # Placeholders without elements are in the model but not in the file.
    empty = {
        name: t
        for name, t in model.state_dict().items()
        if not t.numel() or name.endswith(_FORMAT_OF_WEIGHT)
    }
    model.load_state_dict(state | empty)
    return check_before_loading(model)


def _untie(model: nn.Module, layers: dict[str, dict[str, Any]], same: dict[str, str]) -> None:
    """Give each weight of the file its own parameter, in place, if the model ties several."""
    tied: dict[nn.Parameter, dict[str, nn.Parameter]] = {}
    for owner, module in model.named_modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            name = f"{owner}.{key}".lstrip(".")
            how = layers.get(owner, {}) if key == "weight" else {}
            origin = how.get("same") or same.get(name, name)
            by_origin = tied.setdefault(parameter, {origin: parameter})
            if origin not in by_origin:
                value = parameter.detach().clone()
                by_origin[origin] = nn.Parameter(value, parameter.requires_grad)
            setattr(module, key, by_origin[origin])


def _describe(model: nn.Module) -> dict[str, dict[str, Any]]:
    layers: dict[str, dict[str, Any]] = {}
    first: dict[int, str] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, FastestLinear):
            layers[name] = {"same": first.setdefault(id(layer), name)} | _of_linear(layer)
    for name, layer in model.named_modules():
        if (stored := compressed_weight(layer)) is not None:
            if not isinstance(stored, Palette | GridWeight):
                raise ValueError(f"{name} is in training ({type(stored).__name__}); convert it")
            how = {"same": first.setdefault(id(stored), name), "shape": list(stored.shape)}
            if isinstance(stored, Palette):
                layers[name] = how | {"kind": "palette", "bits": stored.bits}
            else:
                layers[name] = how | {"kind": "grid"} | _of_grid(stored)
    return layers


def _of_linear(layer: FastestLinear) -> dict[str, Any]:
    if isinstance(layer, Int4Linear):
        return {"kind": "int4"} | _of_grid(layer.grid)
    return {"kind": "int8"} | ({} if layer.always else {"auto": True})


def _of_grid(grid: GridWeight) -> dict[str, Any]:
    rows = {"bits": grid.bits, "rows": list(grid.rows), "low": grid.low}
    return rows | ({"transposed": True} if grid.transposed else {})


def _as_stored(
    model: nn.Module,
    name: str,
    layer: Any,
    how: dict[str, Any],
    state: dict[str, Tensor],
    restored: dict[str, nn.Module],
) -> nn.Module:
    """Return a layer in the form that `how` describes; shared weights are stored once."""
    kind, first = how["kind"], how.get("same", name)
    start = f"{name}." if name else ""
    prefix = f"{start}grid." if kind == "int4" else f"{start}parametrizations.weight.0."
    names = ("codes", "scale", "zero")
    parts = {part: state[prefix + part] for part in names if prefix + part in state}
    settings = {k: how[k] for k in ("bits", "rows", "low", "transposed") if k in how}
    if kind not in ("int8", "int4", "palette", "grid"):
        raise ValueError(
            f"expected a known kind of layer, got {kind!r} for {name}; load the file with the "
            "version that wrote it"
        )
    if kind == "int8":
        if first not in restored:
            restored[first] = Int8Linear(layer, may_stay_float=how.get("auto", False))
        return restored[first]
    if first not in restored:
        weight = layer.get_parameter("weight").detach()
        if how.get("shape", list(weight.shape)) != list(weight.shape):
            raise ValueError(
                f"expected a weight of shape {how['shape']} in {name or 'the model'}, which the "
                f"file has, got {tuple(weight.shape)}; load into the model that it was made from"
            )
        if kind == "palette":
            parts["palette"] = state[f"{start}parametrizations.weight.original"]
        restore: Any = Palette.restore if kind == "palette" else GridWeight.restore
        restored[first] = restore(weight, **parts, **settings)
        if kind == "int4":
            restored[first] = Int4Linear(cast(GridWeight, restored[first]), layer.bias)
    if kind == "int4":
        return restored[first]
    compress_layer(layer, cast(CompressedWeight, restored[first]))
    if first != name:
        other: Any = model.get_submodule(first)
        layer.parametrizations.weight.original = other.parametrizations.weight.original
    return cast(nn.Module, layer)


def _sparse_if_smaller(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if tensor.is_floating_point():
        stored = has_value(tensor)
        values = tensor[stored]
        if -(-tensor.numel() // 8) + values.nbytes < tensor.nbytes:
            return {name + _SPARSE[0]: pack(stored, 1), name + _SPARSE[1]: values}
    return {name: tensor}


def _dense(name: str, shape: torch.Size, stored: dict[str, Tensor]) -> Tensor:
    if name in stored:
        return stored[name]
    mask, values = (stored[name + suffix] for suffix in _SPARSE)
    # torch cannot assign to elements of every 8-bit float type.
    bits = as_integers(values)
    dense = bits.new_zeros(shape.numel())
    dense[unpack(mask, 1, shape.numel()).bool()] = bits
    return dense.view(values.dtype).view(shape)
