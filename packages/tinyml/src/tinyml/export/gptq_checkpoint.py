"""Checkpoints in the GPTQ format, which transformers (with GPTQModel) and vLLM load.

    qweight  (in * bits / 32, out)      int32, 32 / bits codes of neighboring inputs per word
    qzeros   (groups, out * bits / 32)  int32, the zero point minus one
    scales   (groups, out)              float16
    g_idx    (in,)                      int32, the group of each input

A weight is `scales[g_idx[i], o] * (q[i, o] - (qzeros[g_idx[i], o] + 1))`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from tinyml.export.pretrained_folder import (
    compute_unsigned_codes,
    get_quantized_linears,
    group_size_of,
    pack_int32,
    write_folder,
)
from tinyml.quantization.grid_weight import GridWeight


def save_gptq(model: nn.Module, folder: str | Path) -> None:
    """Write a transformers model that `gptq` or `quantize` has rounded to 4 or 8 bits.

    The model must be in float16: call `model.half()` before `gptq` or `quantize`. Readers of the
    format assume that exactly the linear layers of numbered blocks are quantized: pass
    `protect=["lm_head"]` and, to `quantize`, `layers=[nn.Linear]`. Raises `ValueError` for other
    models. The tokenizer is not saved.
    """
    grids = get_quantized_linears(model, (4, 8))
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
        "group_size": group_size_of(grids),
        "desc_act": False,
        "sym": all(grid.zero is None for grid in grids.values()),
        "lm_head": False,
        "checkpoint_format": "gptq",
    }
    write_folder(model, folder, grids, _pack_tensors, settings)


def _pack_tensors(grid: GridWeight) -> dict[str, Tensor]:
    codes, zero, scale = compute_unsigned_codes(grid)
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
        "qweight": pack_int32(codes, grid.bits, order).t(),
        "qzeros": pack_int32(zero.t() - 1, grid.bits, order),
        "scales": scale.t(),
        "g_idx": group,
    }
