"""Records that describe a model: matrices, latents, experts, windows, entries and mixers."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from accounting import checks


@dataclass(frozen=True)
class Matrix:
    """One kind of parameter: its size, its sharding, and the tokens to which it applies.

    Parameters, FLOPs and shards are computed from these records.
    """

    #: Names of the part, such as `attention`, and of the matrix in results.
    part: str
    name: str
    #: Input features; 1 for a vector.
    rows: int
    #: Output features.
    columns: int
    #: Dimension along which tensor parallelism splits the matrix: `columns`, `rows`, `heads` (key
    #: and value heads, which are copied if there are fewer heads than devices), or `none` if each
    #: device stores the whole matrix.
    split: str = "none"
    #: A `matrix` multiplies tokens, a `table` is indexed, and a `vector` is added or multiplied
    #: elementwise.
    kind: str = "matrix"
    #: Layers that contain the matrix; None if it is outside the blocks.
    layers: tuple[int, ...] | None = None
    #: Number of experts, each of which has its own copy.
    copies: int = 1
    #: Number of copies that a token uses.
    chosen: int = 1
    #: True if expert parallelism distributes the copies.
    routed: bool = False
    #: Pipeline stage of a matrix outside the blocks: `first` or `last`.
    where: str = "first"
    #: Inputs that the matrix multiplies: all tokens (`tokens`), only the last token if a single
    #: prediction is needed (`last`), or one vector per sequence (`sequence`).
    applies_to: str = "tokens"
    #: Number of tokens per sequence that the matrix does not multiply. For example, a patch
    #: embedding skips the class token.
    skips: int = 0
    #: Number of distinct matrices that the layers reuse cyclically; 0 if each layer has its own.
    shared: int = 0
    #: Number of key heads if `split` is `heads`; 0 for the number of the model.
    kv_heads: int = 0

    @property
    def count(self) -> int:
        """The number of layers with this matrix, or 1 outside the blocks."""
        return 1 if self.layers is None else len(self.layers)

    @property
    def stored_count(self) -> int:
        """The number of distinct matrices that the layers store."""
        return min(self.count, self.shared or self.count)

    @property
    def entries(self) -> int:
        """The number of entries in one copy in one layer."""
        return self.rows * self.columns

    @property
    def size(self) -> int:
        """The number of entries in all stored copies of all layers."""
        return self.stored_count * self.copies * self.entries

    def count_tensor_shards(self, tensor: int, kv_heads: int) -> int:
        """Return the number of shards if `tensor` devices store the matrix.

        It is less than `tensor` if several devices store copies. `kv_heads` is the number of key
        heads of the model.
        """
        if self.split == "none":
            return 1
        return min(tensor, self.kv_heads or kv_heads) if self.split == "heads" else tensor


@dataclass(frozen=True, kw_only=True)
class MLA:
    """Multi-head latent attention, which compresses keys and values into a latent (DeepSeek-V2)."""

    #: Width of the latent from which keys and values are computed.
    kv_rank: int
    #: Width of the rotary part of each query, and of the rotary key that all heads share.
    rope_head_dim: int
    #: Width of compressed queries; 0 if queries are not compressed.
    q_rank: int = 0
    #: Heads of the index that selects keys per query (DeepSeek-V3.2, DSA); 0 for dense attention.
    index_heads: int = 0
    index_head_dim: int = 0
    #: Number of selected keys per query.
    index_top: int = 0

    def __post_init__(self) -> None:
        checks.convert_fields(self, "mla.")
        index = (self.index_heads, self.index_head_dim, self.index_top)
        if any(index) and not (all(index) and self.q_rank):
            raise ValueError(
                "expected mla.index_heads, index_head_dim, index_top and q_rank together, got "
                f"{index} and q_rank={self.q_rank}"
            )


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """Queries and outputs of low rank, and one vector per token as key and value (DeepSeek-V4)."""

    #: Width of compressed queries.
    q_rank: int
    #: Number of groups of heads, each of which is projected to `out_rank` values. A second matrix
    #: projects the values of all groups to the width of the model.
    out_groups: int
    out_rank: int

    def __post_init__(self) -> None:
        checks.convert_fields(self, "low_rank.")


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """Entries that each compress several tokens, and to which later tokens attend (DeepSeek-V4)."""

    #: Number of tokens per entry.
    rate: int
    #: True if each entry also reads the tokens of the entry before it.
    overlaps: bool = False
    #: Heads of the index that selects entries per query; 0 if a query attends to all entries.
    index_heads: int = 0
    index_head_dim: int = 0
    #: Number of selected entries per query.
    index_top: int = 0

    def __post_init__(self) -> None:
        checks.convert_fields(self, "compressed.")
        index = (self.index_heads, self.index_head_dim, self.index_top)
        if any(index) and not all(index):
            raise ValueError(
                "expected compressed.index_heads, index_head_dim and index_top together, got "
                f"{index}"
            )


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts that replaces an MLP; `shared` is a width, not a number of experts."""

    count: int
    per_token: int
    #: Hidden width of one expert; the default is the model's `d_ff`.
    width: int = 0
    #: Total hidden width of the shared experts, which process every token.
    shared: int = 0
    #: True if a gate scales the output of the shared experts (Qwen2-MoE).
    shared_gate: bool = False
    router_bias: bool = False
    #: True if the experts have biases; the default is the model's `mlp_bias`.
    bias: bool | None = None
    #: Layers with experts; the default is all layers.
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        checks.convert_fields(self, "experts.")
        _require_some_layers("experts", self.layers)
        if self.per_token > self.count:
            raise ValueError(
                f"expected 1 <= experts.per_token <= experts.count={self.count}, "
                f"got {self.per_token}"
            )


@dataclass(frozen=True, kw_only=True)
class Window:
    """Sliding-window or chunked attention, in which a query attends to about `size` keys."""

    #: Number of keys that a query attends to, including its own token.
    size: int
    #: True if a query attends to the earlier keys in its chunk of `size` tokens (Llama 4) instead
    #: of the nearest `size` keys.
    chunked: bool = False
    #: Width of a head in these layers; 0 for the widths of the model.
    head_dim: int = 0
    #: Number of key and value heads in these layers; 0 for the number of the model.
    kv_heads: int = 0
    #: Layers with a window; the default is all layers.
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        checks.convert_fields(self, "window.")
        _require_some_layers("window", self.layers)


class AttentionGroup(NamedTuple):
    """Layers whose attention has the same mask and heads of the same sizes."""

    is_windowed: bool
    layers: tuple[int, ...]
    kv_heads: int
    qk_dim: int
    v_head_dim: int

    @property
    def suffix(self) -> str:
        """The suffix of the names of this group's parts in results."""
        return " in windows" if self.is_windowed else ""


#: Records that are fields of a `Transformer`, by the name of the field.
RECORDS: dict[str, Any] = {
    "mla": MLA,
    "low_rank": LowRank,
    "experts": Experts,
    "window": Window,
}


def _require_some_layers(record: str, layers: object) -> None:
    """Raise `ValueError` if a list of layers is empty; None means all layers."""
    if layers is not None and not checks.require_layers(f"{record}.layers", layers):
        raise ValueError(
            f"expected {record}.layers with at least one layer, got {layers!r}; "
            f"pass {record}=None for no layer"
        )


@dataclass(frozen=True, kw_only=True)
class Mixer:
    """A part of a layer that is neither attention nor an MLP, such as a recurrence.

    The size of its state does not depend on the length of the sequence. Only the entries of
    `compressed`, which attention reads, grow with the sequence.
    """

    name: str
    layers: tuple[int, ...]
    #: Matrices of one layer; their `layers` are the layers that contain them.
    matrices: tuple[Matrix, ...]
    #: Number of values in the state per sequence and layer.
    state: int
    #: Operations per token and layer outside the matrices, to write and read the state.
    scan: int
    #: Number of values per token and layer saved for the backward, in addition to the input; None
    #: if the saved tensors are not modeled.
    saved: int | None
    #: Entries that the matrices compute for the attention of these layers.
    compressed: Compressed | None = None
