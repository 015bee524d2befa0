"""Encoding of sparse gradients, such as those of embeddings, by rows.

A piece of a shard may start and end in the middle of a row, because shards have equal bytes. The
elements of a row that are in the piece are sent.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from paramserver.partition import Piece, Shard


def pack(shard: Shard, gradients: Mapping[str, Tensor | None], buffer: Tensor) -> int | None:
    """Write gradients into `buffer`, some of which are sparse, and return the number of bytes.

    The data starts with the number of rows of each piece, -1 for a dense piece. The row numbers and
    elements of each piece follow. Return None and write nothing if no gradient is sparse, or if
    the encoding would take at least as many bytes as dense gradients.
    """
    if not any(gradient is not None and gradient.is_sparse for gradient in gradients.values()):
        return None
    counts: list[int] = []
    parts: list[Tensor] = []
    for piece in shard.pieces:
        gradient = gradients[piece.name]
        if gradient is None:
            counts.append(0)
        elif gradient.is_sparse and gradient.sparse_dim() == 1:
            gradient = gradient.coalesce()
            rows = gradient.indices()[0].cpu()
            elements = _as_stored(gradient.values(), piece)
            _, inside = _elements(piece, rows)  # (rows, width)
            counts.append(int(inside.any(1).sum()))
            parts += [rows[inside.any(1)], elements.reshape(inside.shape)[inside]]
        else:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            counts.append(-1)
            parts.append(_as_stored(dense.reshape(-1)[piece.start : piece.stop], piece))
    raw = torch.cat([p.contiguous().view(torch.uint8) for p in (torch.tensor(counts), *parts)])
    if len(raw) >= len(buffer):
        return None
    buffer[: len(raw)] = raw
    return len(raw)


def _as_stored(values: Tensor, piece: Piece) -> Tensor:
    """Return values in the element type of the piece, in host memory.

    The memory of a lazy conjugate does not contain its values.
    """
    return values.to("cpu", piece.dtype).resolve_conj().resolve_neg()


def unpack(shard: Shard, data: Tensor) -> list[Tensor]:
    """Return the gradient of each piece, dense or sparse, from the data that `pack` wrote.

    Raises:
        ValueError: `pack` cannot have written the data.
    """
    position = 0

    def take(numel: int, dtype: torch.dtype) -> Tensor:
        nonlocal position
        start = position
        position += numel * dtype.itemsize
        if position > len(data):
            raise ValueError(
                f"expected more than the {len(data)} bytes of sparse gradients received"
            )
        # A copy is aligned to its element type, which a slice of the data may not be.
        return data[start:position].clone().view(dtype)

    counts = take(len(shard.pieces), torch.int64).tolist()
    gradients = []
    for piece, count in zip(shard.pieces, counts, strict=True):
        if count < 0:
            gradients.append(take(piece.stop - piece.start, piece.dtype).view(piece.view_shape))
            continue
        rows = take(count, torch.int64)
        increasing = bool((rows.diff() > 0).all())
        if count and not (increasing and rows[0] >= 0 and rows[-1] < piece.shape[0]):
            raise ValueError(
                f"expected {count} increasing row numbers of {piece.name} in "
                f"[0, {piece.shape[0]}), received others"
            )
        indices, inside = _elements(piece, rows)
        elements = take(int(inside.sum()), piece.dtype)
        if piece.view_shape == piece.shape:
            indices = rows
            elements = elements.view(count, *piece.shape[1:])
        else:
            indices = indices[inside] - piece.start
        gradients.append(_coalesced(indices, elements, piece))
    if position != len(data):
        raise ValueError(f"expected {position} bytes of sparse gradients, received {len(data)}")
    return gradients


def convert_for(optimizer: torch.optim.Optimizer | None, gradient: Tensor, piece: Piece) -> Tensor:
    """Return the gradient in the layout, sparse or dense, with which `optimizer` is correct.

    `SparseAdam` needs sparse gradients. Plain SGD gives the same result with both. Momentum, weight
    decay and other optimizers also change rows without a gradient, so they need dense gradients, as
    torch's fused SGD does.
    """
    if isinstance(optimizer, torch.optim.SparseAdam):
        return gradient if gradient.is_sparse else _to_sparse(gradient, piece)
    if not gradient.is_sparse:
        return gradient
    is_plain_sgd = isinstance(optimizer, torch.optim.SGD) and not any(
        group["momentum"] or group["weight_decay"] or group.get("fused")
        for group in optimizer.param_groups
    )
    return gradient if is_plain_sgd else gradient.to_dense()


def _to_sparse(gradient: Tensor, piece: Piece) -> Tensor:
    """Return a dense gradient with the rows that contain a nonzero element."""
    if piece.view_shape == piece.shape:
        return gradient.to_sparse(1)
    rows = torch.arange(piece.start, piece.stop) // torch.Size(piece.shape[1:]).numel()
    (indices,) = torch.isin(rows, rows[gradient != 0]).nonzero(as_tuple=True)
    return _coalesced(indices, gradient[indices], piece)


def _coalesced(indices: Tensor, values: Tensor, piece: Piece) -> Tensor:
    # torch 2.11 warns about the argument check_invariants, but not about this context.
    with torch.sparse.check_sparse_tensor_invariants(False):
        return torch.sparse_coo_tensor(indices[None], values, piece.view_shape, is_coalesced=True)


def _elements(piece: Piece, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the flat indices of the elements of `rows`, and whether each is in the piece.

    Both have shape (rows, width); indices count from the start of the flattened parameter.
    """
    width = torch.Size(piece.shape[1:]).numel()
    indices = rows[:, None] * width + torch.arange(width)
    return indices, (indices >= piece.start) & (indices < piece.stop)
