"""The Triton kernels that multiply by tiles. In plain torch, `plain_kernels.tile_matmul` does the same.

Integer products are exact, and fp32 sums are added in the native engine's order, so the results have the bits of
native/matmul.h. The size of a program, which is smaller for few rows than for many, does not change the bits.
"""

# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa_cli.engine import plain_kernels
from medusa_cli.engine.tiles import Tiles
from medusa_cli.native.library import UNIT

# The number of rows of a program if a pass has few or many rows, its number of warps, and its number of channels.
FEW, MANY = 16, 64
WARPS = {FEW: 2, MANY: 4}
COLUMNS = 32
# The numbers of units that one iteration may process, and the number of groups of a row that one program rounds.
STEPS = (4, 2, 1)
GROUPS = 64
LEAST_SIZE = tl.constexpr(plain_kernels.LEAST_SIZE)
# 1.5 * 2^23: adding it rounds a float to the nearest integer.
SHIFT = tl.constexpr(12582912.0)
# Multiplications and additions are fused only where the native engine fuses them.
UNFUSED = {"enable_fp_fusion": False}


@triton.jit
def round_rows_kernel(x, numbers, scales, sums, K: tl.constexpr, BLOCK: tl.constexpr):
    """Rounds some groups of 32 inputs of one row to 8 bits, as `round_row` does in native/matmul.h."""
    r = tl.program_id(0)
    g = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    half = tl.arange(0, 2)
    inside = g < K // 32
    place = r * K + 32 * g[:, None] + tl.arange(0, 32)[None, :]
    value = tl.load(x + place, mask=inside[:, None], other=0.0).to(tl.float32)
    size = tl.max(tl.abs(value), 1)
    is_zero = size < LEAST_SIZE
    size = tl.where(is_zero, 1.0, size)
    inverse = tl.where(is_zero, 0.0, tl.div_rn(127.0, size))
    scale = tl.where(is_zero, 0.0, tl.div_rn(size, 127.0))
    number = (value * inverse[:, None] + SHIFT) - SHIFT
    tl.store(numbers + place, number.to(tl.int8), mask=inside[:, None])
    tl.store(scales + r * (K // 32) + g, scale, mask=inside)
    total = tl.sum(tl.reshape(number, (BLOCK, 2, 16)), 2)
    place = r * (K // 16) + 2 * g[:, None] + half[None, :]
    tl.store(sums + place, total, mask=inside[:, None])


def round_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows [R, K] as 8-bit numbers [R, K], scales [R, K / 32], and sums of numbers [R, K / 16] in fp32."""
    rows, depth = x.shape
    numbers = torch.empty(rows, depth, dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, depth // UNIT, dtype=torch.float32, device=x.device)
    sums = torch.empty(rows, depth // 16, dtype=torch.float32, device=x.device)
    grid = (rows, triton.cdiv(depth // UNIT, GROUPS))
    round_rows_kernel[grid](x.contiguous(), numbers, scales, sums, depth, GROUPS, **UNFUSED)
    return numbers, scales, sums


@triton.jit
def unpacked(place, BITS: tl.constexpr):
    """Returns a unit's integers of BITS bits [32, channels]; each channel has BITS words, from `place` on."""
    word = tl.arange(0, BITS)
    number = tl.arange(0, 32 // BITS)
    packed = tl.load(place[None, :] + 16 * word[:, None])
    shift = number % 4 * 8 + number // 4 * BITS
    numbers = (packed[:, None, :] >> shift[None, :, None]) & ((1 << BITS) - 1)
    return tl.reshape(numbers, (32, place.shape[0]))


@triton.jit(do_not_specialize=["rows"])
def tile_matmul_kernel(
    numbers,
    scales,
    sums,
    words,
    small,
    halves,
    codes,
    bias,
    out,
    rows,
    WIDE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    UNITS: tl.constexpr,
    BITS: tl.constexpr,
    PLANES: tl.constexpr,
    GROUPS: tl.constexpr,
    ZERO: tl.constexpr,
    UPPER: tl.constexpr,
    SCALE: tl.constexpr,
    MINS: tl.constexpr,
    D: tl.constexpr,
    DMIN: tl.constexpr,
    END: tl.constexpr,
    STEP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Computes some rows times some channels of a matrix in tiles; see `Layout` for the tiles' sizes and places."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, 32)
    inside = m < rows
    # Channels beyond the last one compute the same as the last one, and are not stored.
    channel = tl.minimum(n, N - 1)
    tile = (channel // 16).to(tl.int64) * (K // 32 // UNITS * END)
    channel = channel % 16
    words += tile // 4 + channel
    small += tile + channel
    halves += tile // 2 + channel
    numbers += m[:, None] * K + k[None, :]
    scales += m * (K // 32)
    sums += m * (K // 16)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K // 32, STEP):
        for step in tl.static_range(STEP):
            unit = start + step
            block = unit // UNITS * END
            u = unit % UNITS
            q = unpacked(words + (block // 4 + u * (16 * BITS)), BITS)
            if PLANES > 0:
                place = words + ((block + UPPER) // 4 + u * (16 * PLANES))
                q = q | (unpacked(place, PLANES) << 4)
            if codes is not None:
                q = tl.load(codes + q)
            else:
                q = q - ZERO
            q = q.to(tl.int8)
            x = tl.load(numbers + unit * 32, mask=inside[:, None], other=0)
            size = tl.load(scales + unit, mask=inside, other=0.0)
            d = tl.load(halves + (block + D) // 2).to(tl.float32)
            if END > DMIN:
                dmin = tl.load(halves + (block + DMIN) // 2).to(tl.float32)
            for g in tl.static_range(GROUPS):
                scale = d
                group = (u * GROUPS + g) * 16
                if UNITS > 1:
                    scale = d * tl.load(small + (block + SCALE + group)).to(tl.float32)
                if GROUPS == 1:
                    product = tl.dot(x, q, out_dtype=tl.int32)
                else:
                    part = tl.where(k[:, None] // 16 == g, q, 0).to(tl.int8)
                    product = tl.dot(x, part, out_dtype=tl.int32)
                factor = scale[None, :] * size[:, None]
                total = tl.fma(product.to(tl.float32), factor, total)
                if END > DMIN:
                    offset = dmin
                    if UNITS > 1:
                        offset = -(dmin * tl.load(small + (block + MINS + group)).to(tl.float32))
                    whole = tl.load(sums + (unit * 2 + g), mask=inside, other=0.0)
                    if GROUPS == 1:
                        whole += tl.load(sums + (unit * 2 + 1), mask=inside, other=0.0)
                    total = tl.fma(offset[None, :], (size * whole)[:, None], total)
    if bias is not None:
        total += tl.load(bias + tl.minimum(n, N - 1))[None, :]
    place = m[:, None] * WIDE + n[None, :]
    total = total.to(out.dtype.element_ty)
    tl.store(out + place, total, mask=inside[:, None] & (n < N)[None, :])


def tile_matmul(
    x: Tensor,
    parts: Sequence[Tiles],
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns rows [R, K], rounded to 8 bits, times the transposed matrices, plus a bias in fp32 [N], as [R, N]."""
    rows, depth = x.shape
    rounded = round_rows(x)
    wide = sum(tiles.shape[0] for tiles in parts)
    out = torch.empty(rows, wide, dtype=dtype, device=x.device)
    high = FEW if rows <= FEW else MANY
    first = 0
    for tiles in parts:
        layout = tiles.layout
        count = tiles.shape[0]
        units = depth // UNIT
        tile_matmul_kernel[(triton.cdiv(rows, high), triton.cdiv(count, COLUMNS))](
            *rounded,
            tiles.data.view(torch.int32),
            tiles.data.view(torch.int8) if layout.signed else tiles.data,
            tiles.data.view(torch.float16),
            tiles.codes,
            None if bias is None else bias[first:],
            out[:, first:],
            rows,
            wide,
            count,
            depth,
            layout.units,
            layout.bits,
            layout.planes,
            layout.groups,
            layout.zero,
            *layout.places,
            next(step for step in STEPS if units % step == 0),
            high,
            COLUMNS,
            num_warps=WARPS[high],
            **UNFUSED,
        )
        first += count
    return out
