"""Compression of parameter changes to 8 or 4 bits per element.

Each block of elements is scaled so that its largest magnitude becomes the largest signed integer of
`bits` bits. Elements are rounded to the nearest integer and Huffman coded with zlib. The integers
are far from uniformly distributed, so 4 bits become about 3 bits per element.

Rounding errors are carried over: the sender adds the residual to the next change that it encodes
(error feedback; Seide et al., "1-Bit Stochastic Gradient Descent", 2014).
"""

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

#: Number of elements that share a scale; a scale takes 32 bits.
_BLOCK = 1024


@dataclass(frozen=True)
class Integers:
    """Compression of each element to an integer multiple of its block's scale.

    Args:
        bits: bits per element before Huffman coding, 8 or 4; other values raise `ValueError`.
    """

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"expected 4 or 8 bits per element, got {self.bits}")

    def encode(self, values: Tensor) -> Tensor:
        """Encode a float32 vector as bytes: the scales of all blocks, then the coded integers.

        Raises:
            ValueError: `values` is not a vector of float32 elements, is empty, or has an element
                that is not finite.
        """
        if values.dim() != 1 or not len(values) or values.dtype != torch.float32:
            raise ValueError(
                f"expected a vector of float32 elements, got shape {tuple(values.shape)} of "
                f"{values.dtype}; pass values.flatten().float()"
            )
        largest = 2 ** (self.bits - 1) - 1
        blocks = torch.nn.functional.pad(values, (0, -len(values) % _BLOCK)).view(-1, _BLOCK)
        # Shape (blocks,). A subnormal scale would have too few bits.
        scales = (blocks.abs().amax(1) / largest).clamp_min(torch.finfo(torch.float32).tiny)
        if not scales.isfinite().all():
            raise ValueError(
                f"expected finite values, got {int((~values.isfinite()).sum())} of {len(values)} "
                "elements that are not finite; lower the learning rate"
            )
        rounded = (blocks / scales[:, None]).round().clamp(-largest, largest)
        integers = rounded.to(torch.int8).view(-1)
        if self.bits == 4:
            integers = ((integers[0::2] + 8) << 4) | (integers[1::2] + 8)
        integers = integers[: -(-len(values) * self.bits // 8)]  # without the padding
        coder = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
        packed = coder.compress(integers.numpy().tobytes()) + coder.flush()
        return _to_tensor(scales.numpy().tobytes() + packed)

    def decode(self, data: Tensor, numel: int) -> Tensor:
        """Return the `numel` float32 values that `data` encodes, up to the rounding error.

        Raises:
            ValueError: `encode` cannot have returned `data` for `numel` values.
        """
        raw = data.numpy().tobytes()
        blocks = -(-numel // _BLOCK)
        if len(raw) < 4 * blocks:
            raise ValueError(f"expected {blocks} scales of 4 bytes, got {len(raw)} bytes")
        scales = _to_tensor(raw[: 4 * blocks]).view(torch.float32)
        # Limit the decompressed size, so that invalid data cannot fill the memory.
        size = -(-numel * self.bits // 8)
        decoder = zlib.decompressobj(-15)
        try:
            packed = decoder.decompress(raw[4 * blocks :], size + 1)
        except zlib.error as error:
            raise ValueError(f"expected {numel} compressed elements: {error}") from error
        if len(packed) != size or not decoder.eof or decoder.unused_data:
            raise ValueError(
                f"expected a stream of {size} bytes for {numel} elements, got {len(packed)} bytes "
                "of a stream that is too long or incomplete, or has data after its end"
            )
        padding = bytes(blocks * _BLOCK * self.bits // 8 - size)
        integers = _to_tensor(packed + padding).view(torch.int8)
        if self.bits == 4:
            integers = torch.stack([((integers >> 4) & 15) - 8, (integers & 15) - 8], 1)
        return (integers.view(-1, _BLOCK) * scales[:, None]).view(-1)[:numel]


def _to_tensor(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
