"""A language model as judge (MT-Bench's way): grades of answers, and pairs against the reference in both orders."""

import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

from medusa_cli.bench.questions import Question, read_questions
from medusa_cli.bench.run import Texts
from medusa_cli.errors import UserError
from medusa_cli.runs.io import json_or_none, write_atomic, write_json

GRADE = (
    "You grade answers of an assistant. Judge the assistant's last answer: is it helpful, relevant, correct, deep, "
    "creative and as detailed as it should be? Say in a few sentences why, and be fair. Then end with a grade from "
    "1 to 10 in double brackets, for example: Rating: [[5]]."
)
PAIR = (
    "You compare two assistants that answered the same user. Say which follows the user's wishes better and answers "
    "better: helpful, relevant, correct, deep, creative, as detailed as it should be. Let neither the order nor the "
    "length of the answers sway you. Give your reasons in a few sentences, then end with your verdict in double "
    "brackets: [[A]] if assistant A is better, [[B]] if assistant B is, [[C]] for a tie."
)
MAX_TOKENS = 1024  # of a verdict
CONCURRENCY = 4
Verdict = float | str | None  # a grade; "method", "reference" or "tie"; None: the reply holds neither
log = logging.getLogger(__name__)


class Task(NamedTuple):
    """What the judge is asked. order 0: a grade of one turn; 1 and 2: a pair, the reference first or second."""

    method: str
    question: str
    turn: int
    order: int
    text: str

    @property
    def key(self) -> tuple[Any, ...]:
        return self[:4]

    def read(self, reply: str) -> Verdict:
        """Returns the verdict at the end of the judge's reply."""
        if self.order == 0:
            grades = re.findall(r"\[\[(\d+(?:\.\d+)?)\]\]", reply)
            return float(grades[-1]) if grades and 1 <= float(grades[-1]) <= 10 else None
        letters = re.findall(r"\[\[([ABC])\]\]", reply)
        first, second = ("reference", "method") if self.order == 1 else ("method", "reference")
        return {"A": first, "B": second, "C": "tie"}[letters[-1]] if letters else None


def tasks(questions: Sequence[Question], texts: Texts, reference: str) -> Iterator[Task]:
    """Yields a grade for every turn of every method, and each method against the reference in both orders.

    Pairs of the same answers are not asked: they are ties.
    """
    for question in questions:
        for method, answers in texts.items():
            own, other = answers[question.id], texts[reference][question.id]
            for turn in range(len(own)):
                text = _conversation(question, own[: turn + 1], "Assistant") + _references(question, turn)
                yield Task(method, question.id, turn, 0, text)
            for order, (first, second) in ((1, (other, own)), (2, (own, other))) if own != other else ():
                texts_of_both = [_conversation(question, first, "Assistant A")]
                texts_of_both += [_conversation(question, second, "Assistant B")]
                text = "\n\n".join(texts_of_both) + _references(question, len(own) - 1)
                yield Task(method, question.id, 0, order, text)


def _conversation(question: Question, answers: Sequence[str], name: str) -> str:
    turns = zip(question.turns, answers, strict=False)
    text = "\n\n".join(f"### User:\n{asked}\n\n### {name}:\n{answer}" for asked, answer in turns)
    return f"<conversation with {name}>\n{text}\n</conversation with {name}>"


def _references(question: Question, turn: int) -> str:
    """Returns the question set's own answers up to a turn, if it has any."""
    text = "\n\n".join(question.reference[: turn + 1])
    return f"\n\n<reference answer>\n{text}\n</reference answer>" if text else ""


def tally(
    verdicts: Mapping[tuple[Any, ...], Verdict], questions: Sequence[Question], texts: Texts, reference: str
) -> dict[str, Any]:
    """Returns mean grades by method, and wins, ties and losses against the reference where both orders agree."""
    single, pairs = {}, {}
    for method, answers in texts.items():
        grades = [float(v) for key, v in verdicts.items() if key[0] == method and key[3] == 0 and v is not None]
        if grades:
            single[method] = {"score": sum(grades) / len(grades), "answers": len(grades)}
        counts = {"wins": 0, "ties": 0, "losses": 0}
        for question in questions if method != reference else ():
            orders = {verdicts.get((method, question.id, 0, order)) for order in (1, 2)}
            same = answers[question.id] == texts[reference][question.id]
            if same or (None not in orders and orders not in ({"method"}, {"reference"})):
                counts["ties"] += 1
            elif None not in orders:
                counts["wins" if orders == {"method"} else "losses"] += 1
        if method != reference:
            pairs[method] = {**counts, "answers": sum(counts.values())}
    unread = sum(verdict is None for verdict in verdicts.values())
    return {"reference": reference, "single": single, "pairs": pairs, "unread": unread}


class Judge:
    """A model behind an OpenAI-compatible server. Raises UserError if the server does not answer or refuses."""

    def __init__(self, url: str, model: str, key: str | None = None) -> None:
        self.address = f"{url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
        self.model = model
        self._session = requests.Session()
        retry = Retry(5, backoff_factor=0.3, status_forcelist=(429, 500, 502, 503, 504), allowed_methods=None)
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(max_retries=retry))
        if key:
            self._session.headers["Authorization"] = f"Bearer {key}"

    def ask(self, task: Task) -> str:
        """Returns the judge's reply at temperature 0."""
        system = PAIR if task.order else GRADE
        messages = [{"role": "system", "content": system}, {"role": "user", "content": task.text}]
        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
        try:
            reply = self._session.post(self.address, json=body, timeout=(10, 600))
            if reply.status_code != 200:
                text = " ".join(reply.text.split())[:200]
                remedy = "check @judge_model and MEDUSA_API_KEY"
                raise UserError(f"@judge {self.address} answered {reply.status_code}: {text}", remedy)
            return str(reply.json()["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError, requests.exceptions.JSONDecodeError) as reason:
            what = f"@judge {self.address} gave no chat completion"
            raise UserError(what, "give an OpenAI-compatible server") from reason
        except (requests.RequestException, ValueError) as reason:
            what = f"@judge {self.address} does not answer ({type(reason).__name__})"
            raise UserError(what, "start it, or correct the address") from reason


def judge_bench(
    bench: Path, document: dict[str, Any], judge: Judge, on_verdict: Callable[[int], object]
) -> dict[str, Any]:
    """Asks for the verdicts that are not known yet, adds the outcome to the saved bench, and returns its document.

    on_verdict: receives the number of new verdicts.
    """
    folder, reference = bench.with_suffix(""), document["reference"]
    questions, texts = read_answers(folder, document["backbone"]["id"], list(document["methods"]))
    verdicts, path, lock = _known(folder / "judgement.jsonl", judge.model), folder / "judgement.jsonl", threading.Lock()
    missing = [task for task in tasks(questions, texts, reference) if task.key not in verdicts]
    log.info("%s judges: %d verdicts to ask for, %d known", judge.model, len(missing), len(verdicts))
    with path.open("a", encoding="utf-8") as stream, ThreadPoolExecutor(CONCURRENCY) as pool:

        def ask(task: Task) -> None:
            reply = judge.ask(task)
            line = {"judge": judge.model, "key": task.key, "verdict": task.read(reply), "said": reply}
            with lock:
                stream.write(json.dumps(line, ensure_ascii=False) + "\n")
                stream.flush()
                verdicts[task.key] = task.read(reply)
                on_verdict(1)

        asked = [pool.submit(ask, task) for task in missing]
        done, _ = wait(asked, return_when=FIRST_EXCEPTION)
        if failed := [future for future in done if future.exception() is not None]:
            pool.shutdown(cancel_futures=True)
            failed[0].result()
    document["judge"] = {"url": judge.address, "model": judge.model, **tally(verdicts, questions, texts, reference)}
    if unread := document["judge"]["unread"]:
        log.warning("%d replies of %s hold no grade and count for nothing", unread, judge.model)
    write_json(bench, document)
    return document


def _known(path: Path, model: str) -> dict[tuple[Any, ...], Verdict]:
    """Returns this judge's verdicts in the log; a last line that was cut off is dropped from it."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
    records = {line: record for line in lines if isinstance(record := json_or_none(line), dict)}
    if lines:
        write_atomic(path, "".join(line + "\n" for line in records))
    return {tuple(record["key"]): record["verdict"] for record in records.values() if record["judge"] == model}


def write_answers(folder: Path, model: str, questions: Sequence[Question], texts: Texts) -> None:
    """Writes question.jsonl and model_answer/MODEL-METHOD.jsonl, as FastChat lays out a bench's data."""
    asked = [
        {"question_id": question.id, "category": question.category, "turns": question.turns}
        | ({"reference": question.reference} if question.reference else {})
        for question in questions
    ]
    write_atomic(folder / "question.jsonl", _lines(asked))
    for method, answers in texts.items():
        name = f"{Path(model).name}-{method}"
        records = [
            {
                "question_id": question,
                "answer_id": hashlib.sha256(f"{name} {question} {turns}".encode()).hexdigest()[:22],
                "model_id": name,
                "choices": [{"index": 0, "turns": turns}],
                "tstamp": time.time(),
            }
            for question, turns in answers.items()
        ]
        write_atomic(folder / "model_answer" / f"{name}.jsonl", _lines(records))


def read_answers(folder: Path, model: str, methods: Sequence[str]) -> tuple[list[Question], Texts]:
    """Reads what write_answers wrote; raises UserError if the bench left no answers."""
    paths = {method: folder / "model_answer" / f"{Path(model).name}-{method}.jsonl" for method in methods}
    for path in (folder / "question.jsonl", *paths.values()):
        if not path.is_file():
            raise UserError(f"{path} does not exist", "run `medusa bench` again: it keeps the answers")
    texts: Texts = {}
    for method, path in paths.items():
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        texts[method] = {str(record["question_id"]): list(record["choices"][0]["turns"]) for record in records}
    return read_questions(folder / "question.jsonl")[0], texts


def _lines(records: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
