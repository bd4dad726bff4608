"""The tensors for a network's weights in a GGUF file, and how their order and form differ from transformers'."""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain, starmap
from typing import Any

from medusa_cli.errors import UserError, shown
from medusa_cli.files.gguf_header import Header

# Types of weights that the native library multiplies as they are stored. Weights of other types
# would take up to 32 bits each.
READABLE = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
)
# Architectures whose files store the gains of norms; transformers' weights are the gains minus one.
WHOLE_GAINS = ("gemma2", "gemma3", "qwen35", "qwen35moe")
# Architectures with delta nets.
DELTA_NETS = ("qwen35", "qwen35moe")
# The gated norm of a delta net's heads; its weights are the gains in transformers, too.
GATED_NORM = "linear_attn.norm.weight"
# Architectures whose files interleave the two halves of each query and key head.
INTERLEAVED = ("llama", "granite", "granitemoe", "mistral3", "smollm3")
# Architectures whose networks in transformers transpose the matrices of experts, and interleave gate and up.
TRANSPOSED_EXPERTS = ("gpt-oss",)
# Divisors of rotary frequencies, which belong to the config and not to the weights.
FREQUENCIES = "rope_freqs.weight"
# Divisors of Phi 3's rotary frequencies: for texts within the original context, and for longer texts.
FACTORS_OF_PHI3 = {"short": "rope_factors_short.weight", "long": "rope_factors_long.weight"}
# Modules that layers do not need if they use an earlier layer's keys and values.
KEYS_AND_VALUES = ("attn_k", "attn_v", "attn_k_norm")
# Parts of names in transformers, and their older forms in gguf's table.
OLDER_NAMES = {
    "linear_attn.dt_bias": "linear_attn.dt_proj.bias",
    ".e_score_correction_bias": ".e_score_correction.bias",
    ".block_sparse_moe.router.": ".mlp.gate.",
    ".block_sparse_moe.": ".mlp.",
}
# Parts around a layer that predicts later tokens (MTP); their names are the same in all
# architectures.
PARTS_OF_MTP = re.compile(r"model\.layers\.(\d+)\.(eh_proj|enorm|hnorm|shared_head\.norm)")
# The last norm of an MTP layer; a layer without it uses the model's own norm.
NORM_OF_MTP = "nextn.shared_head_norm"
# Copies of the model's own matrices in an MTP layer.
COPIES = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")


class GgufNames:
    """Maps weights to tensors in a GGUF file, with the gguf package's table of names.

    weights: the weights of a network, or of a layer that predicts later tokens, by transformers' names. config: the
    model's text config, whose number of layers includes that layer. within: the prefix of those tensors that must each
    belong to a weight. Raises ValueError for weights without a tensor, tensors without a weight, and other shapes, and
    UserError for types that are not in READABLE.
    """

    def __init__(
        self, header: Header, weights: Mapping[str, Any], config: Any, within: str = ""
    ) -> None:
        import gguf

        architecture = header.architecture
        known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
        if architecture not in known:
            raise ValueError(f"the installed gguf package does not know {architecture}")
        arch = known[architecture]
        names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
        self.header = header
        self.tensors: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}  # shapes in the network
        self.has_transposed_experts = architecture in TRANSPOSED_EXPERTS
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        stored = partial(_stored_parts, transposed=self.has_transposed_experts)
        for name, module, kind, shape in chain(*starmap(stored, shapes.items())):
            prefix = _part_of_mtp(module) or names.get_name(module)
            tensor = str(names.get_name(name)) if prefix is None else f"{prefix}.{kind}"
            if NORM_OF_MTP in tensor and tensor not in header.tensors:
                tensor = "output_norm.weight"
            if f"{tensor}.weight" in header.tensors:
                tensor += ".weight"  # the parameter has no module, such as a layer's factor
            if tensor not in header.tensors:
                raise ValueError(f"it lacks {shown(tensor)}, the weight {name}")
            stored_shape = header.tensors[tensor].shape
            if _without_ones(stored_shape) != _without_ones(shape):
                raise ValueError(
                    f"its {shown(tensor)} has the shape {[*stored_shape]}, the model needs {[*shape]}"
                )
            if header.tensors[tensor].type not in READABLE:
                raise UserError(
                    f"@model {str(header.files[0])!r} holds weights of the type {header.tensors[tensor].type} "
                    f"({shown(tensor)}), which is not read",
                    "get a file of another type, such as Q4_K_M, IQ4_XS or Q2_K",
                )
            self.tensors[name] = tensor
            self.shapes[name] = shape
        factors = {FREQUENCIES, *(FACTORS_OF_PHI3.values() if architecture == "phi3" else ())}
        needed = {name for name in header.tensors if name.startswith(within)}
        unused = needed - set(self.tensors.values()) - factors
        left = {name for name in unused if not _is_left_out(name, config)}
        if left:
            raise ValueError(f"the model has no place for its tensor {shown(min(left))}")
        self.config = config

    def order(self, name: str) -> list[int] | None:
        """Returns, in transformers' order, a weight's row numbers in the file; None if the order is the same."""
        module, _, part = name.rpartition(".")
        module = module.rpartition(".")[2] if part in ("weight", "bias") else part
        rows = self.header.tensors[self.tensors[name]].shape[0]
        if self.header.architecture in INTERLEAVED:
            return self._order_of_heads(module, rows)
        if self.header.architecture in DELTA_NETS and ".linear_attn." in name:
            return self._order_of_delta_net(module, rows)
        return None

    def _order_of_heads(self, module: str, rows: int) -> list[int] | None:
        """Returns the row order of queries or keys: a file interleaves the halves of a head, which rotate together."""
        config = self.config
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        if module not in heads:
            return None
        dim = rows // heads[module]
        pairs = range(dim // 2)
        own = [2 * pair + half for half in (0, 1) for pair in pairs]
        return [first + row for first in range(0, rows, dim) for row in own]

    def _order_of_delta_net(self, module: str, rows: int) -> list[int] | None:
        """Returns the order of the rows of a delta net's weight.

        llama.cpp stores the first value head of every key head first, then the second value heads, and so on.
        """
        heads = self._value_heads()
        if heads is None or module in ("norm", "out_proj"):
            return None
        config = self.config
        values = config.linear_num_value_heads
        if module not in ("in_proj_qkv", "conv1d"):
            return _expanded(heads, rows // values)
        before = 2 * config.linear_num_key_heads * config.linear_key_head_dim  # queries and keys
        own = _expanded(heads, (rows - before) // values)
        return [*range(before), *(before + row for row in own)]

    def columns(self, name: str) -> list[int] | None:
        """Returns, in transformers' order, a matrix's column numbers in the file; None if the order is the same."""
        if self.header.architecture not in DELTA_NETS:
            return None
        if not name.endswith("linear_attn.out_proj.weight"):
            return None
        heads = self._value_heads()
        return None if heads is None else _expanded(heads, self.config.linear_value_head_dim)

    def _value_heads(self) -> list[int] | None:
        """Returns, in transformers' order, the file's numbers of value heads; None if each key head has only one."""
        keys = self.config.linear_num_key_heads
        values = self.config.linear_num_value_heads
        if keys == values:
            return None
        return [number * keys + key for key in range(keys) for number in range(values // keys)]

    def values(self, name: str, stored: Any) -> Any:
        """Returns the values that transformers has for a vector, given the file's values (both are NumPy arrays)."""
        import numpy as np

        if name.endswith(".A_log") and self.header.architecture in DELTA_NETS:
            return np.log(-stored)  # the file has -exp(A_log)
        if self.header.architecture in WHOLE_GAINS and name.endswith("norm.weight"):
            return stored if name.endswith(GATED_NORM) else stored - 1
        return stored


def names_of(header: Header, network: Any) -> GgufNames:
    """Returns the `GgufNames` of a network's parameters, and of the buffers that its checkpoints contain."""
    saved = network.state_dict()
    buffers = {name: values for name, values in network.named_buffers() if name in saved}
    weights = dict(network.named_parameters()) | buffers
    return GgufNames(header, weights, network.config.get_text_config())


def has_mtp(header: Header, layer: int) -> bool:
    """Returns True if the names of a layer's tensors show that it predicts later tokens (MTP)."""
    return any(name.startswith(f"blk.{layer}.nextn.") for name in header.tensors)


def _part_of_mtp(module: str) -> str | None:
    """Returns the file's name of a module around an MTP layer (see PARTS_OF_MTP); None for other modules."""
    part = PARTS_OF_MTP.fullmatch(module)
    return part and f"blk.{part[1]}.nextn.{part[2].replace('.', '_')}"


def _stored_parts(
    name: str, shape: tuple[int, ...], transposed: bool
) -> Iterator[tuple[str, str, str, tuple[int, ...]]]:
    """Yields, for each part of a weight in a file, its name, its module and kind in gguf's table, and its shape.

    A file stores the gates of all experts separately from their up matrices. The names of these parts are the
    module's name with .gate or .up, and with .gate_bias or .up_bias for biases. transposed: the network's matrices
    of experts are transposed.
    """
    known = name
    for own, older in OLDER_NAMES.items():
        known = known.replace(own, older)
    module, _, kind = known.rpartition(".")
    experts = name.rpartition(".")[0]
    suffix = "_bias" if kind.endswith("_bias") else ""
    stored_kind = "bias" if suffix else "weight"
    if transposed and kind in ("gate_up_proj", "down_proj"):
        shape = (shape[0], shape[2], shape[1])
    if kind == f"gate_up_proj{suffix}":
        half = (shape[0], shape[1] // 2, *shape[2:])
        yield f"{experts}.gate{suffix}", f"{module}.gate_proj", stored_kind, half
        yield f"{experts}.up{suffix}", f"{module}.up_proj", stored_kind, half
    elif kind == f"down_proj{suffix}":
        yield f"{experts}.down{suffix}", f"{module}.down_proj", stored_kind, shape
    else:
        yield name, module, kind, shape


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    """Returns a shape without dimensions of 1, which a file may lack."""
    return [size for size in shape if size != 1]


def _expanded(order: list[int], width: int) -> list[int]:
    """Returns the order of rows that results from an order of blocks of `width` rows."""
    return [block * width + row for block in order for row in range(width)]


def _is_left_out(tensor: str, config: Any) -> bool:
    """Returns True for a tensor that a model does not need.

    There are three kinds: tensors of the layers after the last one, which predict later tokens (MTP); copies in an MTP
    layer; and tensors that make keys or values in a layer that uses those of an earlier layer.
    """
    block, _, rest = tensor.removeprefix("blk.").partition(".")
    if not tensor.startswith("blk.") or not rest or not block.isdigit():
        return False
    layers: int = config.num_hidden_layers
    own = layers - getattr(config, "num_kv_shared_layers", 0)
    of_keys = rest.partition(".")[0] in KEYS_AND_VALUES
    return rest in COPIES or int(block) >= (own if of_keys else layers)
