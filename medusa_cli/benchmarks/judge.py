"""A judge over answers, as in MT-Bench: each turn's score of ten, and pairs of methods in both orders."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

from medusa_cli.benchmarks.answers import Texts
from medusa_cli.benchmarks.questions import Question
from medusa_cli.errors import UserError

SINGLE = (
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
LONGEST = 1024  # tokens of a verdict


@dataclass(frozen=True)
class Grading:
    """One thing to ask the judge: a grade of a method's turn (order 0), or a pair with the reference first (1) or
    second (2)."""

    method: str
    question: str
    turn: int
    order: int
    system: str
    text: str

    @property
    def key(self) -> list[Any]:
        return [self.method, self.question, self.turn, self.order]

    def read(self, said: str) -> float | str | None:
        """The verdict in the judge's words, None where there is none: a grade, or "method", "reference" or "tie"."""
        if self.order == 0:
            grades = re.findall(r"\[\[(\d+(?:\.\d+)?)\]\]", said)
            return float(grades[-1]) if grades and 1 <= float(grades[-1]) <= 10 else None
        verdicts = re.findall(r"\[\[([ABC])\]\]", said)
        first, second = ("reference", "method") if self.order == 1 else ("method", "reference")
        return {"A": first, "B": second, "C": "tie"}[verdicts[-1]] if verdicts else None


def tasks(questions: Sequence[Question], texts: Texts, reference: str) -> Iterator[Grading]:
    """A grade for every turn of every method, and each method against the reference in both orders.

    Pairs whose answers are the same are not asked: they are ties.
    """
    for question in questions:
        for method, found in texts.items():
            own, other = found.get(question.id), texts[reference].get(question.id)
            if own is None or other is None:
                continue
            for turn in range(len(own)):
                text = f"{_talk(question, own[: turn + 1], 'Assistant')}{_known(question, turn)}"
                yield Grading(method, question.id, turn, 0, SINGLE, text)
            if method != reference and own != other:
                for order, (first, second) in ((1, (other, own)), (2, (own, other))):
                    talks = f"{_talk(question, first, 'Assistant A')}\n\n{_talk(question, second, 'Assistant B')}"
                    yield Grading(method, question.id, 0, order, PAIR, talks + _known(question, len(own) - 1))


def _talk(question: Question, answers: Sequence[str], name: str) -> str:
    turns = zip(question.turns, answers, strict=False)
    said = "\n\n".join(f"### User:\n{asked}\n\n### {name}:\n{answer}" for asked, answer in turns)
    return f"<conversation with {name}>\n{said}\n</conversation with {name}>"


def _known(question: Question, turn: int) -> str:
    """The set's own answers up to a turn, where it has any."""
    known = "\n\n".join(question.reference[: turn + 1])
    return f"\n\n<reference answer>\n{known}\n</reference answer>" if known else ""


def tally(
    verdicts: dict[tuple[str | int, ...], float | str | None],
    questions: Sequence[Question],
    texts: Texts,
    reference: str,
) -> dict[str, Any]:
    """Mean grades by method, and wins, ties and losses against the reference: a pair counts where both orders agree."""
    single, pairs, unread = {}, {}, sum(verdict is None for verdict in verdicts.values())
    for method in texts:
        grades = [v for (one, *_, order), v in verdicts.items() if one == method and not order and v is not None]
        if grades:
            single[method] = {"score": sum(map(float, grades)) / len(grades), "answers": len(grades)}
        if method == reference:
            continue
        counts = {"wins": 0, "ties": 0, "losses": 0}
        for question in questions:
            both = {verdicts.get((method, question.id, 0, order)) for order in (1, 2)}
            same = texts[method].get(question.id) == texts[reference].get(question.id)
            if None in both and not same:
                continue
            won = "ties" if same or len(both) > 1 else {"method": "wins", "reference": "losses"}.get(str(*both), "ties")
            counts[won] += 1
        pairs[method] = {**counts, "answers": sum(counts.values())}
    return {"reference": reference, "single": single, "pairs": pairs, "unread": unread}


class Judge:
    """An OpenAI-compatible server's model; a key in MEDUSA_API_KEY goes along as a bearer token.

    Raises UserError, naming the judge, where the server does not answer or refuses.
    """

    def __init__(self, url: str, model: str, key: str | None = None) -> None:
        root = url.rstrip("/")
        self.address = f"{root}/chat/completions" if root.endswith("/v1") else f"{root}/v1/chat/completions"
        self.model = model
        self._session = requests.Session()
        waits = Retry(5, backoff_factor=0.3, status_forcelist=(429, 500, 502, 503, 504), allowed_methods=None)
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(max_retries=waits))
        if key:
            self._session.headers["Authorization"] = f"Bearer {key}"

    def ask(self, task: Grading) -> str:
        """The judge's words on a task, at temperature 0."""
        messages = [{"role": "system", "content": task.system}, {"role": "user", "content": task.text}]
        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": LONGEST}
        try:
            reply = self._session.post(self.address, json=body, timeout=(10, 600))
            if reply.status_code != 200:
                said = " ".join(reply.text.split())[:200]
                remedy = "check @judge_model and MEDUSA_API_KEY"
                raise UserError(f"@judge {self.address} answered {reply.status_code}: {said}", remedy)
            return str(reply.json()["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError, requests.exceptions.JSONDecodeError) as reason:
            what = f"@judge {self.address} gave no chat completion"
            raise UserError(what, "give an OpenAI-compatible server") from reason
        except (requests.RequestException, ValueError) as reason:
            raise UserError(
                f"@judge {self.address} does not answer ({type(reason).__name__})", "start it, or mend the address"
            ) from reason
