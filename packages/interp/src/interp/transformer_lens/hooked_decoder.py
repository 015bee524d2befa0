"""A `Decoder` with the interface of TransformerLens's model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from interp.decoder.decoder import Decoder
from interp.decoder.modules.cache import Cache
from interp.decoder.modules.mlp import DecoderMLP, NoMLP
from interp.hook_points import HookPoint
from interp.tap import install_hooks, record
from interp.transformer_lens.activation_cache import ActivationCache, require_options
from interp.transformer_lens.factored_matrix import FactoredMatrix
from interp.transformer_lens.generation import continue_tokens, sample
from interp.transformer_lens.hooks import Hook, HookFunction, HookManagement, HookSelector
from interp.transformer_lens.tokens import Input, TextConversion
from interp.transformer_lens.weights import collect_named_weights

#: The options of a call; see `HookedDecoder.__call__`.
_OPTIONS = "prepend_bos", "padding_side", "attention_mask", "loss_per_token", "stop_at_layer"


class Submodule:
    """A part of a model, such as `blocks[0].attn`, whose attributes are weights and hook points."""

    def __init__(self, model: HookedDecoder, name: str) -> None:
        self._model = model
        self._name = name

    def __setattr__(self, attribute: str, value: Any) -> None:
        _require_no_weight(attribute)
        super().__setattr__(attribute, value)

    def __getattr__(self, attribute: str) -> Any:
        # copy.copy looks up attributes before they are set.
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        name = f"{self._name}.{attribute}"
        members = self._model.hook_dict | collect_named_weights(self._model.decoder)
        if name in members:
            return members[name]
        if any(other.startswith(f"{name}.") for other in members):
            return Submodule(self._model, name)
        raise AttributeError(f"the model has no {name!r}; {self._model.suggest_remedy(name)}")


def _require_no_weight(attribute: str) -> None:
    """Raise AttributeError for the name of a weight, because setting it would have no effect."""
    if attribute.startswith(("W_", "b_")):
        raise AttributeError(
            f"expected {attribute!r} to be read only, because a new tensor would not be a weight "
            "of the decoder; change it in place, as in model.blocks[0].attn.W_Q.data[...] = x"
        )


class _Stopped(Exception):
    """An exception that ends a call before `stop_at_layer`; its argument is the residual stream."""


def _stop(stream: Tensor) -> None:
    raise _Stopped(stream)


class HookedDecoder(TextConversion, HookManagement):
    """A `Decoder` with the methods, names and weights of TransformerLens's `HookedTransformer`.

    The weights and activations are those of the decoder. For `describe(model)`, they equal those of
    a model from TransformerLens's `from_pretrained_no_processing`. For
    `fold_decoder(describe(model))`, they equal those of a model from `from_pretrained`, whose
    weights are processed. Weights such as `W_Q` are stacked copies of all layers, W_K and W_V have
    one matrix per key head, and missing biases are zeros.

    `tokenizer` is a tokenizer of transformers. Its BOS token is prepended to texts, unless a method
    receives `prepend_bos=False`, or this class `default_prepend_bos=False`. Texts of different
    lengths are padded on the tokenizer's `padding_side`. Positions and losses ignore this padding.

    `cfg` has the sizes of the decoder: n_layers, n_heads, n_key_value_heads, d_model, d_head,
    d_vocab, d_mlp and n_ctx. d_mlp and attn_only are those of the first layer; d_mlp is None if the
    layer has experts or no MLP. n_ctx is the largest number of tokens, or None. `cfg` also has
    device, dtype and use_attn_result.
    """

    def __init__(
        self, decoder: Decoder, tokenizer: Any = None, *, default_prepend_bos: bool = True
    ) -> None:
        HookManagement.__init__(self, decoder, _build_config(decoder))
        TextConversion.__init__(self, tokenizer, default_prepend_bos, self.cfg.device)
        #: The blocks, with weights such as `blocks[0].attn.W_Q` and hook points.
        self.blocks = [Submodule(self, f"blocks.{i}") for i in range(self.cfg.n_layers)]

    def __setattr__(self, attribute: str, value: Any) -> None:
        _require_no_weight(attribute)
        super().__setattr__(attribute, value)

    def __call__(self, input: Input, return_type: str | None = "logits", **options: Any) -> Any:
        """Call the model on texts or token ids.

        `return_type` is "logits", "loss" (the mean next-token loss), "both" or None. `options` are:

        - `prepend_bos` and `padding_side`, see `to_tokens`;
        - `attention_mask` (batch, pos), 0 at the padding of token ids (ignored for texts);
        - `loss_per_token`: if True, the loss is (batch, pos - 1);
        - `stop_at_layer`: the result is the residual stream before that layer instead, and hooks
          of this and later layers are not called. Negative layers count from the end.

        Raises TypeError for another option. Raises ValueError for another `return_type`, a layer
        that does not exist, and token ids that start with padding without an `attention_mask`.
        """
        require_options("HookedDecoder.__call__", options, _OPTIONS)
        return self._call([], input, return_type, **options)[0]

    def run_with_hooks(
        self,
        input: Input,
        *,
        fwd_hooks: Sequence[tuple[HookSelector, HookFunction]] = (),
        bwd_hooks: Sequence[tuple[HookSelector, HookFunction]] = (),
        reset_hooks_end: bool = True,
        **options: Any,
    ) -> Any:
        """Call the model with hook functions, each for a name or a predicate of names.

        A later backward pass calls `bwd_hooks`, which therefore need `reset_hooks_end=False`, or
        `hooks` instead of this method. `options` are those of `__call__`, and `return_type`.
        """
        require_options("run_with_hooks", options, ("return_type", *_OPTIONS))
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end):
            return self(input, **options)

    def run_with_cache(
        self,
        input: Input,
        return_type: str | None = "logits",
        *,
        names_filter: HookSelector | Sequence[str] | None = None,
        remove_batch_dim: bool = False,
        **options: Any,
    ) -> tuple[Any, ActivationCache]:
        """Call the model; return the result and the activations that `names_filter` selects.

        `options` are those of `__call__`.
        """
        require_options("run_with_cache", options, _OPTIONS)
        if names_filter is None:
            names = self._find_hooks(lambda name: True)
        elif isinstance(names_filter, str) or callable(names_filter):
            names = self._find_hooks(names_filter)
        else:
            names = []
            for selector in names_filter:
                names += self._find_hooks(selector)
        output, recorded = self._call(names, input, return_type, **options)
        cache = ActivationCache(recorded, self)
        return output, cache.remove_batch_dim() if remove_batch_dim else cache

    def _call(
        self,
        names: Sequence[str],
        input: Input,
        return_type: str | None,
        *,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        attention_mask: Tensor | None = None,
        loss_per_token: bool = False,
        stop_at_layer: int | None = None,
    ) -> tuple[Any, dict[str, Tensor]]:
        """Return the result of a call, and the activations of the hooks `names`."""
        if return_type not in ("logits", "loss", "both", None):
            raise ValueError(
                f"expected return_type 'logits', 'loss', 'both' or None, got {return_type!r}"
            )
        tokens, mask = self._encode(input, prepend_bos, padding_side, attention_mask)
        result, recorded = self._run(tokens, mask, names=names, stop=stop_at_layer)
        if stop_at_layer is not None or return_type == "logits":
            return result, recorded
        if return_type is None:
            return None, recorded
        loss = self.loss_fn(result, tokens, mask, loss_per_token)
        return loss if return_type == "loss" else (result, loss), recorded

    def _encode(
        self,
        input: Input,
        prepend_bos: bool | None,
        padding_side: str | None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return token ids (batch, pos) and their mask, which is None without padding."""
        if not isinstance(input, Tensor):
            return self.encode_with_mask(input, prepend_bos, padding_side)
        tokens = input[None] if input.ndim == 1 else input
        if attention_mask is None:
            self.require_no_left_padding(tokens)
        return tokens, attention_mask

    def _run(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        cache: Cache | None = None,
        *,
        names: Sequence[str] = (),
        stop: int | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the logits, or the stream before layer `stop`, and the activations of `names`.

        All hooks before layer `stop` are called. With a `cache`, `mask` also covers the earlier
        tokens. Raises ValueError for a layer that does not exist.
        """
        num_layers = self.cfg.n_layers
        if stop is not None:
            if not -num_layers <= stop <= num_layers:
                raise ValueError(
                    f"expected stop_at_layer from -{num_layers} to {num_layers}, got {stop}"
                )
            stop = stop % num_layers if stop < 0 else stop
        names = [name for name in names if self._is_before(name, stop)]
        stored: dict[str, Tensor] = {}

        def store(value: Tensor, hook: HookPoint) -> None:
            stored[hook.name] = value.detach().clone()

        head_outputs_by_layer: dict[int, Tensor] = {}
        hooks = [hook for hook in self._hooks if self._is_before(hook.name, stop)]
        results = [name for name in names if name.endswith("hook_result")]
        hooks += [Hook(name, store) for name in results]
        sites = [name for name in names if name not in results]
        positions = None
        if mask is not None:
            positions = (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
        with ExitStack() as stack:
            for hook in hooks:
                stack.enter_context(self._install(hook, head_outputs_by_layer))
            recording = record(self.decoder, *sites, names="transformer_lens")
            recorded = stack.enter_context(recording)
            if stop is not None:
                site = "norm:input" if stop == num_layers else f"blocks.{stop}:input"
                stack.enter_context(install_hooks(self.decoder, {site: _stop}))
            try:
                result: Tensor = self.decoder(tokens, mask, positions, cache)
            except _Stopped as error:
                result = error.args[0]
        return result, stored | recorded

    def __getattr__(self, name: str) -> Any:
        # copy.copy looks up attributes before they are set.
        if name.startswith("_") or name == "decoder":
            raise AttributeError(name)
        if name in ("embed", "pos_embed", "unembed"):
            return Submodule(self, name)
        weights = collect_named_weights(self.decoder)
        matches = [weight for full, weight in weights.items() if full.endswith(f".{name}")]
        if name in ("W_E", "W_pos", "W_U", "b_U") and matches:
            return matches[0]
        if len(matches) != self.cfg.n_layers:
            raise AttributeError(f"HookedDecoder has no {name!r}; {self.suggest_remedy(name)}")
        return torch.stack(matches)

    def eval(self) -> Self:
        """Set the decoder to evaluation mode; return this model."""
        self.decoder.eval()
        return self

    def to(self, *arguments: Any, **options: Any) -> Self:
        """Move or convert the decoder, as `nn.Module.to` does; return this model.

        The decoder no longer shares the weights that were moved or converted.
        """
        self.decoder.to(*arguments, **options)
        weight = self.decoder.embed.weight
        self.cfg.device, self.cfg.dtype = weight.device, weight.dtype
        self._device = weight.device
        return self

    def tokens_to_residual_directions(self, tokens: str | int | Tensor) -> Tensor:
        """Return the columns of `W_U` of one token (d_model,), or of several (..., d_model)."""
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        elif isinstance(tokens, Tensor) and tokens.numel() == 1:
            tokens = int(tokens)
        directions: Tensor = self.W_U.mT[tokens]
        return directions

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q W_K^T of every head, (n_layers, n_heads, d_model, d_model)."""
        return FactoredMatrix(self.W_Q, self._repeat_for_query_heads(self.W_K).mT)

    @property
    def OV(self) -> FactoredMatrix:
        """W_V W_O of every head, (n_layers, n_heads, d_model, d_model)."""
        return FactoredMatrix(self._repeat_for_query_heads(self.W_V), self.W_O)

    def _repeat_for_query_heads(self, weight: Tensor) -> Tensor:
        return weight.repeat_interleave(self.cfg.n_heads // weight.shape[1], dim=1)

    def tl_named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator of names and weights, except norms, experts and latent projections."""
        return iter(collect_named_weights(self.decoder).items())

    def loss_fn(
        self,
        logits: Tensor,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        per_token: bool = False,
    ) -> Tensor:
        """Return the mean next-token loss, or the loss of each token (batch, pos - 1).

        Losses of padding are 0, and the mean does not count them.
        """
        losses = F.cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none")
        is_counted = torch.ones_like(losses, dtype=torch.bool)
        if attention_mask is not None:
            is_token = attention_mask.bool().expand_as(tokens)
            is_counted = is_token[:, :-1] & is_token[:, 1:]
        losses = losses.where(is_counted, 0)
        return losses if per_token else losses.sum() / is_counted.sum()

    @torch.no_grad()
    def generate(
        self,
        input: Input = "",
        max_new_tokens: int = 10,
        *,
        stop_at_eos: bool = True,
        eos_token_id: int | None = None,
        do_sample: bool = True,
        top_k: int | None = None,
        temperature: float = 1.0,
        prepend_bos: bool | None = None,
        attention_mask: Tensor | None = None,
        return_type: str = "input",
        verbose: bool = True,
    ) -> Any:
        """Continue texts or token ids by sampling, or greedily with `do_sample=False`.

        `return_type` is "str", "tokens", or "input" for the type of the input. Texts of different
        lengths are padded on the left. After the token `eos_token_id`, by default the tokenizer's,
        a row is filled with this token, unless `stop_at_eos=False`. Hook functions receive the
        prompt first, and then the new token of each call. `verbose` has no effect.

        Raises ValueError for another `return_type`, for ids that start with padding without an
        `attention_mask`, for padding at the end, and if `stop_at_eos` needs an unknown EOS token.
        """
        eos = getattr(self.tokenizer, "eos_token_id", None)
        eos = eos if eos_token_id is None else eos_token_id
        if stop_at_eos and eos is None:
            raise ValueError("the EOS token is unknown; pass eos_token_id= or stop_at_eos=False")
        if return_type not in ("input", "str", "tokens"):
            raise ValueError(
                f"expected return_type 'input', 'str' or 'tokens', got {return_type!r}"
            )
        tokens, mask = self._encode(input, prepend_bos, "left", attention_mask)
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError(
                "expected prompts that end with a token, got an attention_mask with padding at the "
                "end, from which the next token would be predicted; pad on the left"
            )
        output = continue_tokens(
            lambda *arguments: self._run(*arguments)[0],
            partial(sample, temperature=temperature if do_sample else 0.0, top_k=top_k),
            tokens,
            mask,
            max_new_tokens,
            eos if stop_at_eos else None,
        )
        if return_type == "tokens" or (return_type == "input" and isinstance(input, Tensor)):
            return output
        texts = [self.tokenizer.decode(row, skip_special_tokens=True) for row in output.tolist()]
        return texts[0] if isinstance(input, str) else texts


def _build_config(decoder: Decoder) -> SimpleNamespace:
    first_layer = decoder.layers[0]
    weight = decoder.embed.weight
    limits = [decoder.settings.context]
    if decoder.position is not None:
        limits.append(decoder.position.num_embeddings)
    return SimpleNamespace(
        n_layers=len(decoder.layers),
        n_heads=first_layer.attention.heads,
        n_key_value_heads=first_layer.attention.kv_heads,
        d_model=weight.shape[1],
        d_head=first_layer.attention.d_head,
        d_mlp=first_layer.mlp.up.out_features if isinstance(first_layer.mlp, DecoderMLP) else None,
        d_vocab=weight.shape[0],
        n_ctx=min((limit for limit in limits if limit is not None), default=None),
        device=weight.device,
        dtype=weight.dtype,
        attn_only=isinstance(first_layer.mlp, NoMLP),
        use_attn_result=False,
    )
