"""Forward passes of a `Decoder` that restart at a block, from the recorded input of that block."""

from __future__ import annotations

from torch import Tensor

from interp.decoder.decoder import Decoder
from interp.prompts import Prompt, forward
from interp.tap import record


class Restart:
    """A recorded forward pass of one prompt, which can be continued from the input of any block.

    `batch` is the number of streams that callers continue together.

    Hooks of the model act on the recorded pass and again on a continuation. Callers that compute
    parts of blocks therefore reject hooks with `require_unchanged_blocks`.
    """

    #: The recorded input of each block, (1, seq, d_model).
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
        with hook, record(model, "blocks.*:input", "norm:input", *projection_sites) as seen:
            forward(model, prompt)
        self.layout = received[1], received[2], received[3]
        self.final_stream = seen.pop("norm:input")
        self.block_inputs = [seen.pop(f"blocks.{i}:input") for i in range(len(model.layers))]
        self.projections = dict(seen)

    def __call__(self, stream: Tensor, start: int) -> Tensor:
        """Run the blocks from `start` on; return the final stream, (n, seq, d_model)."""
        for block in self.model.layers[start:]:
            stream = block(stream, *self.layout)
        return stream
