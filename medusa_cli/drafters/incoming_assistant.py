"""Import of Gemma 4's assistants in their publisher's format."""

from typing import Any

from torch import Tensor

from medusa_cli.errors import UserError
from medusa_cli.files.io import nested
from medusa_cli.files.mtp_layer import LEVELS

TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
CLUSTERS = "masked_embedding."


def read_assistant(
    tensors: dict[str, Tensor], config: dict[str, Any], model: Any
) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """Reads an assistant; returns settings, tensors and notes. Raises UserError for an assistant of another model."""
    size = config.get("backbone_hidden_size")
    tokens = nested(config.get("text_config")).get("vocab_size", model.vocab_size)
    if size != model.hidden_size or tokens != model.vocab_size:
        raise UserError(
            f"the assistant is for hidden size {size} and vocabulary {tokens}, "
            f"the model has {model.hidden_size} and {model.vocab_size}",
            "give its own @model",
        )
    notes = []
    if any(name.startswith(CLUSTERS) for name in tensors):
        notes.append("its clusters of tokens are left out: all tokens are scored")
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(CLUSTERS) and name != "lm_head.weight"
    }
    settings = {"num_heads": LEVELS, "num_layers": 1, "vocabulary": "shared", "text": config}
    return settings, kept, notes
