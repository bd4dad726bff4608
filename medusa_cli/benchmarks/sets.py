"""Question sets in the forms that are about: FastChat's, Spec-Bench, SPEED-Bench, HumanEval, GSM8K, plain prompts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from medusa_cli import assets
from medusa_cli.benchmarks.questions import Question
from medusa_cli.errors import UserError
from medusa_cli.runs.reading import json_or_none, parse_json

FORMS = (".jsonl", ".json", ".parquet", ".txt")
# The keys under which sets keep the user's words, their own id, and an answer to judge by; the first that is there.
WORDS = ("turns", "messages", "conversations", "prompt", "question", "instruction", "text")
NAMES = ("question_id", "task_id", "id")
ANSWERS = ("reference", "answer", "canonical_solution")
# Spec-Bench counts MT-Bench's eight categories as one of its six tasks.
SPEC_BENCH = frozenset({"translation", "summarization", "qa", "math_reasoning", "rag"})
# What stands in SPEED-Bench on the hub where a text may not be passed on.
WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED"


def read_questions(source: str | Path) -> tuple[list[Question], int]:
    """The questions of a file, or of a hub dataset OWNER/NAME[:CONFIG[:SPLIT]], and how many records were skipped.

    UserError if none can be used, and for a name that is neither a file nor a dataset.
    """
    questions: list[Question] = []
    skipped = 0
    for number, record in enumerate(_records(str(source)), 1):
        question = _question(record, number)
        if question is None:
            skipped += 1
        else:
            questions.append(question)
    if not questions:
        raise UserError(
            f"@questions {str(source)!r} holds no usable question ({skipped} records skipped)",
            f"each record needs the user's words under one of {', '.join(WORDS)}",
        )
    if {question.category for question in questions} >= SPEC_BENCH:
        questions = [one if one.category in SPEC_BENCH else replace(one, category="mt_bench") for one in questions]
    return questions, skipped


def _records(source: str) -> Iterator[Any]:
    path = Path(source).expanduser()
    if path.is_file():
        yield from _of_file(path)
        return
    name, *parts = source.split(":")
    if path.suffix in FORMS or source.startswith((".", "/", "~")) or name.count("/") != 1 or len(parts) > 2:
        remedy = f"give a file ({', '.join(FORMS)}) or a hub dataset OWNER/NAME[:CONFIG[:SPLIT]]"
        raise UserError(f"@questions {source!r} does not exist", remedy)
    yield from _of_hub(source, name, *parts)


def _of_file(path: Path) -> Iterator[Any]:
    """Records of a file by its suffix; lines that are no JSON come as None."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            yield from pyarrow.parquet.read_table(path).to_pylist()
        except pyarrow.ArrowException as reason:
            raise UserError(f"@questions {str(path)!r} is no Parquet file", "check the path") from reason
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".json" or (path.suffix != ".txt" and text.lstrip().startswith("[{")):
        try:
            found = parse_json(text)
        except ValueError as reason:
            raise UserError(f"@questions {str(path)!r} is no JSON: {reason}", "give an array of records") from reason
        yield from found if isinstance(found, list) else [found]
        return
    for line in text.split("\n"):  # a question may hold any other line break
        if line.strip():
            yield {"prompt": line.strip()} if path.suffix == ".txt" else json_or_none(line)


def _of_hub(source: str, name: str, config: str | None = None, split: str | None = None) -> Iterator[Any]:
    """The rows of a hub dataset: the split that is named, else test, validation, train, or the first."""
    from datasets import load_dataset

    assets.check_hub(name, kind="dataset", named="@questions")
    try:
        splits = load_dataset(name, config or None, trust_remote_code=False)
    except Exception as reason:  # the library raises its own and its HTTP client's many types
        said = " ".join(str(reason).split())
        raise UserError(
            f"@questions {source!r} could not be loaded from the hub: {said}", "name the config as OWNER/NAME:CONFIG"
        ) from reason
    usual = (one for one in ("test", "validation", "train", *splits) if one in splits)
    chosen = split or next(usual)
    if chosen not in splits:
        raise UserError(f"@questions {source!r}: there is no split {chosen!r}", f"use one of {', '.join(splits)}")
    yield from splits[chosen]


def _question(record: Any, number: int) -> Question | None:
    """A record as a question, None for one that cannot be asked."""
    if not isinstance(record, Mapping):
        return None
    key = next((key for key in WORDS if record.get(key)), None)
    turns = _turns(record[key]) if key else ()
    if not turns or any(not isinstance(turn, str) or not turn.strip() or WITHHELD in turn for turn in turns):
        return None
    if key == "instruction" and isinstance(record.get("input"), str) and record["input"].strip():
        turns = (f"{turns[0]}\n\n{record['input']}",)
    name = next((record[one] for one in NAMES if record.get(one) is not None), number)
    category = record.get("category") or "all"
    if not isinstance(name, str | int) or not isinstance(category, str):
        return None
    answer = next((record[one] for one in ANSWERS if record.get(one)), ())
    reference = tuple(map(str, answer)) if isinstance(answer, list) else (str(answer),) if answer else ()
    return Question(str(name), category, turns, reference)


def _turns(words: Any) -> tuple[Any, ...]:
    """The user's turns: a text, texts in order, or messages with roles, of which the user's are taken."""
    if isinstance(words, str):
        return (words,)
    if not isinstance(words, Sequence):
        return ()
    if all(isinstance(one, Mapping) for one in words):
        said = [(one.get("role", one.get("from")), one.get("content", one.get("value"))) for one in words]
        return tuple(text for role, text in said if role in ("user", "human"))
    return tuple(words)
