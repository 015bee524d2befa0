"""What `flash_attention` would do with an input, and why, without doing it."""

from dataclasses import dataclass

from torch import Tensor

from flashattn2.dispatch import choose
from flashattn2.problem import Score, Window, check_dense, make_score
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
    is_causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    deterministic: bool = True,
    precision: str | None = None,
    backend: str = "auto",
) -> Explanation:
    """The choice that `flash_attention` makes for these arguments; raises what it would raise.

    It names each kernel's tile, and the precision of its float32 products where they are not the
    one asked for: a head dim too large for a tile of that precision runs in ieee.
    """
    check_dense(q, k, v)
    score = make_score(q.shape[-1], is_causal, scale, window, softcap)
    if q.dim() == 3:
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
    method, reason = choose(
        q, k, score, backend=backend, precision=precision, deterministic=deterministic
    )
    tiles: tuple[str, ...] = ()
    if method.backend == "torch":
        tiles = (f"forward and backward: tiles of {TILE} queries by {TILE} keys",)
    elif method.backend == "triton":
        from flashattn2.kernels.configs import has_atomic

        atomic = not deterministic and has_atomic(q.element_size())
        tiles = tuple(
            _describe(kernel, method.precision, score, q, k, v)
            for kernel in (("forward", "atomic") if atomic else ("forward", "dkdv", "dq"))
        )
    return Explanation(method.backend, reason, tiles)


def _describe(kernel: str, precision: str, score: Score, *tensors: Tensor) -> str:
    from flashattn2.kernels import launch

    plan = launch.plan(kernel, precision, score, *launch.rows_contiguous(*tensors), packed=False)
    tile = plan.tile
    products = ""
    if tensors[0].element_size() == 4:
        products = f", {plan.precision} products"
        if plan.precision != precision:
            products += f" since {precision} has no tile for this head dim"
    return (
        f"{kernel}: {tile.block_m} queries by {tile.block_n} keys by head dim {plan.block_d}, "
        f"{tile.num_warps} warps, {tile.num_stages} stages, {plan.splits} splits, "
        f"{'TMA descriptors' if plan.tma else 'pointers'}{products}"
    )
