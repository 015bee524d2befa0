"""TransformerLens's model, cache and patching functions over a `Decoder`, for its notebooks.

    model = HookedDecoder(fold_decoder(describe(gpt2)), tokenizer)
    logits, cache = model.run_with_cache("A text")
    cache["pattern", 5]

Names and results equal those of TransformerLens, except for the differences that the README lists.
A name of TransformerLens that is not supported raises an error that contains this name.
"""

from interp.transformer_lens import patching, utils
from interp.transformer_lens.activation_cache import ActivationCache
from interp.transformer_lens.factored_matrix import FactoredMatrix
from interp.transformer_lens.hooked_decoder import HookedDecoder
from interp.transformer_lens.names import get_act_name

__all__ = [
    "ActivationCache",
    "FactoredMatrix",
    "HookedDecoder",
    "get_act_name",
    "patching",
    "utils",
]
