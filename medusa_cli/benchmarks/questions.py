"""A benchmark's questions, and which of them are asked."""

from collections.abc import Sequence
from dataclasses import dataclass

from medusa_cli.errors import UsageError


@dataclass(frozen=True)
class Question:
    """One question: its id, its category, the user's turns in order, and answers to judge by where the set has them."""

    id: str
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] = ()


def of_categories(questions: Sequence[Question], wanted: str | None) -> list[Question]:
    """The questions of some categories, with commas between them; all for None. UsageError for one that none is of."""
    if wanted is None:
        return list(questions)
    known = list(dict.fromkeys(question.category for question in questions))
    names = [name.strip() for name in wanted.split(",")]
    for name in names:
        if name not in known:
            raise UsageError(f"@category {name!r} is none of these questions'", f"use some of {', '.join(known)}")
    return [question for question in questions if question.category in names]


def spread(questions: Sequence[Question], limit: int | None) -> list[Question]:
    """At most `limit` questions, taken from the categories in turn; all of them for None. UsageError below 1."""
    if limit is None:
        return list(questions)
    if limit < 1:
        raise UsageError(f"@limit {limit} is too small", "use 1 or more")
    groups: dict[str, list[int]] = {}
    for place, question in enumerate(questions):
        groups.setdefault(question.category, []).append(place)
    rounds = max(len(group) for group in groups.values())
    order = [group[i] for i in range(rounds) for group in groups.values() if i < len(group)]
    return [questions[place] for place in sorted(order[:limit])]
