"""Which models can be verified over a tree, and whether an engine computes what the network does."""

from typing import TYPE_CHECKING, Any

import torch

from medusa_cli.backbone.layered import LayeredDecoder, Unsupported
from medusa_cli.backbone.lean import LeanDecoder
from medusa_cli.errors import UserError

if TYPE_CHECKING:
    from medusa_cli.backbone.model import Backbone


@torch.inference_mode()
def check_agreement(backbone: "Backbone", decoder: LeanDecoder | LayeredDecoder) -> None:
    """Raise Unsupported unless a decoder gives the network's states for a few tokens, rounding apart."""
    ids = torch.arange(12, device=backbone.device) * 37 % backbone.vocab_size
    expected = backbone.forward(ids, backbone.new_cache(), logits="none").hidden.float()
    backbone._decoder = decoder
    try:
        found = backbone.forward(ids, backbone.new_cache(), logits="none").hidden.float()
    except RuntimeError as reason:  # shapes that do not fit, such as a rotary part of a head
        raise Unsupported(str(reason).splitlines()[0]) from reason
    finally:
        backbone._decoder = None
    error = float((found - expected).norm() / expected.norm())
    if error > (0.1 if backbone.dtype == torch.bfloat16 else 1e-3):
        raise Unsupported(f"its states differ from the network's own by {error:.1%}")


def layered_decoder(backbone: "Backbone") -> LayeredDecoder:
    """The network's layers one by one, once they have agreed with the network as a whole; else UserError."""
    try:
        layered = LayeredDecoder(backbone.model)
        check_agreement(backbone, layered)
    except Unsupported as reason:
        raise UserError(
            f"the layers of the model {backbone.id!r} cannot be run one by one: {reason}",
            "use a drafter that does not ride in the model's own layers, such as drafter=hydra",
        ) from reason
    return layered


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
