"""The same function in fewer bytes: pruning, quantization and low-rank adapters.

Every function that compresses returns a new model that still runs and leaves yours as it was;
adapters are put into the model that they train.
"""

from tinyml.channels import prune_channels, sort_channels
from tinyml.export import load, save
from tinyml.gptq import gptq
from tinyml.int8 import Int8Linear
from tinyml.integer import IntegerModel
from tinyml.kmeans import kmeans_quantize
from tinyml.linear import quantize
from tinyml.lora import LoRA, add_lora, lora_state_dict, merge, unmerge
from tinyml.prune import Masks, prune
from tinyml.qat import convert, prepare_qat
from tinyml.sensitivity import sensitivity
from tinyml.size import Size, size_of
from tinyml.soft_prompt import PrefixCache, SoftPrompt, adapt, meta_loss

__all__ = [
    "Int8Linear",
    "IntegerModel",
    "LoRA",
    "Masks",
    "PrefixCache",
    "Size",
    "SoftPrompt",
    "adapt",
    "add_lora",
    "convert",
    "gptq",
    "kmeans_quantize",
    "load",
    "lora_state_dict",
    "merge",
    "meta_loss",
    "prepare_qat",
    "prune",
    "prune_channels",
    "quantize",
    "save",
    "sensitivity",
    "size_of",
    "sort_channels",
    "unmerge",
]
