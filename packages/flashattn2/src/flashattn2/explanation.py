"""What `flash_attention` would do with an input, and why, without doing it."""

from dataclasses import dataclass

from torch import Tensor

from flashattn2.dispatch import choose
from flashattn2.problem import Window, check_dense, make_score
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
    """The choice that `flash_attention` makes for these arguments; raises what it would raise."""
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

        block_d = 1 << (q.shape[-1] - 1).bit_length()
        atomic = not deterministic and has_atomic(q.element_size(), block_d)
        tiles = tuple(
            _describe(kernel, method.precision, q, k, v)
            for kernel in (("forward", "atomic") if atomic else ("forward", "dkdv", "dq"))
        )
    return Explanation(method.backend, reason, tiles)


def _describe(kernel: str, precision: str, *tensors: Tensor) -> str:
    from flashattn2.kernels import launch

    plan = launch.plan(kernel, precision, *launch.rows_contiguous(*tensors), packed=False)
    tile = plan.tile
    return (
        f"{kernel}: {tile.block_m} queries by {tile.block_n} keys by head dim {plan.block_d}, "
        f"{tile.num_warps} warps, {tile.num_stages} stages, {plan.splits} splits, "
        f"{'TMA descriptors' if plan.tma else 'pointers'}"
    )
