"""Interpretability of transformers: circuits, kinds of heads, recording and patching."""

from interp.circuits.composition import composition_scores
from interp.circuits.induction import induction_circuit
from interp.circuits.low_rank import LowRank, ov_circuit, qk_circuit
from interp.decoder.attention_only import AttentionOnly
from interp.decoder.checkpoint import load_decoder
from interp.decoder.decoder import Decoder
from interp.decoder.describe import describe
from interp.decoder.modules.cache import Cache
from interp.detect import detect_heads
from interp.interventions import SparseAutoencoder, knock_out_attention, steer, steering_vector
from interp.lens import attribution, logit_lens
from interp.patterns import record_patterns
from interp.tap import patch, record
from interp.view import view

__all__ = [
    "AttentionOnly",
    "Cache",
    "Decoder",
    "LowRank",
    "SparseAutoencoder",
    "attribution",
    "composition_scores",
    "describe",
    "detect_heads",
    "induction_circuit",
    "knock_out_attention",
    "load_decoder",
    "logit_lens",
    "ov_circuit",
    "patch",
    "qk_circuit",
    "record",
    "record_patterns",
    "steer",
    "steering_vector",
    "view",
]
