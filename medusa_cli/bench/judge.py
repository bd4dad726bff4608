"""A language model as judge, as in MT-Bench: grades of answers, and pairwise comparisons with the reference."""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from medusa_cli.bench.questions import Question
from medusa_cli.errors import UserError
from medusa_cli.files.chat_servers import ChatServers
from medusa_cli.files.io import read_jsonl, repair_jsonl, write_json

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
MAX_TOKENS = 1024  # per reply
CONCURRENCY = 4
Texts = Mapping[str, Mapping[str, Sequence[str]]]  # answers to all turns, by method and question
# A grade; or "method", "reference" or "tie"; or None if the reply contains none of these.
Outcome = float | str | None
log = logging.getLogger(__name__)


class Task(NamedTuple):
    """Holds a question for the judge about one turn.

    order: 0 for a grade; for a pair, 1 if the reference comes first, 2 if it comes second.
    """

    method: str
    question: str
    turn: int
    order: int
    text: str

    def read(self, reply: str) -> Outcome:
        """Returns the outcome at the end of the judge's reply."""
        if self.order == 0:
            grades = re.findall(r"\[\[(\d+(?:\.\d+)?)\]\]", reply)
            return float(grades[-1]) if grades and 1 <= float(grades[-1]) <= 10 else None
        letters = re.findall(r"\[\[([ABC])\]\]", reply)
        first, second = ("reference", "method") if self.order == 1 else ("method", "reference")
        return {"A": first, "B": second, "C": "tie"}[letters[-1]] if letters else None


def tasks(questions: Sequence[Question], texts: Texts, reference: str) -> Iterator[Task]:
    """Yields a grading task for every answer of every method, and tasks that compare the answer with the reference's.

    All methods answer a later turn after the reference's earlier answers, so these are also in the task. Each pair of
    answers is compared in both orders. Identical answers are not compared, because they are ties.
    """
    for question in questions:
        for method, answers in texts.items():
            own = answers[question.id]
            other = texts[reference][question.id]
            for turn in range(len(own)):
                earlier = other[:turn]
                ending = _references(question, turn)
                text = _conversation(question, [*earlier, own[turn]], "Assistant") + ending
                yield Task(method, question.id, turn, 0, text)
                if own[turn] == other[turn]:
                    continue
                for order, (first, second) in ((1, (other, own)), (2, (own, other))):
                    pair = _conversation(question, [*earlier, first[turn]], "Assistant A") + "\n\n"
                    pair += _conversation(question, [*earlier, second[turn]], "Assistant B")
                    yield Task(method, question.id, turn, order, pair + ending)


def _conversation(question: Question, answers: Sequence[str], name: str) -> str:
    turns = zip(question.turns, answers, strict=False)
    parts = [f"### User:\n{asked}\n\n### {name}:\n{answer}" for asked, answer in turns]
    if question.system is not None:
        parts.insert(0, f"### System:\n{question.system}")
    text = "\n\n".join(parts)
    return f"<conversation with {name}>\n{text}\n</conversation with {name}>"


def _references(question: Question, turn: int) -> str:
    """Returns the question set's reference answers up to a turn, if it has any."""
    text = "\n\n".join(question.reference[: turn + 1])
    return f"\n\n<reference answer>\n{text}\n</reference answer>" if text else ""


def tally(
    outcomes: Mapping[tuple[Any, ...], Outcome],
    questions: Sequence[Question],
    texts: Texts,
    reference: str,
) -> dict[str, Any]:
    """Returns the mean grade of each method, and its wins, ties and losses against the reference.

    A method wins or loses a pair only if both orders agree. Otherwise, the pair is a tie. Pairs with an unreadable
    reply are not counted. outcomes: each task's outcome by its method, question, turn and order.
    """
    single = {}
    pairs = {}
    for method, answers in texts.items():
        graded = {key: value for key, value in outcomes.items() if value and key[3] == 0}
        grades = [float(value) for key, value in graded.items() if key[0] == method]
        if grades:
            single[method] = {"score": sum(grades) / len(grades), "answers": len(grades)}
        if method == reference:
            continue
        counts = {"wins": 0, "ties": 0, "losses": 0}
        for question in questions:
            own = answers[question.id]
            other = texts[reference][question.id]
            for turn in range(len(own)):
                orders = {outcomes.get((method, question.id, turn, order)) for order in (1, 2)}
                if own[turn] == other[turn]:
                    counts["ties"] += 1
                elif orders == {"method"}:
                    counts["wins"] += 1
                elif orders == {"reference"}:
                    counts["losses"] += 1
                elif None not in orders:
                    counts["ties"] += 1
        pairs[method] = {**counts, "answers": sum(counts.values())}
    unread = sum(outcome is None for outcome in outcomes.values())
    return {"reference": reference, "single": single, "pairs": pairs, "unread": unread}


def judge_bench(
    bench: Path, document: dict[str, Any], url: str, model: str, on_reply: Callable[[int], object]
) -> None:
    """Lets a model on an OpenAI-compatible server judge a saved bench; adds the outcome to its file and document.

    Replies are stored next to the bench and not requested again. Raises UserError if the bench
    holds no answers, or if the server does not answer or refuses.
    """
    path = bench.with_suffix(".judgement.jsonl")
    try:
        reference = document["reference"]
        questions = [Question(**question) for question in document["questions"]]
        texts = {
            method: {answer["question"]: answer["turns"] for answer in figures["answers"]}
            for method, figures in document["methods"].items()
        }
    except (LookupError, TypeError) as reason:
        fault = f"{bench} holds no answers"
        raise UserError(fault, "run `medusa bench` again: it keeps them") from reason
    path.touch()
    repair_jsonl(path)
    known = [line for line in read_jsonl(path) if line["judge"] == model]
    outcomes: dict[tuple[Any, ...], Outcome] = {
        tuple(line["key"]): line["outcome"] for line in known
    }
    missing = [task for task in tasks(questions, texts, reference) if task[:4] not in outcomes]
    servers = ChatServers([url], model, flag="@judge")
    if missing:
        servers.check()

    def ask(task: Task) -> str:
        messages = [{"role": "system", "content": PAIR if task.order else GRADE}]
        messages.append({"role": "user", "content": task.text})
        return servers.complete(messages, temperature=0, max_tokens=MAX_TOKENS)[0]

    with path.open("a", encoding="utf-8") as stream, ThreadPoolExecutor(CONCURRENCY) as pool:
        try:
            for task, reply in zip(missing, pool.map(ask, missing), strict=True):
                outcome = outcomes[task[:4]] = task.read(reply)
                line = {"judge": model, "key": task[:4], "outcome": outcome, "reply": reply}
                stream.write(json.dumps(line, ensure_ascii=False) + "\n")
                stream.flush()
                on_reply(1)
        except BaseException:
            servers.stop()
            pool.shutdown(cancel_futures=True)
            raise
    document["judge"] = {"url": url, "model": model, **tally(outcomes, questions, texts, reference)}
    if unread := document["judge"]["unread"]:
        log.warning("%d replies of %s hold no grade and count for nothing", unread, model)
    write_json(bench, document)
