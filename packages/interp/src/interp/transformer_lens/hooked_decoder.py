"""A `Decoder` with the interface of TransformerLens's model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interp.decoder.decoder import Decoder
from interp.decoder.modules.mlp import DecoderMLP, NoMLP
from interp.hook_points import HookPoint, hook_points
from interp.lens import head_outputs
from interp.tap import installed_hooks, patch, record
from interp.text import token_ids
from interp.transformer_lens.activation_cache import ActivationCache
from interp.transformer_lens.weights import weights_of

#: A function called as `f(activation, hook=point)`. It returns the new activation, or None to keep
#: the activation.
HookFunction = Callable[..., Tensor | None]
#: A full hook name, or a predicate of hook names.
HookSelector = str | Callable[[str], bool]
#: Texts, or token ids (batch, pos) or (pos,).
Input = str | Sequence[str] | Tensor


@dataclass(frozen=True, eq=False)
class ModelHookPoint(HookPoint):
    """A hook point of a model, to which functions can be added."""

    model: HookedDecoder = field(repr=False)
    #: Values that hook functions store.
    ctx: dict[Any, Any] = field(default_factory=dict, repr=False)

    def add_hook(self, hook: HookFunction) -> None:
        """Call `hook` in all later calls of the model, until `model.reset_hooks()`."""
        self.model.add_hook(self.name, hook)


class Submodule:
    """A part of a model, such as `blocks[0].attn`, whose attributes are weights and hook points."""

    def __init__(self, model: HookedDecoder, name: str) -> None:
        self._model, self._name = model, name

    def __getattr__(self, attribute: str) -> Any:
        # copy.copy looks up attributes before they are set.
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        name = f"{self._name}.{attribute}"
        members = self._model.hook_dict | weights_of(self._model.decoder)
        if name in members:
            return members[name]
        if any(other.startswith(f"{name}.") for other in members):
            return Submodule(self._model, name)
        raise AttributeError(f"the model has no {name!r}; {self._model.remedy_for(name)}")


class _Stopped(Exception):
    """An exception that ends a call before `stop_at_layer`; its argument is the residual stream."""


def _stop(stream: Tensor) -> None:
    raise _Stopped(stream)


class HookedDecoder:
    """A `Decoder` with the methods, names and weights of TransformerLens's `HookedTransformer`.

    The weights and activations are those of the decoder. For `describe(model)`, they equal those of
    a model from TransformerLens's `from_pretrained_no_processing`. For
    `fold_decoder(describe(model))`, they equal those of a model from `from_pretrained`, whose
    weights are processed. Weights such as `W_Q` are stacks of all layers, W_K and W_V have one
    matrix per key head, and missing biases are zeros.

    `tokenizer` is a tokenizer of transformers. Its BOS token is prepended to texts, unless
    `prepend_bos=False` is passed, or `default_prepend_bos=False` here.

    `cfg` has the sizes of the decoder: n_layers, n_heads, n_key_value_heads, d_model, d_head,
    d_vocab, d_mlp and n_ctx. d_mlp and attn_only are those of the first layer; d_mlp is None if the
    layer has experts or no MLP. n_ctx is the largest number of tokens, or None. `cfg` also has
    device, dtype and use_attn_result.
    """

    def __init__(
        self, decoder: Decoder, tokenizer: Any = None, *, default_prepend_bos: bool = True
    ) -> None:
        self.decoder, self.tokenizer = decoder, tokenizer
        self.default_prepend_bos = default_prepend_bos
        self.cfg = _config(decoder)
        results = [f"blocks.{i}.attn.hook_result" for i in range(self.cfg.n_layers)]
        names = [*hook_points(decoder, ["**"], "transformer_lens"), *results]
        #: All hook points by name.
        self.hook_dict = {name: ModelHookPoint(name, self) for name in names}
        #: The blocks, with weights such as `blocks[0].attn.W_Q` and hook points.
        self.blocks = [Submodule(self, f"blocks.{i}") for i in range(self.cfg.n_layers)]
        self._hooks: list[tuple[str, HookFunction]] = []

    def __call__(
        self,
        input: Input,
        return_type: str | None = "logits",
        *,
        prepend_bos: bool | None = None,
        stop_at_layer: int | None = None,
    ) -> Any:
        """Return logits, the mean next-token "loss", "both" or None for texts or token ids.

        With `stop_at_layer`, the result is the residual stream before that layer instead, and
        hooks of this and later layers are not called.
        """
        return self._run(input, return_type, prepend_bos, stop_at_layer, [])[0]

    def run_with_hooks(
        self,
        input: Input,
        *,
        fwd_hooks: Sequence[tuple[HookSelector, HookFunction]] = (),
        **options: Any,
    ) -> Any:
        """Call the model with hook functions, each for a name or a predicate of names.

        `options` are passed to the call.
        """
        with self.hooks(fwd_hooks):
            return self(input, **options)

    def run_with_cache(
        self,
        input: Input,
        return_type: str | None = "logits",
        *,
        names_filter: HookSelector | Sequence[str] | None = None,
        remove_batch_dim: bool = False,
        prepend_bos: bool | None = None,
        stop_at_layer: int | None = None,
    ) -> tuple[Any, ActivationCache]:
        """Call the model; return the result and the activations that `names_filter` selects."""
        if names_filter is None:
            names = self._matches(lambda name: True)
        elif isinstance(names_filter, str) or callable(names_filter):
            names = self._matches(names_filter)
        else:
            names = [name for pattern in names_filter for name in self._matches(pattern)]
        output, seen = self._run(input, return_type, prepend_bos, stop_at_layer, names)
        cache = ActivationCache(seen, self.decoder)
        return output, cache.remove_batch_dim() if remove_batch_dim else cache

    @contextmanager
    def hooks(
        self, fwd_hooks: Sequence[tuple[HookSelector, HookFunction]] = ()
    ) -> Iterator[HookedDecoder]:
        """Call hook functions in all calls of the model inside the `with` statement."""
        first = len(self._hooks)
        for name, function in fwd_hooks:
            self.add_hook(name, function)
        last = len(self._hooks)
        try:
            yield self
        finally:
            del self._hooks[first:last]

    def add_hook(self, name: HookSelector, hook: HookFunction) -> None:
        """Call `hook` in all later calls of the model, until `reset_hooks`."""
        self._hooks += [(match, hook) for match in self._matches(name)]

    def reset_hooks(self) -> None:
        """Remove all hook functions and clear the values that they stored in `ctx`."""
        self._hooks = []
        for point in self.hook_dict.values():
            point.ctx.clear()

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Choose whether the outputs of single heads, `hook_result`, can be recorded and hooked."""
        self.cfg.use_attn_result = use_attn_result

    def _run(
        self,
        input: Input,
        return_type: str | None,
        prepend_bos: bool | None,
        stop: int | None,
        names: Sequence[str],
    ) -> tuple[Any, dict[str, Tensor]]:
        """Return the result of a call with all hooks, and the activations of the hooks `names`."""
        if return_type not in ("logits", "loss", "both", None):
            raise ValueError(
                f"expected return_type 'logits', 'loss', 'both' or None, got {return_type!r}"
            )
        tokens = input if isinstance(input, Tensor) else self.to_tokens(input, prepend_bos)
        tokens = tokens[None] if tokens.ndim == 1 else tokens
        names = [name for name in names if self._is_before(name, stop)]
        seen: dict[str, Tensor] = {}
        head_outputs_by_layer: dict[int, Tensor] = {}
        hooks = [hook for hook in self._hooks if self._is_before(hook[0], stop)]
        hooks += [(name, partial(_store, seen)) for name in names if name.endswith("hook_result")]
        recorded = [name for name in names if not name.endswith("hook_result")]
        with ExitStack() as stack:
            for name, function in hooks:
                stack.enter_context(self._hooked(name, function, head_outputs_by_layer))
            records = record(self.decoder, *recorded, names="transformer_lens")
            activations = stack.enter_context(records)
            if stop is not None:
                site = "norm:input" if stop == self.cfg.n_layers else f"blocks.{stop}:input"
                stack.enter_context(installed_hooks(self.decoder, {site: _stop}))
            try:
                logits = self.decoder(tokens)
            except _Stopped as error:
                return error.args[0], seen | activations
        return _result(logits, tokens, return_type), seen | activations

    @contextmanager
    def _hooked(
        self, name: str, function: HookFunction, head_outputs_by_layer: dict[int, Tensor]
    ) -> Iterator[None]:
        """Call `function` in all calls of the decoder inside the context.

        `head_outputs_by_layer` contains the latest outputs of the heads of each layer.
        """
        point = self.hook_dict[name]

        def call(value: Tensor) -> Tensor:
            result = function(value, hook=point)
            return value if result is None else result

        if not name.endswith("hook_result"):
            with patch(self.decoder, {name: call}, names="transformer_lens"):
                yield
            return
        layer = point.layer()
        attention = self.decoder.layers[layer].attention

        def add_changes(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            before = head_outputs_by_layer.get(layer)
            if before is None:
                outputs = head_outputs(inputs[0], attention.o.weight, heads=attention.heads)
                before = torch.stack(list(outputs.values()), -2)
            head_outputs_by_layer[layer] = call(before.clone())
            return output + (head_outputs_by_layer[layer] - before).sum(-2)

        handle = attention.o.register_forward_hook(add_changes)
        try:
            yield
        finally:
            handle.remove()

    def _matches(self, name: HookSelector) -> list[str]:
        """Return the hook names that a name or a predicate selects; ValueError for other names."""
        known = [
            other
            for other in self.hook_dict
            if self.cfg.use_attn_result or not other.endswith("hook_result")
        ]
        if callable(name):
            return [other for other in known if name(other)]
        if name not in known:
            raise ValueError(f"no hook is named {name!r}; {self.remedy_for(name)}")
        return [name]

    def remedy_for(self, name: str) -> str:
        """Return advice for a name that is missing."""
        if name in self.hook_dict and name.endswith("hook_result"):
            return "call set_use_attn_result(True) first"
        return "hook_dict has the hooks; for other methods, use interp's functions with .decoder"

    def _is_before(self, name: str, stop: int | None) -> bool:
        """Return True if an activation is computed before layer `stop`."""
        if stop is None:
            return True
        if not 0 <= stop <= self.cfg.n_layers:
            raise ValueError(f"expected stop_at_layer from 0 to {self.cfg.n_layers}, got {stop}")
        if name.startswith("blocks."):
            return self.hook_dict[name].layer() < stop
        return not name.startswith("ln_final.")

    def __getattr__(self, name: str) -> Any:
        # copy.copy looks up attributes before they are set.
        if name.startswith("_") or name == "decoder":
            raise AttributeError(name)
        if name in ("embed", "pos_embed", "unembed"):
            return Submodule(self, name)
        weights = weights_of(self.decoder).items()
        matches = [weight for full, weight in weights if full.endswith(f".{name}")]
        if name in ("W_E", "W_pos", "W_U", "b_U") and matches:
            return matches[0]
        if len(matches) != self.cfg.n_layers:
            raise AttributeError(f"HookedDecoder has no {name!r}; {self.remedy_for(name)}")
        return torch.stack(matches)

    def tokens_to_residual_directions(self, tokens: str | int | Tensor) -> Tensor:
        """Return the columns of `W_U` of one token (d_model,), or of several (..., d_model)."""
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        elif isinstance(tokens, Tensor) and tokens.numel() == 1:
            tokens = int(tokens)
        directions: Tensor = self.W_U.mT[tokens]
        return directions

    def to_tokens(self, input: str | Sequence[str], prepend_bos: bool | None = None) -> Tensor:
        """Return the token ids (batch, pos) of texts with equal numbers of tokens.

        Raises ValueError without a tokenizer, and for texts with different numbers of tokens. Also
        raises it if a BOS token is to be prepended and the tokenizer has none.
        """
        encode = partial(self._tokenizer(), add_special_tokens=False)
        rows = [token_ids(encode, text) for text in ([input] if isinstance(input, str) else input)]
        if self.default_prepend_bos if prepend_bos is None else prepend_bos:
            bos = self.tokenizer.bos_token_id
            if bos is None:
                raise ValueError("the tokenizer has no BOS token; pass prepend_bos=False")
            rows = [[bos, *row] for row in rows]
        if len({len(row) for row in rows}) != 1:
            raise ValueError(
                f"the texts have {[len(row) for row in rows]} tokens; pass texts of equal lengths, "
                "because padding is not supported"
            )
        return torch.tensor(rows, device=self.cfg.device)

    def to_string(self, tokens: Sequence[int] | int | Tensor) -> str | list[str]:
        """Return the text of token ids (pos,), or the texts of token ids (batch, pos)."""
        ids = torch.as_tensor(tokens)
        decode = partial(self._tokenizer().decode, clean_up_tokenization_spaces=False)
        if ids.ndim == 2:
            return [decode(row) for row in ids.tolist()]
        text: str = decode(ids.reshape(-1).tolist())
        return text

    def to_str_tokens(self, input: Input, prepend_bos: bool | None = None) -> list[Any]:
        """Return the text of each token; for several texts, return one list per text.

        For token ids (batch, pos), return one flat list.
        """
        if not isinstance(input, str | Tensor):
            return [self.to_str_tokens(text, prepend_bos) for text in input]
        ids = input if isinstance(input, Tensor) else self.to_tokens(input, prepend_bos)
        return [self.to_string(int(token)) for token in ids.reshape(-1)]

    def to_single_token(self, string: str) -> int:
        """Return the id of a text of one token; raise ValueError for other texts."""
        ids = self.to_tokens(string, prepend_bos=False)
        if ids.numel() != 1:
            raise ValueError(f"{string!r} has {ids.numel()} tokens; pass a text of one token")
        return int(ids)

    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError("a text needs a tokenizer; pass HookedDecoder(decoder, tokenizer)")
        return self.tokenizer


def _config(decoder: Decoder) -> SimpleNamespace:
    first, weight = decoder.layers[0], decoder.embed.weight
    limits = [decoder.settings.context]
    if decoder.position is not None:
        limits.append(decoder.position.num_embeddings)
    return SimpleNamespace(
        n_layers=len(decoder.layers),
        n_heads=first.attention.heads,
        n_key_value_heads=first.attention.kv_heads,
        d_model=weight.shape[1],
        d_head=first.attention.d_head,
        d_mlp=first.mlp.up.out_features if isinstance(first.mlp, DecoderMLP) else None,
        d_vocab=weight.shape[0],
        n_ctx=min((limit for limit in limits if limit is not None), default=None),
        device=weight.device,
        dtype=weight.dtype,
        attn_only=isinstance(first.mlp, NoMLP),
        use_attn_result=False,
    )


def _store(seen: dict[str, Tensor], value: Tensor, hook: HookPoint) -> None:
    seen[hook.name] = value.detach().clone()


def _result(logits: Tensor, tokens: Tensor, return_type: str | None) -> Any:
    if return_type == "logits":
        return logits
    if return_type is None:
        return None
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    return loss if return_type == "loss" else (logits, loss)
