"""Import of DFlash and DSpark folders as written by speculators."""

from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta
from torch import Tensor

from medusa_cli.drafters.incoming_eagle3 import AGAIN, Width, checked_map, levels
from medusa_cli.errors import UserError, shown
from medusa_cli.files.io import convert, nested

TYPES = ("dflash", "dspark")
# Unused parts of checkpoints: the head for a row's confidence, and the model's own matrices.
UNUSED = ("confidence_head.", "embed_tokens.", "verifier_norm.", "verifier_lm_head.")


@dataclass(frozen=True)
class BlockConfig:
    """Holds the fields of config.json that determine the block, with speculators' defaults."""

    block_size: Annotated[int, Meta(ge=1, le=64)] = 8
    draft_vocab_size: Width | None = None
    mask_token_id: int | None = None
    aux_hidden_state_layer_ids: list[int] | None = None
    sample_from_anchor: bool | None = None
    projector_type: str = "dflash"
    markov_rank: int = 0
    markov_head_type: str = "vanilla"


def read_dflash(
    tensors: dict[str, Tensor], config: dict[str, Any], model: Any
) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """Reads a DFlash or DSpark folder; returns settings, tensors and notes.

    Raises UserError for unsupported variants.
    """
    theirs = convert(
        {key: value for key, value in config.items() if value is not None},
        BlockConfig,
        "config.json",
        AGAIN,
    )
    layer = nested(config.get("transformer_layer_config"))
    kinds = layer.get("layer_types")
    variants = {
        "projector_type": theirs.projector_type != "dflash",
        "markov_head_type": theirs.markov_rank > 0 and theirs.markov_head_type != "vanilla",
        "layer_types": isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds),
        "mask_token_id": theirs.mask_token_id is None,
        "aux_hidden_state_layer_ids": not theirs.aux_hidden_state_layer_ids,
    }
    faults = [name for name, fault in variants.items() if fault]
    if faults:
        values = ", ".join(f"{name}={shown(config.get(name))}" for name in faults)
        raise UserError(f"this block drafter is of another kind ({values})", "give another")

    notes = []
    if any(name.startswith("confidence_head.") for name in tensors):
        notes.append("its confidence head is left out: trees grow by the scores")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(UNUSED)}
    anchor = theirs.sample_from_anchor
    if anchor is None:
        anchor = config.get("speculators_model_type") == "dspark"
    vocabulary = theirs.draft_vocab_size or model.vocab_size
    d2t = tensors.pop("d2t", None)
    t2d = tensors.pop("t2d", None)
    kind = "own" if "lm_head.weight" in tensors else "shared"
    if vocabulary != model.vocab_size:
        tensors["draft_ids"] = checked_map(d2t, t2d, vocabulary, model.vocab_size)
        kind = "draft"
    slots = theirs.block_size if anchor else theirs.block_size - 1
    settings = {
        "num_heads": min(levels(config, slots), slots),
        "num_layers": layer.get("num_hidden_layers", 1),
        "vocabulary": kind,
        "matrices": "one",
        "draft_vocab_size": vocabulary,
        "conditional": theirs.markov_rank or None,
        "text": layer,
        "taps": theirs.aux_hidden_state_layer_ids,
        "block_size": theirs.block_size,
        "mask_token_id": theirs.mask_token_id,
        "sample_from_anchor": anchor,
    }
    return settings, tensors, notes
