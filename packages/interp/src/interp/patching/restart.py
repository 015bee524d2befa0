"""Forward passes of a `Decoder` that restart at a block, from the recorded input of that block."""

from __future__ import annotations

from torch import Tensor

from interp.decoder.decoder import Decoder
from interp.prompts import Prompt, forward
from interp.tap import record, record_before_hooks


class Restart:
    """A recorded forward pass of one prompt, which can be continued from the input of any block.

    `batch` is the number of streams that callers continue together. Hooks of the model act on the
    recorded pass and on a continuation. Callers that compute parts of blocks reject hooks with
    `require_unmodified_modules`. Raises TypeError without a `Decoder`, ValueError if `batch` < 1.
    """

    def __init__(self, model: Decoder, prompt: Prompt, *, batch: int) -> None:
        if not isinstance(model, Decoder):
            raise TypeError(
                f"expected a Decoder, got a {type(model).__name__}; pass describe(model)"
            )
        if batch < 1:
            raise ValueError(f"expected batch >= 1, the number of patches per batch, got {batch}")
        self.model, self.batch = model, batch
        projection_sites = [f"blocks.*.attention.{part}" for part in "qkv"]
        # The arguments of the first block: stream, padding, position embeddings, positions, cache.
        received: list[Tensor | None] = []
        hook = model.layers[0].register_forward_pre_hook(lambda _, args: received.extend(args))
        inputs = [f"blocks.{i}:input" for i in range(len(model.layers))]
        last_block = f"blocks.{len(model.layers) - 1}"
        with (
            hook,
            record_before_hooks(model, *inputs) as before_hooks,
            record(model, *inputs, last_block, *projection_sites) as recorded,
        ):
            forward(model, prompt)
        #: Block inputs before hooks are applied; a continuation runs the hooks again.
        self._inputs = before_hooks
        #: Arguments of every block besides the stream and the cache: the padding (1, seq), the
        #: position embeddings and the position ids. Each of them may be None.
        self.block_arguments = received[1], received[2], received[3]
        #: The output of the last block, (1, seq, d_model).
        self.final_stream = recorded.pop(last_block)
        #: The stream that each block reads, (1, seq, d_model), after hooks of the input.
        self.block_inputs = [recorded.pop(site) for site in inputs]
        #: Recorded queries, keys and values by site, (1, seq, features).
        self.projections = dict(recorded)

    def __call__(self, start: int, rows: int) -> Tensor:
        """Return the final stream (rows, seq, d_model) of copies that continue at block `start`."""
        stream = self._inputs[f"blocks.{start}:input"].repeat(rows, 1, 1)
        for block in self.model.layers[start:]:
            stream = block(stream, *self.block_arguments)
        return stream
