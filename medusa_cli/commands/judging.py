"""`--judge`: a saved bench's answers before a judge; verdicts are kept as they come, and none is asked for twice."""

import json
import os
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from medusa_cli import console
from medusa_cli.errors import UsageError
from medusa_cli.runs.files import write_atomic, write_json
from medusa_cli.runs.reading import Document

if TYPE_CHECKING:
    from medusa_cli.benchmarks.judge import Grading

TOGETHER = 4
KEY = "MEDUSA_API_KEY"


def check_judge(url: str | None, model: str | None) -> None:
    """UsageError where one of the two flags is given without the other."""
    if url is not None and model is None:
        raise UsageError(f"--judge {url} needs the name of a model", "give --judge-model NAME")
    if model is not None and url is None:
        raise UsageError(f"--judge-model {model} says nothing without a server", "give --judge URL")


def folder_of(bench: Path) -> Path:
    """Where a bench's answers and verdicts lie: beside it, under its name."""
    return bench.with_suffix("")


def judge_bench(bench: Path, document: Document, url: str, model: str) -> Document:
    """Ask for what is not judged yet, put the outcome into the saved bench, and give its document back.

    UserError where the bench kept no answers and where the judge cannot be asked.
    """
    from medusa_cli.benchmarks.answers import read_answers
    from medusa_cli.benchmarks.judge import Judge, tally, tasks

    folder, reference = folder_of(bench), document["reference"]
    identity = document["backbone"]
    backbone = identity["id"] if isinstance(identity, dict) else str(identity)
    questions, texts = read_answers(folder, backbone, list(document["methods"]))
    log = folder / "judgement.jsonl"
    verdicts = _known(log, model)
    judge = Judge(url, model, os.environ.get(KEY))
    left = [task for task in tasks(questions, texts, reference) if tuple(task.key) not in verdicts]
    console.info(f"{model} judges: {len(left)} verdicts to ask for, {len(verdicts)} known")
    with (
        console.progress("judging", total=len(left), unit="verdicts") as bar,
        log.open("a", encoding="utf-8") as stream,
        ThreadPoolExecutor(TOGETHER) as pool,
    ):

        def ask(task: "Grading") -> None:
            said = judge.ask(task)
            verdict = task.read(said)
            line = {"judge": model, "key": task.key, "verdict": verdict, "said": said}
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")
            stream.flush()
            verdicts[tuple(task.key)] = verdict
            bar.advance()

        asked = [pool.submit(ask, task) for task in left]
        done, _ = wait(asked, return_when=FIRST_EXCEPTION)
        failed = next((one for one in done if one.exception() is not None), None)
        if failed is not None:
            pool.shutdown(cancel_futures=True)
            failed.result()
    found = tally(verdicts, questions, texts, reference)
    if found["unread"]:
        console.warn(f"{found['unread']} verdicts of {model} held no grade and count for nothing")
    document["judge"] = {"url": url, "model": model, **found}
    write_json(bench, document)
    return document


def verdict_table(found: Document) -> Table:
    """Grades, and pairs against the reference, as a table."""
    rows, ends = [], ("wins", "ties", "losses")
    for method, one in found["single"].items():
        pair = found["pairs"].get(method)
        rows.append([method, f"{one['score']:.2f}", *(str(pair[key]) if pair else "-" for key in ends)])
    title = f"The judge's verdicts; pairs against {found['reference']}, in both orders"
    return console.grid(title, ("method", "score, of 10", *ends), rows, left=("method",))


def _known(log: Path, model: str) -> "dict[tuple[str | int, ...], float | str | None]":
    """The verdicts of this judge in the log; a last line that was cut off is dropped from it."""
    if not log.is_file():
        return {}
    whole, found = [], {}
    for line in log.read_text(encoding="utf-8").split("\n"):
        try:
            one = json.loads(line)
        except json.JSONDecodeError:
            continue
        whole.append(line)
        if one["judge"] == model:
            found[tuple(one["key"])] = one["verdict"]
    write_atomic(log, "".join(line + "\n" for line in whole))
    return found
