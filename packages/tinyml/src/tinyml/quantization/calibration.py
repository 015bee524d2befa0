"""Statistics of the inputs of layers, with the hidden states of one calibration batch in memory.

Note [Replayed blocks]
GPTQ changes layers one after another and calibrates each layer on the outputs of the changed layers
before it. Running every batch from the start for each layer would take time quadratic in the number
of layers. Therefore the outputs of a finished block are recorded, and later runs return the record
instead of running the block. A block is a child of an `nn.ModuleList` or `nn.Sequential`. The
model's own code between the blocks runs each time, so masks and position embeddings are correct.

Records are temporary files, so that the outputs of only one batch are in memory. Only the last
finished block of a list keeps its record: its outputs for all batches. Earlier blocks return
placeholders. In a chain of blocks, these reach only the next block, which ignores its inputs
because it returns a record or a placeholder too. If a model uses the outputs of earlier blocks
elsewhere, as skip connections do, the operation on the placeholder raises an error. From then on,
all records are kept. A block that changes its arguments, or attributes of its modules, runs each
time, because a record contains its outputs only. Changes of the attributes of objects in them count
too. Changes of objects without a `__dict__`, such as NumPy arrays, are not detected.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from tinyml.conversion import tensor_versions
from tinyml.validation import Progress


@torch.no_grad()
def visit_layers(
    model: nn.Module,
    batches: Sequence[Any],
    layers: Mapping[str, nn.Module],
    visit: Callable[[str, Tensor], None],
    progress: Progress | None = None,
) -> None:
    """Call `visit(name, moment)` for each layer that runs, in the order in which it is reached.

    `moment` is H, the float64 sum of x x^T over the tokens x of the layer's first call in every
    batch. A batch is the argument of the model, or a mapping of keyword arguments. Tokens at which
    an `attention_mask` of shape (batch, seq) is zero are padding and left out. Masks of other
    shapes, such as additive masks (batch, 1, seq, seq), leave out no token.

    Later layers are calibrated with the layer as `visit` leaves it. Layers that receive the same
    tensor, such as queries, keys and values, share H. If batches reach different layers, as in a
    mixture of experts, the first of these layers in the order of `layers` comes next. A batch that
    did not reach this layer does not count for it. Raise `ValueError` if the batch reaches the
    layer later.
    """
    with TemporaryDirectory(prefix="tinyml-") as folder, _without_cache(model):
        replay = _Replay(model, batches, layers, Path(folder))
        with _input_hooks(layers, replay.on_layer_input), replay.blocks():
            while (stage := replay.next_stage()) is not None:
                for name in stage.layers:
                    visit(name, stage.moment)
                    replay.done[name] = stage.batches
                    if progress is not None:
                        progress(name, len(replay.done), len(layers))


#: The attributes of every module, which contain its parameters, buffers and hooks.
_ATTRIBUTES_OF_MODULE = frozenset(vars(nn.Module()))
#: Objects whose attributes are not part of the state of a block.
_WITHOUT_STATE = (nn.Module, Tensor, type, ModuleType, FunctionType)
#: Largest number of values that are compared to detect the effects of a block. A block with more
#: values runs each time.
_MAX_VALUES = 100_000
#: Number of tokens that are converted to float64 at a time.
_TOKENS_AT_A_TIME = 256


class _StopRun(BaseException):
    """An exception that ends a run at a layer that must wait for an earlier layer."""


class _Stage:
    """The next layers to calibrate: unfinished layers that receive the same input."""

    def __init__(self, first: str, layers: list[str], inputs: Tensor) -> None:
        self.first = first
        self.layers = layers
        self.batches: set[int] = set()
        #: H, the sum of x x^T over the tokens x.
        self.moment = inputs.new_zeros(inputs.shape[-1], inputs.shape[-1], dtype=torch.float64)

    def add(self, tokens: Tensor) -> None:
        """Add tokens of shape (tokens, width)."""
        # The copies in float64 are small, however long the sequences are.
        for part in tokens.split(_TOKENS_AT_A_TIME):
            part = part.double()
            self.moment.addmm_(part.t(), part)


class _Record:
    """The outputs of a block, whose tensors are in a file."""

    def __init__(self, outputs: Any, path: Path) -> None:
        self._path = path
        #: The outputs with placeholders for tensors. Not all other objects can be pickled.
        self.placeholder = tree_map(_Freed.of, outputs)
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        torch.save(_copied(tensors), path)  # a view would be saved with its whole storage

    def load(self) -> Any:
        """Return a copy of the outputs, into which the model may write."""
        tensors = iter(torch.load(self._path, weights_only=False))

        def loaded(leaf: Any) -> Any:
            return next(tensors) if isinstance(leaf, Tensor) else copy.deepcopy(leaf)

        return tree_map(loaded, self.placeholder)

    def free(self) -> None:
        """Delete the file."""
        self._path.unlink()


class _Run:
    """A run of a batch: the blocks that it has called, and the layers that it has reached."""

    def __init__(self, number: int) -> None:
        #: The number of the batch.
        self.number = number
        self.called: set[str] = set()
        #: The unfinished layers that receive the same input.
        self.reached: list[str] = []
        #: The input of the layers in `reached`.
        self.inputs: Tensor | None = None
        #: A copy of `inputs`, because the model may overwrite them later.
        self.copy = torch.empty(0)
        #: The memory, version, shape and strides of `inputs`, which identify them.
        self.stamp: object = None

    def reach(self, name: str, inputs: Tensor) -> None:
        """Add an unfinished layer, or end the run if the layer receives another input."""
        stamp = tensor_versions(inputs), inputs.shape, inputs.stride()
        if self.inputs is None:
            self.inputs, self.stamp = inputs, stamp
            self.copy = inputs.clone()
        elif stamp != self.stamp:
            raise _StopRun
        self.reached.append(name)


class _Replay:
    """Runs of batches up to the next layer that is not done (Note [Replayed blocks])."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        layers: Mapping[str, nn.Module],
        folder: Path,
    ) -> None:
        #: The numbers of the batches that H was computed from, for each finished layer.
        self.done: dict[str, set[int]] = {}
        self._model = model
        self._batches = batches
        self._order = list(layers)
        self._blocks = _blocks_with(model, layers)
        #: The outputs of finished blocks by batch and block.
        self._records: dict[tuple[int, str], _Record] = {}
        self._folder = folder
        #: Placeholders for records that were freed: tensors of the same shapes without values.
        self._placeholders: dict[tuple[int, str], Any] = {}
        self._keeps_all = False
        #: The name of the last recorded block, by batch and by the name of its list.
        self._last: dict[tuple[int, str], str] = {}
        self._run = _Run(0)

    def next_stage(self) -> _Stage | None:
        """Run all batches to their next layer; return the stage of the first of these layers."""
        stage: _Stage | None = None
        for number, batch in enumerate(self._batches):
            self._run_to_next_layer(number, batch)
            if not (reached := self._run.reached):
                continue
            first = min(reached, key=self._order.index)
            if stage is None or self._order.index(first) < self._order.index(stage.first):
                stage = _Stage(first, reached, self._run.copy)
            if first == stage.first:
                stage.layers = [name for name in stage.layers if name in reached]
                stage.batches.add(number)
                stage.add(_without_padding(self._run.copy, self._model, batch))
        return stage

    def _run_to_next_layer(self, number: int, batch: Any) -> None:
        while True:
            self._run = _Run(number)
            try:
                _call(self._model, batch)
            except _StopRun:
                pass
            except Exception:
                if self._placeholders:  # one of them may have caused the error
                    self._placeholders.clear()
                    self._keeps_all = True
                    continue
                raise
            return

    def on_layer_input(self, name: str, inputs: Tensor) -> None:
        """Add a layer to the stage of this run, or end the run if it receives another input."""
        if name in self._run.reached:
            return
        if name in self.done:
            if self._run.number in self.done[name]:
                return
            raise ValueError(
                f"expected batches that reach layers in one order, got batch {self._run.number}, "
                f"which reaches {name} after a layer that other batches reach later; join the "
                "batches into one, or exclude the layer with protect"
            )
        if not isinstance(inputs, Tensor):
            raise TypeError(
                f"expected a tensor as the input of {name}, got a {type(inputs).__name__}; a batch "
                "is the single argument of the model, or a mapping of keyword arguments"
            )
        self._run.reach(name, inputs)

    @contextmanager
    def blocks(self) -> Iterator[None]:
        """Let blocks return their records while the body runs."""
        for name, block in self._blocks.items():
            block.forward = self._replayed(name, block.forward)
        try:
            yield
        finally:
            for block in self._blocks.values():
                del block.forward

    def _replayed(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def replayed(*arguments: Any, **options: Any) -> Any:
            key = self._run.number, name
            if name in self._run.called:  # a block that the model uses twice
                return forward(*arguments, **options)
            self._run.called.add(name)
            if key in self._records:
                return self._records[key].load()
            if key in self._placeholders:
                return self._placeholders[key]
            before = _state(self._blocks[name], (arguments, options))
            outputs = forward(*arguments, **options)
            has_effects = _state(self._blocks[name], (arguments, options))[1] != before[1]
            # If there is an input, a layer inside is not done.
            if self._run.inputs is None and not has_effects:
                self._record(key, outputs)
            return outputs

        return replayed

    def _record(self, key: tuple[int, str], outputs: Any) -> None:
        number, name = key
        for other in self._blocks:
            if other.startswith(f"{name}.") and (number, other) in self._records:
                self._records.pop((number, other)).free()
        path = self._folder / f"{number}-{list(self._blocks).index(name)}"
        self._records[key] = _Record(outputs, path)
        if self._keeps_all or any(name.startswith(f"{other}.") for other in self._blocks):
            return  # records inside a block are kept until the block itself is recorded
        parent = name.rpartition(".")[0]
        before = self._last.get((number, parent))
        self._last[number, parent] = name
        if before is not None:
            freed = self._records.pop((number, before))
            self._placeholders[number, before] = freed.placeholder
            freed.free()


def _blocks_with(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the children of lists of modules that contain some of `layers`, by name.

    Inside a block, only blocks with several layers are returned: running a single layer again costs
    less than the memory of its outputs.
    """
    blocks: dict[str, nn.Module] = {}
    for path, parent in model.named_modules():
        if not isinstance(parent, nn.ModuleList | nn.Sequential):
            continue
        for child, block in parent.named_children():
            name = f"{path}.{child}".lstrip(".")
            inside = [n for n in layers if n == name or n.startswith(f"{name}.")]
            is_nested = any(name.startswith(f"{other}.") for other in blocks)
            if len(inside) > is_nested and "forward" not in vars(block):
                blocks[name] = block
    return blocks


@contextmanager
def _input_hooks(
    layers: Mapping[str, nn.Module], on_inputs: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Call `on_inputs(name, inputs)` before each call of a layer while the body runs."""

    def hook_for(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        return lambda _, inputs, options: on_inputs(name, (*inputs, *options.values())[0])

    handles = [
        layer.register_forward_pre_hook(hook_for(name), with_kwargs=True)
        for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Disable the cache of transformers models, which replayed blocks would not fill."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    caching: list[Any] = [config for config in configs if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


def _state(block: nn.Module, arguments: Any) -> tuple[list[Any], list[tuple[int, int]]]:
    """Return the values in a block's arguments and in its modules' attributes, and their stamps.

    A stamp changes if the value is replaced, or if it is a tensor that is modified in place. The
    first list keeps the values alive, so that no other object gets the identity of one of them.
    """
    attributes = [
        value
        for module in block.modules()
        for key, value in vars(module).items()
        if key not in _ATTRIBUTES_OF_MODULE
    ]
    leaves = _leaves([arguments, attributes])
    return leaves, [(id(leaf), _version(leaf)) for leaf in leaves]


def _leaves(root: Any) -> list[Any]:
    """Return the values in nested containers and in attributes of objects, without the containers.

    An object with attributes is a value itself. If there are more than `_MAX_VALUES` values, the
    last one is a new object, so that two results are never equal.
    """
    leaves: list[Any] = []
    visited: set[int] = set()
    pending = [root]
    while pending and len(visited) < _MAX_VALUES:
        value = pending.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, dict):
            pending += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset | deque):
            pending += value
        else:
            leaves.append(value)
        if not isinstance(value, _WITHOUT_STATE):
            pending += getattr(value, "__dict__", {}).values()
    if pending:
        leaves.append(object())
    return leaves


def _version(value: Any) -> int:
    """Return the number of modifications of a tensor in place, or 0 if they are not counted."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _call(model: nn.Module, batch: Any) -> None:
    batch = _copied(batch)
    # A run may change buffers, such as a counter of calls, so it gets copies of them.
    named = {
        name: buffer for name, buffer in model.named_buffers() if ".parametrizations." not in name
    }
    if isinstance(batch, Mapping):
        functional_call(model, _copied(named), (), dict(batch))
    else:
        functional_call(model, _copied(named), (batch,))


def _mask_of(model: nn.Module, batch: Any) -> Tensor | None:
    """Return a mask (batch, seq) that is True for tokens that are not padding, or None.

    Masks without two dimensions are ignored. Raise `ValueError` if a mask has other values than 0
    and 1, or only zeros. Also raise it for padding of an encoder-decoder model, whose layers
    receive the tokens of two sequences.
    """
    if not isinstance(batch, Mapping):
        return None
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    for name in ("attention_mask", "decoder_attention_mask"):
        mask = batch.get(name)
        if mask is None or mask.dim() != 2:
            continue
        if not bool(((mask == 0) | (mask == 1)).all()) or not bool(mask.any()):
            raise ValueError(
                f"expected {name} to be 1 at tokens and 0 at padding, got values from "
                f"{float(mask.min()):.3g} to {float(mask.max()):.3g}; convert an additive mask "
                "with (mask == 0).long()"
            )
        if not is_encoder_decoder:
            return cast(Tensor, mask.bool())
        if not bool(mask.all()):
            raise ValueError(
                f"expected batches without padding for an encoder-decoder model, got {name} with "
                "zeros; calibrate with sequences of one length"
            )
    return None


def _without_padding(inputs: Tensor, model: nn.Module, batch: Any) -> Tensor:
    """Return inputs (..., width) as (tokens, width), without padding if the batch's mask fits.

    Raise `ValueError` if the tokens may be in two orders, by sequence or by position.
    """
    flat = inputs.reshape(-1, inputs.shape[-1])
    mask = _mask_of(model, batch)
    if mask is None:
        return flat
    # Blocks of experts join the sequences before their layers.
    is_joined = inputs.shape[:-1] == (mask.numel(),)
    # Layers with batch_first=False receive (seq, batch, width).
    fitting = [m.flatten() for m in (mask, mask.t()) if is_joined or inputs.shape[:-1] == m.shape]
    if not fitting:
        return flat
    is_sequence_first = not all(getattr(m, "batch_first", True) for m in model.modules())
    if is_sequence_first and not torch.equal(fitting[0], fitting[-1]):
        raise ValueError(
            "expected inputs whose axes show the order of their tokens, because the model has "
            f"layers with batch_first=False, got inputs of shape {tuple(inputs.shape)} for a mask "
            f"of shape {tuple(mask.shape)} with padding; pass batches without padding, or with "
            "another number of sequences than their length"
        )
    return flat[fitting[0]]


def _copied(value: Any) -> Any:
    """Return a copy of nested values, because the model may write into them."""

    def copied(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)

    return tree_map(copied, value)


class _Freed(Tensor):
    """A placeholder for a tensor whose values were freed; every operation on it raises an error.

    A plain tensor on the meta device is not sufficient: some operations, such as `index_put_` and
    `add_`, silently ignore it.
    """

    @staticmethod
    def of(value: Any) -> Any:
        """Return a placeholder for a tensor, and a copy of any other object."""
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        return torch.empty_like(value, device="meta").as_subclass(_Freed)

    @classmethod
    def __torch_function__(
        cls, function: Any, _: Any, arguments: Sequence[Any] = (), __: Any = None
    ) -> Any:
        raise ValueError(f"the model calls {function} on the output of a block that was freed")
