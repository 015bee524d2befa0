"""Minimal modules with the shape of a `Transformer`, and a group of ranks without processes."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accounting import Transformer
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def describe_module(module: Any) -> Transformer:
    """Return the description of a module of transformers from its configuration and its class."""
    content = module.config.to_dict() | {"architectures": [type(module).__name__]}
    return Transformer.from_hf(content)


class Model(nn.Module):
    """RMSNorm, grouped queries, SwiGLU or GELU; attention by torch, without a mask."""

    def __init__(self, t: Transformer) -> None:
        super().__init__()
        self.t = t
        self.embedding = nn.Embedding(t.vocab_size, t.d_model)
        self.blocks = nn.ModuleList(Block(t) for _ in range(t.layers))
        self.norm = nn.RMSNorm(t.d_model)
        self.head = nn.Linear(t.d_model, t.vocab_size, bias=False)
        if t.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, t: Transformer) -> None:
        super().__init__()
        self.heads, self.kv_heads = t.heads, t.kv_heads
        d = t.d_model
        h = t.heads
        g = t.kv_heads
        self.attn_norm, self.mlp_norm = nn.RMSNorm(d), nn.RMSNorm(d)
        self.q_proj = nn.Linear(d, h * t.qk_dim, bias=False)
        self.k_proj = nn.Linear(d, g * t.qk_dim, bias=False)
        self.v_proj = nn.Linear(d, g * t.v_head_dim, bias=False)
        self.o_proj = nn.Linear(h * t.v_head_dim, d, bias=False)
        self.gate = nn.Linear(d, t.d_ff, bias=False) if t.gated_mlp else None
        self.up = nn.Linear(d, t.d_ff, bias=False)
        self.down = nn.Linear(t.d_ff, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        y = self.attn_norm(x)
        q = self.q_proj(y).view(b, s, self.heads, -1).transpose(1, 2)
        k = self.k_proj(y).view(b, s, self.kv_heads, -1).transpose(1, 2)
        v = self.v_proj(y).view(b, s, self.kv_heads, -1).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.kv_heads < self.heads)
        x = x + self.o_proj(a.transpose(1, 2).reshape(b, s, -1))
        y = self.mlp_norm(x)
        hidden = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        return x + self.down(hidden)


@contextmanager
def emulate_world(ranks: int, rank: int = 0) -> Iterator[Any]:
    """Yield the mesh of one rank in a group whose collectives send nothing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


class PolledMemory(TorchDispatchMode):
    """An independent reference: before and after each operator, the sizes of all known storages."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Any] = {}
        self.peak_bytes = 0

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.untyped_storage()
            self.known[storage._cdata] = weakref.ref(storage)

    def poll(self) -> None:
        alive = {key: storage for key, ref in self.known.items() if (storage := ref()) is not None}
        self.known = {key: self.known[key] for key in alive}
        self.peak_bytes = max(self.peak_bytes, sum(x.nbytes() for x in alive.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.poll()
        out = func(*args, **(kwargs or {}))
        self.add(leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        self.poll()
        return out
