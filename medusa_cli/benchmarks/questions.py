"""Question sets in FastChat's form: MT-Bench, or any file of question_id, category and turns."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from medusa_cli.errors import UsageError, UserError
from medusa_cli.runs.reading import parse_json


@dataclass(frozen=True)
class Question:
    """One question: its id, its category, and the user's turns in order."""

    id: str
    category: str
    turns: tuple[str, ...]


def read_questions(path: Path) -> tuple[list[Question], int]:
    """The questions of a JSONL file and how many lines were skipped; UserError if none can be used."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"--questions {str(path)!r} does not exist", "give a JSONL file in FastChat's form")
    questions: list[Question] = []
    skipped = 0
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
            turns = record["turns"]
            if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
                raise ValueError("turns")
            name, category = record.get("question_id", number), record.get("category", "all")
            if not isinstance(name, str | int) or not isinstance(category, str):
                raise ValueError("names")
            questions.append(Question(str(name), category, tuple(turns)))
        except (ValueError, KeyError, TypeError, AttributeError):
            skipped += 1
    if not questions:
        raise UserError(
            f"--questions {str(path)!r} holds no usable question ({skipped} lines skipped)",
            'each line needs {"question_id", "category", "turns": ["..."]}',
        )
    return questions, skipped


def of_categories(questions: Sequence[Question], wanted: str | None) -> list[Question]:
    """The questions of some categories, with commas between them; all for None. UsageError for one that none is of."""
    if wanted is None:
        return list(questions)
    known = list(dict.fromkeys(question.category for question in questions))
    names = [name.strip() for name in wanted.split(",")]
    for name in names:
        if name not in known:
            raise UsageError(f"--category {name!r} is none of these questions'", f"use some of {', '.join(known)}")
    return [question for question in questions if question.category in names]


def spread(questions: Sequence[Question], limit: int | None) -> list[Question]:
    """At most `limit` questions, taken from the categories in turn; all of them for None. UsageError below 1."""
    if limit is None:
        return list(questions)
    if limit < 1:
        raise UsageError(f"--limit {limit} is too small", "use 1 or more")
    groups: dict[str, list[int]] = {}
    for place, question in enumerate(questions):
        groups.setdefault(question.category, []).append(place)
    rounds = max(len(group) for group in groups.values())
    order = [group[i] for i in range(rounds) for group in groups.values() if i < len(group)]
    return [questions[place] for place in sorted(order[:limit])]
