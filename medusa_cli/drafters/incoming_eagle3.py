"""Import of EAGLE-3 folders as written by SpecForge, speculators and AngelSlim."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from msgspec import Meta
from torch import Tensor

from medusa_cli.errors import UserError
from medusa_cli.files.io import convert, nested

DEFAULT_METHOD = "default_proposal_method"
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
# The number of draft tokens if a checkpoint does not state for how many it was trained: SpecForge's
# default.
LEVELS = 7
AGAIN = "download the checkpoint again"
# Supported variants of the norms.
NORMS = ("norm_before_residual", "norm_before_fc")
# Unsupported variants of the layer: configs that enable one are refused.
VARIANTS = ("fc_norm", "norm_output", "attention_bias", "mlp_bias")
# With larger widths, the sizes of matrices would overflow.
Width = Annotated[int, Meta(ge=1, lt=1 << 24)]


@dataclass(frozen=True)
class LayerConfig:
    """Holds the fields of a drafter's config.json that determine its layer and vocabulary."""

    num_attention_heads: Width
    intermediate_size: Width
    head_dim: Width | None = None
    num_key_value_heads: Width | None = None
    draft_vocab_size: Width | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    norm_before_residual: bool = False
    norm_before_fc: bool = False


def read_eagle3(
    tensors: dict[str, Tensor], config: dict[str, Any], model: Any
) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """Reads an EAGLE-3 folder; returns settings, tensors and notes.

    Key and value heads that several query heads share are copied, one for each query head. Raises
    UserError for unsupported variants of the layer, and for impossible maps and widths.
    """
    plain = flat(config)
    variants = [key for key in (*VARIANTS, "rope_scaling") if plain.get(key)]
    if "speculators_model_type" in config:
        plain = {"norm_before_residual": True, **plain}  # vLLM's default
    if plain.get("rope_type", "default") != "default":  # from rope_parameters
        variants.append("rope_type")
    if plain.get("num_hidden_layers", 1) != 1:
        variants.append("num_hidden_layers")
    if variants:
        fault = f"the layer of this EAGLE-3 drafter is of another kind ({', '.join(variants)})"
        raise UserError(fault, "give another")

    tensors = {
        name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()
    }
    notes = []
    if tensors.pop("embed_tokens.weight", None) is not None:
        notes.append("its embeddings are left out for the model's")
    theirs = convert(
        {key: value for key, value in plain.items() if value}, LayerConfig, "config.json", AGAIN
    )
    heads = theirs.num_attention_heads
    taps = theirs.eagle_aux_hidden_state_layer_ids
    shared = theirs.num_key_value_heads or heads
    size = theirs.head_dim or model.hidden_size // heads
    vocabulary = theirs.draft_vocab_size or model.vocab_size
    depth = model.num_hidden_layers
    taps = taps or [2, depth // 2, depth - 3]

    if heads % shared:
        fault = f"num_attention_heads {heads} is not a multiple of num_key_value_heads {shared}"
        raise UserError(fault, AGAIN)
    if not all(1 <= layer < depth for layer in taps):
        fault = f"the drafter reads the layers {taps}, the model has {depth}"
        raise UserError(fault, "give its own @model")
    for name in ("midlayer.self_attn.k_proj.weight", "midlayer.self_attn.v_proj.weight"):
        tensor = tensors.get(name)
        if tensor is not None and tensor.dim() and len(tensor) == shared * size:
            tensors[name] = (
                tensor.unflatten(0, (shared, size))
                .repeat_interleave(heads // shared, 0)
                .flatten(0, 1)
            )

    d2t = tensors.pop("d2t", None)
    t2d = tensors.pop("t2d", None)
    if vocabulary != model.vocab_size:
        tensors["draft_ids"] = checked_map(d2t, t2d, vocabulary, model.vocab_size)
    settings = {
        "num_heads": levels(config, LEVELS),
        "num_layers": 1,
        "vocabulary": "own" if vocabulary == model.vocab_size else "draft",
        "matrices": "one",
        "intermediate_size": theirs.intermediate_size,
        "num_attention_heads": heads,
        "head_dim": size,
        "draft_vocab_size": vocabulary,
        "rms_norm_eps": theirs.rms_norm_eps,
        "rope_theta": theirs.rope_theta,
        "norm_before_residual": theirs.norm_before_residual,
        "norm_before_fc": theirs.norm_before_fc,
        "taps": taps,
    }
    return settings, tensors, notes


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config without the nesting that speculators and EAGLE use."""
    eagle = nested(config.get("eagle_config"))
    if isinstance(layers := eagle.get(AUX_LAYERS), list):
        eagle = {
            **eagle,
            AUX_LAYERS: [layer + 1 if type(layer) is int else layer for layer in layers],
        }
    plain = eagle | nested(config.get("transformer_layer_config")) | config
    return nested(plain.get("rope_parameters")) | plain


def checked_map(d2t: Tensor | None, t2d: Tensor | None, vocabulary: int, tokens: int) -> Tensor:
    """Returns the draft tokens' ids [M], given d2t, the differences of these ids from 0 .. M - 1.

    Raises UserError unless t2d [V] marks the same tokens.
    """
    if (
        d2t is None
        or t2d is None
        or d2t.shape != (vocabulary,)
        or t2d.shape != (tokens,)
        or d2t.is_floating_point()
    ):
        raise UserError(f"the checkpoint lacks d2t [{vocabulary}] or t2d [{tokens}]", AGAIN)
    ids = d2t.long() + torch.arange(vocabulary)
    if (
        ids.min() < 0
        or ids.max() >= tokens
        or not torch.equal(ids.sort().values, t2d.bool().nonzero()[:, 0])
    ):
        raise UserError("d2t and t2d of the checkpoint contradict each other", AGAIN)
    return ids.to(torch.int32)


def levels(config: dict[str, Any], otherwise: int) -> int:
    """Returns how many tokens a checkpoint was trained to draft, or `otherwise` if it does not state this."""
    own = nested(config.get("speculators_config"))
    entries = own.get("proposal_methods")
    methods = [nested(entry) for entry in entries] if isinstance(entries, list) else []
    named = [entry for entry in methods if entry.get("proposal_type") == own.get(DEFAULT_METHOD)]
    method = next(iter(named or methods), {})
    tokens = method.get("speculative_tokens")
    return tokens if isinstance(tokens, int) and tokens > 0 else otherwise
