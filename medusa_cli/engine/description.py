"""A transformers decoder as the native library runs it: which weights its layers have, and what they compute.

The layers of most decoders consist of the same parts. A network says which of them it has, and
needs no weights for that.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.model.attention import Masks
from medusa_cli.model.backbone import Layers, Unsupported
from medusa_cli.native.library import TABLES

# In the order of the library's numbers.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
# The library's norms of one head's query and key have a buffer of this size.
MAX_HEAD_DIM = 1024


@dataclass(frozen=True)
class LayerNames:
    """The names in transformers' network of one layer's parts, by the library's names.

    kind: of its attention, such as full or sliding. table: the kind of its rotary positions.
    """

    matrices: dict[str, str]
    norms: dict[str, str]
    kind: str
    table: str


@dataclass(frozen=True)
class Description:
    """A decoder: its sizes, the names of its parts, and the constants that they compute with.

    activation: the index in ACTIVATIONS. one_more: norms multiply by 1 + w. window: of sliding
    layers, 0 for none. tables: the kinds of rotary positions.
    """

    sizes: dict[str, int]
    layers: list[LayerNames]
    embedding: str
    head: str
    norm: str
    eps: float
    scale: float
    embedding_scale: float
    activation: int
    one_more: bool
    window: int
    tables: list[str]

    @property
    def matrix_names(self) -> list[str]:
        """Returns the names of all matrices, each once."""
        of_layers = [name for layer in self.layers for name in layer.matrices.values()]
        return list(dict.fromkeys([self.embedding, self.head, *of_layers]))

    @property
    def norm_names(self) -> list[str]:
        """Returns the names of all norms."""
        return [self.norm, *(name for layer in self.layers for name in layer.norms.values())]


def describe(network: Any) -> Description:
    """Reads a network's parts, on any device; raises Unsupported for parts that the library does not have.

    `one_more` is False: only a pass shows it.
    """
    parts = Layers(network)
    config = network.config.get_text_config()
    masks = Masks(config, torch.float32)
    names = {id(module): name for name, module in network.named_modules()}

    layers = []
    eps = {eps_of(parts.base.norm)}
    scales = set()
    activations = set()
    for index, layer in enumerate(parts.layers):
        attention = getattr(layer, "self_attn", None)
        mlp = getattr(layer, "mlp", None)
        matrices = _matrices(attention, mlp)
        norms = _norms(layer, attention)
        eps |= {eps_of(norm) for norm in norms.values()}
        scales.add(getattr(attention, "scaling", None))
        activations.add(_activation_of(mlp.act_fn))  # type: ignore[union-attr]
        layers.append(
            LayerNames(
                matrices={name: names[id(module)] for name, module in matrices.items()},
                norms={name: names[id(module)] for name, module in norms.items()},
                kind=masks.layer_type(index),
                table=parts.kinds[index],
            )
        )
    if None in scales or any(len(values) != 1 for values in (eps, scales, activations)):
        raise Unsupported("its layers differ in ways not known here")

    tables = sorted(set(parts.kinds)) if parts.by_kind else [parts.kinds[0]]
    if len(tables) > TABLES:
        raise Unsupported("it has more rotary tables than the library takes")
    head = network.get_output_embeddings()
    tied = bool(getattr(config, "tie_word_embeddings", False)) and head.bias is None
    embedding = names[id(parts.base.embed_tokens)]
    return Description(
        sizes=_sizes(network, config, parts),
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


def _sizes(network: Any, config: Any, parts: Layers) -> dict[str, int]:
    """Returns a decoder's sizes by the library's names."""
    first = parts.layers[0]
    heads = config.num_attention_heads
    kv = getattr(config, "num_key_value_heads", None) or heads
    dim = first.self_attn.q_proj.out_features // heads
    if first.self_attn.k_proj.out_features != kv * dim or dim > MAX_HEAD_DIM:
        raise Unsupported("its heads have sizes not known here")
    return {
        "layers": len(parts.layers),
        "hidden": config.hidden_size,
        "heads": heads,
        "kv": kv,
        "dim": dim,
        "inner": first.mlp.gate_proj.out_features,
        "vocab": network.get_input_embeddings().weight.shape[0],
    }


def _matrices(attention: Any, mlp: Any) -> dict[str, nn.Linear]:
    """Returns the linear layers of a decoder layer by the library's names."""
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
    """Returns the norms of a decoder layer by the library's names."""
    names = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if hasattr(layer, "post_feedforward_layernorm"):  # Gemma: norms after attention and MLP, too
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


def eps_of(norm: Any) -> float:
    """Returns the epsilon of a norm; raises Unsupported unless it has the parts of an RMS norm."""
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    weight = getattr(norm, "weight", None)
    is_vector = weight is not None and weight.dim() == 1
    if eps is None or not is_vector or getattr(norm, "bias", None) is not None:
        raise Unsupported(f"{type(norm).__name__} is not an RMS norm")
    return float(eps)


def _activation_of(function: Any) -> int:
    """Returns the library's number of an activation function, by its values."""
    probe = torch.linspace(-6, 6, 101)
    values = function(probe)
    for number, known in enumerate(ACTIVATIONS.values()):
        if torch.allclose(values, known(probe), atol=1e-6):
            return number
    raise Unsupported(f"its activation {type(function).__name__} is not known here")
