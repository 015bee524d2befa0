"""Recurrent mixers, each as its matrices, its state, and what a token does with it.

A state-space layer keeps a state of N numbers a channel: h = a h + b x, y = c h (Gu and Dao 2023,
Mamba; Dao and Gu 2024, Mamba-2). A delta rule keeps a matrix a head: S = S (a - b k k') + b v k'
(Yang et al. 2024, Gated Delta Networks). Writing and reading each entry is a multiply and an add.
"""

from __future__ import annotations

from accounting.model.records import Matrix, Mixer

Layers = tuple[int, ...]


def _matrix(name: str, rows: int, columns: int, split: str = "columns") -> Matrix:
    return Matrix("mixer", name, rows, columns, split)


def _vector(name: str, width: int, split: str = "columns") -> Matrix:
    return Matrix("mixer", name, 1, width, split, kind="vector")


def _kept(*matrices: Matrix | None) -> tuple[Matrix, ...]:
    return tuple(m for m in matrices if m is not None and m.one)


def mamba(
    layers: Layers,
    d_model: int,
    *,
    inner: int,
    state: int,
    conv: int,
    rank: int,
    conv_bias: bool = True,
    bias: bool = False,
    inner_norms: bool = False,
) -> Mixer:
    """Mamba: a state of `state` numbers for each of `inner` channels, stepped by the input."""
    return Mixer(
        name="mamba",
        layers=layers,
        matrices=_kept(
            _matrix("in", d_model, 2 * inner),
            _vector("in bias", 2 * inner if bias else 0),
            _matrix("convolution", conv, inner),
            _vector("convolution bias", inner if conv_bias else 0),
            _matrix("step and state", inner, rank + 2 * state, "rows"),
            _matrix("step", rank, inner),
            _vector("step bias", inner),
            _vector("decay", inner * state),
            _vector("skip", inner),
            _vector("inner norms", rank + 2 * state if inner_norms else 0, "none"),
            _matrix("out", inner, d_model, "rows"),
            _vector("out bias", d_model if bias else 0, "none"),
        ),
        state=inner * (state + conv),
        scan=4 * inner * state,
        kept=4 * inner + rank + 2 * state,
    )


def mamba2(
    layers: Layers,
    d_model: int,
    *,
    inner: int,
    state: int,
    heads: int,
    groups: int,
    conv: int,
    conv_bias: bool = True,
    bias: bool = False,
    out_bias: bool | None = None,
    norm: bool = True,
) -> Mixer:
    """Mamba-2: one decay a head; queries and keys of the dual form are shared in groups."""
    convolved = inner + 2 * groups * state
    return Mixer(
        name="mamba2",
        layers=layers,
        matrices=_kept(
            _matrix("in", d_model, inner + convolved + heads),
            _vector("in bias", inner + convolved + heads if bias else 0),
            _matrix("convolution", conv, convolved),
            _vector("convolution bias", convolved if conv_bias else 0),
            _vector("step, decay and skip", 3 * heads),
            _vector("norm", inner if norm else 0),
            _matrix("out", inner, d_model, "rows"),
            _vector("out bias", d_model if (bias if out_bias is None else out_bias) else 0, "none"),
        ),
        state=inner * state + convolved * conv,
        scan=4 * inner * state,
        kept=2 * inner + 2 * convolved + heads,
    )


def gated_delta(
    layers: Layers,
    d_model: int,
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    conv: int,
) -> Mixer:
    """Gated delta rule: each value head keeps a (key_dim, value_dim) matrix."""
    keys, values = key_heads * key_dim, value_heads * value_dim
    convolved = 2 * keys + values
    return Mixer(
        name="gated delta",
        layers=layers,
        matrices=_kept(
            _matrix("queries, keys, values and gates", d_model, 2 * keys + 2 * values),
            _matrix("steps and decays", d_model, 2 * value_heads),
            _matrix("convolution", conv, convolved),
            _vector("step and decay", 2 * value_heads),
            _vector("norm", value_dim, "none"),
            _matrix("out", values, d_model, "rows"),
        ),
        state=value_heads * key_dim * value_dim + convolved * conv,
        # The delta rule reads what a key holds before it writes, and the query reads after.
        scan=6 * value_heads * key_dim * value_dim,
        kept=2 * convolved + 2 * values + 2 * value_heads,
    )


def short_convolution(layers: Layers, d_model: int, *, conv: int, bias: bool = False) -> Mixer:
    """Two gates around a convolution over the last few tokens (LFM2)."""
    return Mixer(
        name="short convolution",
        layers=layers,
        matrices=_kept(
            _matrix("in", d_model, 3 * d_model),
            _vector("in bias", 3 * d_model if bias else 0),
            _matrix("convolution", conv, d_model),
            _vector("convolution bias", d_model if bias else 0),
            _matrix("out", d_model, d_model, "rows"),
            _vector("out bias", d_model if bias else 0, "none"),
        ),
        state=conv * d_model,
        scan=0,
        kept=5 * d_model,
    )


def recurrent_gate(layers: Layers, d_model: int, *, width: int, heads: int, conv: int) -> Mixer:
    """RG-LRU: a gated diagonal recurrence (De et al. 2024, Griffin)."""
    block = width // heads
    return Mixer(
        name="gated linear recurrence",
        layers=layers,
        matrices=_kept(
            _matrix("in and gate", d_model, 2 * width),
            _vector("their biases", 2 * width),
            _matrix("convolution", conv, width),
            _vector("convolution bias", width),
            _matrix("input and recurrence gates", block, 2 * width),
            _vector("gate biases", 2 * width),
            _vector("decay", width),
            _matrix("out", width, d_model, "rows"),
            _vector("out bias", d_model, "none"),
        ),
        state=width * (1 + conv),
        scan=4 * width,
        kept=6 * width,
    )


def lightning(layers: Layers, d_model: int, *, heads: int, head_dim: int) -> Mixer:
    """Lightning attention: linear attention with a fixed decay a head (MiniMax-01)."""
    width = heads * head_dim
    return Mixer(
        name="lightning attention",
        layers=layers,
        matrices=_kept(
            _matrix("queries, keys and values", d_model, 3 * width),
            _matrix("gate", d_model, width),
            _vector("norm", width),
            _matrix("out", width, d_model, "rows"),
        ),
        state=heads * head_dim * head_dim,
        scan=4 * width * head_dim,
        kept=6 * width,
    )
