"""Self-talk: the model writes the user's turns as well, after the header its chat template puts before them."""

from medusa_cli.backbone import Backbone
from medusa_cli.backbone.dialogue import after_answer, render, token_ids
from medusa_cli.errors import UserError
from medusa_cli.runs.usable import Malformed

# A user's turn that is longer is no question any more.
QUESTION_TOKENS = 128
# Stands where the user's words will be, so that the template can be cut around them.
MARK = "THE-USERS-WORDS"


def user_turn(backbone: Backbone, messages: list[dict[str, str]]) -> list[int] | None:
    """Token ids of the template between the last answer and the user's next words, without messages before the first
    words of all; None if it cannot be cut there."""
    cut = _cut(backbone, messages)
    return None if cut is None else token_ids(backbone, cut[0])


def check_self_talk(backbone: Backbone) -> None:
    """UserError unless the template lets the model speak for the user and end that turn with a token of its own."""
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
    _check(backbone, talk, "@self_talk", "leave @self_talk out and use a seed with several human turns")


def check_opening(backbone: Backbone) -> None:
    """UserError unless the template lets the model write a user's first words, and end them."""
    _check(backbone, [], "@seed self", "give @seed a file of prompts, or sharegpt")


def _check(backbone: Backbone, messages: list[dict[str, str]], named: str, remedy: str) -> None:
    cut = _cut(backbone, messages)
    after = [] if cut is None else token_ids(backbone, cut[1])
    if not after or after[0] not in backbone.eos_ids:
        why = "cannot be cut before a user's turn" if cut is None else "ends a user's turn without an end token"
        raise UserError(f"{named}: the chat template of {backbone.id!r} {why}", remedy)


def _cut(backbone: Backbone, messages: list[dict[str, str]]) -> tuple[str, str] | None:
    """What the template puts between the last answer's text and a user's words, and after these."""
    longer = [*messages, {"role": "user", "content": MARK}]
    try:
        rest = after_answer(backbone, longer, prompt=False) if messages else render(backbone, longer, prompt=False)
    except Malformed:
        return None
    if rest is None or rest.count(MARK) != 1:
        return None
    header, _, end = rest.partition(MARK)
    return header, end
