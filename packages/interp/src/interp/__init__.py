"""Which circuit does the work: transformer circuits, taps and patches for any nn.Module."""

import sys

from interp.circuits import composition, heads, induction, low_rank, vocabulary
from interp.circuits.composition import composition_scores
from interp.circuits.induction import induction_circuit
from interp.circuits.low_rank import LowRank, ov_circuit, qk_circuit
from interp.decoder import attention_only, fold, gpt2
from interp.decoder.attention_only import AttentionOnly
from interp.decoder.decoder import Decoder
from interp.decoder.describe import describe, load_decoder
from interp.decoder.gpt2 import GPT2, load_gpt2
from interp.detect import detect_heads
from interp.lens import attribution, logit_lens
from interp.patterns import record_patterns
from interp.tap import patch, record
from interp.view import view

# The addresses these modules had before there were wings go on working.
for _name, _module in {
    "composition": composition,
    "fold": fold,
    "gpt2": gpt2,
    "heads": heads,
    "induction": induction,
    "low_rank": low_rank,
    "model": attention_only,
    "vocabulary": vocabulary,
}.items():
    sys.modules[f"interp.{_name}"] = _module

__all__ = [
    "GPT2",
    "AttentionOnly",
    "Decoder",
    "LowRank",
    "attribution",
    "composition_scores",
    "describe",
    "detect_heads",
    "induction_circuit",
    "load_decoder",
    "load_gpt2",
    "logit_lens",
    "ov_circuit",
    "patch",
    "qk_circuit",
    "record",
    "record_patterns",
    "view",
]
