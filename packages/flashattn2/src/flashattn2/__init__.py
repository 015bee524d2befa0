"""Exact attention in linear memory: FlashAttention-2 in PyTorch and Triton."""

from flashattn2.attention import flash_attention, flash_attention_varlen
from flashattn2.autograd_functions import FlashAttentionTorch, FlashAttentionTriton
from flashattn2.explanation import Explanation, explain
from flashattn2.integrations.sdpa import sdpa
from flashattn2.kvcache import flash_attention_with_kvcache
from flashattn2.reference import attention_reference

__all__ = [
    "Explanation",
    "FlashAttentionTorch",
    "FlashAttentionTriton",
    "attention_reference",
    "explain",
    "flash_attention",
    "flash_attention_varlen",
    "flash_attention_with_kvcache",
    "sdpa",
]
