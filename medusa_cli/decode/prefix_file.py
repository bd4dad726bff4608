"""The file of a part of a cached prefix: a header, token ids, the arrays of the rows, and a digest of all these."""

from __future__ import annotations

import math
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from io import BufferedReader
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from medusa_cli.files.io import replacing

MAGIC = b"MEDUSA-PREFIX-2\n"
# The magic bytes and the size of the header.
PREAMBLE = struct.Struct("<16sI")
MAX_HEADER = 1 << 16
MAX_TOKENS = 1 << 16
# The maximum size of an array in numbers. Dimensions of size 0 count as 1.
MAX_NUMBERS = 1 << 40
DIGEST = 32
# Arrays begin at multiples of this number of bytes.
ALIGNED = 64
TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8)
}
Kind = tuple[str, list[int]]  # the number type and the shape of an array


@dataclass(frozen=True)
class Rows:
    """Holds the rows of some tokens, and the running states after them."""

    tokens: int
    rows: list[Tensor]
    states: list[Tensor] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in [*self.rows, *self.states])


class Header(msgspec.Struct, forbid_unknown_fields=True):
    """Holds a file's header: the key of the text before the file's tokens, their number, and each array's kind."""

    parent: str
    tokens: int
    rows: list[Kind]
    states: list[Kind]

    @property
    def kinds(self) -> list[Kind]:
        return [*self.rows, *self.states]


def write(path: Path, parent: str, ids: Sequence[int], rows: Rows) -> None:
    """Writes the file of the tokens that follow the text with the key `parent`, completely or not at all."""
    header = msgspec.json.encode(
        Header(
            parent,
            len(ids),
            [_kind(array) for array in rows.rows],
            [_kind(array) for array in rows.states],
        )
    )
    tokens = np.array(ids, "<i4").tobytes()
    begin = PREAMBLE.pack(MAGIC, len(header)) + header + tokens
    digest = sha256()
    with replacing(path) as part, part.open("wb") as file:
        for data in _aligned(begin, [*rows.rows, *rows.states]):
            digest.update(data)
            file.write(data)
        file.write(digest.digest())


def _kind(array: Tensor) -> Kind:
    return str(array.dtype).removeprefix("torch."), list(array.shape)


def _aligned(begin: bytes, arrays: Sequence[Tensor]) -> Iterator[bytes | memoryview]:
    yield begin + bytes(-len(begin) % ALIGNED)
    for array in arrays:
        if array.numel():
            yield array.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            yield bytes(-array.nbytes % ALIGNED)


@contextmanager
def opened(path: Path, max_bytes: int) -> Iterator[BufferedReader]:
    """Opens a regular file of at most `max_bytes` for reading; raises OSError or ValueError for any other file."""
    # Reading a pipe might never end, and a link might lead anywhere.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
            raise ValueError(f"it is not a file of up to {max_bytes:,} bytes")
        with open(handle, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(handle)


def read_ids(file: BufferedReader) -> tuple[Header, tuple[int, ...]]:
    """Returns the header and the token ids at the beginning of a file; raises ValueError if they are damaged."""
    preamble = file.read(PREAMBLE.size)
    if len(preamble) < PREAMBLE.size:
        raise ValueError("it is cut off")
    magic, size = PREAMBLE.unpack(preamble)
    if magic != MAGIC or size > MAX_HEADER:
        raise ValueError("it is not a cached prefix")
    try:
        header = msgspec.json.decode(file.read(size), type=Header)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as reason:
        raise ValueError("its header is damaged") from reason
    if not 0 <= header.tokens <= MAX_TOKENS:
        raise ValueError(f"it has {header.tokens} tokens")
    data = file.read(4 * header.tokens)
    if len(data) < 4 * header.tokens:
        raise ValueError("it is cut off")
    return header, tuple(np.frombuffer(data, "<i4").tolist())


def read(path: Path, max_bytes: int) -> tuple[Header, tuple[int, ...], Rows]:
    """Returns a file's header, token ids and rows; raises OSError or ValueError for a damaged or cut-off file."""
    with opened(path, max_bytes) as file:
        header, ids = read_ids(file)
        begin = file.tell()
        file.seek(0)
        data = bytearray(os.fstat(file.fileno()).st_size)
        if file.readinto(data) < len(data):
            raise ValueError("it is cut off")
    end = len(data) - DIGEST
    sizes = [_size_of(kind) for kind in header.kinds]
    first = begin + -begin % ALIGNED
    if first + sum(size + -size % ALIGNED for size in sizes) != end:
        raise ValueError("its size is not that of its arrays")
    if sha256(memoryview(data)[:end]).digest() != data[end:]:
        raise ValueError("its digest differs")

    arrays = list[Tensor]()
    for (name, shape), size in zip(header.kinds, sizes, strict=True):
        array = torch.empty(shape, dtype=TYPES[name])
        if size:
            flat = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=first)
            array = flat.view(TYPES[name]).view(shape)
        if name in ("float32", "float16") and not np.isfinite(array.numpy()).all():
            raise ValueError("it has numbers that are not finite")
        arrays.append(array)
        first += size + -size % ALIGNED
    rows = len(header.rows)
    return header, ids, Rows(len(ids), arrays[:rows], arrays[rows:])


def _size_of(kind: Kind) -> int:
    """Returns the bytes of an array; raises ValueError for an unknown kind."""
    name, shape = kind
    # The strides of an empty array may overflow, too.
    widest = math.prod(max(1, each) for each in shape)
    if name not in TYPES or min(shape, default=0) < 0 or widest > MAX_NUMBERS or len(shape) > 8:
        raise ValueError(f"it has an array of the kind {name[:40]!r} {shape[:8]}")
    return math.prod(shape) * TYPES[name].itemsize
