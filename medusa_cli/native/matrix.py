"""Matrices for the native library: raw, as a file stores them, and packed in tiles."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from ctypes import pointer
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medusa_cli.native.library import TILE, UNIT, Matrix, check, cpu_count, library, require
from medusa_cli.native.pages import Bytes, aligned

Floats = NDArray[np.float32]

# The largest scale of MXFP4 with which all numbers are finite in fp32.
LARGEST_SCALE = 252


class Format(IntEnum):
    """Lists the number types of weights. Quantized types have the same names as in ggml."""

    F32 = 0
    F16 = 1
    BF16 = 2
    Q4_0 = 3
    Q4_1 = 4
    Q5_0 = 5
    Q5_1 = 6
    Q8_0 = 7
    Q4_K = 8
    Q5_K = 9
    Q6_K = 10
    Q3_K = 11
    Q2_K = 12
    MXFP4 = 13
    IQ4_NL = 14
    IQ4_XS = 15

    @property
    def is_float(self) -> bool:
        return self <= Format.BF16

    @property
    def block(self) -> int:
        """Returns the number of inputs in a block."""
        return int(library().block(int(self)))

    @property
    def file_bytes(self) -> int:
        """Returns the size of a block in a file, in bytes."""
        return int(library().file_bytes(int(self)))

    def row_bytes(self, inputs: int) -> int:
        """Returns the size of a row in a file, in bytes."""
        return inputs // self.block * self.file_bytes

    def fits(self, inputs: int) -> bool:
        """Returns True if a row of `inputs` inputs is a whole number of blocks."""
        return inputs % self.block == 0


# The byte positions of the fp16 scales in a block of a file.
SCALE_PLACES = {
    Format.Q4_0: (0,),
    Format.Q4_1: (0, 2),
    Format.Q5_0: (0,),
    Format.Q5_1: (0, 2),
    Format.Q8_0: (0,),
    Format.Q4_K: (0, 2),
    Format.Q5_K: (0, 2),
    Format.Q6_K: (208,),
    Format.Q3_K: (108,),
    Format.Q2_K: (80, 82),
    Format.IQ4_NL: (0,),
    Format.IQ4_XS: (0,),
}


@dataclass(frozen=True)
class RawMatrix:
    """Holds a matrix [n, k] as a file stores it: bytes [n, row bytes] in a format."""

    format: Format
    rows: Bytes
    inputs: int

    def __post_init__(self) -> None:
        whole = self.format.fits(self.inputs)
        require(
            whole and self.rows.shape[1] == self.format.row_bytes(self.inputs),
            f"rows of {self.rows.shape[1]:,} bytes do not hold {self.inputs:,} inputs",
        )

    @classmethod
    def of(cls, values: NDArray[Any]) -> "RawMatrix":
        """Returns a matrix of floats, which may be fp32, fp16, or bf16 stored as uint16."""
        kinds = {"float32": Format.F32, "float16": Format.F16, "uint16": Format.BF16}
        values = np.ascontiguousarray(values)
        return cls(
            kinds[values.dtype.name],
            values.view(np.uint8).reshape(len(values), -1),
            values.shape[1],
        )

    def floats(self) -> Floats:
        """Returns the exact values [n, k] in fp32."""
        if self.format == Format.F32:
            return self.rows.view(np.float32)
        if self.format == Format.F16:
            return self.rows.view(np.float16).astype(np.float32)
        if self.format == Format.BF16:
            return (self.rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        from gguf import GGMLQuantizationType, dequantize

        kind = GGMLQuantizationType[self.format.name]
        values = np.empty((len(self.rows), self.inputs), np.float32)

        def dequantize_part(first: int, end: int) -> None:
            values[first:end] = dequantize(self.rows[first:end], kind)

        in_parts(len(values), dequantize_part)
        return values

    @property
    def is_finite(self) -> bool:
        """Returns False if a scale of a quantized matrix is not finite; matrices of floats are not checked.

        Outputs may not show such a scale: rounding rows to 8 bits may make a number finite that is not.
        """
        if self.format.is_float:
            return True
        blocks = self.rows.reshape(-1, self.format.file_bytes)
        if self.format == Format.MXFP4:
            return bool(blocks[:, 0].max() <= LARGEST_SCALE)
        places = SCALE_PLACES[self.format]
        # In fp16, all exponent bits of a number that is not finite are 1.
        return all((blocks[:, place + 1] & 0x7C).max() < 0x7C for place in places)

    def transposed(self, count: int) -> "RawMatrix":
        """Returns the rows as `count` consecutive matrices of floats, each of them transposed."""
        size = self.format.row_bytes(1)
        values = self.rows.view(f"u{size}").reshape(count, -1, self.inputs)
        turned = np.ascontiguousarray(values.transpose(0, 2, 1))
        rows = turned.view(np.uint8).reshape(count * self.inputs, -1)
        return RawMatrix(self.format, rows, turned.shape[2])

    def rounded(self, format: Format) -> "RawMatrix":
        """Returns the matrix rounded to Q8_0 or Q4_1; inputs are padded with zeros to whole groups."""
        inputs = -(-self.inputs // UNIT) * UNIT
        values = self.floats()
        if inputs > self.inputs:
            values = np.pad(values, ((0, 0), (0, inputs - self.inputs)))
        rows = np.empty((len(values), format.row_bytes(inputs)), np.uint8)

        def round_part(first: int, end: int) -> None:
            part = rows[first:end]
            code = library().round(
                int(format), values[first:].ctypes.data, len(part), inputs, part.ctypes.data
            )
            require(code == 0, f"rows cannot be rounded to {format.name}")

        in_parts(len(values), round_part)
        return RawMatrix(format, rows, inputs)

    def reordered(self, order: NDArray[np.int64]) -> "RawMatrix":
        return replace(self, rows=self.rows[order])


class PackedMatrix:
    """Holds a matrix [n, k] in tiles and an optional bias [n], and owns the memory of both.

    int8_rows: the rows that a quantized matrix is multiplied with are rounded to 8 bits. Raises
    ValueError if the tiles or the bias do not fit the shape.
    """

    def __init__(
        self,
        format: Format,
        shape: tuple[int, int],
        tiles: Bytes,
        bias: Floats | None = None,
        int8_rows: bool = False,
    ) -> None:
        self.format = format
        self.shape = shape
        self.tiles = tiles
        self.bias = None if bias is None else padded_floats(bias)
        outputs, inputs = shape
        whole = outputs > 0 and inputs > 0 and format.fits(inputs)
        if not whole or tiles.nbytes != library().tiled_bytes(int(format), outputs, inputs):
            raise ValueError(
                f"tiles of {tiles.nbytes:,} bytes are not a matrix {shape} in {format.name}"
            )
        if bias is not None and len(bias) < outputs:
            raise ValueError(f"a bias of {len(bias):,} numbers is too short for a matrix {shape}")
        address = None if self.bias is None else self.bias.ctypes.data
        int8 = int8_rows and not format.is_float
        self.struct = Matrix(int(format), int8, *shape, tiles.ctypes.data, address)
        self.pointer = pointer(self.struct)

    @classmethod
    def pack(
        cls, raw: RawMatrix, bias: Floats | None = None, int8_rows: bool = False
    ) -> "PackedMatrix":
        shape = len(raw.rows), raw.inputs
        return cls(raw.format, shape, pack_tiles(raw), bias, int8_rows)

    @property
    def nbytes(self) -> int:
        return self.tiles.nbytes

    def multiply(self, x: Floats) -> Floats:
        """Returns x [rows, K] times the transposed matrix, plus the bias: [rows, n]."""
        rows, given = x.shape
        y = np.empty((rows, -(-self.shape[0] // TILE) * TILE), np.float32)
        fits = x.dtype == np.float32 and x.flags.c_contiguous and given <= self.shape[1]
        require(fits, f"rows {x.shape} do not fit a matrix {self.shape}")
        code = library().multiply(
            self.struct, x.ctypes.data, rows, given, y.ctypes.data, y.shape[1]
        )
        check(code, f"rows {x.shape} do not fit a matrix {self.shape}")
        return y[:, : self.shape[0]]

    def embed(self, ids: NDArray[np.int64], scale: float = 1.0, width: int | None = None) -> Floats:
        """Returns the rows [count, width] of the matrix for ids, times a scale. A width of None is the matrix's own.

        Raises IndexError if the matrix has no row for an id.
        """
        out = np.empty((len(ids), width or self.shape[1]), np.float32)
        ids = np.ascontiguousarray(ids, np.int64)
        code = library().embed(
            self.struct, ids.ctypes.data, len(ids), scale, out.ctypes.data, out.shape[1]
        )
        check(code, f"an id is not below {self.shape[0]}", IndexError)
        return out


# Consecutive parts [n, k] of a matrix's channels, each with a bias [n] or None.
Parts = Iterable[tuple[Floats, Floats | None]]


def drafting_matrix(parts: Parts) -> PackedMatrix:
    """Returns a drafter's matrix [n, k] with 4-bit weights, for rows that are rounded to 8 bits.

    Drafts need not be exact. With 8-bit weights, a level's matrices would not stay in the CPU's cache.
    """
    rounded, biases = [], []
    for values, bias in parts:
        rounded.append(RawMatrix.of(values).rounded(Format.Q4_1))
        if bias is not None:
            biases.append(bias)
    raw = replace(rounded[0], rows=np.concatenate([part.rows for part in rounded]))
    return PackedMatrix.pack(raw, np.concatenate(biases) if biases else None, int8_rows=True)


def pack_tiles(raw: RawMatrix) -> Bytes:
    """Returns a matrix's tiles."""
    outputs = len(raw.rows)
    tiles = aligned(library().tiled_bytes(int(raw.format), outputs, raw.inputs))
    rows = np.ascontiguousarray(raw.rows)

    def pack_part(first: int, end: int) -> None:
        library().pack(int(raw.format), rows.ctypes.data, raw.inputs, first, end, tiles.ctypes.data)

    in_parts(outputs, pack_part)
    return tiles


def in_parts(count: int, work: Callable[[int, int], None]) -> None:
    """Calls work(first, end) in threads for consecutive parts of 0 .. count - 1. Each part begins at a new tile."""
    size = max(TILE, -(-count // (4 * cpu_count()) // TILE) * TILE)
    parts = [(first, min(count, first + size)) for first in range(0, count, size)]
    if len(parts) == 1:
        work(*parts[0])
        return
    with ThreadPoolExecutor(cpu_count()) as pool:
        list(pool.map(lambda part: work(*part), parts))


def padded_floats(values: NDArray[Any]) -> Floats:
    """Returns numbers [n] in fp32, padded with zeros to the next multiple of 32."""
    out = np.zeros(-(-len(values) // UNIT) * UNIT, np.float32)
    out[: len(values)] = values
    return out
