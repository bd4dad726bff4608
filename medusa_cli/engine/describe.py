"""Describes a network by its modules, without loading weights: most decoders consist of the same few kinds of parts."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from medusa_cli.engine.description import XIELU_VECTORS, Description, Inputs, LayerNames
from medusa_cli.engine.experts import Experts, Part, Routing, experts_of, has_experts
from medusa_cli.engine.mixers import Mixer, mixers_of
from medusa_cli.engine.probes import (
    ACTIVATION_NAMES,
    activation_of_experts,
    activation_of_mlp,
    embedding_scale,
    eps_of,
    eps_without_gain,
    first_of,
    has_gain,
    is_xielu,
    norm_kind,
    norms_first,
    plain_attributes,
    quarter_turn,
    rotary_of,
    turning_of,
)
from medusa_cli.model.backbone import Layers, Unsupported, has_tied_head
from medusa_cli.model.masks import Masks
from medusa_cli.native.library import PATHS, TABLES

# The size of the buffer in which the library normalizes one head's query or key.
MAX_HEAD_DIM = 1024

# The library's names of a layer's matrices, mapped to their names in transformers' networks.
ATTENTION_MATRICES = {
    "query": ("q_proj",),
    "key": ("k_proj",),
    "value": ("v_proj",),
    "out": ("o_proj", "dense", "out_proj"),
}
MLP_MATRICES = {
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "fc1", "c_fc", "w3"),
    "down": ("down_proj", "fc2", "c_proj", "output_linear", "w2"),
}
# The names of matrices that hold several of these matrices.
JOINED_ATTENTION = ("qkv_proj",)
JOINED_MLP = ("gate_up_proj", "input_linear")
MLP_NAMES = ("mlp", "block_sparse_moe", "feed_forward")
SHARED_NAMES = ("shared_expert", "shared_experts", "shared_mlp")
HEAD_NORMS = {
    "query_norm": ("q_norm", "q_layernorm", "query_layernorm"),
    "key_norm": ("k_norm", "k_layernorm", "key_layernorm"),
}
# The names of BitNet's norms before the matrix `out` in attention and before `down` in the MLP.
ATTENDED_NORM, INNER_NORM = "attn_sub_norm", "ffn_sub_norm"
# The matrices and the norm for the additional inputs of layers (Gemma 4's per-layer embeddings).
INPUT_MATRICES = {"input_gate": "per_layer_input_gate", "input_out": "per_layer_projection"}
INPUT_NORM = "post_per_layer_input_norm"
# The norms before and after attention and before and after the MLP, with their names by family.
NORM_PLACES = ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
NORM_NAMES = (
    ("input_layernorm", None, "post_attention_layernorm", None),  # Llama
    ("attention_layernorm", None, "feedforward_layernorm", None),  # Apertus
    ("input_layernorm", None, "pre_feedforward_layernorm", None),  # VaultGemma
    ("operator_norm", None, "ffn_norm", None),  # LFM2
    ("input_layernorm", None, "input_layernorm", None),  # Cohere, Phi: parallel
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),  # OLMo 2
    # Gemma.
    (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    # GLM-4.
    (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
)


@dataclass(frozen=True)
class _Rows:
    """Rows first .. end - 1 of a linear layer or, with `every`, of each block of `every` rows."""

    linear: nn.Linear
    first: int
    end: int
    every: int | None = None

    @property
    def count(self) -> int:
        times = self.linear.out_features // self.every if self.every else 1
        return times * (self.end - self.first)

    def stored(self, module: str, name: str) -> tuple[str, Part | None]:
        """Returns the name under which these rows are stored, and the part of the layer's weight that they are.

        module: the name of the linear layer. name: the library's name of the rows. The part is None if they are the
        whole weight; they are then stored under the layer's name.
        """
        if self.count == self.linear.out_features:
            return module, None
        part = Part(f"{module}.weight", f"{module}.bias", self.first, self.end, self.every)
        return f"{module}.{name}", part


def describe(network: Any) -> Description:
    """Describes a network on any device; raises Unsupported if it has parts that the library lacks."""
    reader = _Reader(network)
    for index in range(len(reader.parts.layers)):
        reader.read_layer(index)
    parts = reader.parts
    config = reader.config
    names = reader.names
    shared = reader.shared

    tables = sorted(set(parts.kinds)) if parts.by_kind else [parts.kinds[0]]
    if len(tables) > TABLES:
        raise Unsupported("it has more rotary tables than the library takes")
    head = network.get_output_embeddings()
    tied = has_tied_head(network) and head.bias is None
    embedding = names[id(parts.base.embed_tokens)]
    window = reader.masks.window
    turns = quarter_turn(reader.first_attending.self_attn)
    return Description(
        sizes={
            "layers": len(parts.layers),
            "hidden": config.hidden_size,
            "heads": config.num_attention_heads,
            "vocab": network.get_input_embeddings().weight.shape[0],
            **{name: shared.only(name, 0) for name in PATHS if name != "delta_layers"},
            "delta_layers": sum(
                mixer is not None and mixer.kind == "delta_net" for mixer in reader.mixers
            ),
        },
        layers=reader.layers,
        parts=reader.stored_parts,
        embedding=embedding,
        head=embedding if tied else names[id(head)],
        norm=reader.norm_name(parts.norm),
        eps=shared.only("eps"),
        scale=float(shared.only("scale")),
        embedding_scale=embedding_scale(parts.base),
        residual=float(shared.only("residual")),
        cap=float(shared.only("cap")),
        clip=float(shared.only("clip")),
        activation=shared.only("activation"),
        flags={
            "centered": shared.only("centered"),
            "whole_norms": shared.only("whole_norms", False),
            "late_norms": shared.only("late_norms", False),
            "pairs": turns == [-1, 0, -3, 2],
            "reversed": turns == [2, 3, 0, -1],
            "parallel": shared.only("parallel"),
            "first_norm": norms_first(parts, reader.masks),
            "value_norms": shared.only("value_norms"),
        },
        one_more=shared.only("one_more", False),
        routing=shared.only("routing", Routing()),
        window=0 if math.isinf(window) else int(window),
        tables=tables,
        inputs=_inputs(parts.base, names, shared),
    )


@dataclass(frozen=True)
class _LayerParts:
    """The modules of one layer.

    matrices, norms: the library's names, mapped to rows of linear layers and to norms. attention: None
    in a layer with another mixer.
    """

    matrices: dict[str, _Rows]
    norms: dict[str, Any]
    attention: Any
    mlp: Any
    experts: Experts | None
    mixer: Mixer | None


@dataclass(frozen=True)
class _Turning:
    """Tells whether a layer rotates its queries and keys, and whether their norms come after the rotation."""

    turns: bool = False
    late_norms: bool = False


class _Reader:
    """Reads the layers of a network in order, and collects the facts that they share."""

    def __init__(self, network: Any) -> None:
        self.parts = Layers(network)
        self.config = network.config.get_text_config()
        self.masks = Masks(self.config, torch.float32)
        self.names = {id(module): name for name, module in network.named_modules()}
        self.mixers = mixers_of(self.parts.base, self.parts.layers, self.names)
        self.shared = _Shared(self.config.hidden_size)
        self.shared.add_norm(self.parts.norm)
        self.layers: list[LayerNames] = []
        self.stored_parts: dict[str, Part] = {}
        self._rotary = rotary_of(network)
        self._turning: dict[Any, _Turning] = {}
        # By kind of attention: the layer whose keys and values later layers share.
        self._owners: dict[str, LayerNames] = {}
        layers = zip(self.parts.layers, self.mixers, strict=True)
        attending = [layer for layer, mixer in layers if mixer is None]
        if not attending:
            raise Unsupported("it has no attention")
        self.first_attending = attending[0]

    def read_layer(self, index: int) -> None:
        """Adds the names of a layer's parts to `layers`, and its facts to `shared`."""
        layer = self.parts.layers[index]
        own = self._parts_of(layer, self.mixers[index])
        kind = self.masks.layer_type(index)
        shares_keys = own.mixer is None and "key" not in own.matrices
        owner = self._owners.get(kind) if shares_keys else None
        turning = self._turning_of(index, own, owner)
        kv, dim = self._heads_of(own, owner)
        self._add_facts(layer, own, dim)
        if "query_norm" in own.norms and owner is None:
            self.shared.add(late_norms=turning.late_norms)

        matrices = self._stored_matrices(own)
        vectors = self._vectors(layer, own)
        number = 0 if own.mixer is None else own.mixer.number
        if owner is not None:
            place = owner.place
        else:
            place = len({earlier.place for earlier in self.layers if earlier.mixer == number})
        self.layers.append(
            LayerNames(
                matrices=matrices,
                norms={name: self.norm_name(norm) for name, norm in own.norms.items()},
                vectors=vectors,
                kind=kind,
                table=self.parts.kinds[index] if turning.turns else None,
                experts=0 if own.experts is None else own.experts.count,
                kv=kv,
                dim=dim,
                mixer=number,
                place=place,
            )
        )
        if getattr(own.attention, "store_full_length_kv", False):
            self._owners[kind] = self.layers[-1]

    def norm_name(self, norm: Any) -> str:
        """Returns the name of a norm, or an empty name if it has no gain."""
        return self.names[id(norm)] if has_gain(norm) else ""

    def _parts_of(self, layer: Any, mixer: Mixer | None) -> _LayerParts:
        attention = getattr(layer, "self_attn", None)
        mlp = first_of(layer, MLP_NAMES)
        matrices = _input_matrices(layer)
        if mixer is None:
            matrices |= _attention_matrices(attention)
        experts = None
        if has_experts(mlp):
            experts = experts_of(mlp, self.names[id(mlp)])
            shared_mlp = first_of(mlp, SHARED_NAMES) or first_of(layer, SHARED_NAMES)
            if shared_mlp is not None:
                own = _mlp_matrices(shared_mlp)
                matrices |= {f"shared_{name}": rows for name, rows in own.items()}
        else:
            matrices |= _mlp_matrices(mlp)
        norms = _norms(layer) | _head_norms(attention) | _last_norms(attention, mlp)
        return _LayerParts(matrices, norms, attention, mlp, experts, mixer)

    def _turning_of(self, index: int, own: _LayerParts, owner: LayerNames | None) -> _Turning:
        if owner is not None:
            return _Turning(owner.table is not None)
        if own.mixer is not None:
            return _Turning()
        # Layers with the same attributes rotate queries and keys in the same way.
        alike = self.masks.layer_type(index), *plain_attributes(own.attention)
        if alike not in self._turning:
            query_norm = own.norms.get("query_norm")
            self._turning[alike] = _Turning(
                *turning_of(self.parts, index, self._rotary, query_norm)
            )
        return self._turning[alike]

    def _heads_of(self, own: _LayerParts, owner: LayerNames | None) -> tuple[int, int]:
        """Returns the number and width of a layer's key heads, zeros without attention.

        Raises Unsupported for sizes that the library lacks.
        """
        if own.mixer is not None:
            return 0, 0
        heads = self.config.num_attention_heads
        dim = own.matrices["query"].count // heads
        keys = owner.kv * dim if owner is not None else own.matrices["key"].count
        if not 0 < dim <= min(MAX_HEAD_DIM, keys) or heads % (keys // dim):
            raise Unsupported("its heads have sizes that are not supported")
        kv = keys // dim
        return kv, dim

    def _add_facts(self, layer: Any, own: _LayerParts, dim: int) -> None:
        shared = self.shared
        for norm in own.norms.values():
            shared.add_norm(norm)
        if own.experts is not None:
            shared.add(routing=own.experts.routing)
        if own.mixer is None:
            shared.add(
                scale=getattr(own.attention, "scaling", None),
                cap=getattr(own.attention, "attn_logit_softcapping", None) or 0.0,
                clip=_clip_of(own.attention),
            )
        else:
            shared.add(**own.mixer.sizes)
            if own.mixer.norm is not None:
                shared.add(eps=eps_of(own.mixer.norm))
        attention_norm = own.norms.get("attention_norm")
        if own.experts is None:
            activation = activation_of_mlp(own.mlp)
        else:
            activation = activation_of_experts(own.mlp.experts)
        shared.add(
            residual=getattr(layer, "residual_multiplier", 1.0),
            activation=activation,
            parallel=attention_norm is own.norms.get("mlp_norm") is not None,
        )
        if "query_norm" in own.norms:
            norm = own.norms["query_norm"]
            shared.add(whole_norms=has_gain(norm) and norm.weight.numel() != dim)
        if "key" in own.matrices:
            shared.add(value_norms=_has_value_norm(own.attention))

    def _stored_matrices(self, own: _LayerParts) -> dict[str, str]:
        """Returns the names of a layer's matrices, and records those that are parts of stored matrices."""
        stored = {}
        for name, rows in own.matrices.items():
            stored[name], part = rows.stored(self.names[id(rows.linear)], name)
            if part is not None:
                self.stored_parts[stored[name]] = part
        if own.mixer is not None:
            stored |= own.mixer.matrices
        if own.experts is not None:
            stored |= own.experts.matrices
            self.stored_parts |= own.experts.parts
        return stored

    def _vectors(self, layer: Any, own: _LayerParts) -> dict[str, str]:
        """Returns the names of a layer's vectors that are not norms."""
        vectors = {}
        if getattr(own.attention, "sinks", None) is not None:
            vectors["sinks"] = f"{self.names[id(own.attention)]}.sinks"
        if getattr(layer, "layer_scalar", None) is not None:
            vectors["scalar"] = f"{self.names[id(layer)]}.layer_scalar"
        if own.mixer is not None:
            vectors |= own.mixer.vectors
        if own.experts is not None:
            vectors |= own.experts.vectors
        activation = first_of(own.mlp, ACTIVATION_NAMES)
        if is_xielu(activation):
            vectors |= {name: f"{self.names[id(activation)]}.{name}" for name in XIELU_VECTORS}
        return vectors


class _Shared:
    """Facts that the library stores once for all layers."""

    def __init__(self, hidden: int) -> None:
        self.hidden = hidden
        self.values: dict[str, set[Any]] = defaultdict(set)
        self.kinds: dict[type, tuple[bool, bool]] = {}

    def add(self, **facts: Any) -> None:
        for name, value in facts.items():
            self.values[name].add(value)

    def add_norm(self, norm: Any) -> None:
        """Adds a norm's epsilon and kind; raises Unsupported if the library does not have such a norm."""
        gain = has_gain(norm)
        eps = eps_of(norm) if gain else eps_without_gain(norm, self.hidden)
        if type(norm) not in self.kinds:
            self.kinds[type(norm)] = norm_kind(norm, eps, self.hidden)
        centered, one_more = self.kinds[type(norm)]
        self.add(eps=eps, centered=centered)
        if gain:
            self.add(one_more=one_more)

    def only(self, name: str, default: Any = None) -> Any:
        """Returns a fact's value, or `default` if no layer has it.

        Raises Unsupported if layers differ in the value, or if the value is None.
        """
        values = self.values[name] or {default}
        if len(values) != 1 or None in values:
            raise Unsupported(f"its layers differ in ways that are not supported ({name})")
        return next(iter(values))


def _attention_matrices(attention: Any) -> dict[str, _Rows]:
    """Returns the matrices of an attention module by the library's names."""
    matrices = _linears(attention, ATTENTION_MATRICES)
    joined = first_of(attention, JOINED_ATTENTION)
    if joined is not None and "out" in matrices:
        queries = matrices["out"].linear.in_features
        keys = (joined.out_features - queries) // 2
        matrices |= _cut(joined, {"query": queries, "key": keys, "value": keys})
    if getattr(attention, "is_kv_shared_layer", False):
        return _complete(matrices, ("query", "out"))
    if getattr(attention, "use_alternative_attention", False) and "key" in matrices:
        matrices["value"] = matrices["key"]
    return _without_gate(attention, _complete(matrices, ATTENTION_MATRICES))


def _without_gate(attention: Any, matrices: dict[str, _Rows]) -> dict[str, _Rows]:
    """Splits the query matrix if an output gate follows the query of each head (Qwen3.5)."""
    linear = matrices["query"].linear
    dim = getattr(attention, "head_dim", None)
    if dim is None or matrices["query"].count != 2 * matrices["out"].linear.in_features:
        return matrices
    gates = {
        "query": _Rows(linear, 0, dim, 2 * dim),
        "output_gate": _Rows(linear, dim, 2 * dim, 2 * dim),
    }
    return matrices | gates


def _input_matrices(layer: Any) -> dict[str, _Rows]:
    """Returns the matrices for a layer's additional inputs, by the library's names.

    The result is empty if the layer has no such inputs.
    """
    if getattr(layer, INPUT_NORM, None) is None:
        return {}
    return _complete(
        _linears(layer, {name: (own,) for name, own in INPUT_MATRICES.items()}), INPUT_MATRICES
    )


def _mlp_matrices(mlp: Any) -> dict[str, _Rows]:
    """Returns the matrices of an MLP by the library's names; the gate is optional."""
    matrices = _linears(mlp, MLP_MATRICES)
    joined = first_of(mlp, JOINED_MLP)
    if joined is not None:
        half = joined.out_features // 2
        matrices |= _cut(joined, {"gate": half, "up": half})
    return _complete(matrices, ("up", "down"))


def _linears(owner: Any, names: dict[str, tuple[str, ...]]) -> dict[str, _Rows]:
    linears = {name: first_of(owner, own) for name, own in names.items()}
    return {
        name: _Rows(linear, 0, getattr(linear, "out_features", 0))
        for name, linear in linears.items()
        if linear is not None
    }


def _cut(linear: Any, counts: dict[str, int]) -> dict[str, _Rows]:
    """Splits a linear layer into parts with these numbers of rows."""
    parts = {}
    first = 0
    for name, count in counts.items():
        parts[name] = _Rows(linear, first, first + count)
        first += count
    return parts


def _complete(
    matrices: dict[str, _Rows], wanted: Sequence[str] | dict[str, Any]
) -> dict[str, _Rows]:
    """Returns `matrices`; raises Unsupported if a matrix is missing or is not a plain linear layer."""
    for name in wanted:
        if name not in matrices:
            raise Unsupported(f"its layers have no plain {name} matrix")
    for name, rows in matrices.items():
        if type(rows.linear) is not nn.Linear:
            raise Unsupported(f"its layers have no plain {name} matrix")
    return matrices


def _norms(layer: Any) -> dict[str, Any]:
    """Returns the norms around a layer's attention and MLP by the library's names."""
    own = {name: module for name, module in layer.named_children() if "norm" in name}
    of_inputs = own.pop(INPUT_NORM, None)
    for names in NORM_NAMES:
        if set(names) - {None} == set(own):
            norms = {
                place: own[name]
                for place, name in zip(NORM_PLACES, names, strict=True)
                if name is not None
            }
            return norms if of_inputs is None else {**norms, "input_norm": of_inputs}
    raise Unsupported("the places of its norms are not supported")


def _head_norms(attention: Any) -> dict[str, Any]:
    """Returns the norms of queries and keys by the library's names."""
    norms = {name: first_of(attention, own) for name, own in HEAD_NORMS.items()}
    return {name: norm for name, norm in norms.items() if norm is not None}


def _last_norms(attention: Any, mlp: Any) -> dict[str, Any]:
    """Returns the norms before the last matrices of attention and the MLP by the library's names."""
    norms = {
        "attended_norm": getattr(attention, ATTENDED_NORM, None),
        "inner_norm": getattr(mlp, INNER_NORM, None),
    }
    return {name: norm for name, norm in norms.items() if norm is not None}


def _has_value_norm(attention: Any) -> bool:
    """Returns True if attention normalizes values; raises Unsupported if that norm has a gain."""
    norm = getattr(attention, "v_norm", None)
    if getattr(norm, "weight", None) is not None:
        raise Unsupported("its norms of values have gains")
    return norm is not None


def _clip_of(attention: Any) -> float:
    """Returns the limit for queries, keys and values, 0 for none; raises Unsupported if a limit is not positive."""
    clip = getattr(getattr(attention, "config", None), "clip_qkv", None)
    if clip is None:
        return 0.0
    if not clip > 0:
        raise Unsupported("its bound of queries, keys and values is not positive")
    return float(clip)


def _inputs(base: Any, names: dict[int, str], shared: "_Shared") -> Inputs | None:
    """Describes the additional inputs of layers; returns None if there are none."""
    embedding = getattr(base, "embed_tokens_per_layer", None)
    if embedding is None:
        return None
    norm = base.per_layer_projection_norm
    shared.add_norm(norm)
    return Inputs(
        width=norm.weight.numel(),
        embedding=names[id(embedding)],
        embedding_scale=float(embedding.scalar_embed_scale),
        projection=names[id(base.per_layer_model_projection)],
        norm=names[id(norm)],
        scale=float(base.per_layer_model_projection_scale),
        factor=float(base.per_layer_input_scale),
    )
