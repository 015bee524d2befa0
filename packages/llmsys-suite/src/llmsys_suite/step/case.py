"""One case of the benchmark of a training step: a model, its options and its predicted cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import accounting

from llmsys_suite.config import LEAST_CONTEXT, UsageError, get_size, require_integer, require_known
from llmsys_suite.model import ModelConfig

DTYPES = ("fp32", "tf32", "bf16", "fp16")
PHASES = ("forward", "backward", "optimizer")
#: Numbers of warm-up steps to report, and the number of measured steps after each.
WARMUPS, STEPS = (0, 1, 2, 5), 10


@dataclass(frozen=True, kw_only=True)
class Case:
    """One benchmark case: AdamW steps on one device, on `rows` sequences of `context` tokens.

    Attention runs without a fused kernel. `dtype` is the arithmetic of products: fp32, tf32 (CUDA
    only), or the autocast dtype; the weights are float32. `layers` overrides the number of layers
    of `size`, and `checkpoint` recomputes blocks in the backward pass. Raises UsageError for
    invalid values.
    """

    size: str = "tiny"
    context: int = 128
    rows: int = 4
    dtype: str = "fp32"
    compile: bool = False
    checkpoint: bool = False
    layers: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        get_size(self.size)
        require_known("dtype", self.dtype, DTYPES)
        require_known("device", self.device, ("cpu", "cuda"))
        if self.dtype == "tf32" and self.device != "cuda":
            raise UsageError("dtype tf32 needs device cuda, got cpu; use fp32")
        minimums = {"context": LEAST_CONTEXT, "rows": 1, "layers": 1}
        for name, minimum in minimums.items():
            value = getattr(self, name)
            if name != "layers" or value is not None:
                require_integer(name, value, minimum)

    @property
    def model(self) -> ModelConfig:
        """The shape of the model."""
        config = ModelConfig.from_size(self.size, context=self.context)
        return replace(
            config, num_layers=self.layers or config.num_layers, checkpoint=self.checkpoint
        )

    @property
    def tokens(self) -> int:
        """The number of tokens per step."""
        return self.rows * self.context

    def predict_peak_bytes(self) -> int:
        """Return the peak memory of a step in bytes, which `accounting` predicts for float32."""
        on_gpu = self.device == "cuda"
        return int(
            accounting.peak_memory(
                self._describe_model(),
                accounting.Plan(recompute="full" if self.checkpoint else "none"),
                batch=self.rows,
                seq=self.context,
                flash=False,
                fused_norm=on_gpu,
                foreach=on_gpu,
            ).total
        )

    def count_useful_flops(self) -> int:
        """Return the FLOPs per step for MFU: without masked scores and recomputation."""
        model = self._describe_model()
        return int(accounting.flops(model, batch=self.rows, seq=self.context).total)

    def count_executed_flops(self) -> int:
        """Return the FLOPs per step for HFU: with masked scores and recomputation."""
        model = self.model
        total = accounting.flops(
            self._describe_model(),
            batch=self.rows,
            seq=self.context,
            attention="full",
            recompute="full" if self.checkpoint else "none",
        ).total
        if not self.checkpoint:
            return int(total)
        # When torch recomputes a block, it stops before the last product, because the backward pass
        # does not need its output.
        skipped = 2 * self.tokens * model.d_ff * model.d_model * model.num_layers
        return int(total) - skipped

    def get_labels(self) -> dict[str, Any]:
        """Return the columns that identify the case in a table."""
        values = asdict(self) | {"layers": self.model.num_layers}
        return {key: values[key] for key in LABELS}

    def _describe_model(self) -> accounting.Transformer:
        return get_size(self.size).to_transformer(layers=self.layers)


LABELS = ("size", "layers", "context", "rows", "dtype", "compile", "checkpoint")
