"""Differences of weights in fewer bytes: 8 or 4 bits an element, or the largest elements alone.

Notable:
- absmax scaling in blocks, rounded to the nearest; then Huffman coding (zlib), because the rounded
  values of a block are far from evenly spread: about three bits an element are left of four;
- what rounding takes away is not lost: whoever encodes keeps it and adds it to what it sends next
  (error feedback; Seide et al., "1-Bit Stochastic Gradient Descent", 2014).
"""

import math
import zlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_BLOCK = 1024  # elements that share a scale: 32 bits more for 1024 elements


class Compression(Protocol):
    """A way to write float32 elements in fewer bytes."""

    def encode(self, values: Tensor) -> Tensor:
        """Flat float32 -> bytes."""

    def decode(self, data: Tensor, numel: int) -> Tensor:
        """The bytes that `encode` made of `numel` elements -> flat float32, nearly the same."""


@dataclass(frozen=True)
class Integers:
    """Elements as whole multiples of a scale a block, in 8 or 4 bits before they are coded."""

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"{self.bits} bits an element; give 4 or 8")

    def encode(self, values: Tensor) -> Tensor:
        """Scales, then whole numbers."""
        largest = 2 ** (self.bits - 1) - 1
        blocks = torch.nn.functional.pad(values, (0, -len(values) % _BLOCK)).view(-1, _BLOCK)
        # [blocks]; below the smallest normal number a scale would itself be badly rounded.
        scales = (blocks.abs().amax(1) / largest).clamp_min(torch.finfo(torch.float32).tiny)
        whole = (blocks / scales[:, None]).round().clamp(-largest, largest).to(torch.int8).view(-1)
        if self.bits == 4:
            whole = ((whole[0::2] + 8) << 4) | (whole[1::2] + 8)
        whole = whole[: -(-len(values) * self.bits // 8)]  # without the padding
        coder = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
        packed = coder.compress(whole.numpy().tobytes()) + coder.flush()
        return _bytes(scales.numpy().tobytes() + packed)

    def decode(self, data: Tensor, numel: int) -> Tensor:
        """See encode."""
        raw, blocks = data.numpy().tobytes(), -(-numel // _BLOCK)
        scales = _bytes(raw[: 4 * blocks]).view(torch.float32)
        # No more than what a shard may have: garbage cannot fill the memory.
        size = -(-numel * self.bits // 8)
        try:
            packed = zlib.decompressobj(-15).decompress(raw[4 * blocks :], size + 1)
        except zlib.error as error:
            raise ValueError(f"what came is not {numel} compressed elements: {error}") from error
        if len(packed) != size or len(raw) < 4 * blocks:
            raise ValueError(f"{len(packed)} bytes where {numel} elements take {size}")
        whole = _bytes(packed + bytes(blocks * _BLOCK * self.bits // 8 - size)).view(torch.int8)
        if self.bits == 4:
            whole = torch.stack([((whole >> 4) & 15) - 8, (whole & 15) - 8], 1)
        return (whole.view(-1, _BLOCK) * scales[:, None]).view(-1)[:numel]


@dataclass(frozen=True)
class TopK:
    """The `share` of the elements that are largest, as they are; the others are zero."""

    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 0.25:
            raise ValueError(f"a share of {self.share}; give more than 0 and at most 0.25")

    def encode(self, values: Tensor) -> Tensor:
        """Places, then values."""
        places = values.abs().topk(math.ceil(self.share * len(values))).indices.sort().values
        return _bytes(places.int().numpy().tobytes() + values[places].numpy().tobytes())

    def decode(self, data: Tensor, numel: int) -> Tensor:
        """See encode."""
        raw, values = data.numpy().tobytes(), torch.zeros(numel)
        half = 4 * math.ceil(self.share * numel)
        if len(raw) != 2 * half:
            raise ValueError(f"{len(raw)} bytes where {numel} elements take {2 * half}")
        places = _bytes(raw[:half]).view(torch.int32).long()
        if half and not 0 <= int(places.min()) <= int(places.max()) < numel:
            raise ValueError(f"a place in what came is not one of {numel} elements")
        values[places] = _bytes(raw[half:]).view(torch.float32)
        return values


def _bytes(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0).byte()
