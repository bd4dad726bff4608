"""Prompts for the text between a prefix and a suffix, with a model's tokens for filling in the middle."""

from collections.abc import Sequence
from typing import NamedTuple

from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.model.chat_template import token_ids

# The tokens before the prefix, the suffix and the middle, as Qwen, StarCoder, CodeLlama, DeepSeek and
# others use them.
TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
# The tokens before a repository's name and before a file's name, as used by Qwen and StarCoder 2.
FILE_TOKENS = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"))
# Tokens that end the middle, though models do not list them among the tokens that end an answer.
END_TOKENS = ("<|fim_pad|>", "<fim_pad>", *(token for pair in FILE_TOKENS for token in pair))
# If a prompt must be shortened, a long suffix keeps at least this share of the tokens.
MIN_SUFFIX = 1 / 4


class File(NamedTuple):
    """Holds a part of a file other than the one to fill in, and that file's name."""

    name: str
    text: str


def infill_ids(
    backbone: Backbone,
    prefix: str,
    suffix: str,
    files: Sequence[File] = (),
    room: int | None = None,
) -> list[int]:
    """Returns the token ids of a prompt for the text between a prefix and a suffix.

    files: parts of other files, which come first. room: the maximum number of tokens; a longer prompt is cut to the
    text nearest to the middle. Raises UsageError if the model has no tokens for filling in the middle.
    """
    known = _known(backbone, TOKENS)
    if known is None:
        fault = "@suffix has no effect: this model has no tokens to fill in the middle"
        raise UsageError(fault, "leave it out")
    before, after, middle = known
    begin = token_ids(backbone, "", begin=True)
    first = token_ids(backbone, prefix)
    last = token_ids(backbone, suffix)
    context = _file_ids(backbone, files) if files else []
    if room is not None:
        room = max(0, room - len(begin) - len(known))
        last = last[: max(int(room * MIN_SUFFIX), room - len(first))]
        first = _end(first, room - len(last))
        context = _end(context, room - len(last) - len(first))
    return [*begin, *context, before, *first, after, *last, middle]


def infill_ends(backbone: Backbone) -> list[int]:
    """Returns the ids of the tokens that end the text in the middle, in addition to the model's own end tokens."""
    vocabulary = backbone.tokenizer.get_vocab()
    return [vocabulary[token] for token in END_TOKENS if token in vocabulary]


def can_infill(backbone: Backbone) -> bool:
    return _known(backbone, TOKENS) is not None


def _known(backbone: Backbone, names: Sequence[tuple[str, ...]]) -> list[int] | None:
    """Returns the ids of the first group in `names` whose tokens are all in the vocabulary; None if there is none."""
    vocabulary = backbone.tokenizer.get_vocab()
    for tokens in names:
        if all(token in vocabulary for token in tokens):
            return [vocabulary[token] for token in tokens]
    return None


def _file_ids(backbone: Backbone, files: Sequence[File]) -> list[int]:
    """Returns the token ids of parts of other files, in llama.cpp's form."""
    known = _known(backbone, FILE_TOKENS)
    if known is None:
        text = "".join(f"\n\n--- snippet ---\n\n{file.text}" for file in files)
        return token_ids(backbone, text)
    repository, separator = known
    ids = [repository, *token_ids(backbone, "myproject\n")]
    for file in files:
        ids += [separator, *token_ids(backbone, f"{file.name or 'tmp'}\n{file.text}")]
    return [*ids, separator, *token_ids(backbone, "filename\n")]


def _end(tokens: list[int], count: int) -> list[int]:
    """Returns the last `count` tokens."""
    return tokens[max(0, len(tokens) - count) :]
