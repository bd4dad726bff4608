"""Conversations of any origin as token ids and assistant spans; the chat template needs no generation marks.

The template is rendered up to each answer and through it; what is added is the answer with its end token.
Pieces are tokenised as decoding meets them: a prompt first, then the answer's own tokens.
"""

from collections.abc import Collection
from typing import Any, Protocol

from medusa_cli.errors import UserError, first_line
from medusa_cli.runs.usable import Malformed

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "system": "system",
}


class Speaker(Protocol):
    """What is needed of a model to lay out its conversations: a backbone has it, and so has a tokenizer alone."""

    id: str
    tokenizer: Any
    vocab_size: int

    @property
    def eos_ids(self) -> Collection[int]: ...


# Why a text with half of a surrogate pair cannot be used.
HALF = "half a character"


def messages_of(record: dict[str, Any]) -> list[dict[str, str]]:
    """The messages (role, content) of a record in either form: "messages" or ShareGPT's "conversations"."""
    raw = record.get("messages") or record.get("conversations")
    if not isinstance(raw, list) or not raw:
        raise Malformed("no messages or conversations")
    messages = []
    for one in raw:
        if not isinstance(one, dict):
            raise Malformed("a message is not an object")
        role = one.get("role", one.get("from"))
        text = one.get("content", one.get("value"))
        if not isinstance(role, str) or role not in ROLES:
            raise Malformed(f"unknown role {role!r}")
        if not isinstance(text, str):
            raise Malformed("a message without text")
        messages.append({"role": ROLES[role], "content": text})
    if not any(one["role"] == "assistant" for one in messages[1:]):
        raise Malformed("no answer to a question")
    return messages


def render(speaker: Speaker, messages: list[dict[str, str]], *, prompt: bool) -> str:
    """What the chat template makes of messages, with `prompt` up to where the next answer begins.

    UserError where the model has no template, Malformed where the template or the tokenizer cannot take the messages.
    """
    if not getattr(speaker.tokenizer, "chat_template", None):
        raise UserError(
            f"the model {speaker.id!r} has no chat template",
            "use an instruction-tuned model, or a recipe that names a template as chat_template",
        )
    try:
        text = str(speaker.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))
    except MemoryError:
        raise
    except Exception as reason:  # a template is a program, and may fail as any
        raise Malformed(f"the chat template refuses it ({first_line(reason)})") from reason
    if not is_whole(text):
        raise Malformed(HALF)
    return text


def token_ids(speaker: Speaker, text: str, *, begin: bool = False) -> list[int]:
    """Token ids of a text, `begin` with what the tokenizer puts around one; UserError for ids the model has not."""
    ids: list[int] = speaker.tokenizer.encode(text, add_special_tokens=begin)
    if ids and max(ids) >= speaker.vocab_size:
        raise UserError(
            f"the tokenizer of {speaker.id!r} gives token {max(ids)}, and the model has {speaker.vocab_size:,}",
            "put the tokenizer that belongs to it into its folder",
        )
    return ids


def is_whole(text: str) -> bool:
    """Whether a text is of whole characters: half of a surrogate pair can be neither tokenised nor written."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def after_answer(speaker: Speaker, messages: list[dict[str, str]], *, prompt: bool) -> str | None:
    """What the template puts after the answer in messages [.., answer, question]; None where it rewrites the past."""
    before = render(speaker, messages[:-2], prompt=True)
    whole = render(speaker, messages, prompt=prompt)
    answer, said = messages[-2]["content"], whole.removeprefix(before)
    if not said.startswith(answer):  # some tokenizers take a blank for a part of the answer's first token
        said = said.lstrip()
    return said.removeprefix(answer) if whole.startswith(before) and said.startswith(answer) else None


def encode(speaker: Speaker, messages: list[dict[str, str]]) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of a conversation and the spans [start, end) of its answers, each with its end token.

    Raises UserError where the model has no chat template or one that rewrites earlier turns, so that no span
    of the whole conversation is what the model would have generated; Malformed where it refuses the roles.
    """
    tokens: list[int] = []
    spans: list[tuple[int, int]] = []
    text = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index == 0:
            continue
        text = _extend(speaker, tokens, text, messages[:index], prompt=True)
        start = len(tokens)
        text = _extend(speaker, tokens, text, messages[: index + 1], prompt=False)
        ends = [at for at in range(start, len(tokens)) if tokens[at] in speaker.eos_ids]
        # Templates put a newline after the end token, which the model never generates.
        spans.append((start, ends[0] + 1 if ends else len(tokens)))
    return tokens, spans


def _extend(speaker: Speaker, tokens: list[int], text: str, messages: list[dict[str, str]], *, prompt: bool) -> str:
    """Append the tokens of what the template adds to `text`; return the longer text."""
    longer = render(speaker, messages, prompt=prompt)
    if not longer.startswith(text):
        raise UserError(
            f"the chat template of {speaker.id!r} rewrites earlier turns, so answers have no fixed place",
            "use @data with single-turn conversations, or data made by `medusa distill`",
        )
    # A piece alone may begin with a token of its own (Llama's blank), so it is cut from the whole if it can be.
    whole = token_ids(speaker, longer)
    if whole[: len(tokens)] != tokens:
        whole = [*tokens, *token_ids(speaker, longer[len(text) :])]
    tokens[:] = whole
    return longer
