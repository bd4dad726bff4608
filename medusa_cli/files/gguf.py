"""GGUF files: reads their header within bounds, and writes config and tokenizer as transformers reads them."""

import math
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from medusa_cli.errors import UserError, first_line, shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Bounds of a header, several times any model's: a reader trusts them.
ENTRIES = 1 << 16  # metadata, and tensors
ELEMENTS = 1 << 21  # of all arrays: a vocabulary's tokens, scores, types and merges
STRING = 1 << 24  # bytes
SIZES = {"block_count": 1024, "context_length": 1 << 30}
DIMENSIONS = 4
# Types of metadata by their number, in the format of `struct`; besides there are strings and arrays.
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
# Architectures whose tensors have transformers' layout, but for the order of a llama's heads.
DIRECT = (
    *("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "starcoder2", "stablelm"),
    *("qwen2moe", "qwen3moe"),
)
# Sizes of experts that transformers' reader leaves out, with the fields of configs that they belong to.
EXPERT_SIZES = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# Gains of norms are stored as they are, where transformers' weights are the gains less one.
WHOLE_GAINS = ("gemma2", "gemma3")
ELSEWHERE = "give the folder or the hub id of the model that it was made from"


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file: its type by ggml's name, its shape, and where its bytes begin and end in the file."""

    type: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass
class Header:
    """Metadata and the tensors by name; of arrays only the lengths, unless they were asked for."""

    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def numbers(self) -> int:
        """Returns how many numbers all tensors hold."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def types(self) -> set[str]:
        return {tensor.type for tensor in self.tensors.values()}

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def dtype(self) -> str:
        """Returns the name of the torch type that the weights are kept in: bf16 for quantized ones."""
        if self.types <= {"F16", "F32"}:
            return "float16" if "F16" in self.types else "float32"
        return "bfloat16"


def is_gguf(path: Path) -> bool:
    """Returns True if a file exists and begins as a GGUF file does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_header(path: Path, arrays: bool = False) -> Header:
    """Reads a GGUF file's header; raises UserError for a damaged one, before memory is taken by what it claims.

    arrays: reads the arrays of the metadata, too, such as a vocabulary's tokens.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, arrays).header()
    except ValueError as reason:  # its own refusals, and numbers of unknown types
        raise UserError(
            f"@model {str(path)!r} is not a usable GGUF file: {reason}", ELSEWHERE
        ) from reason
    except struct.error as reason:
        raise UserError(
            f"@model {str(path)!r} is a GGUF file that ends too early", "get it again"
        ) from reason


class _Reader:
    """Reads a header from the beginning of a file's bytes; raises ValueError, and struct.error at their end."""

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
        """Returns the position before `size` bytes, and moves behind them."""
        self.position += size
        return self.position - size

    def value(self, kind: int) -> Any:
        """Returns a scalar, a text or an array; of an array its length where arrays are skipped."""
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
        """Skips `count` texts; a vocabulary has some hundred thousand."""
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
        """Returns a tensor and its name; its bytes are counted from the beginning of all tensors' bytes."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self.string()
        dimensions = self.number("I")
        if not 1 <= dimensions <= DIMENSIONS:
            raise ValueError(f"its tensor {shown(name)} has {dimensions} dimensions")
        shape = [self.number("Q") for _ in range(dimensions)]
        kind = GGMLQuantizationType(self.number("I"))
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


def write_metadata(path: Path, header: Header, folder: Path) -> None:
    """Writes config, generation config and tokenizer of a GGUF file into a folder, as transformers reads them.

    Weights stay in the file, but for architectures that only transformers' reader knows: these it dequantizes. Raises
    UserError where that reader does not know the architecture, or would leave something out.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    folder.mkdir()
    link = (
        folder / "model.gguf"
    )  # alone in its folder: transformers also reads what lies beside a file
    link.symlink_to(path.absolute())
    source = {
        "pretrained_model_name_or_path": str(folder),
        "gguf_file": link.name,
        "trust_remote_code": False,
    }
    try:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        _check_read(header)
        with _read_once(path):
            config = AutoConfig.from_pretrained(**source)
            tokenizer = AutoTokenizer.from_pretrained(**source)
        config.dtype = header.dtype
        for key, own in EXPERT_SIZES.items():
            size = header.metadata.get(f"{header.architecture}.{key}")
            if size is not None and hasattr(config, own):
                setattr(config, own, size)
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        config.architectures = [type(network).__name__]
        factors = _rope_factors(path, header, network)
        if factors:
            config.rope_parameters |= {
                "rope_type": "longrope",  # the one type that takes factors; they are those of any length
                "short_factor": factors,
                "long_factor": factors,
                "attention_factor": 1.0,
                "original_max_position_embeddings": config.max_position_embeddings,
            }
        generation = GenerationConfig.from_model_config(config)
        if (end := header.metadata.get("tokenizer.ggml.eot_token_id")) not in (
            None,
            config.eos_token_id,
        ):
            generation.eos_token_id = [config.eos_token_id, end]  # of a text, of a turn
        if header.architecture in DIRECT:
            GgufNames(header, network)
        else:
            _dequantize(source, header, network, len(factors), folder)
    except (MemoryError, OSError, UserError):
        raise
    except Exception as reason:  # a damaged file raises any exception
        fault = f"@model {str(path)!r}, a GGUF file, cannot be used: {first_line(reason)}"
        raise UserError(fault.removesuffix("."), ELSEWHERE) from reason
    finally:
        logging.set_verbosity(verbosity)
    link.unlink()
    config.save_pretrained(folder)
    generation.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _dequantize(
    source: dict[str, Any], header: Header, network: Any, left_out: int, folder: Path
) -> None:
    """Writes the weights as safetensors by transformers' reader; ValueError if it would leave some out."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    wanted = sum(weight.numel() for weight in network.parameters()) + left_out
    if wanted != header.numbers:
        raise ValueError(
            f"it holds {header.numbers:,} weights, and transformers' reader makes {wanted:,} of them"
        )
    # Without dequantize=True the weights stay quantised, and such a model cannot be saved.
    model, info = AutoModelForCausalLM.from_pretrained(
        **source,
        quantization_config=GgufConfig(dequantize=True),
        dtype=getattr(torch, header.dtype),
        output_loading_info=True,
    )
    if info["missing_keys"]:
        raise ValueError(f"it lacks {shown(min(info['missing_keys']))}")
    model.save_pretrained(folder)


@contextmanager
def _read_once(path: Path) -> Iterator[None]:
    """Lets transformers read a file's metadata from here: its own reader takes ten seconds for a large vocabulary."""
    import gguf
    from transformers import modeling_gguf_pytorch_utils as reading

    header = read_header(path, arrays=True)

    class Field:
        types: tuple[()] = ()

        def __init__(self, value: Any) -> None:
            self.parts = value if isinstance(value, list) else [value]
            self.data = range(len(self.parts))

    class Reader:
        fields = {key: Field(value) for key, value in header.metadata.items()}
        tensors = [SimpleNamespace(name=name) for name in header.tensors]

    with (
        patch.object(gguf, "GGUFReader", lambda file: Reader),
        patch.object(reading, "_gguf_parse_value", lambda value, types: value),
    ):
        yield


@cache
def _is_readable(kind: str) -> bool:
    """Returns True for a type of weights that the gguf package reads, tried on one block of zeros."""
    import gguf
    import numpy as np

    number = gguf.GGMLQuantizationType[kind]
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[number][1]), np.uint8), number)
    except NotImplementedError:
        return False
    return True


def _stored_parts(
    name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, str, str, tuple[int, ...]]]:
    """Yields what a file holds of a weight: its name, the module and kind by gguf's table, and its shape.

    A file has the gates of all experts apart from their up matrices; both are named as their
    module, with .gate and .up.
    """
    module, _, kind = name.rpartition(".")
    if kind == "gate_up_proj":
        half = (shape[0], shape[1] // 2, shape[2])
        yield f"{module}.gate", f"{module}.gate_proj", "weight", half
        yield f"{module}.up", f"{module}.up_proj", "weight", half
    elif kind == "down_proj":
        yield f"{module}.down", f"{module}.down_proj", "weight", shape
    else:
        yield name, module, kind, shape


class GgufNames:
    """The tensor of a GGUF file for each weight of a network, by the names that the gguf package gives.

    Raises ValueError for weights without a tensor, tensors without a weight, shapes that differ and unreadable types.
    """

    def __init__(self, header: Header, network: Any) -> None:
        import gguf

        architecture = header.architecture
        arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        config = network.config.get_text_config()
        names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
        self.header = header
        self.tensors: dict[str, str] = {}
        stored = (
            part
            for name, weight in network.named_parameters()
            for part in _stored_parts(name, tuple(weight.shape))
        )
        for name, module, kind, shape in stored:
            tensor = f"{names.get_name(module)}.{kind}"
            if tensor not in header.tensors:
                raise ValueError(f"it lacks {shown(tensor)}, the weight {name}")
            if header.tensors[tensor].shape != shape:
                stored_shape = [*header.tensors[tensor].shape]
                raise ValueError(
                    f"its {shown(tensor)} has the shape {stored_shape}, the model needs {[*shape]}"
                )
            if not _is_readable(header.tensors[tensor].type):
                raise ValueError(f"its {shown(tensor)} has the type {header.tensors[tensor].type}")
            self.tensors[name] = tensor
        left = set(header.tensors) - set(self.tensors.values()) - {"rope_freqs.weight"}
        if left:
            raise ValueError(f"the model has no place for its tensor {shown(min(left))}")
        self.heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    def order(self, name: str) -> Any:
        """Returns the rows of a weight in the file in the order that transformers has, or None if it is the same.

        llama.cpp alternates the halves of a llama's head, which rotate together.
        """
        import numpy as np

        parts = name.split(".")
        if self.header.architecture != "llama" or len(parts) < 2 or parts[-2] not in self.heads:
            return None
        rows = self.header.tensors[self.tensors[name]].shape[0]
        dim = rows // self.heads[parts[-2]]
        return np.arange(rows).reshape(-1, dim // 2, 2).swapaxes(1, 2).flatten()

    def gain_less_one(self, name: str) -> bool:
        """Returns True for the weight of a norm that transformers keeps less one."""
        return self.header.architecture in WHOLE_GAINS and "norm" in name


def _rope_factors(path: Path, header: Header, network: Any) -> list[float]:
    """Returns the divisors of a model's rotary frequencies (Llama 3), which transformers' reader leaves out.

    Empty if the file does not say. Raises ValueError for factors that do not fit the network.
    """
    import numpy as np

    tensor = header.tensors.get("rope_freqs.weight")
    if tensor is None:
        return []
    if tensor.type != "F32":
        raise ValueError(f"its rope_freqs.weight has the type {tensor.type}")
    values = np.fromfile(path, np.float32, math.prod(tensor.shape), offset=tensor.start).astype(
        np.float64
    )
    frequencies = getattr(
        getattr(getattr(network, "model", None), "rotary_emb", None), "inv_freq", None
    )
    if (
        frequencies is None
        or values.shape != frequencies.shape
        or not (np.isfinite(values) & (values > 0)).all()
    ):
        raise ValueError(
            f"its rope_freqs.weight {shown(values.shape)} holds no factors of the rotary frequencies"
        )
    return [float(value) for value in values]


def _check_read(header: Header) -> None:
    """Raises ValueError for what transformers' reader passes over in silence."""
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise ValueError("it is one part of several; join them with `llama-gguf-split --merge`")
    for key, value in header.metadata.items():
        if key.endswith(".rope.scaling.type") and value != "none":
            raise ValueError(
                f"its positions are scaled ({shown(value)}), which transformers' reader leaves out"
            )
