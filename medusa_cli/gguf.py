"""GGUF files: reads their header within bounds, and unpacks one as a checkpoint folder."""

import math
import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medusa_cli.errors import UserError, first_line, shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Bounds of a header, several times those of any model: a reader takes them at their word.
ENTRIES = 1 << 16  # metadata, and tensors
ELEMENTS = 1 << 21  # of all arrays: a vocabulary's tokens, scores, types and merges
STRING = 1 << 24  # bytes
SIZES = {"block_count": 1024, "context_length": 1 << 30}
DIMENSIONS = 4
# Types of metadata by their number, in the format of `struct`; besides there are strings and arrays.
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
# Matrices that the CPU multiplies by as the file holds them: bytes of a block of 32 weights by type.
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20}
BLOCKS_FILE = "gguf-blocks.safetensors"
ELSEWHERE = "give the folder or the hub id of the model that it was made from"


@dataclass
class Header:
    """Metadata but for arrays, how many numbers all tensors hold, and the types of these by their names in ggml."""

    metadata: dict[str, Any] = field(default_factory=dict)
    numbers: int = 0
    types: set[str] = field(default_factory=set)

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


def read_header(path: Path) -> Header:
    """Reads a GGUF file's header; raises UserError for a damaged one, before memory is taken by what it claims."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except ValueError as reason:  # its own refusals, and numbers of unknown types
        raise UserError(f"@model {str(path)!r} is no usable GGUF file: {reason}", ELSEWHERE) from reason
    except struct.error as reason:
        raise UserError(f"@model {str(path)!r} is a GGUF file that ends too early", "get it again") from reason


class _Reader:
    """Reads a header from the beginning of a file's bytes; raises ValueError, and struct.error at their end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.position, self.elements = data, len(MAGIC), 0

    def header(self) -> Header:
        header = Header()
        version, tensors, entries = self.number("I"), self.bounded(ENTRIES, "tensors"), self.bounded(ENTRIES, "entries")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}, not one of {VERSIONS}")
        for _ in range(entries):
            key = self.string()
            header.metadata[key] = self.value(self.number("I"))
        for key, value in header.metadata.items():
            limit = SIZES.get(key.rpartition(".")[2])
            if limit is not None and not (type(value) is int and 1 <= value <= limit):
                raise ValueError(f"its {shown(key)} is {shown(value)}")
        ends = [self.tensor(header) for _ in range(tensors)]
        alignment = header.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"its alignment is {shown(alignment)}")
        if -(-self.position // alignment) * alignment + max(ends, default=0) > len(self.data):
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
        """Returns a scalar or a text; an array is skipped, and its length returned."""
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == TEXT:
            return self.string()
        if kind != ARRAY:
            raise ValueError(f"it has metadata of the unknown type {kind}")
        kind, count = self.number("I"), self.bounded(ELEMENTS, "elements of an array")
        self.elements += count
        if self.elements > ELEMENTS:
            raise ValueError(f"it claims {self.elements:,} elements of arrays")
        if kind in SCALARS:
            self.position += count * struct.calcsize(f"<{SCALARS[kind]}")
            return count
        if kind != TEXT:
            raise ValueError(f"it has an array of the unknown type {kind}")
        for _ in range(count):
            self._advance(self.bounded(STRING, "bytes of one text"))
        return count

    def tensor(self, header: Header) -> int:
        """Adds a tensor to the header; returns where its bytes end, from the beginning of all tensors' bytes."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name, dimensions = self.string(), self.number("I")
        if dimensions > DIMENSIONS:
            raise ValueError(f"its tensor {shown(name)} has {dimensions} dimensions")
        shape = [self.number("Q") for _ in range(dimensions)]
        kind, offset = GGMLQuantizationType(self.number("I")), self.number("Q")
        block, size = GGML_QUANT_SIZES[kind]
        header.numbers += math.prod(shape)
        header.types.add(kind.name)
        return offset + math.prod(shape) // block * size


def unpack(path: Path, header: Header, folder: Path) -> None:
    """Writes a GGUF file as a checkpoint folder, its weights dequantized by transformers' reader.

    Raises UserError where that reader does not know the architecture, or would leave something out.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    folder.mkdir()
    link = folder / "model.gguf"  # alone in its folder: transformers also reads what lies beside a file
    link.symlink_to(path.absolute())
    source = {"pretrained_model_name_or_path": str(folder), "gguf_file": link.name, "trust_remote_code": False}
    try:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        _check_read(header)
        config = AutoConfig.from_pretrained(**source)
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        factors = _rope_factors(path, network)
        wanted = sum(weight.numel() for weight in network.parameters()) + len(factors)
        if wanted != header.numbers:
            raise ValueError(f"it holds {header.numbers:,} weights, and transformers' reader makes {wanted:,} of them")
        # Without dequantize=True the weights stay quantised, and such a model cannot be saved.
        model, info = AutoModelForCausalLM.from_pretrained(
            **source,
            quantization_config=GgufConfig(dequantize=True),
            dtype=getattr(torch, header.dtype),
            output_loading_info=True,
        )
        if info["missing_keys"]:
            raise ValueError(f"it lacks {shown(min(info['missing_keys']))}")
        if factors:
            model.config.rope_parameters |= {
                "rope_type": "longrope",  # the one type that takes factors; they are those of any length
                "short_factor": factors,
                "long_factor": factors,
                "attention_factor": 1.0,
                "original_max_position_embeddings": config.max_position_embeddings,
            }
        if (end := header.metadata.get("tokenizer.ggml.eot_token_id")) not in (None, config.eos_token_id):
            model.generation_config.eos_token_id = [config.eos_token_id, end]  # of a text, of a turn
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except (MemoryError, OSError, UserError):
        raise
    except Exception as reason:  # a damaged file raises any exception
        fault = f"@model {str(path)!r}, a GGUF file, cannot be used: {first_line(reason)}"
        raise UserError(fault.removesuffix("."), ELSEWHERE) from reason
    finally:
        logging.set_verbosity(verbosity)
    link.unlink()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if blocks := _blocks(path, header, model):
        save_file(blocks, folder / BLOCKS_FILE)


def _rope_factors(path: Path, network: Any) -> list[float]:
    """Returns what the rotary frequencies of a model are divided by (Llama 3), which transformers' reader leaves out.

    Empty if the file does not say. Raises ValueError for factors that do not fit the network.
    """
    import gguf
    import numpy as np

    factors = [tensor.data for tensor in gguf.GGUFReader(path).tensors if tensor.name == "rope_freqs.weight"]
    if not factors:
        return []
    values = np.asarray(factors[0], np.float64)
    frequencies = getattr(getattr(getattr(network, "model", None), "rotary_emb", None), "inv_freq", None)
    if frequencies is None or values.shape != frequencies.shape or not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"its rope_freqs.weight {shown(values.shape)} holds no factors of the rotary frequencies")
    return [float(value) for value in values]


def _blocks(path: Path, header: Header, network: Any) -> dict[str, Any]:
    """Returns the blocks, bytes [N, K / 32 * size], of linear layers that the file holds in 4 bits, by their names.

    They are those of the network's weights: the names come from the `gguf` package, and the values are compared.
    """
    import gguf
    import numpy as np
    import torch
    from torch import nn

    archs = [arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == header.metadata["general.architecture"]]
    if not archs or not header.types & set(BLOCK_BYTES):
        return {}
    names = gguf.get_tensor_name_map(archs[0], network.config.num_hidden_layers)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    blocks = {}
    for name, layer in network.named_modules():
        tensor = tensors.get(f"{names.get_name(name)}.weight")
        if type(layer) is not nn.Linear or tensor is None or tensor.tensor_type.name not in BLOCK_BYTES:
            continue
        rows = layer.out_features
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)).to(layer.weight.dtype)
        orders = [torch.arange(rows)]
        # llama.cpp alternates the halves of a head that rotate together.
        dim = getattr(network.config, "head_dim", None) or rows
        if rows % dim == 0:
            orders.append(torch.arange(rows).view(-1, dim // 2, 2).transpose(1, 2).flatten())
        for order in orders:
            if torch.equal(values[order], layer.weight):
                blocks[name] = torch.from_numpy(np.ascontiguousarray(tensor.data[order.numpy()]))
                break
    return blocks


def _check_read(header: Header) -> None:
    """Raises ValueError for what transformers' reader passes over in silence."""
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise ValueError("it is one part of several; join them with `llama-gguf-split --merge`")
    for key, value in header.metadata.items():
        if key.endswith(".rope.scaling.type") and value != "none":
            raise ValueError(f"its positions are scaled ({shown(value)}), which transformers' reader leaves out")
