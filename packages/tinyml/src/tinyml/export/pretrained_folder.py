"""Folders with packed weights, which transformers and vLLM load: the GPTQ and AWQ formats.

The formats store codes of 4 or 8 bits with a float16 scale per output and group of inputs. The
weight that they represent, rounded to float16, is exactly `layer.weight`.

GPTQ, which transformers loads with GPTQModel:

    qweight  (in * bits / 32, out)      int32, 32 / bits codes of neighboring inputs per word
    qzeros   (groups, out * bits / 32)  int32, the zero point minus one
    scales   (groups, out)              float16
    g_idx    (in,)                      int32, the group of each input

A weight is `scales[g_idx[i], o] * (q[i, o] - (qzeros[g_idx[i], o] + 1))`.

AWQ (version "gemm"):

    qweight  (in, out / 8)      int32, eight 4-bit codes of neighboring outputs per word
    qzeros   (groups, out / 8)  int32, in the same order
    scales   (groups, out)      float16

A weight is `scales[i // group, o] * (q[i, o] - qzeros[i // group, o])`. A word contains the outputs
0, 2, 4, 6, 1, 3, 5, 7, starting from the lowest bits.
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

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def save_gptq(model: nn.Module, folder: str | Path) -> None:
    """Write a transformers model that `gptq` or `quantize` has rounded to 4 or 8 bits.

    The model must be in float16: call `model.half()` before `gptq` or `quantize`. Readers of the
    format assume that exactly the linear layers of numbered blocks are quantized: pass
    `protect=["lm_head"]` and, to `quantize`, `layers=[nn.Linear]`. Raises `ValueError` for other
    models. The tokenizer is not saved.
    """
    grids = _get_quantized_linears(model, (4, 8))
    for name, layer in model.named_modules():
        is_in_block = any(part.isdigit() for part in name.split("."))
        if isinstance(layer, nn.Linear) and (name in grids) != is_in_block:
            remedy = (
                f"pass protect=[{name!r}]"
                if name in grids
                else "remove it from protect, or add its type to layers"
            )
            raise ValueError(
                "expected a model whose quantized layers are exactly the linear layers in blocks, "
                f"got {name}, which is{'' if name in grids else ' not'} quantized; {remedy}"
            )
    first = next(iter(grids.values()))
    settings = {
        "quant_method": "gptq",
        "bits": first.bits,
        "group_size": _get_common_group_size(grids),
        "desc_act": False,
        "sym": all(grid.zero is None for grid in grids.values()),
        "lm_head": False,
        "checkpoint_format": "gptq",
    }
    _write_folder(model, folder, grids, _pack_gptq, settings)


def _pack_gptq(grid: GridWeight) -> dict[str, Tensor]:
    codes, zero, scale = _to_unsigned_codes(grid)
    outputs, inputs = codes.shape
    per_word = 32 // grid.bits
    if outputs % per_word or inputs % per_word:
        raise ValueError(
            f"expected sizes that are multiples of {per_word} for {grid.bits} bits, got a layer "
            f"with {inputs} inputs and {outputs} outputs; exclude it with protect"
        )
    if not zero.all():
        raise ValueError(
            "expected zero points above the lowest code, got one that equals it, which the format "
            "cannot store; quantize with symmetric=True"
        )
    order = range(per_word)
    group = torch.arange(inputs, dtype=torch.int32, device="cpu") // (inputs // scale.shape[1])
    return {
        "qweight": _pack_int32(codes, grid.bits, order).t(),
        "qzeros": _pack_int32(zero.t() - 1, grid.bits, order),
        "scales": scale.t(),
        "g_idx": group,
    }


def save_awq(model: nn.Module, folder: str | Path) -> None:
    """Write a transformers model whose linear layers have 4-bit weights in groups.

    The model must be in float16: call `model.half()` before `gptq` or `quantize`. Linear layers
    that are not quantized are listed in `modules_to_not_convert`. The head must not be quantized,
    because transformers leaves it dense: pass `protect=["lm_head"]`. The tokenizer is not saved.
    """
    grids = _get_quantized_linears(model, (4,))
    group_size = _get_common_group_size(grids)
    if group_size == -1:
        raise ValueError("expected groups of inputs, got one scale per output; pass group_size=128")
    linears = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    dense = [name for name in linears if name not in grids]
    for name in grids:
        # Readers compare parts of names, so an entry may also exclude a layer with a longer name.
        excluded = [other for other in [*dense, *_list_dense_layers(model)] if other in name]
        if excluded:
            raise ValueError(
                f"expected layers that readers of the format quantize, got {name}, which they "
                f"leave dense because of {excluded[0]}; exclude it with protect"
            )
    settings = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": dense or None,
    }
    _write_folder(model, folder, grids, _pack_awq, settings)


def _list_dense_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers that transformers never converts.

    These are the head and the layer of the model's last parameter, unless this parameter is a bias.
    """
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    names = [name for name, layer in model.named_modules() if layer is head]
    last, _, key = list(model.named_parameters())[-1][0].rpartition(".")
    if key == "original":  # compressing a weight has moved it after the bias of its layer
        last = last.partition(".parametrizations.")[0]
        key = "weight" if model.get_submodule(last).bias is None else "bias"
    return [*names, last] if key == "weight" else names


def _pack_awq(grid: GridWeight) -> dict[str, Tensor]:
    codes, zero, scale = _to_unsigned_codes(grid)
    if len(codes) % 8:
        raise ValueError(
            f"expected a multiple of 8 outputs, got {len(codes)}; exclude the layer with protect"
        )
    return {
        "qweight": _pack_int32(codes.t(), 4, _AWQ_ORDER),
        "qzeros": _pack_int32(zero.t(), 4, _AWQ_ORDER),
        "scales": scale.t(),
    }


def _get_quantized_linears(model: nn.Module, widths: Sequence[int]) -> dict[str, GridWeight]:
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
    if _get_common_group_size(grids) is None or len(bits) > 1 or not bits <= {*widths}:
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


def _make_storage_error(name: str, content: str) -> ValueError:
    return ValueError(
        f"expected linear layers that were quantized by gptq or quantize(..., layers=[nn.Linear]), "
        f"got {name} with {content}"
    )


def _get_common_group_size(grids: Mapping[str, GridWeight]) -> int | None:
    """Return the number of inputs per scale if all layers have the same number.

    Otherwise, return -1 if every layer has one scale per output, and None if not.
    """
    sizes = {grid.rows[1] for grid in grids.values()}
    if len(sizes) == 1:
        return sizes.pop()
    has_scale_per_output = all(grid.rows[1] == grid.shape[1] for grid in grids.values())
    return -1 if has_scale_per_output else None


def _to_unsigned_codes(grid: GridWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Return unsigned codes (out, in), with zero points and scales (out, groups)."""
    lowest = -(2 ** (grid.bits - 1))
    codes = grid.unpack_signed_codes().int().view(grid.shape) - lowest
    scale = grid.scale.view(grid.shape[0], -1)
    zero = torch.zeros_like(scale, dtype=torch.int32)
    if grid.zero is not None:
        zero = grid.zero.int().view_as(scale)
    return codes, zero - lowest, scale


def _pack_int32(codes: Tensor, bits: int, order: Sequence[int]) -> Tensor:
    """Pack unsigned codes (..., n) into int32 (..., n * bits / 32).

    In each word of 32 / bits codes, the code at position `order[i]` starts at bit `i * bits`.
    """
    words = codes.unflatten(-1, (-1, len(order)))[..., list(order)]
    return pack(words, bits).view(torch.int32).view(words.shape[:-1])


def _write_folder(
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
