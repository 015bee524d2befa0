"""What `flash_attention` would do with an input, and why, without doing it."""

from dataclasses import dataclass

from torch import Tensor

from flashattn2.autocast import lowered
from flashattn2.dispatch import Method, choose
from flashattn2.problem import Score, Window, check_dense, check_sinks, check_varlen, make_score
from flashattn2.tiled import TILE


@dataclass(frozen=True)
class Explanation:
    """The backend, the reason for it, and the tiles of each kernel that would run."""

    backend: str
    reason: str
    tiles: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join((f"{self.backend}: {self.reason}", *(f"  {t}" for t in self.tiles)))


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_max_logits: bool = False,
    deterministic: bool = True,
    precision: str | None = None,
    split_size: int | None = None,
    backend: str = "auto",
) -> Explanation:
    """The choice that `flash_attention` makes for these arguments; raises what it would raise.

    With ``cu_seqlens_q`` and ``cu_seqlens_k``, that of `flash_attention_varlen`.
    It names each kernel's tile, and the precision of its float32 products where they are not the
    one asked for: a head dim too large for a tile of that precision runs in ieee.
    """
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    if packed:
        check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k)  # type: ignore[arg-type]
    else:
        check_dense(q, k, v)
    q, k, v = lowered(q, k, v)
    check_sinks(sinks, 1 if q.dim() == 3 and not packed else q.shape[1], q)
    score = make_score(q.shape[-1], is_causal, scale, window, softcap)
    if packed:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    elif q.dim() == 3:
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
    method, reason = choose(
        q, k, v, score, backend=backend, precision=precision, deterministic=deterministic,
        packed=packed, split_size=split_size, max_logits=return_max_logits,
    )  # fmt: skip
    tiles: tuple[str, ...] = ()
    if method.backend == "torch":
        tiles = (f"forward and backward: tiles of {TILE} queries by {TILE} keys",)
    elif method.backend == "gluon":
        from flashattn2.gluon import backward, forward

        dim = q.shape[-1]
        tiles = (forward.describe(dim), *backward.describe(dim, deterministic))
    elif method.backend == "triton":
        from flashattn2.kernels.configs import has_atomic

        atomic = not deterministic and has_atomic(q.element_size())
        tiles = tuple(
            _describe(kernel, method, score, packed, q, k, v)
            for kernel in (("forward", "atomic") if atomic else ("forward", "dkdv", "dq"))
        )
    return Explanation(method.backend, reason, tiles)


def _describe(kernel: str, method: Method, score: Score, packed: bool, *tensors: Tensor) -> str:
    from flashattn2.kernels import launch

    precision = method.precision
    plan = launch.plan(
        kernel, precision, score, *launch.rows_contiguous(*tensors),
        packed=packed, split_size=method.split_size,
    )  # fmt: skip
    tile = plan.tile
    products = ""
    if tensors[0].element_size() == 4:
        products = f", {plan.precision} products"
        if plan.precision != precision:
            products += f" since {precision} has no tile for this head dim on this GPU"
    return (
        f"{kernel}: {tile.block_m} queries by {tile.block_n} keys by head dim {plan.block_d}, "
        f"{tile.num_warps} warps, {tile.num_stages} stages, {plan.splits} splits, "
        f"{'TMA descriptors' if plan.tma else 'pointers'}{products}"
    )
