"""A `Decoder` with the interface of TransformerLens's model."""

from __future__ import annotations

import re
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
from interp.decoder.modules.cache import Cache
from interp.decoder.modules.mlp import DecoderMLP, NoMLP
from interp.hook_points import HookPoint, hook_points
from interp.lens import head_outputs
from interp.tap import installed_hooks, patch, record
from interp.transformer_lens.activation_cache import ActivationCache
from interp.transformer_lens.factored_matrix import FactoredMatrix
from interp.transformer_lens.generation import continued, sample
from interp.transformer_lens.tokens import Input, TextConversion
from interp.transformer_lens.weights import weights_of

#: A function called as `f(activation, hook=point)`. It returns the new activation, or None to keep
#: the activation. In the direction "bwd", the gradient takes the place of the activation.
HookFunction = Callable[..., Tensor | None]
#: A full hook name, or a predicate of hook names.
HookSelector = str | Callable[[str], bool]


@dataclass(frozen=True, eq=False)
class ModelHookPoint(HookPoint):
    """A hook point of a model, to which functions can be added."""

    model: HookedDecoder = field(repr=False)
    #: Values that hook functions store.
    ctx: dict[Any, Any] = field(default_factory=dict, repr=False)

    def add_hook(self, hook: HookFunction, dir: str = "fwd") -> None:
        """Call `hook` in all later calls of the model, until `model.reset_hooks()`."""
        self.model.add_hook(self.name, hook, dir)


class Submodule:
    """A part of a model, such as `blocks[0].attn`, whose attributes are weights and hook points."""

    def __init__(self, model: HookedDecoder, name: str) -> None:
        self._model, self._name = model, name

    def __setattr__(self, attribute: str, value: Any) -> None:
        _require_no_weight(attribute)
        super().__setattr__(attribute, value)

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


def _require_no_weight(attribute: str) -> None:
    """Raise AttributeError if a program would set a weight, which would have no effect."""
    if attribute.startswith(("W_", "b_")):
        raise AttributeError(
            f"expected {attribute!r} to be read only, because a new tensor would not be a weight "
            "of the decoder; change it in place, as in model.blocks[0].attn.W_Q.data[...] = x"
        )


class _Stopped(Exception):
    """An exception that ends a call before `stop_at_layer`; its argument is the residual stream."""


def _stop(stream: Tensor) -> None:
    raise _Stopped(stream)


@dataclass(frozen=True, eq=False)
class _Hook:
    """A hook function, the name of its activation, and its direction, "fwd" or "bwd"."""

    name: str
    function: HookFunction
    dir: str = "fwd"


class HookedDecoder(TextConversion):
    """A `Decoder` with the methods, names and weights of TransformerLens's `HookedTransformer`.

    The weights and activations are those of the decoder. For `describe(model)`, they equal those of
    a model from TransformerLens's `from_pretrained_no_processing`. For
    `fold_decoder(describe(model))`, they equal those of a model from `from_pretrained`, whose
    weights are processed. Weights such as `W_Q` are stacks of all layers, W_K and W_V have one
    matrix per key head, and missing biases are zeros.

    `tokenizer` is a tokenizer of transformers. Its BOS token is prepended to texts, unless
    `prepend_bos=False` is passed, or `default_prepend_bos=False` here. Texts of different lengths
    are padded on the tokenizer's `padding_side`, and positions and losses do not count the padding.

    `cfg` has the sizes of the decoder: n_layers, n_heads, n_key_value_heads, d_model, d_head,
    d_vocab, d_mlp and n_ctx. d_mlp and attn_only are those of the first layer; d_mlp is None if the
    layer has experts or no MLP. n_ctx is the largest number of tokens, or None. `cfg` also has
    device, dtype and use_attn_result.
    """

    def __init__(
        self, decoder: Decoder, tokenizer: Any = None, *, default_prepend_bos: bool = True
    ) -> None:
        self.decoder = decoder
        self.cfg = _config(decoder)
        super().__init__(tokenizer, default_prepend_bos, self.cfg.device)
        results = [f"blocks.{i}.attn.hook_result" for i in range(self.cfg.n_layers)]
        names = [*hook_points(decoder, ["**"], "transformer_lens"), *results]
        #: All hook points by name.
        self.hook_dict = {name: ModelHookPoint(name, self) for name in names}
        #: The blocks, with weights such as `blocks[0].attn.W_Q` and hook points.
        self.blocks = [Submodule(self, f"blocks.{i}") for i in range(self.cfg.n_layers)]
        self._hooks: list[_Hook] = []

    def __setattr__(self, attribute: str, value: Any) -> None:
        _require_no_weight(attribute)
        super().__setattr__(attribute, value)

    def __call__(self, input: Input, return_type: str | None = "logits", **options: Any) -> Any:
        """Return logits, the mean next-token "loss", "both" or None for texts or token ids.

        `options` are:

        - `prepend_bos` and `padding_side`, see `to_tokens`;
        - `attention_mask` (batch, pos), 0 at the padding of token ids;
        - `loss_per_token`: if True, the loss is (batch, pos - 1);
        - `stop_at_layer`: the result is the residual stream before that layer instead, and hooks
          of this and later layers are not called. Negative layers count from the end.

        Raises ValueError for token ids that start with padding, without an `attention_mask`.
        """
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
        `hooks` instead of this method. `options` are passed to the call.
        """
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

        `options` are passed to the call.
        """
        if names_filter is None:
            names = self._matches(lambda name: True)
        elif isinstance(names_filter, str) or callable(names_filter):
            names = self._matches(names_filter)
        else:
            names = [name for pattern in names_filter for name in self._matches(pattern)]
        output, seen = self._call(names, input, return_type, **options)
        cache = ActivationCache(seen, self)
        return output, cache.remove_batch_dim() if remove_batch_dim else cache

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Sequence[tuple[HookSelector, HookFunction]] = (),
        bwd_hooks: Sequence[tuple[HookSelector, HookFunction]] = (),
        reset_hooks_end: bool = True,
    ) -> Iterator[HookedDecoder]:
        """Call hook functions in all calls of the model inside the `with` statement.

        With `reset_hooks_end=False`, the functions remain until `reset_hooks`.
        """
        added = [hook for name, f in fwd_hooks for hook in self._hooks_for(name, f, "fwd")]
        added += [hook for name, f in bwd_hooks for hook in self._hooks_for(name, f, "bwd")]
        self._hooks = self._hooks + added
        try:
            yield self
        finally:
            if reset_hooks_end:
                self._hooks = [hook for hook in self._hooks if hook not in added]

    def add_hook(self, name: HookSelector, hook: HookFunction, dir: str = "fwd") -> None:
        """Call `hook` in all later calls of the model, until `reset_hooks`.

        With `dir="bwd"`, backward passes call it with the gradient of the activation, and the
        gradient that it returns replaces this gradient. Predicates do not select the scales of
        norms, which have no gradient.

        Raises ValueError for another direction, and for the gradient of a scale.
        """
        self._hooks = self._hooks + self._hooks_for(name, hook, dir)

    def _hooks_for(self, name: HookSelector, function: HookFunction, dir: str) -> list[_Hook]:
        matches = self._matches(name)
        if dir == "bwd" and callable(name):
            matches = [match for match in matches if not match.endswith("hook_scale")]
        has_scale = any(match.endswith("hook_scale") for match in matches)
        if dir not in ("fwd", "bwd") or (dir == "bwd" and has_scale):
            raise ValueError(
                f"expected dir 'fwd', or 'bwd' for an activation with a gradient, got {dir!r} for "
                f"{name!r}; hook the residual stream instead of a scale"
            )
        return [_Hook(match, function, dir) for match in matches]

    def reset_hooks(self) -> None:
        """Remove all hook functions and clear the values that they stored in `ctx`."""
        self._hooks = []
        for point in self.hook_dict.values():
            point.ctx.clear()

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Choose whether the outputs of single heads, `hook_result`, can be recorded and hooked."""
        self.cfg.use_attn_result = use_attn_result

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
        result, seen = self._run(tokens, mask, names=names, stop=stop_at_layer)
        if stop_at_layer is not None or return_type == "logits":
            return result, seen
        if return_type is None:
            return None, seen
        loss = self.loss_fn(result, tokens, mask, loss_per_token)
        return loss if return_type == "loss" else (result, loss), seen

    def _encode(
        self,
        input: Input,
        prepend_bos: bool | None,
        padding_side: str | None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return token ids (batch, pos) and their mask, or None without padding."""
        if not isinstance(input, Tensor):
            return self.tokens_and_mask(input, prepend_bos, padding_side)
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

        All hooks are called. With a `cache`, `mask` also covers the earlier tokens.
        """
        num_layers = self.cfg.n_layers
        if stop is not None:
            if not -num_layers <= stop <= num_layers:
                raise ValueError(
                    f"expected stop_at_layer from -{num_layers} to {num_layers}, got {stop}"
                )
            stop = stop % num_layers if stop < 0 else stop
        names = [name for name in names if self._is_before(name, stop)]
        seen: dict[str, Tensor] = {}
        head_outputs_by_layer: dict[int, Tensor] = {}
        hooks = [hook for hook in self._hooks if self._is_before(hook.name, stop)]
        results = [name for name in names if name.endswith("hook_result")]
        hooks += [_Hook(name, partial(_store, seen)) for name in results]
        recorded = [name for name in names if name not in results]
        positions = None
        if mask is not None:
            positions = (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
        with ExitStack() as stack:
            for hook in hooks:
                stack.enter_context(self._hooked(hook, head_outputs_by_layer))
            records = record(self.decoder, *recorded, names="transformer_lens")
            activations = stack.enter_context(records)
            if stop is not None:
                site = "norm:input" if stop == num_layers else f"blocks.{stop}:input"
                stack.enter_context(installed_hooks(self.decoder, {site: _stop}))
            try:
                result: Tensor = self.decoder(tokens, mask, positions, cache)
            except _Stopped as error:
                result = error.args[0]
        return result, seen | activations

    @contextmanager
    def _hooked(self, hook: _Hook, head_outputs_by_layer: dict[int, Tensor]) -> Iterator[None]:
        """Call the function of `hook` in all calls of the decoder inside the context.

        `head_outputs_by_layer` contains the latest outputs of the heads of each layer.
        """
        name, point = hook.name, self.hook_dict[hook.name]

        def call(value: Tensor) -> Tensor:
            result = hook.function(value, hook=point)
            return value if result is None else result

        def call_backward(gradient: Tensor) -> Tensor | None:
            # The graph may outlive the hook, so check that it is still installed. Functions may
            # change the gradient in place, and autograd may use it again, so pass a copy.
            return call(gradient.clone()) if hook in self._hooks else None

        def watch_gradient(value: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                # Weights from `describe` do not require gradients by default, so `value` may not
                # be part of a graph yet.
                value = value if value.requires_grad else value.detach().requires_grad_()
                value.register_hook(call_backward)
            return value

        act = call if hook.dir == "fwd" else watch_gradient
        if not name.endswith("hook_result"):
            with patch(self.decoder, {name: act}, names="transformer_lens"):
                yield
            return
        layer = point.layer()
        attention = self.decoder.layers[layer].attention

        def add_changes(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            before = head_outputs_by_layer.get(layer)
            if before is None:
                outputs = head_outputs(inputs[0], attention.o.weight, heads=attention.heads)
                before = torch.stack(list(outputs.values()), -2)
            head_outputs_by_layer[layer] = act(before.clone())
            return output + (head_outputs_by_layer[layer] - before).sum(-2)

        handle = attention.o.register_forward_hook(add_changes)
        try:
            yield
        finally:
            handle.remove()

    def _matches(self, name: HookSelector) -> list[str]:
        """Return the hook names that a name or a predicate selects; ValueError for other names.

        "hook_in" and "hook_out" of a block are its input and output streams.
        """
        known = [
            other
            for other in self.hook_dict
            if self.cfg.use_attn_result or not other.endswith("hook_result")
        ]
        if callable(name):
            return [other for other in known if name(other)]
        name = re.sub(r"^(blocks\.\d+\.hook)_in$", r"\1_resid_pre", name)
        name = re.sub(r"^(blocks\.\d+\.hook)_out$", r"\1_resid_post", name)
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

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q W_K^T of every head, (n_layers, n_heads, d_model, d_model)."""
        return FactoredMatrix(self.W_Q, self._for_each_query_head(self.W_K).mT)

    @property
    def OV(self) -> FactoredMatrix:
        """W_V W_O of every head, (n_layers, n_heads, d_model, d_model)."""
        return FactoredMatrix(self._for_each_query_head(self.W_V), self.W_O)

    def _for_each_query_head(self, weight: Tensor) -> Tensor:
        return weight.repeat_interleave(self.cfg.n_heads // weight.shape[1], dim=1)

    def tl_named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Return the names and values of all weights except those of norms and experts."""
        return iter(weights_of(self.decoder).items())

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
        a row is filled with this token. Hooks receive the prompt first, and then the new
        token of each call. `verbose` has no effect.

        Raises ValueError for a padded prompt without an `attention_mask`, for padding at the end,
        and if `stop_at_eos` and no such token is known.
        """
        eos = getattr(self.tokenizer, "eos_token_id", None)
        eos = eos if eos_token_id is None else eos_token_id
        if stop_at_eos and eos is None:
            raise ValueError("the end-of-text token is unknown; pass it, or stop_at_eos=False")
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
        output = continued(
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
