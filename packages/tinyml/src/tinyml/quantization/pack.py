"""Packing of n integers of b bits, 1 <= b <= 8, into at most b n / 8 + 3 bytes.

A width that divides 8 is packed by shifts. Any other width is a sum of such widths (3 = 2 + 1), and
each of them is packed as a separate plane. Only the last byte of a plane may have unused bits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of any shape, with values from 0 to 2^bits - 1, into a flat uint8 tensor."""
    if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < 2**bits:
        raise ValueError(
            f"expected codes from 0 to {2**bits - 1} for {bits} bits, got {int(codes.min())} to "
            f"{int(codes.max())}; subtract the lowest code first"
        )
    flat = codes.reshape(-1).to(torch.uint8)
    parts: list[Tensor] = []
    shift = 0
    for width in _list_planes(bits):
        per_byte = 8 // width
        plane = (flat >> shift) & (2**width - 1)
        plane = torch.nn.functional.pad(plane, (0, -plane.numel() % per_byte)).view(-1, per_byte)
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=plane.device)
        parts.append((plane << shifts).sum(1, dtype=torch.uint8))
        shift += width
    return torch.cat(parts)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the `count` codes, flat uint8, from which `pack` produced `packed`."""
    codes = torch.zeros(count, dtype=torch.uint8, device=packed.device)
    start = shift = 0
    for width in _list_planes(bits):
        end = start + -(-count * width // 8)
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
        plane = (packed[start:end, None] >> shifts) & (2**width - 1)
        codes |= plane.reshape(-1)[:count] << shift
        start, shift = end, shift + width
    return codes


def _list_planes(bits: int) -> list[int]:
    """Return the widths in bits of the planes, which divide 8 and sum to `bits`."""
    if not 1 <= bits <= 8:
        raise ValueError(f"expected 1 to 8 bits per code, got {bits}")
    return [width for width in (8, 4, 2, 1) if bits & width]
