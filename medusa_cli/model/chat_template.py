"""Conversations of any origin as token ids and assistant spans; the chat template needs no generation marks.

The template is rendered up to each answer and through it; what is added is the answer with its end token.
Pieces are tokenised as decoding meets them: a prompt first, then the answer's own tokens.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from medusa_cli.errors import UserError, first_line
from medusa_cli.runs.io import Malformed

Message = dict[str, str]


class ChatTokenizer(Protocol):
    """What is needed of a model to lay out its conversations: a backbone has it, and so has a tokenizer alone."""

    id: str
    tokenizer: Any
    vocab_size: int

    @property
    def eos_ids(self) -> Collection[int]: ...


# Why a text with half of a surrogate pair cannot be used.
HALF = "half a character"


def render(speaker: ChatTokenizer, messages: list[dict[str, str]], *, prompt: bool) -> str:
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


def token_ids(speaker: ChatTokenizer, text: str, *, begin: bool = False) -> list[int]:
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


def after_answer(speaker: ChatTokenizer, messages: list[dict[str, str]], *, prompt: bool) -> str | None:
    """What the template puts after the answer in messages [.., answer, question]; None where it rewrites the past."""
    before = render(speaker, messages[:-2], prompt=True)
    whole = render(speaker, messages, prompt=prompt)
    answer, said = messages[-2]["content"], whole.removeprefix(before)
    if not said.startswith(answer):  # some tokenizers take a blank for a part of the answer's first token
        said = said.lstrip()
    return said.removeprefix(answer) if whole.startswith(before) and said.startswith(answer) else None


def encode(speaker: ChatTokenizer, messages: list[dict[str, str]]) -> tuple[list[int], list[tuple[int, int]]]:
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


def _extend(
    speaker: ChatTokenizer, tokens: list[int], text: str, messages: list[dict[str, str]], *, prompt: bool
) -> str:
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


def fit(
    encode: Callable[[list[Message]], list[int]],
    messages: Sequence[Message],
    question: Message,
    *,
    context: int,
    answer: int,
    forgotten: int = 0,
) -> tuple[list[int], int]:
    """The token ids of a prompt that leaves room for an answer, and how many of the oldest messages it leaves out.

    A system prompt stays, and so does what was forgotten before. `answer`: tokens of the longest answer; a quarter of
    the context is room enough. UserError where the question does not fit, the model being told nothing else.
    """
    system = list(messages[:1]) if messages and messages[0]["role"] == "system" else []
    turns = list(messages[len(system) :])

    def prompt(left_out: int) -> list[int]:
        return encode([*system, *turns[left_out:], question])

    tokens, room = prompt(forgotten), min(answer, context // 4)
    if len(tokens) + room > context:
        # Room for two answers, so that not every turn from here on leaves another one out.
        while forgotten < len(turns) and len(tokens) + 2 * room > context:
            forgotten += 2
            tokens = prompt(forgotten)
    if len(tokens) >= context:
        beside = " with the system prompt" if system else ""
        raise UserError(
            f"the question{beside} has {len(tokens):,} tokens, the model has a context of {context:,}",
            "ask something shorter",
        )
    return tokens, forgotten


def check_system(backbone: Any, system: str) -> None:
    """UserError for a system prompt that leaves no room for a question."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": ""}]
    taken = len(backbone.encode_chat(messages))
    if taken >= backbone.max_positions:
        raise UserError(
            f"the system prompt has {taken:,} tokens, the model has a context of {backbone.max_positions:,}",
            "give a shorter one",
        )
