"""Which circuit does the work: transformer circuits, taps and patches for any nn.Module."""

from interp.composition import composition_scores
from interp.detect import detect_heads
from interp.gpt2 import GPT2, load_gpt2
from interp.induction import induction_circuit
from interp.lens import attribution, logit_lens
from interp.low_rank import LowRank, ov_circuit, qk_circuit
from interp.model import AttentionOnly
from interp.tap import patch, record
from interp.view import view

__all__ = [
    "GPT2",
    "AttentionOnly",
    "LowRank",
    "attribution",
    "composition_scores",
    "detect_heads",
    "induction_circuit",
    "load_gpt2",
    "logit_lens",
    "ov_circuit",
    "patch",
    "qk_circuit",
    "record",
    "view",
]
