"""The implementations of attention that the cases compare."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashattn2.attention import flash_attention
from flashattn2.reference import attention_reference

Attention = Callable[[Tensor, Tensor, Tensor], Any]


@functools.cache
def make_causal_kernels(device: str, quick: bool) -> dict[str, Attention]:
    """Return the available implementations of causal attention, ours first."""
    plain = functools.partial(attention_reference, is_causal=True)
    attentions: dict[str, Attention] = {
        "ours": functools.partial(flash_attention, is_causal=True),
        "tiled": functools.partial(flash_attention, is_causal=True, backend="torch"),
        "plain": plain,
    }
    if not quick:
        attentions["compiled"] = torch.compile(plain)
    if device == "cpu":
        return {**attentions, "sdpa": restrict_torch_sdpa(True, SDPBackend.FLASH_ATTENTION)}
    return {**attentions, **make_fused_kernels(True)}


def make_fused_kernels(is_causal: bool) -> dict[str, Attention]:
    """Return the GPU kernels for training in half precision, ours first."""
    ours = functools.partial(flash_attention, is_causal=is_causal)
    return {
        "ours": ours,
        "ours atomic": functools.partial(ours, deterministic=False),
        "ours triton": functools.partial(ours, backend="triton"),
        "sdpa flash": restrict_torch_sdpa(is_causal, SDPBackend.FLASH_ATTENTION),
        "sdpa cudnn": restrict_torch_sdpa(is_causal, SDPBackend.CUDNN_ATTENTION),
    }


def restrict_torch_sdpa(is_causal: bool, backend: SDPBackend) -> Attention:
    """Return torch's attention, restricted to one backend."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return run
