"""Model compression: pruning, quantization and low-rank adapters.

Functions that compress a model return a new model and leave their argument unchanged. `add_lora`,
`load_lora`, `merge`, `unmerge` and `merge_and_unload` change the model that they receive.
"""

from tinyml.adapters.insertion import add_lora
from tinyml.adapters.lora import LoRA
from tinyml.adapters.merging import merge, merge_and_unload, unmerge
from tinyml.adapters.peft_files import load_lora, save_lora
from tinyml.adapters.soft_prompt import SoftPrompt
from tinyml.export.gguf_file import save_gguf
from tinyml.export.pretrained_folder import save_awq, save_gptq
from tinyml.export.safetensors_file import load, save
from tinyml.integer.model import IntegerModel
from tinyml.integer.to_c import CProgram, to_c
from tinyml.integer.to_onnx import to_onnx
from tinyml.pruning.channels import prune_channels, sort_channels
from tinyml.pruning.magnitude import Masks, prune
from tinyml.pruning.sensitivity import sensitivity
from tinyml.quantization.gptq import gptq
from tinyml.quantization.int4 import Int4Linear
from tinyml.quantization.int8 import Int8Linear
from tinyml.quantization.kmeans import kmeans, kmeans_quantize
from tinyml.quantization.linear import quantize
from tinyml.quantization.qat import convert, prepare_qat
from tinyml.size import Size, size_of

__all__ = [
    "CProgram",
    "Int4Linear",
    "Int8Linear",
    "IntegerModel",
    "LoRA",
    "Masks",
    "Size",
    "SoftPrompt",
    "add_lora",
    "convert",
    "gptq",
    "kmeans",
    "kmeans_quantize",
    "load",
    "load_lora",
    "merge",
    "merge_and_unload",
    "prepare_qat",
    "prune",
    "prune_channels",
    "quantize",
    "save",
    "save_awq",
    "save_gguf",
    "save_gptq",
    "save_lora",
    "sensitivity",
    "size_of",
    "sort_channels",
    "to_c",
    "to_onnx",
    "unmerge",
]
