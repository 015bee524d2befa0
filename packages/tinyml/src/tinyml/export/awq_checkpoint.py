"""Checkpoints in the AWQ format (version "gemm"), which transformers and vLLM load.

    qweight  (in, out / 8)      int32, eight 4-bit codes of neighboring outputs per word
    qzeros   (groups, out / 8)  int32, in the same order
    scales   (groups, out)      float16

A weight is `scales[i // group, o] * (q[i, o] - qzeros[i // group, o])`. A word contains the outputs
0, 2, 4, 6, 1, 3, 5, 7, starting from the lowest bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tinyml.export.pretrained_folder import (
    compute_unsigned_codes,
    get_quantized_linears,
    group_size_of,
    pack_int32,
    write_folder,
)
from tinyml.quantization.grid_weight import GridWeight

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def save_awq(model: nn.Module, folder: str | Path) -> None:
    """Write a transformers model whose linear layers have 4-bit weights in groups.

    The model must be in float16: call `model.half()` before `gptq` or `quantize`. Linear layers
    that are not quantized are listed in `modules_to_not_convert`. The head must not be quantized,
    because transformers leaves it dense: pass `protect=["lm_head"]`. The tokenizer is not saved.
    """
    grids = get_quantized_linears(model, (4,))
    group_size = group_size_of(grids)
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
    write_folder(model, folder, grids, _pack_tensors, settings)


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


def _pack_tensors(grid: GridWeight) -> dict[str, Tensor]:
    codes, zero, scale = compute_unsigned_codes(grid)
    if len(codes) % 8:
        raise ValueError(
            f"expected a multiple of 8 outputs, got {len(codes)}; exclude the layer with protect"
        )
    return {
        "qweight": pack_int32(codes.t(), 4, _ORDER),
        "qzeros": pack_int32(zero.t(), 4, _ORDER),
        "scales": scale.t(),
    }
