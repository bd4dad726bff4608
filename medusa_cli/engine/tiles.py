"""Quantized matrices in the library's tiles, as tensors on any device, and the linear layers that hold them.

The bytes are those of the native engine (native/formats.h), so 4-bit weights stay 4-bit. On a GPU with Triton, a layer
rounds its inputs to 8 bits and adds in the native engine's order. Elsewhere it dequantizes some channels at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.model.backbone import Unsupported
from medusa_cli.native import Format, PackedMatrix
from medusa_cli.native.library import TILE, UNIT

# The number of channels that are dequantized at a time.
CHANNELS = 1024
# The numbers for which the codes of IQ4_NL and IQ4_XS stand.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FLOATS = {Format.F32: torch.float32, Format.F16: torch.float16, Format.BF16: torch.bfloat16}


@dataclass(frozen=True)
class Layout:
    """Tells how the tiles of a format hold their numbers.

    units: the number of units, of 32 inputs each, in a block. With several units, groups have 8-bit scales besides the
    block's scale. bits: how many lower bits a number has, 4 or 8. planes: how many upper bits it has, stored apart.
    group: how many inputs share a scale. zero: is subtracted from a number. offset: True if groups have offsets.
    signed: True if 8-bit scales are signed. codes: the values for which the numbers stand, if any.
    """

    units: int
    bits: int = 4
    planes: int = 0
    group: int = UNIT
    zero: int = 0
    offset: bool = False
    signed: bool = False
    codes: tuple[int, ...] = ()

    @property
    def groups(self) -> int:
        """Returns the number of groups in a unit."""
        return UNIT // self.group

    @property
    def places(self) -> tuple[int, int, int, int, int, int]:
        """Returns the starts of a block's upper bits, 8-bit scales, 8-bit offsets, scales and offsets, and its end."""
        upper = self.units * UNIT * TILE * self.bits // 8
        small = self.units * self.groups * TILE if self.units > 1 else 0
        scale = upper + self.units * 64 * self.planes
        mins = scale + small
        d = mins + small * self.offset
        return upper, scale, mins, d, d + 2 * TILE, d + 2 * TILE * (1 + self.offset)


LAYOUTS = {
    Format.Q4_0: Layout(1, zero=8),
    Format.Q4_1: Layout(1, offset=True),
    Format.Q5_0: Layout(1, planes=1, zero=16),
    Format.Q5_1: Layout(1, planes=1, offset=True),
    Format.Q8_0: Layout(1, bits=8, zero=128),
    Format.Q4_K: Layout(8, offset=True),
    Format.Q5_K: Layout(8, planes=1, offset=True),
    Format.Q6_K: Layout(8, planes=2, group=16, zero=32, signed=True),
    Format.Q3_K: Layout(8, group=16, zero=4, signed=True),
    Format.Q2_K: Layout(8, group=16, offset=True),
    Format.IQ4_NL: Layout(1, codes=IQ4),
    Format.IQ4_XS: Layout(8, signed=True, codes=IQ4),
}


class Tiles(nn.Module):
    """A quantized matrix [N, K] as bytes [tiles, blocks, bytes of a block]; a tile has 16 channels."""

    data: Tensor
    codes: Tensor | None

    def __init__(self, format: Format, shape: tuple[int, int], data: Tensor) -> None:
        super().__init__()
        self.format = format
        self.layout = LAYOUTS[format]
        self.shape = shape
        codes = None
        if self.layout.codes:
            codes = torch.tensor(self.layout.codes, dtype=torch.int32, device=data.device)
        self.register_buffer("data", data, persistent=False)
        self.register_buffer("codes", codes, persistent=False)

    @classmethod
    def of(cls, matrix: PackedMatrix, device: torch.device) -> "Tiles":
        """Returns a packed matrix on a device; raises Unsupported for a format without a layout."""
        layout = LAYOUTS.get(matrix.format)
        if layout is None:
            raise Unsupported(f"its weights in {matrix.format.name} run on a CPU only")
        outputs, inputs = matrix.shape
        shape = (-(-outputs // TILE), inputs // (UNIT * layout.units), layout.places[-1])
        return cls(matrix.format, matrix.shape, _bytes(matrix).view(shape).to(device))

    def decoded(self, data: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the integers [M, K], and the fp32 scales and offsets [M, groups], of the M channels of some tiles."""
        layout = self.layout
        upper, scale, mins, d, dmin, end = layout.places
        numbers = self._integers(data[..., :upper], layout.bits)
        if layout.planes:
            numbers += self._integers(data[..., upper:scale], layout.planes) << 4
        if self.codes is not None:
            numbers = self.codes[numbers]
        scales = _halves(data[..., d:dmin])
        offsets = _halves(data[..., dmin:end]) if layout.offset else None
        if layout.units > 1:
            small = data[..., scale:mins]
            scales = scales * self._small(small.view(torch.int8) if layout.signed else small)
            if offsets is not None:
                offsets = -(offsets * self._small(data[..., mins:d]))
        return (
            numbers - layout.zero,
            _by_channel(scales),
            None if offsets is None else _by_channel(offsets),
        )

    def _integers(self, data: Tensor, bits: int) -> Tensor:
        """Returns the integers [M, K] of `bits` bits; a unit has `bits` words of 32 bits for each channel."""
        words = data.contiguous().view(torch.int32).unflatten(-1, (self.layout.units, bits, TILE))
        number = torch.arange(UNIT // bits, device=data.device, dtype=torch.int32)
        shifts = number % 4 * 8 + number // 4 * bits
        # [T, B, units, words, 16, numbers of a word]
        numbers = (words[..., None] >> shifts) & ((1 << bits) - 1)
        return numbers.permute(0, 4, 1, 2, 3, 5).flatten(0, 1).flatten(1)

    def _small(self, data: Tensor) -> Tensor:
        """Returns the 8-bit scales or offsets [T, B, groups, 16] of blocks in fp32."""
        return data.unflatten(-1, (-1, TILE)).float()

    def floats(self, data: Tensor) -> Tensor:
        """Returns the channels of some tiles in fp32 [M, K]."""
        numbers, scales, offsets = self.decoded(data)
        values = numbers.unflatten(1, (-1, self.layout.group)) * scales[..., None]
        return (values if offsets is None else values + offsets[..., None]).flatten(1)

    def blocks(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yields the matrix as floats, CHANNELS channels at a time."""
        left = self.shape[0]
        for data in self.data.split(CHANNELS // TILE):
            yield self.floats(data)[:left].to(dtype)
            left -= CHANNELS

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the channels `ids` [M] as floats [M, K]."""
        parts = []
        for some in ids.split(CHANNELS // TILE):
            values = self.floats(self.data[some // TILE]).unflatten(0, (-1, TILE))
            parts.append(values[torch.arange(len(some), device=ids.device), some % TILE].to(dtype))
        return torch.cat(parts)


def _halves(data: Tensor) -> Tensor:
    """Returns fp16 numbers [T, B, 1, 16] in fp32."""
    return data.contiguous().view(torch.float16).float()[:, :, None]


def _by_channel(values: Tensor) -> Tensor:
    """Returns numbers [T, B, groups, 16] by channel, [T * 16, B * groups]."""
    return values.permute(0, 3, 1, 2).flatten(0, 1).flatten(1)


def _bytes(matrix: PackedMatrix) -> Tensor:
    # torch warns of memory that cannot be written, such as a mapped file's, so such memory is copied.
    return torch.from_numpy(np.require(matrix.tiles, requirements="W"))


def floats_of(matrix: PackedMatrix, dtype: torch.dtype) -> Tensor:
    """Returns a packed matrix [N, K] as floats in a number type, on the CPU."""
    outputs, inputs = matrix.shape
    if matrix.format in FLOATS:
        values = _bytes(matrix).view(FLOATS[matrix.format]).view(-1, inputs, TILE)
        return values.mT.flatten(0, 1)[:outputs].to(dtype)
    return torch.cat([*Tiles.of(matrix, torch.device("cpu")).blocks(dtype)])


class TileLinear(nn.Module):
    """A linear layer of one or several matrices in tiles, whose outputs are concatenated.

    multiply: a `tile_matmul`, which rounds rows to 8 bits; None dequantizes the tiles. bias [N]: in fp32.
    """

    bias: Tensor | None

    def __init__(
        self,
        parts: Sequence[Tiles],
        bias: Tensor | None = None,
        multiply: Callable[..., Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.parts: Any = nn.ModuleList(parts)
        self.multiply = multiply
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.multiply is not None:
            y = self.multiply(x.flatten(0, -2), self.parts, self.bias, x.dtype)
            return y.unflatten(0, x.shape[:-1])
        weights = (weight for part in self.parts for weight in part.blocks(x.dtype))
        y = torch.cat([F.linear(x, weight) for weight in weights], dim=-1)
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def rows(self, ids: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Returns the weight and the bias of the outputs `ids`, or of all outputs, for a layer of one matrix."""
        (tiles,) = self.parts
        if ids is None:
            return torch.cat([*tiles.blocks(dtype)]), self.bias
        return tiles.rows(ids, dtype), None if self.bias is None else self.bias[ids]

    @classmethod
    def joined(cls, linears: Sequence["TileLinear"]) -> "TileLinear":
        """Returns one layer for layers that read the same rows; neighboring matrices of one format are joined."""
        parts: list[Tiles] = []
        for tiles in (tiles for linear in linears for tiles in linear.parts):
            last = parts[-1] if parts else None
            if last is not None and last.format == tiles.format and last.shape[0] % TILE == 0:
                shape = (last.shape[0] + tiles.shape[0], tiles.shape[1])
                tiles = Tiles(tiles.format, shape, torch.cat([parts.pop().data, tiles.data]))
            parts.append(tiles)
        bias = None
        if any(linear.bias is not None for linear in linears):
            bias = torch.cat([linear.bias_or_zeros() for linear in linears])
        return cls(parts, bias, linears[0].multiply)

    def bias_or_zeros(self) -> Tensor:
        if self.bias is not None:
            return self.bias
        count = sum(tiles.shape[0] for tiles in self.parts)
        return torch.zeros(count, device=self.parts[0].data.device)
