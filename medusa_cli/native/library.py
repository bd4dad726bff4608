"""The compiled library: its structures and functions, and the instruction set and threads that it uses."""

import ctypes
import os
import re
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from medusa_cli.files.cpus import cpu_count

# MEDUSA_LIBRARY selects another build of the library, such as one with sanitizers.
LIBRARY = Path(os.environ.get("MEDUSA_LIBRARY") or Path(__file__).parent / "libmedusa.so")
TILE = 16
UNIT = 32
NO_MEMORY = -2  # kNoMemory in library.cpp


def require(holds: bool, fault: str) -> None:
    """Raises ValueError unless a condition on the library's arguments holds, even in `python -O`."""
    if not holds:
        raise ValueError(f"internal: {fault}")


class Unavailable(Exception):
    """Reports why the native library cannot be used."""


# The mixers of layers, in the order of the library's enum Mixer.
MIXERS = ("attention", "short_conv", "delta_net")
# The sizes of layers that follow the paths of a tree: the kernel size of convolutions, and the sizes
# of delta nets.
PATHS = ("kernel", "delta_layers", "key_heads", "value_heads", "key_dim", "value_dim")


# Declarations in structures.def: the beginning of a structure, and a field (type, name, count).
STRUCT = "\nSTRUCT("
FIELD = re.compile(r"^(?:FIELD|ARRAY)\(([^,]+), (\w+)(?:, (\d+))?\)", re.MULTILINE)
TYPES: dict[str, Any] = {
    "int32_t": c_int32,
    "int64_t": c_int64,
    "Flag": c_int64,
    "float": c_float,
    "Gain": c_void_p,
    "Vector": c_void_p,
}


class Declarations:
    """Holds the structures that a text like structures.def declares: their fields and their ctypes classes."""

    def __init__(self, text: str) -> None:
        self.fields: dict[str, list[tuple[str, str, str]]] = {}
        self.classes: dict[str, type[Structure]] = {}
        for part in text.split(STRUCT)[1:]:
            name = part[: part.index(")")]
            self.fields[name] = FIELD.findall(part)
            kinds = [(field, self._kind(kind, count)) for kind, field, count in self.fields[name]]
            # Without a dictionary, instances accept only attributes that are fields.
            body = {"__slots__": (), "_fields_": kinds}
            self.classes[name] = type(name, (Structure,), body)

    def _kind(self, kind: str, count: str) -> Any:
        if count:
            return self._kind(kind, "") * int(count)
        if kind.endswith("*"):
            target = self.classes.get(kind.removeprefix("const ").removesuffix("*"))
            return c_void_p if target is None else POINTER(target)
        return TYPES.get(kind) or self.classes[kind]

    def names(self, structure: str, kind: str) -> tuple[str, ...]:
        """Returns the names of those fields of a structure that have the type `kind`."""
        return tuple(name for own, name, _ in self.fields[structure] if own == kind)

    def layout(self) -> str:
        """Returns the layout of the structures, in the format of `medusa_layout`."""
        lines = []
        for structure, kind in self.classes.items():
            lines.append(f"struct {structure} {ctypes.sizeof(kind)}\n")
            for own, name, _ in self.fields[structure]:
                lines.append(f"{own} {name} {getattr(kind, name).offset}\n")
        return "".join(lines)


DECLARED = Declarations(Path(__file__).with_name("structures.def").read_text("utf-8"))
Matrix = DECLARED.classes["Matrix"]
Activation = DECLARED.classes["Activation"]
Layer = DECLARED.classes["Layer"]
Model = DECLARED.classes["Model"]
CacheBuffers = DECLARED.classes["Cache"]
Step = DECLARED.classes["Step"]
DraftRows = DECLARED.classes["DraftRows"]
DraftPass = DECLARED.classes["DraftPass"]
Guesses = DECLARED.classes["Guesses"]
DraftLevel = DECLARED.classes["DraftLevel"]
# The names of a layer's norms, of its other vectors, and of a model's boolean properties.
NORMS = DECLARED.names("Layer", "Gain")
VECTORS = DECLARED.names("Layer", "Vector")
FLAGS = DECLARED.names("Model", "Flag")
# The maximum number of rotary tables of a model.
TABLES = len(Model().rotary)


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "instructions": (c_char_p, []),
    "use": (c_int, [c_char_p]),
    "threads": (None, [c_int]),
    "layout": (c_char_p, []),
    "block": (c_int64, [c_int]),
    "file_bytes": (c_int64, [c_int]),
    "tiled_bytes": (c_int64, [c_int, c_int64, c_int64]),
    "pack": (None, [c_int, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "round": (c_int, [c_int, c_void_p, c_int64, c_int64, c_void_p]),
    "run": (c_int, [POINTER(Model), POINTER(CacheBuffers), POINTER(Step)]),
    "draft": (c_int, [POINTER(Model), POINTER(DraftPass)]),
    "logits": (c_int, [POINTER(Matrix), c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p]),
    "guess": (c_int, [POINTER(Matrix), POINTER(Guesses)]),
    "level": (c_int, [POINTER(Model), POINTER(DraftLevel)]),
    "multiply": (c_int, [POINTER(Matrix), c_void_p, c_int64, c_int64, c_void_p, c_int64]),
    "embed": (c_int, [POINTER(Matrix), c_void_p, c_int64, c_float, c_void_p, c_int64]),
    "keep": (c_int, [POINTER(Model), POINTER(CacheBuffers), c_int64, c_int64, c_void_p, c_int64]),
}


@cache
def library() -> Any:
    """Loads the library once; raises Unavailable if it was not compiled, cannot be loaded, or has another version.

    The library uses the CPU's fastest instruction set, or that in MEDUSA_CPU, and `cpu_count()` threads.
    """
    if not LIBRARY.is_file():
        raise Unavailable(
            "the native library was not compiled; install the package again with a C++ compiler, or ziglang"
        )
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
    except OSError as reason:
        raise Unavailable(f"the native library cannot be loaded: {reason}") from reason
    another = "the native library is of another version; install the package again"
    functions = {}
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(loaded, f"medusa_{name}", None)
        if function is None:
            raise Unavailable(another)
        function.restype = result
        function.argtypes = arguments
        functions[name] = function
    if functions["layout"]().decode() != DECLARED.layout():
        raise Unavailable(another)
    native = type(
        "Native", (), {name: staticmethod(function) for name, function in functions.items()}
    )()
    wanted = _wanted_set()
    if wanted and native.use(wanted.encode()):
        raise Unavailable(
            f"MEDUSA_CPU={wanted} names none of this CPU's instruction sets: {', '.join(instructions(native))}"
        )
    native.threads(cpu_count())
    return native


def check(code: int, fault: str, error: type[Exception] = ValueError) -> None:
    """Raises MemoryError if a function's result `code` means missing memory, or `error` if it means another fault."""
    if code == NO_MEMORY:
        raise MemoryError("the system gave the native library no more memory")
    if code:
        raise error(f"internal: {fault}")


def instructions(native: Any = None) -> list[str]:
    """Returns the instruction sets that both this machine and the library support, fastest first."""
    names: bytes = (native or library()).instructions()
    return names.decode().split(",")


def instruction_set() -> str:
    """Returns the instruction set in use: the fastest, or that in MEDUSA_CPU."""
    return _wanted_set() or instructions()[0]


def _wanted_set() -> str:
    return os.environ.get("MEDUSA_CPU", "").lower()


def is_available() -> bool:
    """Returns True if the library can be used."""
    return why_unavailable() is None


def why_unavailable() -> str | None:
    """Returns why the library cannot be used, or None if it can be used."""
    try:
        library()
    except Unavailable as reason:
        return str(reason)
    return None
