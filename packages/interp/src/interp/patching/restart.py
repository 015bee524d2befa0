"""Forward passes that restart at a block, from the recorded input of that block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from interp.decoder.decoder import Decoder, DecoderBlock
from interp.prompts import Prompt, forward, is_close, require_repeatable
from interp.tap import expand_sites, record

# The modules of a Decoder's blocks. Attention alone mixes positions; all others act on each
# position separately.
_DECODER_MODULES = (
    "interp.decoder.modules.attention",
    "interp.decoder.decoder",
    "interp.decoder.modules.mlp",
    "interp.decoder.modules.weights",
    "torch.nn.modules.linear",
    "torch.nn.modules.normalization",
    "torch.nn.modules.container",
)


class Restart:
    """A recorded run that can be continued from the input of any block.

    Raises ValueError if a block's output is not the next block's input, if a block is called
    several times, or if a second call of the blocks returns another result.
    """

    #: Names of the blocks, in order.
    block_names: tuple[str, ...]
    #: The recorded input of each block, (1, seq, d_model).
    block_inputs: list[Tensor]
    #: The output of the last block, (1, seq, d_model).
    final_stream: Tensor
    #: Queries, keys and values by site, recorded for a `Decoder` only; empty otherwise.
    projections: dict[str, Tensor]

    def __init__(self, model: nn.Module, blocks: str, prompt: Prompt, *, batch: int) -> None:
        if batch < 1:
            raise ValueError(f"expected batch >= 1, got {batch}")
        self.model, self.batch = model, batch
        self.block_names = tuple(expand_sites(model, (blocks,)))
        modules = [model.get_submodule(name) for name in self.block_names]
        self.layers = len(modules)
        self.replay = BlockReplay(modules)
        inputs = [f"{name}:input" for name in self.block_names]
        projections: list[str] = []
        if _is_causal(model, modules):
            projections = [f"{name}.attention.{x}" for name in self.block_names for x in "qkv"]
        with (
            record(model, *inputs, *self.block_names, *projections, clone=True) as seen,
            self.replay,
        ):
            forward(model, prompt)
        self.projections = {site: seen[site] for site in projections}
        self.block_inputs = [seen[site] for site in inputs]
        self.final_stream = seen[self.block_names[-1]]
        for name, following in zip(self.block_names, self.block_inputs[1:], strict=False):
            if not torch.equal(seen[name], following):
                raise ValueError(
                    f"one of {self.block_names[0]} ... {self.block_names[-1]} does not feed the "
                    f"next: the output of {name} is not the next block's input; name the blocks of "
                    "the residual stream, in order"
                )
        if not projections:  # The blocks of a Decoder have no state.
            with record(model, inputs[0], clone=True) as seen_again:
                forward(model, prompt)
            require_repeatable(seen, seen_again)
            self._require_no_state()

    def _require_no_state(self) -> None:
        stateful = (
            f"called again, {self.block_names[0]} ... {self.block_names[-1]} return another "
            "stream; they must not keep state (a cache, dropout) or mix the rows of a batch (batch "
            "norm): use eval() and turn caches off"
        )
        # Copied, because blocks may work in place.
        stream = self.block_inputs[0].clone()
        # Patches share a batch, so the rows must not depend on each other.
        two_rows = torch.cat([stream, -stream])
        # If a cache has grown, keys are longer than masks, and a call fails deep inside a block.
        try:
            repeated = self(stream, 0)
            mixed = self(two_rows, 0)[:1] if self.batch > 1 else repeated
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ValueError(stateful) from error
        # Another batch size may change the rounding, which matters in half precision.
        tolerance = torch.finfo(mixed.dtype).eps ** 0.5
        is_mixed = (mixed - self.final_stream).norm() > tolerance * self.final_stream.norm()
        if not is_close(repeated, self.final_stream) or bool(is_mixed):
            raise ValueError(stateful)

    def __call__(self, stream: Tensor, start: int) -> Tensor:
        """Return the final stream (n, seq, d_model) for inputs of block `start`."""
        for index in range(start, self.layers):
            stream = self.replay(index, stream)
        return stream


def _is_causal(model: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    """Return True if the blocks are those of a `Decoder`, without hooks or replaced methods."""
    return (
        isinstance(model, Decoder)
        and all(type(block) is DecoderBlock for block in blocks)
        and all(
            type(module).__module__ in _DECODER_MODULES
            for block in blocks
            for module in block.modules()
        )
        and not any(
            module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
            for module in model.modules()
        )
    )


class BlockReplay:
    """Calls of blocks with their recorded arguments and another stream."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = blocks
        #: Positional and keyword arguments by block.
        self.arguments: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def __enter__(self) -> None:
        self.handles = [
            block.register_forward_pre_hook(partial(self._save_arguments, index), with_kwargs=True)
            for index, block in enumerate(self.blocks)
        ]

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _save_arguments(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if index in self.arguments:
            raise ValueError(
                f"block {index} is called several times in one run, as with shared layers; a "
                "restart needs blocks that are called once"
            )
        self.arguments[index] = (args, kwargs)

    def __call__(self, index: int, stream: Tensor) -> Tensor:
        """Return the output of block `index` for `stream` and its other recorded arguments."""
        args, kwargs = self.arguments[index]
        if args:
            args = (stream, *args[1:])
        else:
            kwargs = {**kwargs, next(iter(kwargs)): stream}
        output = self.blocks[index](*args, **kwargs)
        result: Tensor = output if isinstance(output, Tensor) else output[0]
        return result
