"""Verification that a `Decoder` computes the same function as the model that it describes.

The model's own weights can hide a difference: at the usual initialization, attention is nearly
uniform, biases are 0 and a wrong norm epsilon has no effect. The model is therefore called with
random float32 weights that make each property visible, and the decoder must reproduce its
logits:

    small      a residual stream whose mean square is about the norms' epsilon
    large      large scores and activations, which reach caps and clamps
    huge       streams, scores and MLPs of thousands, beyond clamps and mask values other than -inf
    random     scores with a standard deviation of 2.5, for one token and for the whole context
    window     the same scores, with all windows reduced, if no text exceeds the model's window
    rotation   the same scores, if long texts have other rotary angles, with position ids that end
               at the original length, one position later, and at twice this length
    padded     the same scores, with padding before, between and after tokens
    positions  the same padding, with position ids that do not count it

`rotation` needs a model that accepts position ids, `padded` one that accepts masks, and `positions`
both. A bound that neither these comparisons nor the model's own weights reach is not detected.
"""
