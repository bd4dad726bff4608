"""A model's tokenizer and sizes without its weights: what distilling through a server needs of it."""

import sys
from typing import Any

from medusa_cli import assets
from medusa_cli.errors import UserError, first_line


class Tokenizer:
    """What lays out a model's conversations and tells its end tokens; UserError where it cannot be loaded.

    chat_template takes the place of the tokenizer's own. trust_remote_code lets Python files of the model's run.
    """

    def __init__(self, model: str, chat_template: str | None = None, trust_remote_code: bool = False) -> None:
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        source = assets.model_dir(model)
        self.id = model
        try:
            config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code).get_text_config()
            self.tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as reason:
            if "trust_remote_code" in str(reason):
                raise assets.untrusted(model) from reason
            raise UserError(
                f"@model {model!r}: its tokenizer could not be loaded: {first_line(reason)}",
                "give the folder or hub id of the model that the server serves",
            ) from reason
        if chat_template is not None:
            self.tokenizer.chat_template = chat_template
        try:
            generation: Any = GenerationConfig.from_pretrained(source)
        except OSError:
            generation = None
        ids: set[int] = set()
        for owner in (generation, config, self.tokenizer):
            found = getattr(owner, "eos_token_id", None)
            ids.update(found if isinstance(found, list) else [] if found is None else [found])
        self.eos_ids = frozenset(ids)
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.max_positions: int = getattr(config, "max_position_embeddings", None) or sys.maxsize
        self.identity = {
            "id": model,
            "architecture": config.model_type,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "layers": config.num_hidden_layers,
            "fingerprint": None,  # of the weights, which are elsewhere
        }
