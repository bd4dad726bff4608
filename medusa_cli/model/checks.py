"""Which models can be verified over a tree at all."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta

from medusa_cli.errors import UserError, first_line, shown
from medusa_cli.runs.io import read_as

# What architectures do to the lm_head's scores: most logits are those as they are.
SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier")
CAPS = ("final_logit_softcapping", "logits_soft_cap")


def refuse_unsupported(config: Any) -> None:
    """Raise UserError, with the reason, for a model whose attention the tree mask cannot express, or whose logits are
    not its lm_head's scores: sampling and the distributions that training aims at would not be the model's own."""
    text = config.get_text_config()
    why = ""
    if getattr(config, "is_encoder_decoder", False):
        why = "it is an encoder-decoder, not a causal LM"
    elif getattr(text, "attn_logit_softcapping", None):
        why = "its attention logits are soft-capped"
    elif not hasattr(text, "max_position_embeddings") or not hasattr(text, "num_attention_heads"):
        why = "it has no position-indexed softmax attention"
    else:
        kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if kinds:
            why = f"it has layers of kind {', '.join(sorted(kinds))}"
    if why:
        raise UserError(
            f"the model type {text.model_type!r} cannot be verified over a tree: {why}",
            "use a decoder with full or sliding-window softmax attention (Llama, Mistral, Qwen, Gemma 3, ...)",
        )
    values = {key: getattr(text, key, None) for key in (*SCALES, *CAPS)}
    changed = [f"{key}={one}" for key, one in values.items() if one is not None and not (key in SCALES and one == 1)]
    if changed:
        raise UserError(
            f"the model type {text.model_type!r} changes its logits after the lm_head ({', '.join(changed)}), "
            "which sampling and training here do not know",
            "use a model whose logits are the lm_head's own (Llama, Mistral, Qwen, Gemma 3, ...)",
        )


# Rotary tables that change once a text outgrows the context that the model was first trained for: what lies in the
# cache by then was turned by the old ones, and a tree's rows on both sides of that place would need both.
CHANGING_ROPE = ("longrope", "dynamic")


def usable_positions(config: Any) -> int:
    """The positions that a model is run for: its context, or its original one where its rotary tables change there."""
    most = int(config.max_position_embeddings)
    scaling = getattr(config, "rope_scaling", None) or getattr(config, "rope_parameters", None) or {}
    if scaling.get("rope_type", scaling.get("type")) not in CHANGING_ROPE:
        return most
    original = scaling.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    return min(most, int(original or most))


# Tokens of the probe pass.
PROBE = 4


@dataclass(frozen=True)
class Sizes:
    """The sizes in a model's config.json, where it names them, and the most that any model has by far."""

    num_hidden_layers: Annotated[int, Meta(ge=1, le=1024)] | None = None
    hidden_size: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    intermediate_size: Annotated[int, Meta(ge=1, le=1 << 24)] | list[int] | None = None
    num_attention_heads: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    num_key_value_heads: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    head_dim: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    vocab_size: Annotated[int, Meta(ge=1, le=1 << 26)] | None = None
    max_position_embeddings: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None
    text_config: "Sizes | None" = None


def check_config(folder: str) -> None:
    """UserError where the config of a model folder names sizes that cannot be; before a layer is made of them."""
    path = Path(folder) / "config.json"
    if path.exists():
        read_as(path, Sizes, "the model's config", "get the model again")


def check_complete(info: dict[str, Any], model: str) -> None:
    """UserError where tensors of a network were not in its files: they would be random numbers."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"@model {model!r}: its files lack {len(missing)} tensors of the network, such as {shown(missing[0])}",
            "get the model again",
        )


def check_ends(owners: Sequence[Any], model: str) -> None:
    """UserError where a config or a tokenizer names something that is no token id as the end of an answer."""
    for owner in owners:
        found = getattr(owner, "eos_token_id", None)
        if not all(
            type(one) is int for one in (found if isinstance(found, list) else [] if found is None else [found])
        ):
            raise UserError(f"@model {model!r}: eos_token_id={shown(found)} is no token id", "get the model again")


@torch.no_grad()
def check_finite(network: Any, model: str) -> None:
    """UserError for a network that a tree cannot be verified with, or whose pass over a few tokens is not finite."""
    refuse_unsupported(network.config)
    rows = network.get_input_embeddings().weight
    ids = torch.arange(PROBE, device=rows.device)[None] % len(rows)
    try:
        finite = bool(torch.isfinite(network(input_ids=ids).logits).all())
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as reason:
        if isinstance(reason, torch.OutOfMemoryError):
            raise
        raise UserError(
            f"@model {model!r} cannot be run: {first_line(reason)}", "check its config.json, or get it again"
        ) from reason
    if not finite:
        kind = str(rows.dtype).removeprefix("torch.")
        raise UserError(
            f"@model {model!r} computes numbers that are not finite in {kind}: its weights are damaged, or need more "
            "range",
            "get the model again, or try @dtype fp32",
        )
