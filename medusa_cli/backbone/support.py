"""Which models can be verified over a tree at all."""

from typing import Any

from medusa_cli.errors import UserError

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
