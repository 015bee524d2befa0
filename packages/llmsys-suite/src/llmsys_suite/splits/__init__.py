"""Strategies for splitting one model over the ranks: by layers, inside layers, by tokens."""

from __future__ import annotations

from llmsys_suite.splits.layers import DataTensorModel, SequenceModel, TensorModel
from llmsys_suite.splits.pipeline import Interleaved, OneForwardOneBackward, PipelineModel
from llmsys_suite.splits.split import Split

__all__ = ["SPLITS", "DataTensorModel", "PipelineModel", "Split", "TensorModel"]

SPLITS: dict[str, type[Split]] = {
    "pipeline (GPipe)": PipelineModel,
    "pipeline (1F1B)": OneForwardOneBackward,
    "pipeline (interleaved)": Interleaved,
    "tensor (Megatron)": TensorModel,
    "tensor and sequence": SequenceModel,
    "data x tensor": DataTensorModel,
}
