"""Folders that transformers and vLLM load: packed weights and a `quantization_config`.

The formats store codes of 4 or 8 bits with a float16 scale per output and group of inputs. The
weight that they represent, rounded to float16, is exactly `layer.weight`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tinyml.adapters.insertion import find_tying_configs
from tinyml.adapters.parameter_lora import find_parameter_adapters
from tinyml.compressed_weight import get_compressed_weight
from tinyml.conversion import Replacement
from tinyml.export.atomic_file import atomic_file
from tinyml.export.shared_tensors import copy_if_shared, get_memory_key, get_state_tensors
from tinyml.pruning.config_sizes import check_described_by_config
from tinyml.quantization.grid_weight import GridWeight
from tinyml.quantization.pack import pack


def get_quantized_linears(model: nn.Module, widths: Sequence[int]) -> dict[str, GridWeight]:
    """Return the grids of the quantized linear layers by name.

    Raise `ValueError` if the formats cannot store the model. All layers must have the same number
    of bits, one of `widths`, and either the same group size or one scale per output.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        raise ValueError(
            f"expected a transformers model with a configuration, got {type(model).__name__}; "
            "use tinyml.save for other models"
        )
    check_described_by_config(model)
    if adapted := sorted(find_parameter_adapters(model)):
        raise _make_storage_error(adapted[0], "an adapter")
    grids: dict[str, GridWeight] = {}
    for name, layer in model.named_modules():
        grid = _get_stored_grid(name, layer)
        if grid is not None:
            if any(grid is other for other in grids.values()):
                raise _make_storage_error(name, "a weight of two layers; exclude them with protect")
            grids[name] = grid
    if not grids:
        raise ValueError("expected quantized linear layers, got none; call gptq or quantize first")
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if kinds != {torch.float16}:
        raise ValueError(
            f"expected a model in float16, the type in which readers load the folder, got {kinds}; "
            "call model.half() before gptq or quantize"
        )
    settings = {(grid.bits, grid.rows[1]) for grid in grids.values()}
    bits = {bits for bits, _ in settings}
    if group_size_of(grids) is None or len(bits) > 1 or not bits <= {*widths}:
        raise ValueError(
            f"expected one number of bits, one of {list(widths)}, and one group size for all "
            f"layers, got (bits, group size) {sorted(settings)}"
        )
    return grids


def _get_stored_grid(name: str, layer: nn.Module) -> GridWeight | None:
    """Return the grid of a quantized linear layer, or None if the layer is not compressed."""
    if isinstance(layer, Replacement):
        raise _make_storage_error(name, f"a {type(layer).__name__}")
    stored = get_compressed_weight(layer)
    if stored is None:
        return None
    if not isinstance(stored, GridWeight) or not isinstance(layer, nn.Linear):
        raise _make_storage_error(name, f"a {type(layer).__name__} with a {type(stored).__name__}")
    return stored


def _make_storage_error(name: str, what: str) -> ValueError:
    return ValueError(
        f"expected linear layers that were quantized by gptq or quantize(..., layers=[nn.Linear]), "
        f"got {name} with {what}"
    )


def group_size_of(grids: Mapping[str, GridWeight]) -> int | None:
    """Return the number of inputs per scale if all layers have the same number.

    Otherwise, return -1 if every layer has one scale per output, and None if not.
    """
    sizes = {grid.rows[1] for grid in grids.values()}
    if len(sizes) == 1:
        return sizes.pop()
    has_scale_per_output = all(grid.rows[1] == grid.shape[1] for grid in grids.values())
    return -1 if has_scale_per_output else None


def compute_unsigned_codes(grid: GridWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Return unsigned codes (out, in), with zero points and scales (out, groups)."""
    lowest = -(2 ** (grid.bits - 1))
    codes = grid.unpack_signed_codes().int().view(grid.shape) - lowest
    scale = grid.scale.view(grid.shape[0], -1)
    zero = torch.zeros_like(scale, dtype=torch.int32)
    if grid.zero is not None:
        zero = grid.zero.int().view_as(scale)
    return codes, zero - lowest, scale


def pack_int32(codes: Tensor, bits: int, order: Sequence[int]) -> Tensor:
    """Pack unsigned codes (..., n) into int32 (..., n * bits / 32).

    The code at position `order[i]` of each word starts at bit `i * bits`. `order` has 32 / bits
    positions.
    """
    words = codes.unflatten(-1, (-1, len(order)))[..., list(order)]
    return pack(words, bits).view(torch.int32).view(words.shape[:-1])


def write_folder(
    model: nn.Module,
    folder: str | Path,
    grids: dict[str, GridWeight],
    tensors_of: Callable[[GridWeight], dict[str, Tensor]],
    settings: dict[str, Any],
) -> None:
    """Write the weights and the configuration, with `settings` as `quantization_config`.

    `tensors_of` returns the tensors of a quantized layer by their names in the layer. The model's
    generation configuration is also written, because it may differ from the one that readers derive
    from the model's configuration.
    """
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    tied_keys = (
        getattr(model, "_tied_weights_keys", None) or () if find_tying_configs(model) else ()
    )
    tied = [re.compile(key) for key in tied_keys]
    written: set[object] = set()
    for name, tensor in get_state_tensors(model).items():
        is_packed = name.partition(".parametrizations.")[0] in grids and ".parametriz" in name
        memory = get_memory_key(tensor)
        # transformers ties only the weights that the model lists, and only by its configuration.
        is_tied = memory in written and any(key.search(name) for key in tied)
        written.add(memory)
        if not is_packed and not is_tied:
            tensors[name] = copy_if_shared(tensor, storages)
    for name, grid in grids.items():
        for key, tensor in tensors_of(grid).items():
            tensors[f"{name}.{key}"] = tensor.cpu().contiguous()
    config: Any = copy.deepcopy(model.config)
    config.quantization_config = settings
    config.architectures = [type(model).__name__]
    config.dtype = torch.float16
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(folder / "model.safetensors") as part:
        save_file(tensors, part, {"format": "pt"})
    config.save_pretrained(folder)
    generation_config: Any = getattr(model, "generation_config", None)
    if generation_config is not None:
        generation_config.save_pretrained(folder)
