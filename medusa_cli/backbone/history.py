"""What of a conversation a model is told: all of it, or, where its context ends, all but the oldest turns."""

from collections.abc import Callable, Sequence
from typing import Any

from medusa_cli.errors import UserError

Message = dict[str, str]


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
