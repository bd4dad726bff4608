"""Answers and questions on disk in FastChat's form, which its judges and viewers read."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa_cli.backbone import Backbone
from medusa_cli.benchmarks.measure import Result
from medusa_cli.benchmarks.questions import Question
from medusa_cli.benchmarks.sets import read_questions
from medusa_cli.errors import UserError
from medusa_cli.runs.files import write_atomic

QUESTIONS = "question.jsonl"
ANSWERS = "model_answer"

# By method and question id, the text of each turn.
Texts = dict[str, dict[str, list[str]]]


def texts_of(backbone: Backbone, results: Sequence[Result]) -> Texts:
    """What every method answered, as text without marks of the template."""
    return {
        name: {one.question.id: [backbone.decode(turn).strip() for turn in one.answers[name].turns] for one in results}
        for name in results[0].answers
    }


def write_answers(folder: Path, model: str, questions: Sequence[Question], texts: Texts) -> None:
    """Write question.jsonl and model_answer/MODEL-METHOD.jsonl, as FastChat lays out a bench's data folder."""
    asked = [
        {"question_id": one.id, "category": one.category, "turns": one.turns}
        | ({"reference": one.reference} if one.reference else {})
        for one in questions
    ]
    write_atomic(folder / QUESTIONS, _lines(asked))
    for method, found in texts.items():
        name = f"{Path(model).name}-{method}"
        lines = [
            {
                "question_id": question,
                "answer_id": hashlib.sha256(f"{name} {question} {turns}".encode()).hexdigest()[:22],
                "model_id": name,
                "choices": [{"index": 0, "turns": turns}],
                "tstamp": time.time(),
            }
            for question, turns in found.items()
        ]
        write_atomic(folder / ANSWERS / f"{name}.jsonl", _lines(lines))


def read_answers(folder: Path, model: str, methods: Sequence[str]) -> tuple[list[Question], Texts]:
    """What write_answers wrote; UserError where the bench left no answers."""
    paths = {method: folder / ANSWERS / f"{Path(model).name}-{method}.jsonl" for method in methods}
    for path in (folder / QUESTIONS, *paths.values()):
        if not path.is_file():
            raise UserError(f"{path} does not exist", "measure again with this version: its benches keep the answers")
    texts = {}
    for method, path in paths.items():
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        texts[method] = {str(one["question_id"]): list(one["choices"][0]["turns"]) for one in records}
    return read_questions(folder / QUESTIONS)[0], texts


def _lines(records: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records)
