"""The header of a GGUF file, read within bounds: its metadata, and the positions of its tensors.

A large model may be split into several files, as llama-gguf-split does. The first file then stands for the model.
"""

import math
import mmap
import re
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from medusa_cli.errors import UserError, shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Bounds of a header's numbers, without which a reader would trust any number. The bounds are several times larger
# than the numbers of any model.
ENTRIES = 1 << 16  # number of metadata entries, and number of tensors
ELEMENTS = 1 << 21  # of all arrays together: a vocabulary's tokens, scores, types and merges
STRING = 1 << 24  # bytes of a text
SIZES = {"block_count": 1024, "context_length": 1 << 30}
DIMENSIONS = 4
# Formats of `struct` for the types of metadata, by the type's number; the other two types are texts and arrays.
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
# The end of a file's name if a model is split into several files.
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
# Types of weights in files from 2024, by number. llama.cpp no longer reads them: it repacks other types at loading.
REPACKED = {
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
ELSEWHERE = "give the folder or the hub id of the model that it was made from"


@dataclass(frozen=True)
class Tensor:
    """Describes a tensor: ggml's name of its type, its shape, and where its bytes begin and end in its file.

    file: the index of the file, if the model is split into several.
    """

    type: str
    shape: tuple[int, ...]
    start: int
    end: int
    file: int = 0


@dataclass
class Header:
    """Holds the metadata and the tensors by name. Arrays are replaced by their lengths, unless arrays were requested.

    files: the files that hold the tensors.
    """

    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    files: tuple[Path, ...] = ()

    @property
    def numbers(self) -> int:
        """Returns the total number of values in all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def types(self) -> set[str]:
        return {tensor.type for tensor in self.tensors.values()}

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def dtype(self) -> str:
        """Returns the name of the torch type for the weights, which is bfloat16 for quantized weights."""
        if self.types <= {"F16", "F32"}:
            return "float16" if "F16" in self.types else "float32"
        return "bfloat16"


def is_gguf(path: Path) -> bool:
    """Returns True if a file exists and begins like a GGUF file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def is_first(name: str) -> bool:
    """Returns True for the name of the first of the files into which a model is split."""
    part = PART.search(name)
    return part is not None and int(part[1]) == 1


def file_names(name: str) -> list[str]:
    """Returns the names of all files of a split model, given the first file's name; other names are returned alone."""
    if not is_first(name):
        return [name]
    stem, _, count, _ = PART.split(name)
    return [f"{stem}-{number:05}-of-{count}.gguf" for number in range(1, int(count) + 1)]


def read_header(path: Path, arrays: bool = False) -> Header:
    """Reads a GGUF file's header; raises UserError for a damaged header, before it allocates the claimed sizes.

    Given the first of several files, the header also holds the tensors of the other files. Raises UserError if another
    of these files is given, and if one is missing or belongs to another model. arrays: also read the arrays in the
    metadata, such as a vocabulary's tokens.
    """
    header = _read_file(path, arrays)
    if header.metadata.get("split.count", 1) not in (0, 1):
        _add_others(header, path)
    return header


def _add_others(header: Header, path: Path) -> None:
    """Adds the tensors of a split model's other files to the header of the first file."""
    count = header.metadata["split.count"]
    files = [path.with_name(name) for name in file_names(path.name)]
    if header.metadata.get("split.no") != 0 or len(files) != count:
        raise UserError(
            f"@model {str(path)!r} is one of the {shown(count)} files of a model, and not the first by its name",
            f"give the file that ends in -00001-of-{shown(count):0>5}.gguf, with the others next to it",
        )
    for number, file in enumerate(files[1:], 1):
        if not file.is_file():
            fault = (
                f"@model {str(path)!r} is the first of {count} files, and {file.name} is missing"
            )
            raise UserError(fault, "get the others, too")
        other = _read_file(file, arrays=False)
        place = other.metadata.get("split.no"), other.metadata.get("split.count")
        if place != (number, count) or other.tensors.keys() & header.tensors.keys():
            fault = f"@model {str(path)!r}: {file.name} belongs to another model"
            raise UserError(fault, "get the files again")
        for name, tensor in other.tensors.items():
            header.tensors[name] = replace(tensor, file=number)
    wanted = header.metadata.get("split.tensors.count", len(header.tensors))
    if wanted != len(header.tensors):
        fault = f"@model {str(path)!r}: its {count} files hold {len(header.tensors)} of {shown(wanted)} tensors"
        raise UserError(fault, "get the files again")
    header.files = tuple(files)


def _read_file(path: Path, arrays: bool) -> Header:
    """Reads the header of one file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _Reader(data, arrays).header()
    except ValueError as reason:  # raised by the reader, or for unknown type numbers
        fault = f"@model {str(path)!r} is not a usable GGUF file: {reason}"
        raise UserError(fault, f"{ELSEWHERE}, or its file in Q4_0 or Q4_K_M") from reason
    except struct.error as reason:
        fault = f"@model {str(path)!r} is a GGUF file that ends too early"
        raise UserError(fault, "get it again") from reason
    header.files = (path,)
    return header


class _Reader:
    """Reads a header from a file's bytes; raises ValueError, or struct.error if the bytes end too early."""

    def __init__(self, data: mmap.mmap, arrays: bool) -> None:
        self.data = data
        self.arrays = arrays
        self.position = len(MAGIC)
        self.elements = 0

    def header(self) -> Header:
        header = Header()
        version = self.number("I")
        tensors = self.bounded(ENTRIES, "tensors")
        entries = self.bounded(ENTRIES, "entries")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}, not one of {VERSIONS}")
        for _ in range(entries):
            key = self.string()
            header.metadata[key] = self.value(self.number("I"))
        for key, value in header.metadata.items():
            limit = SIZES.get(key.rpartition(".")[2])
            if limit is not None and not (type(value) is int and 1 <= value <= limit):
                raise ValueError(f"its {shown(key)} is {shown(value)}")
        named = [self.tensor() for _ in range(tensors)]
        alignment = header.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"its alignment is {shown(alignment)}")
        begin = -(-self.position // alignment) * alignment
        for name, tensor in named:
            if name in header.tensors:
                raise ValueError(f"it has two tensors {shown(name)}")
            header.tensors[name] = replace(
                tensor, start=begin + tensor.start, end=begin + tensor.end
            )
            if begin + tensor.end > len(self.data):
                raise struct.error
        return header

    def number(self, format: str) -> Any:
        [value] = struct.unpack_from(f"<{format}", self.data, self.position)
        self.position += struct.calcsize(f"<{format}")
        return value

    def bounded(self, limit: int, what: str) -> int:
        count: int = self.number("Q")
        if count > limit:
            raise ValueError(f"it claims {count:,} {what}")
        return count

    def string(self) -> str:
        length = self.bounded(STRING, "bytes of one text")
        return struct.unpack_from(f"{length}s", self.data, self._advance(length))[0].decode("utf-8")

    def _advance(self, size: int) -> int:
        """Returns the current position, and moves it forward by `size` bytes."""
        self.position += size
        return self.position - size

    def value(self, kind: int) -> Any:
        """Returns a scalar, a text or an array, or only an array's length if arrays are skipped."""
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == TEXT:
            return self.string()
        if kind != ARRAY:
            raise ValueError(f"it has metadata of the unknown type {kind}")
        kind = self.number("I")
        count = self.bounded(ELEMENTS, "elements of an array")
        self.elements += count
        if self.elements > ELEMENTS:
            raise ValueError(f"it claims {self.elements:,} elements of arrays")
        if kind in SCALARS:
            start = self._advance(count * struct.calcsize(f"<{SCALARS[kind]}"))
            if not self.arrays:
                return count
            return list(struct.unpack_from(f"<{count}{SCALARS[kind]}", self.data, start))
        if kind != TEXT:
            raise ValueError(f"it has an array of the unknown type {kind}")
        if self.arrays:
            return [self.string() for _ in range(count)]
        self._skip_strings(count)
        return count

    def _skip_strings(self, count: int) -> None:
        """Skips `count` texts in a fast loop, because a vocabulary has about a hundred thousand."""
        length = struct.Struct("<Q")
        data = self.data
        position = self.position
        for _ in range(count):
            [size] = length.unpack_from(data, position)
            if size > STRING:
                raise ValueError(f"it claims {size:,} bytes of one text")
            position += 8 + size
        self.position = position

    def tensor(self) -> tuple[str, Tensor]:
        """Returns a tensor's name and the tensor; its byte positions count from the start of the tensor data."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self.string()
        dimensions = self.number("I")
        if not 1 <= dimensions <= DIMENSIONS:
            raise ValueError(f"its tensor {shown(name)} has {dimensions} dimensions")
        shape = [self.number("Q") for _ in range(dimensions)]
        number = self.number("I")
        if number in REPACKED:
            raise ValueError(
                f"its {shown(name)} is repacked for one kind of CPU ({REPACKED[number]}), "
                "which llama.cpp no longer supports"
            )
        if number not in list(GGMLQuantizationType):
            raise ValueError(f"its {shown(name)} has the unknown type {number}")
        kind = GGMLQuantizationType(number)
        offset = self.number("Q")
        block, size = GGML_QUANT_SIZES[kind]
        if shape[0] % block:
            raise ValueError(
                f"its tensor {shown(name)} has rows of {shape[0]:,} numbers, no whole blocks of {kind.name}"
            )
        # The file's first dimension is the innermost.
        return name, Tensor(
            kind.name, tuple(reversed(shape)), offset, offset + math.prod(shape) // block * size
        )
