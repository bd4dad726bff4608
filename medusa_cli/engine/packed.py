"""Packed weights: a model's matrices in the library's tiles, made once and kept in a file."""

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medusa_cli.device import free_memory
from medusa_cli.engine.description import Description
from medusa_cli.engine.experts import Part
from medusa_cli.engine.packed_cache import (
    forget,
    forget_outdated,
    is_checked,
    note_checked,
    packed_path,
    source_of,
)
from medusa_cli.engine.shapes import Shapes, padded
from medusa_cli.files.io import replacing
from medusa_cli.files.model_source import ModelSource
from medusa_cli.files.paths import home
from medusa_cli.model.backbone import LazyNetwork, Unsupported
from medusa_cli.model.digest import weights_of
from medusa_cli.model.weights import Weights, open_weights
from medusa_cli.native import Format, PackedMatrix, RawMatrix
from medusa_cli.native.library import UNIT, cpu_count
from medusa_cli.native.matrix import Floats, padded_floats
from medusa_cli.native.pages import HAS_HUGE_PAGES, Bytes, aligned

# The version of the file format. Changes of the code that packs change the files' names instead.
VERSION = 2
# Every part of a file begins at a multiple of this many bytes.
ALIGNMENT = 64
# The number of bytes of a digest, and of a file's head, which holds a position and a digest.
DIGEST = 16
HEAD = 8 + DIGEST
# Weights are read into memory, in pieces of PIECE bytes, if this multiple of their size is free.
READING_ROOM = 1.5
PIECE = 32 << 20
log = logging.getLogger(__name__)


class MissingWeights(Unsupported):
    """Says which weight of transformers' network is missing from a model's files."""


@dataclass
class Packed:
    """Packed matrices and fp32 vectors by name.

    path, memory: the file that holds them, if any, and its bytes. digest: the digest, from `weights_of`, of the
    model that they were made from.
    """

    matrices: dict[str, PackedMatrix] = field(default_factory=dict)
    vectors: dict[str, Floats] = field(default_factory=dict)
    path: Path | None = None
    memory: Any = None
    digest: str | None = None

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self.matrices.values())

    @property
    def is_quantized(self) -> bool:
        """Returns True if some matrix is not in a float format."""
        return any(not matrix.format.is_float for matrix in self.matrices.values())


def pack_once(
    model: ModelSource,
    description: Description,
    lazy: LazyNetwork,
    quantize: str | None,
    int8_rows: bool,
) -> Packed:
    """Returns the packed weights of a model's files from the cache; the first call writes them there.

    If the cache cannot be written, the weights are packed in memory.
    """
    path = packed_path(model, description, quantize)
    packed = read_kept(model.name, lambda: read_packed(path, description, int8_rows))
    if packed is not None:
        return packed

    weights = open_weights(model, lazy.network)
    shapes_of(description, weights).check()
    try:
        log.info("packing the weights of %s, once", model.name)
        matrices = _matrices(description, weights, quantize, int8_rows)
        vectors = _vectors(description, weights)
        keep_packed(path, matrices, vectors, source_of(model), weights_of(model))
        return read_packed(path, description, int8_rows)
    except OSError as reason:
        log.warning("packed weights cannot be kept in %s: %s", path.parent, reason.strerror)
        return pack_in_memory(description, weights, quantize, int8_rows)


def read_kept(name: str, read: Callable[[], Packed]) -> Packed | None:
    """Returns the packed weights that `read` reads; None if there is no file, or if it is damaged.

    name: the model or the drafter, for the warning.
    """
    try:
        return read()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as reason:
        log.warning("the packed weights of %s are damaged (%s); packing them again", name, reason)
        return None


def shapes_of(description: Description, weights: Weights) -> Shapes:
    """Returns the shapes that a model's packed weights will have, without reading weights; raises MissingWeights."""
    matrices = {}
    for name in description.matrix_names:
        part = description.parts.get(name) or Part(f"{name}.weight", f"{name}.bias")
        # The files of some models hold the part as a weight of its own.
        own = name if part.every is not None and name in weights else _stored(part.weight, weights)
        shape, is_float = weights.shape(own)
        *outputs, inputs = shape
        count = math.prod(outputs)
        if own != name and part.transposed and is_float:
            count, inputs = part.transposed * inputs, count // part.transposed
        if own != name:
            rows = part.rows(count)
            count = len(range(count)[rows]) if isinstance(rows, slice) else int(rows.sum())
        matrices[name] = (count, inputs)
    parts = 2 if description.flags["centered"] else 1
    vectors = {}
    for names, times, suffix in (
        (description.norm_names, parts, ".weight"),
        (description.vector_names, 1, ""),
    ):
        for name in names:
            shape, _ = weights.shape(_stored(f"{name}{suffix}", weights))
            vectors[name] = times * padded(math.prod(shape), UNIT)
    return Shapes(description, matrices, vectors)


def pack_in_memory(
    description: Description, weights: Weights, quantize: str | None, int8_rows: bool
) -> Packed:
    """Packs a model's weights; raises MissingWeights if its files lack a weight."""
    return Packed(
        dict(_matrices(description, weights, quantize, int8_rows)),
        dict(_vectors(description, weights)),
    )


def keep_packed(
    path: Path,
    matrices: Iterable[tuple[str, PackedMatrix]],
    vectors: Iterable[tuple[str, Floats]],
    source: str,
    digest: str | None = None,
) -> None:
    """Writes packed weights to the cache, and removes the files that they replace.

    matrices: is iterated once, so one matrix is in memory at a time. source, digest: the place of
    the weights, and a model's digest. The file begins with the position and the digest of its JSON.
    The JSON lists the position and the digest of each part.
    """
    entries: list[dict[str, Any]] = []
    with replacing(path) as part, part.open("wb") as file:
        file.truncate(HEAD)
        end = HEAD
        for name, matrix in matrices:
            entry: dict[str, Any] = {"name": name, "shape": matrix.shape}
            entry["format"] = matrix.format.name
            if matrix.bias is not None:
                entry["vector"] = _write(file, end, matrix.bias.view(np.uint8))
                end = sum(entry["vector"][:2])
            entry["tiles"] = _write(file, end, matrix.tiles)
            end = sum(entry["tiles"][:2])
            entries.append(entry)
        for name, vector in vectors:
            place = _write(file, end, vector.view(np.uint8))
            end = sum(place[:2])
            entries.append({"name": name, "vector": place})
        table = {"version": VERSION, "source": source, "digest": digest, "entries": entries}
        text = np.frombuffer(json.dumps(table).encode(), np.uint8)
        start, _, own = _write(file, end, text)
        file.seek(0)
        file.write(start.to_bytes(8, "little") + bytes.fromhex(own))
    note_checked(path)
    forget_outdated(path, packed_files())


def bytes_of(path: Path) -> Bytes:
    """Returns the bytes of a file: read into huge pages if there is enough free memory, else mapped."""
    size = path.stat().st_size
    if not HAS_HUGE_PAGES or free_memory(torch.device("cpu")) < READING_ROOM * size:
        return np.memmap(path, np.uint8, "r")
    memory = aligned(size)

    def read(start: int) -> int:
        with path.open("rb") as file:
            file.seek(start)
            return file.readinto(memory[start : start + PIECE].data)

    with ThreadPoolExecutor(cpu_count()) as pool:
        if sum(pool.map(read, range(0, size, PIECE))) != size:
            raise ValueError("it is cut off")
    return memory


def _write(file: Any, end: int, data: Bytes) -> tuple[int, int, str]:
    """Writes bytes at the first aligned position from `end` on; returns the bytes' position, number and digest."""
    start = padded(end, ALIGNMENT)
    file.seek(start)
    file.write(data)
    return start, data.nbytes, _digest(data)


def _digest(data: Bytes) -> str:
    return blake2b(data.data, digest_size=DIGEST).hexdigest()


def read_packed(path: Path, description: Description, int8_rows: bool) -> Packed:
    """Reads a model's packed weights; raises ValueError if the file is damaged or does not hold this model."""
    packed = read_parts(path, lambda name: int8_rows and name not in description.routers)
    vectors = {*description.norm_names, *description.vector_names}
    same_matrices = set(packed.matrices) == set(description.matrix_names)
    if not same_matrices or set(packed.vectors) != vectors:
        raise ValueError("it holds another model")
    return packed


def read_parts(path: Path, has_int8_rows: Callable[[str], bool]) -> Packed:
    """Reads packed weights; raises ValueError if the file is damaged.

    has_int8_rows: takes a matrix's name; returns True if the matrix's activations are rounded. The
    digests of the file's parts are checked once after each change of the file and each boot.
    """
    memory = bytes_of(path)
    data = _table(memory)
    if not is_checked(path):
        _check_digests(memory, data)
        note_checked(path)

    packed = Packed(memory=memory, digest=data["digest"], path=path)
    for entry in data["entries"]:
        name = entry["name"]
        vector = _part(memory, entry["vector"]).view(np.float32) if "vector" in entry else None
        if "tiles" in entry:
            format = Format[entry["format"]]
            shape = tuple(entry["shape"])
            tiles = _part(memory, entry["tiles"])
            int8 = has_int8_rows(name)
            packed.matrices[name] = PackedMatrix(format, shape, tiles, vector, int8)
        elif vector is not None:
            packed.vectors[name] = vector
    return packed


def _table(memory: Bytes) -> dict[str, Any]:
    """Returns the list of a packed file's parts; raises ValueError if the list is damaged or of another version."""
    start = int.from_bytes(memory[:8].tobytes(), "little")
    if not HEAD <= start < memory.nbytes:
        raise ValueError("it is cut off")
    text = memory[start:]
    if _digest(text) != memory[8:HEAD].tobytes().hex():
        raise ValueError("its list of parts is damaged")
    table: dict[str, Any] = json.loads(text.tobytes())
    if table["version"] != VERSION:
        raise ValueError("it is of another version")
    return table


def _check_digests(memory: Bytes, table: dict[str, Any]) -> None:
    """Raises ValueError if a part of a packed file has changed since it was written."""
    places = [
        entry[key] for entry in table["entries"] for key in ("tiles", "vector") if key in entry
    ]

    def is_whole(place: list[Any]) -> bool:
        return _digest(_part(memory, place)) == place[2]

    with ThreadPoolExecutor(cpu_count()) as pool:
        if not all(pool.map(is_whole, places)):
            raise ValueError("its bytes have changed")


def check_packed(path: Path) -> None:
    """Raises ValueError or OSError if the packed weights in a file are damaged; the next start packs them again."""
    memory = np.memmap(path, np.uint8, "r")
    try:
        _check_digests(memory, _table(memory))
    except ValueError:
        forget(path)
        raise


def packed_files() -> Iterator[tuple[Path, str | None]]:
    """Yields each file of packed weights with the place of its model's weights, None for damaged or outdated files."""
    for path in (home() / "packed").glob("*.bin"):
        try:
            yield path, _table(np.memmap(path, np.uint8, "r"))["source"]
        except (OSError, ValueError):
            yield path, None


def _part(memory: Any, place: list[Any]) -> Bytes:
    """Returns a part of a mapped file, given its position and size; raises ValueError if it lies outside the file."""
    start, size, _ = place
    if start < 0 or size < 0 or start % ALIGNMENT or start + size > memory.nbytes:
        raise ValueError("it is cut off")
    part: Bytes = memory[start : start + size]
    return part


def _matrices(
    description: Description, weights: Weights, quantize: str | None, int8_rows: bool
) -> Iterator[tuple[str, PackedMatrix]]:
    """Yields the name and the packed matrix of every matrix of a model; raises MissingWeights if one is missing."""
    for name in description.matrix_names:
        part = description.parts.get(name) or Part(f"{name}.weight", f"{name}.bias")
        raw, bias = _part_of(name, part, weights)
        weights.check(name, raw)
        is_head = name == description.head
        is_exact = name in description.routers
        if quantize is not None and not is_exact and name not in description.looked_up:
            raw = raw.rounded(_rounded_format(quantize, is_head))
        yield name, PackedMatrix.pack(raw, bias, int8_rows and not is_exact)
        weights.release()


def _part_of(name: str, part: Part, weights: Weights) -> tuple[RawMatrix, Floats | None]:
    """Returns the matrix and the bias of a part; raises MissingWeights if the files lack the weight.

    name: the matrix's name in the description.
    """
    if part.every is not None and (stacked := weights.experts(name)) is not None:
        if not part.bias:
            return stacked, None
        return stacked, weights.vector(_stored(f"{name}_bias", weights))
    raw = weights.matrix(_stored(part.weight, weights))
    # The blocks of quantized weights lie along the inputs, so only floats are stored transposed.
    if part.transposed and raw.format.is_float:
        if len(raw.rows) % part.transposed:
            raise Unsupported(f"its {part.weight} has another size")
        raw = raw.transposed(part.transposed)
    count = len(raw.rows)
    rows = part.rows(count)
    if part.bias not in weights:
        return replace(raw, rows=raw.rows[rows]), None
    bias = weights.vector(part.bias)
    if len(bias) != count:
        raise Unsupported(f"its {part.bias} has another size")
    return replace(raw, rows=raw.rows[rows]), bias[rows]


def _vectors(description: Description, weights: Weights) -> Iterator[tuple[str, Floats]]:
    """Yields the name and padded values of every vector of a model; raises MissingWeights if one is missing.

    The vector of a norm is its gain, followed by its bias if norms are centered.
    """
    for name in description.norm_names:
        gain = weights.vector(_stored(f"{name}.weight", weights))
        vector = padded_floats(1 + gain if description.one_more else gain)
        if description.flags["centered"]:
            bias = f"{name}.bias"
            values = weights.vector(bias) if bias in weights else np.zeros_like(gain)
            vector = np.concatenate([vector, padded_floats(values)])
        yield name, vector
    for name in description.vector_names:
        values = weights.vector(_stored(name, weights))
        if name in description.convolutions:  # [channels, kernel]; the library reads the transpose
            values = values.reshape(-1, description.sizes["kernel"]).T.ravel()
        yield name, padded_floats(values)


def _stored(name: str, weights: Weights) -> str:
    """Returns the name of a weight; raises MissingWeights if the files lack it."""
    if name not in weights:
        raise MissingWeights(f"its files have no {name}")
    return name


def _rounded_format(quantize: str, is_head: bool) -> Format:
    """Returns the format of rounded weights.

    The lm_head is never rounded to 4 bits, because this changed the default model ten times as much as
    4 bits in all other matrices.
    """
    return Format.Q4_1 if quantize == "int4" and not is_head else Format.Q8_0
