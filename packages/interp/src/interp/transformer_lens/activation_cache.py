"""Recorded activations, and decompositions of the residual stream."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from interp.decoder.decoder import Decoder
from interp.decoder.modules.mlp import NoMLP
from interp.hook_points import center
from interp.lens import compute_head_outputs
from interp.transformer_lens.names import get_act_name

#: One position, (stop,), (start, stop), (start, stop, step), several positions, or None for all.
PosSlice = int | tuple[int, ...] | list[int] | Tensor | None
#: Components (components, batch, pos, d_model), or a pair of components and labels.
Stack = Tensor | tuple[Tensor, list[str]]
#: The options of the methods that return a `Stack`; see `ActivationCache`.
_OPTIONS = "pos_slice", "apply_ln", "return_labels"


class ActivationCache(Mapping[Any, Tensor]):
    """Activations by hook name, by ("pattern", layer) or by ("scale", layer, "ln1").

    A negative layer in a key counts from the end. In the methods, `layer` is the layer whose input
    is decomposed; None, -1 and the number of layers mean the input of the final norm. `options` are
    `pos_slice`, `apply_ln` (see `apply_ln_to_stack`), and `return_labels`, which adds the labels of
    the components to the result. Other options raise TypeError, and other layers ValueError.
    """

    def __init__(self, cache_dict: dict[str, Tensor], model: Any) -> None:
        self.cache_dict = cache_dict
        #: The `HookedDecoder` whose activations were recorded.
        self.model = model
        self.decoder: Decoder = model.decoder

    def __getitem__(self, key: Any) -> Tensor:
        name = key
        if not isinstance(key, str):
            short, layer, *layer_type = key
            if layer is not None and layer < 0:
                layer += len(self.decoder.layers)
            name = get_act_name(short, layer, *layer_type)
        name = name if name in self.cache_dict else get_act_name(name)
        if name not in self.cache_dict:
            raise KeyError(
                f"{key!r} was not recorded; keys() are the recorded names: names_filter and "
                "stop_at_layer leave names out, and set_use_attn_result(True) adds hook_result"
            )
        return self.cache_dict[name]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"ActivationCache has no {name!r}; for neurons, use "
            "interp.decoder.neurons.neuron_attribution, and otherwise the tensors in cache_dict"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.cache_dict)

    def __len__(self) -> int:
        return len(self.cache_dict)

    def remove_batch_dim(self) -> ActivationCache:
        """Remove the batch dimension of a single prompt in place; return the cache.

        Raises ValueError for several prompts.
        """
        for name, value in self.cache_dict.items():
            if len(value) != 1:
                raise ValueError(
                    f"{name!r} is {tuple(value.shape)}; only a batch of one prompt can be removed, "
                    "so call the model on a single prompt"
                )
            self.cache_dict[name] = value[0]
        return self

    def accumulated_resid(
        self, layer: int | None = None, *, incl_mid: bool = False, **options: Any
    ) -> Stack:
        """Return the residual streams before each layer up to `layer`.

        `incl_mid` adds the streams between attention and MLP. If `layer` means the input of the
        final norm, `apply_ln` applies this norm to each stream, with the stream's own scale.
        """
        require_options("accumulated_resid", options, _OPTIONS)
        last = self._resolve_layer(layer)
        streams = {}
        for i in range(min(last + 1, len(self.decoder.layers))):
            streams[f"{i}_pre"] = self["resid_pre", i]
            if incl_mid and i < last:
                streams[f"{i}_mid"] = self["resid_mid", i]
        if last == len(self.decoder.layers):
            streams["final_post"] = self["resid_post", -1]
            if options.pop("apply_ln", False):
                norm = self.decoder.norm
                streams = {name: norm(stream) for name, stream in streams.items()}
        return self._stack(streams, layer, **options)

    def decompose_resid(
        self,
        layer: int | None = None,
        *,
        mode: str = "all",
        incl_embeds: bool = True,
        **options: Any,
    ) -> Stack:
        """Return the embeddings and the outputs of all earlier layers.

        They sum to the stream if `mode` is "all". `mode` may also be "attn" (no MLPs) or "mlp" (no
        attention). `incl_embeds=False` leaves out the embeddings. Raises ValueError for another
        mode.
        """
        require_options("decompose_resid", options, _OPTIONS)
        if mode not in ("all", "attn", "mlp"):
            raise ValueError(f"expected mode 'all', 'attn' or 'mlp', got {mode!r}")
        parts = {}
        if incl_embeds:
            parts["embed"] = self["embed"]
            in_attention = self.decoder.settings.positions_in_attention
            if self.decoder.position is not None and not in_attention:
                parts["pos_embed"] = self["pos_embed"]
        for i in range(self._resolve_layer(layer)):
            if mode != "mlp":
                parts[f"{i}_attn_out"] = self["attn_out", i]
            if mode != "attn" and not isinstance(self.decoder.layers[i].mlp, NoMLP):
                parts[f"{i}_mlp_out"] = self["mlp_out", i]
        return self._stack(parts, layer, **options)

    def stack_head_results(self, layer: int | None = None, **options: Any) -> Stack:
        """Return the output of each head before `layer`, computed from z, without biases.

        Raises ValueError if a norm follows the heads, whose outputs are then not in the stream.
        """
        require_options("stack_head_results", options, _OPTIONS)
        parts: dict[str, Tensor] = {}
        for i in range(self._resolve_layer(layer)):
            block = self.decoder.layers[i]
            if not isinstance(block.attention_out, nn.Identity):
                raise ValueError(
                    f"a norm follows the heads of layer {i}, so their outputs are not terms of the "
                    "stream; use decompose_resid()"
                )
            z = self["z", i].flatten(-2)
            attention = block.attention
            parts |= compute_head_outputs(
                z, attention.o.weight, heads=attention.heads, prefix=f"L{i}H"
            )
        return self._stack(parts, layer, **options)

    def apply_ln_to_stack(
        self,
        residual_stack: Tensor,
        layer: int | None = None,
        *,
        mlp_input: bool = False,
        pos_slice: PosSlice = None,
    ) -> Tensor:
        """Divide components by the recorded scale of the norm that reads the input of `layer`.

        With `mlp_input`, the norm is the one before the MLP of that layer. A layer norm also
        centers each component. Weights and biases of the norm are not applied; `fold_decoder` moves
        them into the next matrix.
        """
        index = self._resolve_layer(layer)
        norm, key = self.decoder.norm, "ln_final.hook_scale"
        if index < len(self.decoder.layers):
            block = self.decoder.layers[index]
            norm = block.norm2 if mlp_input else block.norm1
            key = f"blocks.{index}.{'ln2' if mlp_input else 'ln1'}.hook_scale"
        if isinstance(norm, nn.Identity):
            return residual_stack
        return center(norm, residual_stack) / _select_positions(self[key], pos_slice)

    def logit_attrs(
        self,
        residual_stack: Tensor,
        tokens: str | int | Tensor,
        incorrect_tokens: str | int | Tensor | None = None,
        *,
        pos_slice: PosSlice = None,
        has_batch_dim: bool = True,
    ) -> Tensor:
        """Return each component's contribution to the logit of `tokens`, (components, batch, pos).

        `tokens` are one token, or token ids that broadcast to the stack without its last dimension,
        such as (batch, pos). Ids of shape (batch,) belong to all positions of a stack of four
        dimensions. With `incorrect_tokens`, the contributions are to the difference of both logits.
        The scale of the final norm is the recorded one. Set `has_batch_dim=False` for a stack
        without a batch dimension.
        """
        direction: Tensor = self.model.tokens_to_residual_directions(tokens)
        if incorrect_tokens is not None:
            direction = direction - self.model.tokens_to_residual_directions(incorrect_tokens)
        stack = self.apply_ln_to_stack(residual_stack, pos_slice=pos_slice)
        is_per_prompt = direction.ndim == 2 and len(direction) == stack.shape[1]
        if has_batch_dim and stack.ndim == 4 and is_per_prompt:
            direction = direction[:, None]
        return (stack * direction).sum(-1)

    def _resolve_layer(self, layer: int | None) -> int:
        """Return the index of the layer, or the number of layers for the final norm."""
        num_layers = len(self.decoder.layers)
        if layer is None or layer == -1:
            return num_layers
        if not 0 <= layer <= num_layers:
            raise ValueError(
                f"expected a layer from 0 to {num_layers}, or -1 or None for the final norm, got "
                f"{layer}"
            )
        return layer

    def _stack(
        self,
        parts: Mapping[str, Tensor],
        layer: int | None,
        *,
        pos_slice: PosSlice = None,
        apply_ln: bool = False,
        return_labels: bool = False,
    ) -> Stack:
        chosen = [_select_positions(part, pos_slice) for part in parts.values()]
        if chosen:
            stack = torch.stack(chosen)
        else:  # no component precedes the layer, such as the heads before layer 0
            stack = _select_positions(self["embed"][None][:0], pos_slice)
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, layer, pos_slice=pos_slice)
        return (stack, list(parts)) if return_labels else stack


def _select_positions(value: Tensor, pos_slice: PosSlice) -> Tensor:
    """Index the positions of (..., pos, features); an integer removes the dimension."""
    if pos_slice is None:
        return value
    index = slice(*pos_slice) if isinstance(pos_slice, tuple) else pos_slice
    return value[..., index, :]


def require_options(method: str, options: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError, with the name of `method`, if an option is not in `known`."""
    for option in options:
        if option not in known:
            expected = f"{', '.join(known)} or a named parameter"
            raise TypeError(f"{method}() has no option {option!r}; expected {expected}")
