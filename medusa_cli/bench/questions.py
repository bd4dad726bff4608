"""Questions for a bench, read from files and hub datasets, and selected by category and number."""

import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from medusa_cli.data.conversation import messages_of, system_of
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files import hub
from medusa_cli.files.io import Malformed, read_jsonl
from medusa_cli.files.paths import expanded

# Our own questions, which are not used for training. The prompts of `distill --seed code` come from
# other sources.
CODING = Path(__file__).with_name("coding.jsonl")
MT_BENCH = (
    *("writing", "roleplay", "reasoning", "math"),
    *("coding", "extraction", "stem", "humanities"),
)
# Requests to a coding agent about files of the standard library.
AGENT_FILES = ("argparse.py", "shutil.py", "inspect.py", "subprocess.py", "tarfile.py")
AGENT_SYSTEM = (
    "You are a coding agent. You read files with read_file(path, offset), and the user sends you the "
    "results. Answer in a few sentences, and quote the lines that you mean."
)
AGENT_ASKS = (
    "What is this module for, and which names does it export?",
    "How do these two files report errors?",
    "Write a docstring for the first function here that has none.",
    "Which function of this file is hardest to test, and why?",
    "Repeat the longest function in this part, with type hints.",
    "Sum up what you have read so far, file by file.",
)
# Number of characters of a file in a turn; they are about 2,000 tokens.
RESULT_CHARACTERS = 8000
SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
# Keys under which published sets store the user's text, the question's id and a reference answer.
# The first key that is present is used.
TEXT_KEYS = ("turns", "messages", "conversations", "prompt", "question", "instruction", "text")
ID_KEYS = ("question_id", "task_id", "id")
REFERENCE_KEYS = ("reference", "answer", "canonical_solution")
# Five of Spec-Bench's six tasks. MT-Bench's eight categories together are the sixth.
SPEC_BENCH = frozenset({"translation", "summarization", "qa", "math_reasoning", "rag"})
# On the hub, SPEED-Bench has this placeholder for texts that may not be redistributed.
WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED"


@dataclass(frozen=True)
class Question:
    """Holds a question's user turns and, if it has them, its reference answers for the judge and its system prompt."""

    id: str
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] = ()
    system: str | None = None


def agent_questions() -> list[Question]:
    """Returns conversations of a coding agent: each turn brings about 2,000 tokens of this Python's own sources."""
    folder = Path(sysconfig.get_path("stdlib"))
    try:
        texts = [(folder / name).read_text(encoding="utf-8") for name in AGENT_FILES]
    except OSError as reason:
        fault = f"@agent needs this Python's sources, and {reason.filename} cannot be read"
        raise UserError(fault, "use other @questions") from reason
    count = len(texts)
    questions = []
    for number in range(count):
        turns = []
        for turn, ask in enumerate(AGENT_ASKS):
            # Every second result is from another file.
            file = (number + turn) % count if turn % 2 else number
            start = turn // 2 * RESULT_CHARACTERS
            part = texts[file][start : start + RESULT_CHARACTERS]
            call = f"read_file(path={AGENT_FILES[file]!r}, offset={start})"
            turns.append(f"Result of {call}:\n```python\n{part}\n```\n{ask}")
        questions.append(
            Question(f"agent-{number + 1}", "agent", tuple(turns), system=AGENT_SYSTEM)
        )
    return questions


def checked_categories(wanted: str, known: Sequence[str]) -> list[str]:
    """Returns the categories of a comma-separated list; raises UsageError for an unknown category."""
    names = [name.strip() for name in wanted.split(",")]
    if unknown := [name for name in names if name not in known]:
        fault = f"@category {unknown[0]!r} is not in these questions"
        raise UsageError(fault, f"use some of {', '.join(known)}")
    return names


def of_categories(questions: Sequence[Question], wanted: str | None) -> list[Question]:
    """Returns the questions in a comma-separated list of categories; None: all questions."""
    if wanted is None:
        return list(questions)
    known = list(dict.fromkeys(question.category for question in questions))
    names = checked_categories(wanted, known)
    return [question for question in questions if question.category in names]


def spread(questions: Sequence[Question], limit: int | None) -> list[Question]:
    """Returns at most `limit` questions (None: all), chosen from each category in turn.

    The chosen questions keep their order.
    """
    groups: dict[str, list[int]] = {}
    for index, question in enumerate(questions):
        groups.setdefault(question.category, []).append(index)
    chosen = [
        index for turn in zip_longest(*groups.values()) for index in turn if index is not None
    ][:limit]
    return [questions[index] for index in sorted(chosen)]


def read_questions(source: str | Path) -> tuple[list[Question], int]:
    """Returns the questions of a file or hub dataset OWNER/NAME[:CONFIG[:SPLIT]], and the number of skipped records.

    Raises UserError if the source does not exist or has no usable question.
    """
    records = [_question(record, number) for number, record in enumerate(_records(str(source)), 1)]
    questions = [question for question in records if question is not None]
    skipped = len(records) - len(questions)
    if not questions:
        raise UserError(
            f"@questions {str(source)!r} holds no usable question ({skipped} records skipped)",
            f"each record needs the user's words under one of {', '.join(TEXT_KEYS)}",
        )
    if {question.category for question in questions} >= SPEC_BENCH:
        others = {q.category: "mt_bench" for q in questions if q.category not in SPEC_BENCH}
        questions = [replace(q, category=others.get(q.category, q.category)) for q in questions]
    return list(_with_own_ids(questions)), skipped


def _with_own_ids(questions: Iterable[Question]) -> Iterator[Question]:
    """Yields the questions; an id that occurred before gets a number, because answers are stored by id."""
    counts = Counter[str]()
    for question in questions:
        counts[question.id] += 1
        count = counts[question.id]
        yield question if count == 1 else replace(question, id=f"{question.id} #{count}")


def _records(source: str) -> Iterator[Any]:
    path = expanded(source)
    if path.is_file():
        yield from _file_records(path)
        return
    name, *parts = source.split(":")
    if (
        path.suffix in SUFFIXES
        or source.startswith((".", "/", "~"))
        or name.count("/") != 1
        or len(parts) > 2
    ):
        remedy = f"give a file ({', '.join(SUFFIXES)}) or a hub dataset OWNER/NAME[:CONFIG[:SPLIT]]"
        raise UserError(f"@questions {source!r} does not exist", remedy)
    yield from hub.hub_rows(name, "@questions", ("test", "validation", "train"), *parts)


def _file_records(path: Path) -> Iterator[Any]:
    """Yields a file's records in the format given by its suffix; None for a line that is not JSON."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            yield from pyarrow.parquet.read_table(path).to_pylist()
        except pyarrow.ArrowException as reason:
            fault = f"@questions {str(path)!r} is not a Parquet file"
            raise UserError(fault, "check the path") from reason
        return
    if path.suffix == ".txt":
        # This does not use splitlines, because a question may contain other line breaks.
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        yield from ({"prompt": line.strip()} for line in lines if line.strip())
        return
    bad: list[None] = []
    yield from read_jsonl(path, on_bad=lambda number, reason: bad.append(None), array=True)
    yield from bad


def _question(record: Any, number: int) -> Question | None:
    """Returns a record as a question, or None if it has no user text."""
    if not isinstance(record, dict):
        return None
    key = next((key for key in TEXT_KEYS if record.get(key)), "")
    try:
        system, turns = _asked(record, record.get(key))
    except Malformed:
        return None
    if not turns or any(
        not isinstance(turn, str) or not turn.strip() or WITHHELD in turn for turn in turns
    ):
        return None
    if key == "instruction" and isinstance(record.get("input"), str) and record["input"].strip():
        turns = (f"{turns[0]}\n\n{record['input']}",)
    name = next((record[key] for key in ID_KEYS if record.get(key) is not None), number)
    category = record.get("category") or "all"
    if not isinstance(name, str | int) or not isinstance(category, str):
        return None
    answer: Any = next((record[key] for key in REFERENCE_KEYS if record.get(key)), [])
    reference = tuple(map(str, answer if isinstance(answer, list) else [answer]))
    return Question(str(name), category, turns, reference, system)


def _asked(record: dict[str, Any], words: Any) -> tuple[str | None, tuple[Any, ...]]:
    """Returns the system prompt and the user turns of a text, a list of texts, or a list of messages with roles.

    Raises Malformed for messages that cannot be read, and for a system message after the first turn.
    """
    if not isinstance(words, list):
        return system_of(record), (words,)
    if not isinstance(words[0], dict):
        return system_of(record), tuple(words)
    messages = messages_of({**record, "messages": words})
    systems = [at for at, message in enumerate(messages) if message["role"] == "system"]
    if systems not in ([], [0]):
        raise Malformed("a system message after the first turn")
    turns = tuple(message["content"] for message in messages if message["role"] == "user")
    return messages[0]["content"] if systems else None, turns
