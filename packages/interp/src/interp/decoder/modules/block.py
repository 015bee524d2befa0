"""One block of a decoder: attention and MLP on the residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from interp.decoder.modules.attention import DecoderAttention
from interp.decoder.modules.cache import Cache
from interp.decoder.modules.mlp import DecoderMLP, Experts, NoMLP
from interp.decoder.modules.settings import Settings
from interp.decoder.modules.weights import Weights


class DecoderBlock(nn.Module):
    """Attention and MLP, each with a norm before and a norm after, added to the stream."""

    def __init__(self, weights: Weights, layer: int, settings: Settings) -> None:
        super().__init__()
        name = f"blocks.{layer}"
        self.parallel = settings.parallel
        self.norm1 = weights.build_stream_norm(f"{name}.norm1", settings)
        self.attention = DecoderAttention(weights, f"{name}.attention", settings, layer)
        self.attention_out = weights.build_norm(f"{name}.attention_out", settings)
        # Parallel blocks with one norm (Phi, GPT-J, Cohere) use it for attention and MLP.
        is_shared = settings.parallel and f"{name}.norm2" not in weights
        norm2 = f"{name}.norm1" if is_shared else f"{name}.norm2"
        #: The site of the stream between attention and MLP, which parallel blocks do not have.
        self.mid = None if settings.parallel else nn.Identity()
        self.norm2 = weights.build_stream_norm(norm2, settings)
        self.mlp: nn.Module
        if f"{name}.mlp.router" in weights:
            self.mlp = Experts(weights, f"{name}.mlp", settings)
        elif any(".mlp." in known or ".norm2." in known for known in weights.tensors):
            self.mlp = DecoderMLP(weights, f"{name}.mlp", settings)
        else:
            self.mlp = NoMLP()
        self.mlp_out = weights.build_norm(f"{name}.mlp_out", settings)

    def forward(
        self,
        x: Tensor,
        padding: Tensor | None = None,
        position: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the stream after the block for the stream `x` before it, (batch, seq, d_model)."""
        heads = self.attention(self.norm1(x), padding, position, position_ids, cache)
        after_attention = x + self.attention_out(heads)
        if self.mid is not None:
            after_attention = self.mid(after_attention)
        mlp_input = x if self.parallel else after_attention
        out: Tensor = after_attention + self.mlp_out(self.mlp(self.norm2(mlp_input)))
        return out
