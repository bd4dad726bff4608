"""Self-talk: the model writes the user's turns as well, after the header its chat template puts before them."""

from medusa_cli.backbone import Backbone
from medusa_cli.backbone.dialogue import after_answer, token_ids
from medusa_cli.errors import UserError
from medusa_cli.runs.usable import Malformed

# Stands where the user's words will be, so that the template can be cut around them.
MARK = "THE-USERS-WORDS"


def user_turn(backbone: Backbone, messages: list[dict[str, str]]) -> list[int] | None:
    """Token ids of the template between the last answer and the user's next words; None if it cannot be cut there."""
    cut = _cut(backbone, messages)
    return None if cut is None else token_ids(backbone, cut[0])


def check_self_talk(backbone: Backbone) -> None:
    """UserError unless the template lets the model speak for the user and end that turn with a token of its own."""
    cut = _cut(backbone, [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}])
    after = [] if cut is None else token_ids(backbone, cut[1])
    if not after or after[0] not in backbone.eos_ids:
        why = "cannot be cut before a user's turn" if cut is None else "ends a user's turn without an end token"
        raise UserError(
            f"@self_talk: the chat template of {backbone.id!r} {why}",
            "leave @self_talk out and use a seed with several human turns",
        )


def _cut(backbone: Backbone, messages: list[dict[str, str]]) -> tuple[str, str] | None:
    """What the template puts between the last answer's text and a user's words, and after these."""
    try:
        rest = after_answer(backbone, [*messages, {"role": "user", "content": MARK}], prompt=False)
    except Malformed:
        return None
    if rest is None or rest.count(MARK) != 1:
        return None
    header, _, end = rest.partition(MARK)
    return header, end
