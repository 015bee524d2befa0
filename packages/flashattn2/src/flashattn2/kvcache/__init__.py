"""Attention of new queries over a cache of keys and values, contiguous or paged.

A contiguous cache is `(batch, kv_heads, capacity, dim)`.  A paged cache is `(pages, kv_heads,
page_size, dim)` with a block table.  Both may have any strides.
"""

from flashattn2.kvcache.attention import flash_attention_with_kvcache

__all__ = ["flash_attention_with_kvcache"]
