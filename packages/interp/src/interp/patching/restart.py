"""Forward passes of a `Decoder` that restart at a block, from the recorded input of that block."""

from __future__ import annotations

from torch import Tensor

from interp.decoder.decoder import Decoder
from interp.prompts import Prompt, forward
from interp.tap import record


class Restart:
    """A recorded forward pass of one prompt, which can be continued from the input of any block.

    `batch` is the number of streams that callers continue together. Raises TypeError without a
    `Decoder`. Raises ValueError if `batch` < 1, and for a model with hooks or modules of another
    library, because continuations compute only a part of the model.
    """

    def __init__(self, model: Decoder, prompt: Prompt, *, batch: int) -> None:
        if not isinstance(model, Decoder):
            raise TypeError(
                f"expected a Decoder, got a {type(model).__name__}; pass describe(model)"
            )
        if batch < 1:
            raise ValueError(f"expected batch >= 1, the number of patches per batch, got {batch}")
        _require_unmodified_modules(model)
        self.model = model
        self.batch = batch
        projection_sites = [f"blocks.*.attention.{part}" for part in "qkv"]
        # The arguments of the first block: stream, padding, position embeddings, positions, cache.
        received: list[Tensor | None] = []
        hook = model.layers[0].register_forward_pre_hook(lambda _, args: received.extend(args))
        inputs = [f"blocks.{i}:input" for i in range(len(model.layers))]
        last_block = f"blocks.{len(model.layers) - 1}"
        with hook, record(model, *inputs, last_block, *projection_sites) as recorded:
            forward(model, prompt)
        #: Arguments of every block besides the stream and the cache: the padding (1, seq), the
        #: position embeddings and the position ids. Each of them may be None.
        self.block_arguments = received[1], received[2], received[3]
        #: The output of the last block, (1, seq, d_model).
        self.final_stream = recorded.pop(last_block)
        #: The stream that each block reads, (1, seq, d_model).
        self.block_inputs = [recorded.pop(site) for site in inputs]
        #: Recorded queries, keys and values by site, (1, seq, features).
        self.projections = dict(recorded)

    def __call__(self, start: int, rows: int) -> Tensor:
        """Return the final stream (rows, seq, d_model) of copies that continue at block `start`."""
        stream = self.block_inputs[start].repeat(rows, 1, 1)
        for block in self.model.layers[start:]:
            stream = block(stream, *self.block_arguments)
        return stream


def _require_unmodified_modules(model: Decoder) -> None:
    """Raise ValueError for forward hooks, a replaced `forward` and modules of other libraries.

    Such code may depend on all positions and rows, but patched runs compute only a part of them.
    """
    for name, module in model.named_modules():
        is_hooked = bool(module._forward_hooks or module._forward_pre_hooks)
        library = type(module).__module__.partition(".")[0]
        if is_hooked or "forward" in vars(module) or library not in ("interp", "torch"):
            raise ValueError(
                f"{name!r} has a hook, as inside patch() or record(), or is a module of another "
                "library; only parts of the model are computed, so call this function outside of "
                "other contexts, on a decoder of describe()"
            )
