"""Forward passes of a `Decoder` that restart at a block, from the recorded input of that block."""

from __future__ import annotations

from torch import Tensor

from interp.decoder.decoder import Decoder
from interp.prompts import Prompt, forward
from interp.tap import record, record_before_hooks


class Restart:
    """A recorded forward pass of one prompt, which can be continued from the input of any block.

    `batch` is the number of streams that callers continue together.

    Hooks of the model act on the recorded pass and on a continuation. Callers that compute parts of
    blocks reject hooks with `require_unchanged_blocks`.
    """

    #: The stream that each block reads, (1, seq, d_model), after hooks of the input.
    block_inputs: list[Tensor]
    #: The output of the last block, (1, seq, d_model).
    final_stream: Tensor
    #: Recorded queries, keys and values by site, (1, seq, features).
    projections: dict[str, Tensor]
    #: The arguments that every block receives after the stream: the padding (1, seq), the position
    #: embeddings and the position ids. Each of them may be None.
    layout: tuple[Tensor | None, Tensor | None, Tensor | None]

    def __init__(self, model: Decoder, prompt: Prompt, *, batch: int) -> None:
        if not isinstance(model, Decoder):
            raise TypeError(
                f"expected a Decoder, got a {type(model).__name__}; pass describe(model)"
            )
        if batch < 1:
            raise ValueError(f"expected batch >= 1, the patches that run together, got {batch}")
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
            record(model, *inputs, last_block, *projection_sites) as seen,
        ):
            forward(model, prompt)
        #: The inputs of blocks before hooks, which a continuation calls again.
        self._inputs = before_hooks
        self.layout = received[1], received[2], received[3]
        self.final_stream = seen.pop(last_block)
        self.block_inputs = [seen.pop(site) for site in inputs]
        self.projections = dict(seen)

    def __call__(self, start: int, rows: int) -> Tensor:
        """Run the blocks from `start` on for copies of the prompt; return (rows, seq, d_model)."""
        stream = self._inputs[f"blocks.{start}:input"].repeat(rows, 1, 1)
        for block in self.model.layers[start:]:
            stream = block(stream, *self.layout)
        return stream
