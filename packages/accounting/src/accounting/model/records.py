"""The small records that a model is described with: what is in a matrix, a latent, an expert."""

from dataclasses import dataclass

from accounting import checks


@dataclass(frozen=True)
class Matrix:
    """One kind of parameter: how large it is, who holds how much of it, which tokens meet it.

    Parameters, FLOPs, shards, activations and low-rank updates are all derived from these records;
    `part` and `name` are for reading alone.
    """

    part: str
    name: str
    rows: int
    """Inputs; 1 for a vector."""
    columns: int
    """Outputs."""
    split: str = "none"
    """What tensor parallelism cuts: `columns`, `rows`, `heads` (of keys and values, which are
    copied where there are fewer than devices), or `none`: every device has all of it."""
    kind: str = "matrix"
    """A `matrix` multiplies every token that meets it; a `table` is looked up; a `vector` is added
    or scales."""
    layers: tuple[int, ...] | None = None
    """Which layers have one; None: it stands outside the blocks."""
    copies: int = 1
    """Experts, each with one of its own."""
    chosen: int = 1
    """Of those, how many a token meets."""
    routed: bool = False
    """The copies are dealt out by expert parallelism."""
    where: str = "first"
    """Outside the blocks: on the `first` or the `last` pipeline stage."""
    meets: str = "tokens"
    """What a matrix multiplies: all `tokens`; the `last` one alone where only that is asked for; a
    `sequence` once; or the tokens of the `source` that cross-attention looks at."""

    skips: int = 0
    """Tokens of a sequence that do not meet it: a class token is no patch."""

    @property
    def times(self) -> int:
        """Layers that have one, or 1."""
        return 1 if self.layers is None else len(self.layers)

    @property
    def one(self) -> int:
        """Entries of one copy in one layer."""
        return self.rows * self.columns

    @property
    def size(self) -> int:
        """Entries in all."""
        return self.times * self.copies * self.one

    def tensor_ranks(self, tensor: int, kv_heads: int) -> int:
        """Return over how many of `tensor` devices this is cut; the others have copies."""
        if self.split == "none":
            return 1
        return min(tensor, kv_heads) if self.split == "heads" else tensor


@checks.named
@dataclass(frozen=True, kw_only=True)
class MLA:
    """Multi-head latent attention: keys and values live in a latent (DeepSeek-V2)."""

    kv_rank: int
    """Width of the latent that stands for keys and values."""
    rope_head_dim: int
    """The part of a query, and of the one shared key, that carries the position."""
    q_rank: int = 0
    """Width that queries are compressed to; 0: they are not."""
    index_heads: int = 0
    """Small heads that choose the keys of a query (DeepSeek-V3.2, DSA); 0: it sees all of them."""
    index_head_dim: int = 0
    index_top: int = 0
    """Keys that are chosen."""

    def __post_init__(self) -> None:
        checks.fields(MLA, vars(self), "mla.")
        index = (self.index_heads, self.index_head_dim, self.index_top)
        if any(index) and not (all(index) and self.q_rank):
            raise ValueError(
                f"mla.index_heads, index_head_dim and index_top are {index} with q_rank="
                f"{self.q_rank}; an index needs all four"
            )


@checks.named
@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the MLP."""

    count: int
    per_token: int
    width: int = 0
    """Width of one expert; the model's `d_ff` if not given."""
    shared: int = 0
    """Width of the expert that every token visits: all shared experts together."""
    shared_gate: bool = False
    """A gate in front of the shared expert (Qwen2-MoE)."""
    router_bias: bool = False
    bias: bool | None = None
    """Biases inside the experts; as the model's `mlp_bias` if not given."""
    beside_mlp: bool = False
    """The layers keep their dense MLP as well (Arctic, HRM)."""
    layers: tuple[int, ...] | None = None
    """Which layers hold experts: all if not given."""

    def __post_init__(self) -> None:
        checks.fields(Experts, vars(self), "experts.")
        _some_layers("experts", self.layers)
        if self.per_token > self.count:
            raise ValueError(
                f"experts.per_token is {self.per_token}; it must lie between 1 and "
                f"experts.count={self.count}"
            )


@checks.named
@dataclass(frozen=True, kw_only=True)
class Window:
    """Attention to the nearest tokens only."""

    size: int
    """Keys that a token sees, itself among them."""
    layers: tuple[int, ...] | None = None
    """Which layers are windowed: all if not given."""

    def __post_init__(self) -> None:
        checks.fields(Window, vars(self), "window.")
        _some_layers("window", self.layers)


def _some_layers(record: str, layers: object) -> None:
    """All of them (None), or at least one."""
    if layers is not None and not checks.layers(f"{record}.layers", layers):
        raise ValueError(f"{record}.layers is {layers!r}; give {record}=None for none at all")


@dataclass(frozen=True, kw_only=True)
class Mixer:
    """What mixes tokens in some layers by a recurrence: a state of one size, however long the
    sequence."""

    name: str
    layers: tuple[int, ...]
    matrices: tuple[Matrix, ...]
    """Of one layer; `layers` above says how many of each there are."""
    state: int
    """Numbers that decoding keeps for a sequence, in one layer."""
    scan: int
    """Operations a token outside the matrices, in one layer: writing the state and reading it."""
    kept: int
    """Numbers a token that the forward keeps for the backward, beside the input."""
