"""A transformers decoder as the native library runs it: which weights its layers have, and what they compute.

The layers of most decoders consist of the same parts. Which of these a model has is read from its network, which needs
no weights for that. What they compute is checked on a small random twin of the model: transformers' pass and the
library's must give the same states.
"""

import copy
import json
import logging
import math
import os
from collections.abc import Iterator
from ctypes import POINTER, cast
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from medusa_cli.model.attention import FULL, Masks
from medusa_cli.model.backbone import Layers, Unsupported, padded_pass
from medusa_cli.model.weights import NetworkWeights, Weights
from medusa_cli.native import Format, PackedMatrix, RawMatrix
from medusa_cli.native.library import MATRICES, NORMS, TABLES, Layer, Matrix, Model
from medusa_cli.native.matrix import Bytes, Floats, aligned, pack_tiles, padded_floats

ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
# Tokens of the pass over a twin, its window, and the largest difference of its states relative to their size.
PROBE = 20
PROBE_WINDOW = 7
TOLERANCE = 1e-4
# Layers of a twin: with Gemma 3's pattern, of both kinds.
TWIN_LAYERS = 7
# Rows of rotary tables at first; they grow.
FIRST_POSITIONS = 2048
# Of weights packed by another version of the library, or in another way.
VERSION = 1
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerNames:
    """The names of one layer's parts in transformers' network; norms by the library's names."""

    matrices: dict[str, str]
    norms: dict[str, str]
    kind: str
    table: str


@dataclass(frozen=True)
class Description:
    """A decoder: sizes, the names of its parts, and what the network's classes say that they compute."""

    sizes: dict[str, int]
    layers: list[LayerNames]
    embedding: str
    head: str
    norm: str
    eps: float
    scale: float
    embedding_scale: float
    activation: int
    one_more: bool  # norms multiply by 1 + w
    window: int
    tables: list[str]


def describe(network: Any) -> Description:
    """Reads a network's parts, on any device; raises Unsupported for parts that the library does not have."""
    parts = Layers(network)
    config = network.config.get_text_config()
    names = {id(module): name for name, module in network.named_modules()}
    masks = Masks(config, torch.float32)
    kv = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    first = parts.layers[0]
    layers = []
    eps = set()
    scales = set()
    activations = set()
    for index, layer in enumerate(parts.layers):
        attention = getattr(layer, "self_attn", None)
        mlp = getattr(layer, "mlp", None)
        linears = _linears(attention, mlp)
        norms = _norms(layer, attention)
        eps |= {_eps_of(norm) for norm in norms.values()}
        scales.add(getattr(attention, "scaling", None))
        activations.add(_activation_of(mlp.act_fn))  # type: ignore[union-attr]
        layers.append(
            LayerNames(
                {name: names[id(module)] for name, module in linears.items()},
                {name: names[id(module)] for name, module in norms.items()},
                masks.layer_type(index),
                parts.kinds[index],
            )
        )
    if len(eps | {_eps_of(parts.base.norm)}) != 1 or len(scales) != 1 or None in scales or len(activations) != 1:
        raise Unsupported("its layers differ in ways not known here")
    dim = first.self_attn.q_proj.out_features // config.num_attention_heads
    sizes = {
        "layers": len(parts.layers),
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv": kv,
        "dim": dim,
        "inner": first.mlp.gate_proj.out_features,
        "vocab": network.get_input_embeddings().weight.shape[0],
    }
    if first.self_attn.k_proj.out_features != kv * dim or dim > 1024:
        raise Unsupported("its heads have sizes not known here")
    head = network.get_output_embeddings()
    tied = bool(getattr(config, "tie_word_embeddings", False)) and head.bias is None
    embedding = names[id(parts.base.embed_tokens)]
    tables = sorted(set(parts.kinds)) if parts.by_kind else [parts.kinds[0]]
    if len(tables) > TABLES:
        raise Unsupported("it has more rotary tables than the library takes")
    return Description(
        sizes=sizes,
        layers=layers,
        embedding=embedding,
        head=embedding if tied else names[id(head)],
        norm=names[id(parts.base.norm)],
        eps=eps.pop(),
        scale=float(scales.pop() or 0),
        embedding_scale=float(getattr(parts.base.embed_tokens, "scalar_embed_scale", 1.0)),
        activation=activations.pop(),
        one_more=False,
        window=0 if math.isinf(masks.window) else int(masks.window),
        tables=tables,
    )


def _linears(attention: Any, mlp: Any) -> dict[str, nn.Linear]:
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
    linears = {name: getattr(attention, own, None) for name, own in names.items()}
    linears |= {name: getattr(mlp, f"{name}_proj", None) for name in ("gate", "up", "down")}
    for name, module in linears.items():
        if type(module) is not nn.Linear:
            raise Unsupported(f"its layers have no plain {name} matrix")
    if not hasattr(mlp, "act_fn"):
        raise Unsupported("its MLP has no activation function")
    return linears  # type: ignore[return-value]


def _norms(layer: Any, attention: Any) -> dict[str, Any]:
    """Returns the norms of a layer by the library's names."""
    after = hasattr(layer, "post_feedforward_layernorm")
    names = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if after:
        names["mlp_norm"] = "pre_feedforward_layernorm"
        names["attention_out_norm"] = "post_attention_layernorm"
        names["mlp_out_norm"] = "post_feedforward_layernorm"
    norms = {name: getattr(layer, own, None) for name, own in names.items()}
    if None in norms.values():
        raise Unsupported("its norms are placed in a way not known here")
    for name, own in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
        if getattr(attention, own, None) is not None:
            norms[name] = getattr(attention, own)
    return norms


def _eps_of(norm: Any) -> float:
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    weight = getattr(norm, "weight", None)
    if eps is None or weight is None or weight.dim() != 1 or getattr(norm, "bias", None) is not None:
        raise Unsupported(f"{type(norm).__name__} is no RMS norm")
    return float(eps)


def _activation_of(function: Any) -> int:
    probe = torch.linspace(-6, 6, 101)
    values = function(probe)
    for number, known in enumerate(ACTIVATIONS.values()):
        if torch.allclose(values, known(probe), atol=1e-6):
            return number
    raise Unsupported(f"its activation {type(function).__name__} is not known here")


# ---- packed weights


class MissingWeights(Unsupported):
    """Says which weight a model's files do not have by the name of transformers' network."""


@dataclass
class Packed:
    """Packed matrices and fp32 vectors by name.

    memory: the mapped file that they lie in, if any. digest: of the weights they were made from, `weights_of`.
    """

    matrices: dict[str, PackedMatrix] = field(default_factory=dict)
    vectors: dict[str, Floats] = field(default_factory=dict)
    memory: Any = None
    digest: str | None = None

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self.matrices.values())


def read_parts(
    description: Description, weights: Weights, quantize: str | None
) -> Iterator[tuple[str, RawMatrix, Floats | None] | tuple[str, None, Floats]]:
    """Yields every matrix (name, matrix, bias) and every norm's gain (name, None, gain) of a model.

    Raises Unsupported for weights that the files do not have by these names.
    """
    names = [description.embedding, description.head]
    names += [name for layer in description.layers for name in layer.matrices.values()]
    for name in dict.fromkeys(names):
        if f"{name}.weight" not in weights:
            raise MissingWeights(f"its files have no {name}.weight")
        raw = weights.matrix(f"{name}.weight")
        # An embedding that is not the lm_head, too, is only looked up.
        if quantize is not None and (name != description.embedding or name == description.head):
            raw = raw.rounded(_rounded_format(quantize, name == description.head))
        bias = weights.vector(f"{name}.bias") if f"{name}.bias" in weights else None
        yield name, raw, bias
        weights.release()
    norms = [description.norm, *(name for layer in description.layers for name in layer.norms.values())]
    for name in norms:
        if f"{name}.weight" not in weights:
            raise MissingWeights(f"its files have no {name}.weight")
        gain = weights.vector(f"{name}.weight")
        yield name, None, 1 + gain if description.one_more else gain


def _rounded_format(quantize: str, is_head: bool) -> Format:
    """Returns the format of rounded weights; 4 bits in the lm_head alone change a model ten times as much."""
    return Format.Q4_1 if quantize == "int4" and not is_head else Format.Q8_0


def pack_in_memory(description: Description, weights: Weights, quantize: str | None, int8_rows: bool) -> Packed:
    packed = Packed()
    for name, raw, values in read_parts(description, weights, quantize):
        if raw is None:
            assert values is not None
            packed.vectors[name] = padded_floats(values)
        else:
            packed.matrices[name] = PackedMatrix.pack(raw, values, int8_rows)
    return packed


def pack_to_file(
    path: Path, description: Description, weights: Weights, quantize: str | None, digest: str | None
) -> None:
    """Writes packed weights: the length of a JSON of what it holds, that JSON, and the tiles, each from a multiple of
    64 bytes on."""
    from medusa_cli.native import library

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    entries: list[dict[str, Any]] = []
    try:
        with part.open("wb") as file:
            file.truncate(8)
            end = 8
            for name, raw, values in read_parts(description, weights, quantize):
                entry: dict[str, Any] = {"name": name}
                if values is not None:
                    entry["vector"] = _write(file, end, padded_floats(values).view(np.uint8))
                    end = sum(entry["vector"])
                if raw is not None:
                    size = library().tiled_bytes(int(raw.format), len(raw.rows), raw.inputs)
                    entry |= {"format": raw.format.name, "shape": [len(raw.rows), raw.inputs]}
                    entry["tiles"] = _write(file, end, pack_tiles(raw, aligned(size)))
                    end = sum(entry["tiles"])
                entries.append(entry)
            text = json.dumps({"version": VERSION, "digest": digest, "entries": entries}).encode()
            place = _write(file, end, np.frombuffer(text, np.uint8))
            file.seek(0)
            file.write(place[0].to_bytes(8, "little"))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write(file: Any, end: int, data: Bytes) -> list[int]:
    """Writes bytes from the next multiple of 64 after `end` on; returns where, and how many."""
    start = -(-end // 64) * 64
    file.seek(start)
    file.write(data)
    return [start, data.nbytes]


def read_packed(path: Path, description: Description, int8_rows: bool) -> Packed:
    """Maps packed weights; raises ValueError for a file that does not hold those of a model."""
    memory = np.memmap(path, np.uint8, "r")
    start = int.from_bytes(memory[:8].tobytes(), "little")
    if not 8 <= start < memory.nbytes:
        raise ValueError("it is cut off")
    data = json.loads(memory[start:].tobytes())
    if data["version"] != VERSION:
        raise ValueError("it is of another version")
    packed = Packed(memory=memory, digest=data["digest"])

    def part(place: list[int]) -> Bytes:
        first, size = place
        if first < 0 or size < 0 or first % 64 or first + size > memory.nbytes:
            raise ValueError("it is cut off")
        bytes: Bytes = memory[first : first + size]
        return bytes

    for entry in data["entries"]:
        vector = part(entry["vector"]).view(np.float32) if "vector" in entry else None
        if "tiles" in entry:
            format = Format[entry["format"]]
            shape = tuple(entry["shape"])
            packed.matrices[entry["name"]] = PackedMatrix(format, shape, part(entry["tiles"]), vector, int8_rows)
        elif vector is not None:
            packed.vectors[entry["name"]] = vector
    wanted = {description.embedding, description.head}
    wanted |= {name for layer in description.layers for name in layer.matrices.values()}
    norms = {description.norm} | {name for layer in description.layers for name in layer.norms.values()}
    if wanted != set(packed.matrices) or norms != set(packed.vectors):
        raise ValueError("it holds another model")
    return packed


def stamp_of(*parts: Any) -> str:
    """Returns a digest of what packed weights depend on."""
    return sha256(json.dumps([VERSION, *parts], default=str).encode()).hexdigest()[:24]


# ---- the library's structures


class NativeModel:
    """A model in the library's structures, which keeps all memory that these point to."""

    def __init__(self, description: Description, packed: Packed, rotary: Any) -> None:
        self.description = description
        self.packed = packed
        self._rotary = rotary
        self._check_shapes()
        self.layers = (Layer * len(description.layers))()
        for layer, names in zip(self.layers, description.layers, strict=True):
            for name in MATRICES:
                setattr(layer, name, packed.matrices[names.matrices[name]].struct)
            for name in NORMS:
                if name in names.norms:
                    setattr(layer, name, packed.vectors[names.norms[name]].ctypes.data)
            layer.window = 0 if names.kind == FULL else description.window
            layer.table = description.tables.index(names.table) if len(description.tables) > 1 else 0
        self.struct = Model(**description.sizes)
        self.struct.activation = description.activation
        self.struct.eps = description.eps
        self.struct.scale = description.scale
        self.struct.embedding_scale = description.embedding_scale
        self.struct.norm = packed.vectors[description.norm].ctypes.data
        self.struct.embedding = self.embedding.struct
        self.struct.head = self.head.struct
        self.struct.layer = cast(self.layers, POINTER(Layer))
        self._tables: list[Floats] = []

    @property
    def embedding(self) -> PackedMatrix:
        return self.packed.matrices[self.description.embedding]

    @property
    def head(self) -> PackedMatrix:
        return self.packed.matrices[self.description.head]

    def _check_shapes(self) -> None:
        """Raises Unsupported unless every matrix and norm has the size that the library will read."""
        sizes = self.description.sizes
        hidden = sizes["hidden"]
        heads = sizes["heads"] * sizes["dim"]
        inner = sizes["inner"]
        keys = sizes["kv"] * sizes["dim"]
        outputs = {
            "query": heads,
            "key": keys,
            "value": keys,
            "out": hidden,
            "gate": inner,
            "up": inner,
            "down": hidden,
        }
        inputs = {"out": heads, "down": inner}
        for names in self.description.layers:
            for name, stored in names.matrices.items():
                shape = self.packed.matrices[stored].shape
                # Rounded matrices are filled up to whole groups.
                if shape[0] != outputs[name] or not 0 <= shape[1] - inputs.get(name, hidden) < 32:
                    raise Unsupported(f"its {stored} has the shape {shape}")
            for name, stored in names.norms.items():
                wide = sizes["dim"] if name in ("query_norm", "key_norm") else hidden
                if len(self.packed.vectors[stored]) != -(-wide // 32) * 32:
                    raise Unsupported(f"its {stored} has another size")
        for matrix in (self.embedding, self.head):
            if matrix.shape[0] < sizes["vocab"] or not 0 <= matrix.shape[1] - hidden < 32:
                raise Unsupported("its vocabulary has another size")

    def reserve(self, positions: int) -> None:
        """Makes rotary tables of at least so many positions."""
        if positions <= self.struct.positions:
            return
        count = max(positions, 2 * self.struct.positions, FIRST_POSITIONS)
        tables = []
        rotary = 0
        for number, kind in enumerate(self.description.tables):
            cos, sin = self._rotary(torch.arange(count)[None], kind)
            rotary = cos.shape[-1]
            half = rotary // 2
            for column, table in enumerate((cos, sin)):
                values = np.ascontiguousarray(table[0, :, :half].float().numpy())
                tables.append(values)
                target = self.struct.sin if column else self.struct.cos
                target[number] = values.ctypes.data
        self._tables = tables
        self.struct.rotary = rotary
        self.struct.positions = count


def rotary_of(network: Any) -> Any:
    """Returns a function that gives the cosines and sines [1, n, D] of positions [1, n] for layers of a kind."""
    parts = Layers(network)
    config = network.config.get_text_config()
    with torch.device("cpu"):
        module = type(parts.base.rotary_emb)(config)
    like = torch.empty(1)

    def rotary(positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            cos, sin = module(like, positions, kind) if parts.by_kind else module(like, positions)
        return cos, sin

    return rotary


# ---- the twin


def twin_of(network: Any) -> Any:
    """Returns a small network of random fp32 weights that computes what a network's layers do."""
    config = copy.deepcopy(network.config.get_text_config())
    groups = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = min(config.num_hidden_layers, TWIN_LAYERS)
    changes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 2 * groups,
        "num_key_value_heads": 2,
        "head_dim": dim,
    }
    for name, value in changes.items():
        setattr(config, name, value)
    if kinds := getattr(config, "layer_types", None):
        # Its last layers may be of a kind that its first are not.
        chosen = kinds[:layers]
        chosen[-1] = next((kind for kind in kinds if kind not in chosen), chosen[-1])
        config.layer_types = chosen
    if getattr(config, "sliding_window", None):
        config.sliding_window = PROBE_WINDOW
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, None)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        twin = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        for parameter in twin.parameters():
            parameter.data = torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.2)
            if parameter.dim() == 1:
                parameter.data += 1
    return twin.eval()


def gains_one_more(twin: Any) -> bool:
    """Returns True if a network's norms multiply by 1 + w; raises Unsupported unless they are RMS norms."""
    norm = Layers(twin).base.norm
    x = torch.linspace(-2, 3, 2 * len(norm.weight)).view(2, -1)
    unit = F.rms_norm(x, x.shape[-1:], eps=_eps_of(norm))
    for more in (False, True):
        if torch.allclose(norm(x), unit * (norm.weight + more), atol=1e-4, rtol=1e-4):
            return more
    raise Unsupported(f"{type(norm).__name__} computes something other than an RMS norm")


def states_of(network: Any, backbone: Any, tokens: Tensor, first: int) -> Tensor:
    """Returns a network's final states [n, H] of tokens [n] at the positions from `first` on."""
    positions = first + torch.arange(len(tokens))[None]
    states: Tensor = padded_pass(backbone, tokens[None], position_ids=positions).last_hidden_state[0]
    return states


def network_weights(network: Any) -> Weights:
    return NetworkWeights(network)


__all__ = ["Description", "Matrix", "NativeModel", "Packed", "describe"]
