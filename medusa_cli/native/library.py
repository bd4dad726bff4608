"""The compiled library: its structures and functions, and the instruction set and threads that it uses."""

import ctypes
import os
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from medusa_cli.files.cpus import cpu_count

# MEDUSA_LIBRARY selects another build of the library, such as one with sanitizers.
LIBRARY = Path(os.environ.get("MEDUSA_LIBRARY") or Path(__file__).parent / "libmedusa.so")
TABLES = 4  # the most rotary tables that a model may have
TILE = 16
UNIT = 32
NO_MEMORY = -2  # kNoMemory in library.cpp


def require(holds: bool, fault: str) -> None:
    """Raises ValueError unless a condition on what the library reads holds; `python -O` keeps it, unlike an assert."""
    if not holds:
        raise ValueError(f"internal: {fault}")


class Unavailable(Exception):
    """Says why the native library cannot be used."""


class Matrix(Structure):
    """A matrix [n, k] in tiles; see matmul.h."""

    _fields_ = [
        ("format", c_int32),
        ("int8_rows", c_int32),
        ("n", c_int64),
        ("k", c_int64),
        ("tiles", c_void_p),
        ("bias", c_void_p),
    ]


MATRICES = (
    *("query", "key", "value", "out", "gate", "up", "down"),
    *("input", "output_gate", "beta", "decay"),
    *("router", "shared_gate", "shared_up", "shared_down", "shared_router"),
    *("input_gate", "input_out"),
)
NORMS = (
    "attention_norm",
    "query_norm",
    "key_norm",
    "value_norm",
    "attention_out_norm",
    "mlp_norm",
    "mlp_out_norm",
    "input_norm",
    "attended_norm",
    "inner_norm",
)
VECTORS = ("sinks", "router_bias", "conv", "decay_log", "decay_bias", "state_norm")
# The ways in which layers mix rows, in the order of the library's numbers.
MIXERS = ("attention", "short_conv", "delta_net")
# Sizes of layers that follow paths: the kernel size of convolutions, and the sizes of delta nets.
PATHS = ("kernel", "delta_layers", "key_heads", "value_heads", "key_dim", "value_dim")
# The boolean properties of a model.
FLAGS = ("centered", "whole_norms", "late_norms", "pairs", "parallel", "first_norm")
ROUTING = ("top_experts", "sigmoid", "normalized")


class Activation(Structure):
    """An activation and its constants; see step.h."""

    _fields_ = [
        ("kind", c_int64),
        *((name, c_float) for name in ("alpha", "alpha_below", "beta", "limit")),
    ]


class Layer(Structure):
    """One decoder layer; see step.h."""

    _fields_ = [
        *((name, Matrix) for name in MATRICES),
        *((name, c_void_p) for name in NORMS),
        *((name, c_void_p) for name in VECTORS),
        *((name, c_int64) for name in ("table", "window", "experts", "kv", "dim")),
        *((name, c_int64) for name in ("mixer", "place")),
        ("activation", Activation),
        ("scalar", c_float),
    ]


class Model(Structure):
    """A decoder's sizes and layers; see step.h."""

    _fields_ = [
        *((name, c_int64) for name in ("layers", "hidden", "heads", "vocab")),
        *((name, c_int64) for name in PATHS),
        ("key_width", c_int64),
        ("value_width", c_int64),
        ("rotary", c_int64 * TABLES),
        *((name, c_int64) for name in ("positions", *FLAGS, *ROUTING)),
        *((name, c_float) for name in ("eps", "scale", "residual")),
        *((name, c_float) for name in ("expert_scale", "jitter", "cap", "clip")),
        ("inputs", c_int64),
        ("inputs_scale", c_float),
        ("inputs_factor", c_float),
        ("inputs_projection", Matrix),
        ("inputs_norm", c_void_p),
        ("cos", c_void_p * TABLES),
        ("sin", c_void_p * TABLES),
        ("norm", c_void_p),
        ("layer", POINTER(Layer)),
    ]


class CacheBuffers(Structure):
    """The buffers of a cache; see step.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("keys", "values", "inputs", "states", "pending", "parts")),
        *((name, c_int64) for name in ("slots", "capacity", "pending_rows")),
    ]


class Step(Structure):
    """A pass over some layers; see step.h."""

    _fields_ = [
        *((name, c_int64) for name in ("first_slot", "slots", "rows")),
        *((name, c_void_p) for name in ("lengths", "positions", "seen")),
        *((name, c_int64) for name in ("seen_slot", "seen_row", "first", "end", "keeps")),
        ("x", c_void_p),
        ("inputs", c_void_p),
        ("taps", c_int64),
        ("tap_layers", c_void_p),
        ("tapped", c_void_p),
    ]


class DraftRows(Structure):
    """The rows of one sequence that enter a drafter's layer; see step.h."""

    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        *((name, c_int64) for name in ("capacity", "prefix", "earlier", "rows")),
        ("seen", c_void_p),
    ]


class DraftPass(Structure):
    """A pass through a drafter's decoder layer; see step.h."""

    _fields_ = [
        ("own", POINTER(DraftRows)),
        ("sequences", c_int64),
        ("last", c_int64),
        *((name, c_void_p) for name in ("positions", "x", "embedded")),
    ]


class Guesses(Structure):
    """States whose next tokens a matrix guesses; see step.h."""

    _fields_ = [
        ("states", c_void_p),
        *((name, c_int64) for name in ("rows", "stride")),
        ("norm", c_void_p),
        *((name, c_float) for name in ("eps", "temperature")),
        ("width", c_int64),
        *((name, c_void_p) for name in ("ids", "scores")),
    ]


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "instructions": (c_char_p, []),
    "use": (c_int, [c_char_p]),
    "threads": (None, [c_int]),
    "size": (c_int64, [c_int]),
    "block": (c_int64, [c_int]),
    "file_bytes": (c_int64, [c_int]),
    "tiled_bytes": (c_int64, [c_int, c_int64, c_int64]),
    "pack": (None, [c_int, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "round": (c_int, [c_int, c_void_p, c_int64, c_int64, c_void_p]),
    "run": (c_int, [POINTER(Model), POINTER(CacheBuffers), POINTER(Step)]),
    "draft": (c_int, [POINTER(Model), POINTER(DraftPass)]),
    "logits": (c_int, [POINTER(Matrix), c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p]),
    "guess": (c_int, [POINTER(Matrix), POINTER(Guesses)]),
    "multiply": (c_int, [POINTER(Matrix), c_void_p, c_int64, c_int64, c_void_p, c_int64]),
    "embed": (c_int, [POINTER(Matrix), c_void_p, c_int64, c_float, c_void_p, c_int64]),
    "keep": (c_int, [POINTER(Model), POINTER(CacheBuffers), c_int64, c_int64, c_void_p, c_int64]),
}


@cache
def library() -> Any:
    """Loads the library once; raises Unavailable if it was not compiled or does not fit this machine.

    It uses this CPU's fastest instruction set, or the one in MEDUSA_CPU, and `cpu_count()` threads.
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
    structures = (Matrix, Layer, Model, CacheBuffers, Step, DraftRows, DraftPass, Guesses)
    sizes = [ctypes.sizeof(kind) for kind in structures]
    if sizes != [functions["size"](which) for which in range(len(sizes))]:
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
    """Raises MemoryError, or `error` for arguments that do not fit, if a function's code says so."""
    if code == NO_MEMORY:
        raise MemoryError("the system gave the native library no more memory")
    if code:
        raise error(f"internal: {fault}")


def instructions(native: Any = None) -> list[str]:
    """Returns the instruction sets that both this machine and the library support, fastest first."""
    names: bytes = (native or library()).instructions()
    return names.decode().split(",")


def instruction_set() -> str:
    """Returns the instruction set in use: the fastest one, or the one in MEDUSA_CPU."""
    return _wanted_set() or instructions()[0]


def _wanted_set() -> str:
    return os.environ.get("MEDUSA_CPU", "").lower()


def is_available() -> bool:
    """Returns True if the library can be used."""
    return why_unavailable() is None


def why_unavailable() -> str | None:
    """Returns why the library cannot be used; None if it can."""
    try:
        library()
    except Unavailable as reason:
        return str(reason)
    return None
