"""Prompts for completions with a suffix, which use some models' tokens for filling in the middle."""

from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.model.chat_template import token_ids

# The tokens before the prefix, the suffix and the middle, as used by Qwen and others, StarCoder and
# others, CodeLlama, and DeepSeek.
TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)


def infill_ids(backbone: Backbone, prefix: str, suffix: str) -> list[int]:
    """Returns the token ids of a prompt for the text between two others.

    Raises UsageError if the model has no tokens for filling in the middle.
    """
    vocabulary = backbone.tokenizer.get_vocab()
    known = next((names for names in TOKENS if all(name in vocabulary for name in names)), None)
    if known is None:
        raise UsageError(
            "@suffix has no effect: this model has no tokens to fill in the middle", "leave it out"
        )
    before, after, middle = (vocabulary[name] for name in known)
    begin = token_ids(backbone, "", begin=True)
    return [
        *begin,
        before,
        *token_ids(backbone, prefix),
        after,
        *token_ids(backbone, suffix),
        middle,
    ]
