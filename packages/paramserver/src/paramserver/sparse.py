"""Gradients of embeddings in the bytes of the rows that they touch.

Notable: a shard's piece may begin and end in the middle of a row, since shards are cut where equal
bytes fall: of a row, what lies in the piece is sent.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from paramserver.partition import Piece, Shard


def pack(shard: Shard, gradients: Mapping[str, Tensor | None], buffer: Tensor) -> int:
    """Write gradients of which some are sparse; the bytes, or 0 where dense ones take no more.

    First how many rows each piece has, -1 for all; then, piece by piece, row numbers and elements.
    """
    if not any(gradient is not None and gradient.is_sparse for gradient in gradients.values()):
        return 0
    counts, parts = [], []
    for piece in shard.pieces:
        gradient = gradients[piece.name]
        if gradient is None:
            counts.append(0)
        elif gradient.is_sparse and gradient.sparse_dim() == 1:
            gradient = gradient.coalesce()
            rows, elements = gradient.indices()[0].cpu(), gradient.values().cpu()
            inside = _elements(piece, rows)[1]  # [rows, width]
            counts.append(int(inside.any(1).sum()))
            parts += [rows[inside.any(1)], elements.reshape(inside.shape)[inside]]
        else:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            counts.append(-1)
            parts.append(dense.reshape(-1)[piece.start : piece.stop].cpu())
    raw = torch.cat([p.contiguous().view(torch.uint8) for p in (torch.tensor(counts), *parts)])
    if len(raw) >= len(buffer):
        return 0
    buffer[: len(raw)] = raw
    return len(raw)


def unpack(shard: Shard, data: Tensor) -> list[Tensor]:
    """What `pack` wrote: a gradient a piece, dense or sparse. ValueError for anything else."""
    at = 0

    def take(numel: int, dtype: torch.dtype) -> Tensor:
        nonlocal at
        start, at = at, at + numel * dtype.itemsize
        if at > len(data):
            raise ValueError(f"{len(data)} bytes came where sparse gradients take more")
        return data[start:at].clone().view(dtype)  # aligned, whatever came before

    counts = take(len(shard.pieces), torch.int64).tolist()
    gradients = []
    for piece, count in zip(shard.pieces, counts, strict=True):
        if count < 0:
            gradients.append(take(piece.stop - piece.start, piece.dtype).view(piece.viewed))
            continue
        rows = take(count, torch.int64)
        increasing = bool((rows.diff() > 0).all())
        if count and not (increasing and rows[0] >= 0 and rows[-1] < piece.shape[0]):
            raise ValueError(f"rows of {piece.name} that came are not {count} of {piece.shape[0]}")
        places, inside = _elements(piece, rows)
        elements = take(int(inside.sum()), piece.dtype)
        if piece.viewed == piece.shape:
            places, elements = rows, elements.view(count, *piece.shape[1:])
        else:
            places = places[inside] - piece.start
        gradients.append(_coalesced(places, elements, piece))
    if at != len(data):
        raise ValueError(f"{len(data)} bytes came where sparse gradients take {at}")
    return gradients


def taken_by(optimizer: torch.optim.Optimizer | None, gradient: Tensor, piece: Piece) -> Tensor:
    """A gradient as the optimizer takes it; one of embeddings may come sparse, or as dense."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        return gradient if gradient.is_sparse else _of_rows(gradient, piece)
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else [None]
    # All others move rows that nobody touched too, and would not if the gradient stayed sparse.
    plain = not any(g is None or g["momentum"] or g["weight_decay"] for g in groups)
    return gradient.to_dense() if gradient.is_sparse and not plain else gradient


def _of_rows(gradient: Tensor, piece: Piece) -> Tensor:
    if piece.viewed == piece.shape:
        return gradient.to_sparse(1)
    rows = torch.arange(piece.start, piece.stop) // torch.Size(piece.shape[1:]).numel()
    (places,) = torch.isin(rows, rows[gradient != 0]).nonzero(as_tuple=True)
    return _coalesced(places, gradient[places], piece)


def _coalesced(places: Tensor, values: Tensor, piece: Piece) -> Tensor:
    return torch.sparse_coo_tensor(
        places[None], values, piece.viewed, is_coalesced=True, check_invariants=False
    )


def _elements(piece: Piece, rows: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, width]: where the elements of rows lie in the flattened parameter; if in the piece."""
    width = torch.Size(piece.shape[1:]).numel()
    places = rows[:, None] * width + torch.arange(width)
    return places, (places >= piece.start) & (places < piece.stop)
