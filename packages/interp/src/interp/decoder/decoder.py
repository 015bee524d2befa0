"""One decoder-only transformer for all families: GPT-2, Llama, Gemma, DeepSeek and others.

    stream -> norm1 -> attention -> attention_out -> + -> norm2 -> mlp -> mlp_out -> +

A norm that a family does not have is an `nn.Identity`. All families therefore have these sites.
The exceptions are `position`, which needs learned positions, and `mid`:

    embed, position                     the token embeddings, and the learned positions
    blocks.*:input, blocks.*            the residual stream before and after a block
    blocks.*.mid                        the stream between attention and MLP, unless parallel
    blocks.*.attention.q, .k, .v        queries, keys and values, before norms and rotation
    blocks.*.attention.pattern          (batch, heads, seq, seq), after the softmax
    blocks.*.attention.o:input          z, the mixed values (batch, seq, heads * d_head)
    blocks.*.attention_out, .mlp_out    the outputs that are added to the stream
    norm:input, unembed                 the final stream and the logits (before a cap)

Modules share the memory of the weights that they are built from.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from interp.circuits.low_rank import LowRank, stack_layers
from interp.decoder.modules.block import DecoderBlock
from interp.decoder.modules.cache import Cache, require_cache_of
from interp.decoder.modules.settings import Comparison, Settings
from interp.decoder.modules.weights import UnsetLinear, Weights
from interp.decoder.source import Source
from interp.lens import compute_head_outputs, require_sum
from interp.prompts import Prompt, forward, require_zeros_and_ones
from interp.tap import record


def _warn_if_tokens_follow_padding(padding: Tensor) -> None:
    """Warn if tokens follow `padding` (batch, seq), because learned positions count padding."""
    if bool(((padding.cumsum(-1) > 0) & ~padding).any()):
        warnings.warn(
            "tokens follow padding, and learned positions count padding too unless position_ids "
            "are passed; pass (attention_mask.cumsum(-1) - 1).clamp(min=0) for the logits of the "
            "prompt without padding",
            stacklevel=3,
        )


def _require_one_text_per_row(position_ids: Tensor, padding: Tensor | None) -> None:
    """Raise ValueError if a row of positions (batch, seq) contains several packed texts."""
    for row, ids in enumerate(position_ids):
        steps = ids.diff() if padding is None else ids[~padding[row]].diff()
        # Without a mask, Hugging Face's models treat any step other than 1 as the start of a text.
        if bool((steps < 1).any()) or (padding is None and bool((steps > 1).any())):
            raise ValueError(
                f"position_ids of row {row} are {ids.tolist()}; they must increase by 1 per token "
                "(by 1 or more with an attention_mask): packed texts are not supported, pass one "
                "text per row"
            )


class Decoder(nn.Module):
    """A decoder from tokens (batch, seq) to logits (batch, seq, vocabulary)."""

    def __init__(self, tensors: Mapping[str, Tensor], settings: Settings) -> None:
        super().__init__()
        weights = Weights(tensors)
        self.settings = settings
        #: The link to the model that was passed to `describe`, or None.
        self.source: Source | None = None
        #: The comparisons under random weights that this decoder passed in `describe`.
        self.comparisons: tuple[Comparison, ...] = ()
        self.embed = weights.build_embedding("embed")
        self.embed_norm = weights.build_norm("embed_norm", settings)
        self.position = weights.build_embedding("position") if "position" in weights else None
        layers = len(settings.windows)
        self.blocks = nn.ModuleList(DecoderBlock(weights, i, settings) for i in range(layers))
        self.norm = weights.build_stream_norm("norm", settings)
        if "unembed" in weights:
            self.unembed = weights.build_linear("unembed")
        else:
            vocabulary, d_model = self.embed.weight.shape
            tied = UnsetLinear(d_model, vocabulary, bias=False, device="meta")
            self.unembed = weights.share_memory("unembed", tied)  # also sets the bias, if any
            self.unembed.weight = self.embed.weight
        if unused := sorted(tensors.keys() - weights.used):
            raise ValueError(
                f"expected only tensors with a role in this decoder, got {', '.join(unused)}; "
                "check their names, or leave them out"
            )
        self.eval()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the next-token logits (batch, seq, vocabulary) of `input_ids` (batch, seq).

        `attention_mask` (batch, seq) is 0 at padding. `position_ids` (batch, seq) are the indices
        of learned and rotary positions. By default they are computed as in the family's Hugging
        Face model: the column index, or the number of earlier tokens that are not padding (OPT,
        Bloom). If tokens follow padding, pass `position_ids` to models with learned positions that
        count padding; a warning is issued without them.

        With a `cache` of earlier tokens, `attention_mask` covers these tokens too, and the new
        tokens are added to the cache. If the earlier tokens include padding, pass the mask.

        Raises ValueError for arguments of wrong shapes or values, and RuntimeError if the described
        model has changed; see `require_fresh`.
        """
        self.require_fresh()
        padding = self._find_padding(input_ids, attention_mask, cache)
        x, position, positions = self._embed(input_ids, padding, position_ids, cache)
        for block in self.blocks:
            x = block(x, padding, position, positions, cache)
        if cache is not None and positions is not None:
            cache.commit(self, positions, padding)
        return self._compute_logits(x)

    def _find_padding(
        self, input_ids: Tensor, attention_mask: Tensor | None, cache: Cache | None
    ) -> Tensor | None:
        """Return booleans (batch, tokens), True at padding, or None without an `attention_mask`.

        Raises ValueError for wrong tokens and masks, and for a cache of another decoder or batch.
        """
        if cache is not None:
            require_cache_of(self, cache)
        past = 0 if cache is None else cache.get_seq_length()
        self._require_tokens(input_ids, past)
        if cache is not None:
            cache.require_rows(len(input_ids))
        shape = len(input_ids), past + input_ids.shape[1]
        if attention_mask is None:
            if cache is not None and cache.padding is not None:
                raise ValueError(
                    "the cache contains padding, to which the new tokens would attend; pass the "
                    f"attention_mask {shape} of the earlier and the new tokens"
                )
            return None
        if attention_mask.shape != shape:
            raise ValueError(
                f"attention_mask is {tuple(attention_mask.shape)}; pass {shape}, the shape of the "
                "tokens" + (" in the cache and the new tokens" if past else "")
            )
        require_zeros_and_ones(attention_mask)
        padding = attention_mask == 0
        if cache is not None:
            cache.require_same_padding(padding)
        return padding

    def _embed(
        self,
        input_ids: Tensor,
        padding: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the initial residual stream, the position embeddings, and all positions.

        The position embeddings are None unless only queries and keys read them. Positions are None
        if they are column indices.
        """
        positions = self._compute_positions(input_ids, padding, position_ids, cache)
        x = self.embed_norm(self.embed(input_ids))
        if self.position is None:
            return x, None, positions
        new = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
        if positions is not None:
            new = positions[:, -input_ids.shape[1] :]
        position = self.position(new)
        if self.settings.positions_in_attention:
            return x, position, positions
        return x + position, None, positions

    def _compute_positions(
        self,
        tokens: Tensor,
        padding: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
    ) -> Tensor | None:
        """Return the positions of all tokens, (batch, tokens), or None for column indices."""
        earlier = None if cache is None else cache.position_ids
        new: Tensor | None = None  # The positions of `tokens`.
        if position_ids is not None:
            new = self._validate_positions(position_ids, tokens)
        elif padding is not None and self.settings.positions_skip_padding:
            return ((~padding).cumsum(-1) - 1).clamp(min=0)
        elif cache is not None:
            new = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
            new = new if earlier is None else new + earlier[:, -1:] + 1
        is_default = position_ids is None and earlier is None
        if is_default and padding is not None and self.position is not None:
            _warn_if_tokens_follow_padding(padding)
        positions = new
        if new is not None and earlier is not None:
            positions = torch.cat([earlier, new], 1)
            self._require_same_angles(earlier, positions)
        if positions is not None and position_ids is not None:
            _require_one_text_per_row(positions, padding)
        return positions

    def _require_same_angles(self, earlier: Tensor, positions: Tensor) -> None:
        """Raise ValueError if the new tokens change the rotary angles of the cached tokens."""
        for block in self.layers:
            select_angles = block.attention.select_angles
            if select_angles(earlier) != select_angles(positions):
                raise ValueError(
                    f"the rotary angles depend on the length of the text, and {positions.shape[1]} "
                    "tokens have other angles than the tokens in the cache; pass the whole text "
                    "without a cache"
                )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        self.require_fresh()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.source is not None:
            # Weights that were converted or moved no longer share memory with the described model.
            self.source = self.source.derive_with_copies(self.parameters())
        return self

    def require_fresh(self) -> None:
        """Raise RuntimeError if the described model has changes that this decoder does not follow.

        Such changes are replaced modules and weights, changed constants, and in-place changes of
        weights of which this decoder has copies.
        """
        if self.source is not None:
            self.source.require_fresh()

    def _require_tokens(self, tokens: Tensor, past: int) -> None:
        if tokens.ndim != 2 or tokens.is_floating_point() or not tokens.numel():
            raise ValueError(
                f"tokens are {tokens.dtype} {tuple(tokens.shape)}; pass at least one id, in a "
                "tensor of integers (batch, seq)"
            )
        if int(tokens.max()) >= self.embed.num_embeddings or int(tokens.min()) < 0:
            raise ValueError(
                f"token ids reach from {int(tokens.min())} to {int(tokens.max())}; this vocabulary "
                f"has {self.embed.num_embeddings} tokens: use the tokenizer of this model"
            )
        length, context = past + tokens.shape[1], self.settings.context
        if self.position is not None and length > self.position.num_embeddings:
            raise ValueError(
                f"expected at most {self.position.num_embeddings} tokens, the number of learned "
                f"positions, got {length}; pass a shorter text"
            )
        if context is not None and length > context:
            raise ValueError(
                f"this description was verified with up to {context} tokens, got {length}; "
                f"describe(model, context={length}) verifies more"
            )

    def _validate_positions(self, position_ids: Tensor, tokens: Tensor) -> Tensor:
        """Validate `position_ids` and broadcast them to (batch, seq).

        Raises ValueError if the dtype or shape is wrong, or a position is out of range.
        """
        if position_ids.is_floating_point() or position_ids.shape not in (
            tokens.shape,
            (1, tokens.shape[1]),
        ):
            raise ValueError(
                f"position_ids are {position_ids.dtype} {tuple(position_ids.shape)}; pass "
                f"integers {tuple(tokens.shape)}"
            )
        limit = None if self.position is None else self.position.num_embeddings - 1
        lowest, highest = int(position_ids.min()), int(position_ids.max())
        if lowest < 0 or (limit is not None and highest > limit):
            at_most = "" if limit is None else f" and at most {limit}"
            raise ValueError(
                f"position_ids reach from {lowest} to {highest}; expected positions of at least "
                f"0{at_most}"
            )
        return position_ids.expand(tokens.shape)

    def decode(self, stream: Tensor) -> Tensor:
        """Return the logits (..., vocabulary) of residual streams (..., d_model).

        The final norm, the unembedding and the cap on logits are applied. Raises RuntimeError if
        the described model has changed; see `require_fresh`.
        """
        self.require_fresh()
        return self._compute_logits(stream)

    def _compute_logits(self, stream: Tensor) -> Tensor:
        logits: Tensor = self.unembed(self.norm(stream))
        cap = self.settings.logit_cap
        return logits if cap is None else (logits / cap).tanh() * cap

    @property
    def layers(self) -> list[DecoderBlock]:
        """The modules of `blocks`, typed as `DecoderBlock`."""
        return cast(list[DecoderBlock], list(self.blocks))

    def qk(self, distance: int = 0) -> LowRank:
        """Return W_QK of every head, (layers, heads), for keys `distance` positions earlier.

        The scale and the cap of scores, biases, bounds, sinks, ALiBi and norms are left out, except
        for the gains of norms inside latent attention.
        """
        self.require_fresh()
        return stack_layers([block.attention.qk(distance) for block in self.layers])

    def ov(self) -> LowRank:
        """Return W_OV of every head without biases, (layers, heads)."""
        self.require_fresh()
        return stack_layers([block.attention.ov() for block in self.layers])

    @torch.no_grad()
    def components(self, prompt: Prompt) -> dict[str, Tensor]:
        """Return all terms of the residual stream by name; they sum to the input of `norm`.

        `prompt` is a tensor of token ids or the keyword arguments of `forward`. The output of an
        attention is split into heads unless a norm follows it. Raises ValueError if the terms do
        not sum to the final stream, as inside a patch of the stream.
        """
        outputs = ("blocks.*.attention.o:input", "blocks.*.attention_out", "blocks.*.mlp_out")
        sites = ["embed_norm", "norm:input", *outputs]
        if self.position is not None:
            sites.append("position")
        with record(self, *sites) as recorded:
            forward(self, prompt)
        parts = {"embed": recorded["embed_norm"]}
        if self.position is not None and not self.settings.positions_in_attention:
            parts["position"] = recorded["position"]
        for i, block in enumerate(self.layers):
            o = block.attention.o
            if isinstance(block.attention_out, nn.Identity):
                mixed = recorded[f"blocks.{i}.attention.o:input"]
                heads = block.attention.heads
                parts |= compute_head_outputs(mixed, o.weight, heads=heads, prefix=f"head {i}.")
                if o.bias is not None:
                    parts[f"attention bias {i}"] = o.bias.expand(1, 1, -1)
            else:
                parts[f"attention {i}"] = recorded[f"blocks.{i}.attention_out"]
            parts[f"mlp {i}"] = recorded[f"blocks.{i}.mlp_out"]
        require_sum(parts.values(), recorded["norm:input"])
        return parts
