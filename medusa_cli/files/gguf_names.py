"""Where a GGUF file holds a network's weights, and what it stores in another order or form than transformers."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from medusa_cli.errors import shown
from medusa_cli.files.gguf_header import Header

# Gains of norms are stored as they are, where transformers' weights are the gains less one.
WHOLE_GAINS = ("gemma2", "gemma3", "qwen35")
# The gated norm of a delta net's heads, which is no such norm.
GATED_NORM = "linear_attn.norm.weight"
# Rotary frequencies, which are a config's.
FREQUENCIES = "rope_freqs.weight"
# Names of weights that gguf's table has by older ones.
OLDER_NAMES = (
    ("linear_attn.dt_bias", "linear_attn.dt_proj.bias"),
    ("layer_scalar", "layer_scalar.weight"),
)
# Buffers that are weights.
BUFFERS = ("layer_scalar",)


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
        self.shapes: dict[str, tuple[int, ...]] = {}  # in the network
        for name, module, kind, shape in _all_parts(network):
            known = names.get_name(module)
            tensor = names.get_name(name) if known is None else f"{known}.{kind}"
            if tensor not in header.tensors:
                raise ValueError(f"it lacks {shown(str(tensor))}, the weight {name}")
            stored_shape = header.tensors[tensor].shape
            if stored_shape != _without_ones(shape):
                raise ValueError(
                    f"its {shown(tensor)} has the shape {[*stored_shape]}, the model needs {[*shape]}"
                )
            if not _is_readable(header.tensors[tensor].type):
                raise ValueError(f"its {shown(tensor)} has the type {header.tensors[tensor].type}")
            self.tensors[name] = tensor
            self.shapes[name] = shape
        unused = set(header.tensors) - set(self.tensors.values()) - {FREQUENCIES}
        left = {name for name in unused if not _is_later_layer(name, config.num_hidden_layers)}
        if left:
            raise ValueError(f"the model has no place for its tensor {shown(min(left))}")
        self.config = config

    def order(self, name: str) -> list[int] | None:
        """Returns the rows of a weight in the file in the order that transformers has, or None if it is the same."""
        module, _, part = name.rpartition(".")
        module = module.rpartition(".")[2] if part in ("weight", "bias") else part
        rows = self.header.tensors[self.tensors[name]].shape[0]
        if self.header.architecture == "llama":
            return self._order_of_llama(module, rows)
        if self.header.architecture == "qwen35" and ".linear_attn." in name:
            return self._order_of_delta_net(module, rows)
        return None

    def _order_of_llama(self, module: str, rows: int) -> list[int] | None:
        """llama.cpp alternates the halves of a llama's head, which rotate together."""
        config = self.config
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        if module not in heads:
            return None
        dim = rows // heads[module]
        pairs = range(dim // 2)
        return [
            first + 2 * pair + half
            for first in range(0, rows, dim)
            for half in (0, 1)
            for pair in pairs
        ]

    def _order_of_delta_net(self, module: str, rows: int) -> list[int] | None:
        """llama.cpp has the first value head of each key head first, then the second ones, and so on."""
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
        """Returns the inputs of a matrix in the file in the order that transformers has, or None if it is the same."""
        if self.header.architecture != "qwen35" or not name.endswith("linear_attn.out_proj.weight"):
            return None
        heads = self._value_heads()
        return None if heads is None else _expanded(heads, self.config.linear_value_head_dim)

    def _value_heads(self) -> list[int] | None:
        """Returns a delta net's value heads in transformers' order, None if each key head has one."""
        keys = self.config.linear_num_key_heads
        values = self.config.linear_num_value_heads
        if keys == values:
            return None
        return [number * keys + key for key in range(keys) for number in range(values // keys)]

    def values(self, name: str, stored: Any) -> Any:
        """Returns the numbers of a vector, an array, as transformers has them."""
        import numpy as np

        if name.endswith(".A_log") and self.header.architecture == "qwen35":
            return np.log(-stored)  # the file has -exp(A_log)
        if self.header.architecture in WHOLE_GAINS and name.endswith("norm.weight"):
            return stored if name.endswith(GATED_NORM) else stored - 1
        return stored


def _all_parts(network: Any) -> Iterator[tuple[str, str, str, tuple[int, ...]]]:
    """Yields what a file holds of a network: name, module and kind by gguf's table, and shape."""
    buffers = (item for item in network.named_buffers() if item[0].endswith(BUFFERS))
    for name, weight in (*network.named_parameters(), *buffers):
        yield from _stored_parts(name, tuple(weight.shape))


def _stored_parts(
    name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, str, str, tuple[int, ...]]]:
    """Yields what a file holds of a weight: its name, the module and kind by gguf's table, and its shape.

    A file has the gates of all experts apart from their up matrices; both are named as their
    module, with .gate and .up.
    """
    known = name
    for ours, older in OLDER_NAMES:
        known = known.removesuffix(ours) + older if known.endswith(ours) else known
    module, _, kind = known.rpartition(".")
    if kind == "gate_up_proj":
        half = (shape[0], shape[1] // 2, shape[2])
        yield f"{module}.gate", f"{module}.gate_proj", "weight", half
        yield f"{module}.up", f"{module}.up_proj", "weight", half
    elif kind == "down_proj":
        yield f"{module}.down", f"{module}.down_proj", "weight", shape
    else:
        yield name, module, kind, shape


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape that a file has: a convolution's middle dimension, of 1, is left out."""
    return (shape[0], *shape[2:]) if len(shape) == 3 and shape[1] == 1 else shape


def _expanded(order: list[int], width: int) -> list[int]:
    """Returns an order of blocks of `width` rows as an order of rows."""
    return [block * width + row for block in order for row in range(width)]


def _is_later_layer(tensor: str, layers: int) -> bool:
    """Returns True for a tensor of a layer behind the model's, which predicts later tokens (MTP)."""
    block, _, rest = tensor.removeprefix("blk.").partition(".")
    return tensor.startswith("blk.") and bool(rest) and block.isdigit() and int(block) >= layers


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
