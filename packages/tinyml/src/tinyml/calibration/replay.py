"""Statistics of the inputs of layers, with the hidden states of one calibration batch in memory.

Note [Replayed blocks]
GPTQ changes layers one after another and calibrates each layer on the outputs of the changed layers
before it. Running every batch from the start for each layer would take time quadratic in the number
of layers. Therefore the outputs of a finished block are recorded, and later runs return the record
instead of running the block. A block is a child of an `nn.ModuleList` or `nn.Sequential`. The
model's own code between the blocks runs each time, so masks and position embeddings are correct.

Records are temporary files, so that the outputs of only one batch are in memory. Only the last
finished block of a list keeps its records, one per batch. Earlier blocks return placeholders. In a
chain of blocks, a placeholder reaches only the next block, which ignores it and returns a record or
a placeholder too. If a model uses the outputs of earlier blocks elsewhere, as skip connections do,
the operation on the placeholder raises an error. From then on, all records are kept.

A record contains only outputs. A block therefore runs each time if it changes its arguments, the
attributes of its modules, or the attributes of objects in them. Changes inside objects without a
`__dict__`, such as NumPy arrays, are not detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tinyml.calibration.block_records import BlockRecord, copy_values, get_block_state
from tinyml.calibration.padding_mask import remove_padding
from tinyml.conversion import get_tensor_versions
from tinyml.validation import Progress

#: Number of tokens that are converted to float64 at a time.
_TOKENS_AT_A_TIME = 256


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
    an `attention_mask` (batch, seq) is zero are left out; masks of other shapes are ignored.

    `visit` may change the layer; later layers are calibrated on the outputs of the changed layer.
    Layers that receive the same tensor, such as queries, keys and values, share H. If batches reach
    different layers, as in a mixture of experts, the first of these layers in the order of `layers`
    comes next. A batch that did not reach this layer does not count for it. Raise `ValueError` if
    such a batch reaches the layer in a later run.
    """
    with TemporaryDirectory(prefix="tinyml-") as folder:
        replay = _Replay(model, batches, layers, Path(folder))
        with replay.installed():
            while (stage := replay.run_to_next_stage()) is not None:
                for name in stage.layers:
                    visit(name, stage.moment)
                    replay.done[name] = stage.batches
                    if progress is not None:
                        progress(name, len(replay.done), len(layers))


class _StopRun(BaseException):
    """An exception that ends a run at a layer that must wait for an earlier layer."""


class _Stage:
    """The next layers to calibrate: unfinished layers that receive the same input."""

    def __init__(self, first: str, layers: list[str], inputs: Tensor) -> None:
        #: The first of these layers in the order of all layers.
        self.first = first
        self.layers = layers
        #: The numbers of the batches that reach the layers.
        self.batches: set[int] = set()
        #: H, the sum of x x^T over the tokens x.
        self.moment = inputs.new_zeros(inputs.shape[-1], inputs.shape[-1], dtype=torch.float64)

    def add(self, tokens: Tensor) -> None:
        """Add tokens of shape (tokens, width) to H."""
        # The copies in float64 are small, however long the sequences are.
        for part in tokens.split(_TOKENS_AT_A_TIME):
            part = part.double()
            self.moment.addmm_(part.t(), part)


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
        stamp = get_tensor_versions(inputs), inputs.shape, inputs.stride()
        if self.inputs is None:
            self.inputs = inputs
            self.stamp = stamp
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
        self._layers = layers
        self._order = list(layers)
        self._blocks = _find_blocks(model, layers)
        #: The outputs of finished blocks by batch and block.
        self._records: dict[tuple[int, str], BlockRecord] = {}
        self._folder = folder
        #: Placeholders for records that were freed: tensors of the same shapes without values.
        self._placeholders: dict[tuple[int, str], Any] = {}
        self._keeps_all = False
        #: The name of the last recorded block, by batch and by the name of its list.
        self._last: dict[tuple[int, str], str] = {}
        self._run = _Run(0)

    def run_to_next_stage(self) -> _Stage | None:
        """Run all batches to their next layer; return the stage of the first of these layers."""
        stage: _Stage | None = None
        for number, batch in enumerate(self._batches):
            self._run_to_next_layer(number, batch)
            reached = self._run.reached
            if not reached:
                continue
            first = min(reached, key=self._order.index)
            if stage is None or self._order.index(first) < self._order.index(stage.first):
                stage = _Stage(first, reached, self._run.copy)
            if first == stage.first:
                stage.layers = [name for name in stage.layers if name in reached]
                stage.batches.add(number)
                stage.add(remove_padding(self._run.copy, self._model, batch))
        return stage

    def _run_to_next_layer(self, number: int, batch: Any) -> None:
        self._run = _Run(number)
        try:
            _call_model(self._model, batch)
        except _StopRun:
            pass
        except Exception:
            if not self._placeholders:
                raise
            self._placeholders.clear()  # one of them may have caused the error
            self._keeps_all = True
            self._run_to_next_layer(number, batch)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Observe the inputs of layers and let blocks return their records while the body runs."""
        with ExitStack() as stack:
            for module in self._model.modules():
                config: Any = getattr(module, "config", None)
                if getattr(config, "use_cache", False):  # replayed blocks would not fill the cache
                    config.use_cache = False
                    stack.callback(setattr, config, "use_cache", True)
            for name, layer in self._layers.items():
                observe = partial(self._observe_call, name)
                handle = layer.register_forward_pre_hook(observe, with_kwargs=True)
                stack.callback(handle.remove)
            for name, block in self._blocks.items():
                block.forward = partial(self._call_block, name, block.forward)
                stack.callback(delattr, block, "forward")
            yield

    def _observe_call(
        self, name: str, _: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
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
        inputs = (*arguments, *options.values())[0]
        if not isinstance(inputs, Tensor):
            raise TypeError(
                f"expected a tensor as the input of {name}, got a {type(inputs).__name__}; a batch "
                "is the single argument of the model, or a mapping of keyword arguments; for pairs "
                "(inputs, targets), pass only the inputs"
            )
        self._run.reach(name, inputs)

    def _call_block(
        self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the recorded outputs of a block or a placeholder; without them, run the block."""
        key = self._run.number, name
        if name in self._run.called:  # a block that the model uses twice
            return forward(*args, **kwargs)
        self._run.called.add(name)
        if key in self._records:
            return self._records[key].load()
        if key in self._placeholders:
            return self._placeholders[key]
        # `before` keeps the old values alive (see `get_block_state`).
        before = get_block_state(self._blocks[name], (args, kwargs))
        outputs = forward(*args, **kwargs)
        has_effects = get_block_state(self._blocks[name], (args, kwargs))[1] != before[1]
        # If the run has an input of an unfinished layer, the layer may be inside the block.
        if self._run.inputs is None and not has_effects:
            self._record(key, outputs)
        return outputs

    def _record(self, key: tuple[int, str], outputs: Any) -> None:
        number, name = key
        for other in self._blocks:
            if other.startswith(f"{name}.") and (number, other) in self._records:
                self._records.pop((number, other)).path.unlink()
        path = self._folder / f"{number}-{list(self._blocks).index(name)}"
        self._records[key] = BlockRecord(outputs, path)
        if self._keeps_all or any(name.startswith(f"{other}.") for other in self._blocks):
            return  # records inside a block are kept until the block itself is recorded
        parent = name.rpartition(".")[0]
        before = self._last.get((number, parent))
        self._last[number, parent] = name
        if before is not None:
            freed = self._records.pop((number, before))
            self._placeholders[number, before] = freed.placeholder
            freed.path.unlink()


def _find_blocks(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the children of lists of modules that contain some of `layers`, by name.

    A block inside another block is returned only if it contains several layers: running a single
    layer again costs less than storing its outputs.
    """
    blocks: dict[str, nn.Module] = {}
    for path, parent in model.named_modules():
        if not isinstance(parent, nn.ModuleList | nn.Sequential):
            continue
        for child, block in parent.named_children():
            name = f"{path}.{child}".lstrip(".")
            inside = [n for n in layers if n == name or n.startswith(f"{name}.")]
            min_layers = 2 if any(name.startswith(f"{other}.") for other in blocks) else 1
            if len(inside) >= min_layers and "forward" not in vars(block):
                blocks[name] = block
    return blocks


def _call_model(model: nn.Module, batch: Any) -> None:
    """Run the model on a copy of a batch and with copies of its buffers, which it may change."""
    batch = copy_values(batch)
    buffers = {
        name: buffer for name, buffer in model.named_buffers() if ".parametrizations." not in name
    }
    if isinstance(batch, Mapping):
        functional_call(model, copy_values(buffers), (), dict(batch))
    else:
        functional_call(model, copy_values(buffers), (batch,))
