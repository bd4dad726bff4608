"""Answers in FastChat's form, and a judge over them: grades, pairs in both orders, going on, bad servers."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import Result

from medusa_cli.bench.judge import Task, tally, tasks
from medusa_cli.bench.questions import Question
from medusa_cli.bench.run import save
from tests.helpers import medusa, save_bench


class Judged:
    """A server whose verdicts `say` makes from the text it is asked; `status` may spoil them."""

    def __init__(self) -> None:
        self.asked: list[dict] = []
        self.say: Callable[[str], str] = lambda text: "Rating: [[7]] [[C]]"
        self.status = 200
        outer, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                """Silent."""

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.asked.append({**body, "path": self.path, "key": self.headers.get("Authorization")})
                content = outer.say(body["messages"][-1]["content"])
                reply = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
                self.send_response(outer.status)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def judge() -> Iterator[Judged]:
    found = Judged()
    yield found
    found.server.shutdown()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bench(tmp_path_factory.mktemp("judge"))


def bench(place: Path, *words: str) -> Result:
    common = ["bench", "--questions", str(place / "q.jsonl"), "--run", str(place / "mine"), "--dtype", "fp32"]
    return medusa(*common, "--limit", "2", "--max-new-tokens", "8", "--json", *words)


def newest(place: Path) -> Path:
    return max((place / "mine/bench").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)


SAMPLED = ["--methods", "ar,medusa", "--tree", "static", "--sampling", "typical", "--temperature", "0.9"]


def test_answers_lie_beside_the_bench_in_fastchats_form(place: Path) -> None:
    done = bench(place, "--methods", "hf,ar")
    assert done.exit_code == 0, done.stderr
    folder = newest(place).with_suffix("")
    asked = [json.loads(line) for line in (folder / "question.jsonl").read_text().splitlines()]
    assert [one["question_id"] for one in asked] == ["0", "1"] and len(asked[0]["turns"]) == 2
    lines = (folder / "model_answer/model-ar.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    assert first["model_id"] == "model-ar" and first["question_id"] == "0" and len(lines) == 2
    assert first["choices"][0]["index"] == 0 and len(first["choices"][0]["turns"]) == 2
    assert first["tstamp"] > 1.7e9 and first["answer_id"] != json.loads(lines[1])["answer_id"]
    assert any(word.startswith("w") for turn in first["choices"][0]["turns"] for word in turn.split())


def test_a_judge_grades_every_turn_and_compares_in_both_orders(
    place: Path, judge: Judged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDUSA_API_KEY", "secret")
    judge.say = lambda text: "Good. Rating: [[8]]" if "Assistant B" not in text else "The first. [[A]]"
    done = bench(place, *SAMPLED, "--judge", judge.url, "--judge-model", "wise")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)["judge"]
    assert found["single"] == {name: {"score": 8.0, "answers": 4} for name in ("ar", "medusa")}
    # A judge that always prefers what comes first prefers nobody.
    assert found["pairs"] == {"medusa": {"wins": 0, "ties": 2, "losses": 0, "answers": 2}}
    assert {one["path"] for one in judge.asked} == {"/v1/chat/completions"}
    assert {(one["model"], one["key"], one["temperature"]) for one in judge.asked} == {("wise", "Bearer secret", 0)}
    count = len(judge.asked)
    again = medusa("report", str(newest(place)), "--judge", judge.url, "--judge-model", "wise")
    assert again.exit_code == 0 and len(judge.asked) == count  # nothing is asked twice
    page = newest(place).with_suffix(".md").read_text()
    assert "| mine | medusa against ar | - | 0 | 2 | 0 | 2 |" in page and "| mine | medusa | 8.00 |" in page


def test_benches_of_one_second_leave_one_another_alone(place: Path, tmp_path: Path) -> None:
    document = json.loads(bench(place, "--methods", "ar").stdout)
    first, second = (save({**document, "title": title}, tmp_path) for title in ("first", "second"))
    assert [json.loads(path.read_text())["title"] for path in (first, second)] == ["first", "second"]
    assert [path.stem for path in sorted(tmp_path.glob("*.json"))] == [first.stem, second.stem]  # the newest one last
    with ThreadPoolExecutor(8) as pool:  # several at once take names of their own, too
        saved = list(pool.map(lambda title: save({**document, "title": title}, tmp_path), map(str, range(8))))
    assert [json.loads(path.read_text())["title"] for path in saved] == [str(n) for n in range(8)]


def test_a_judgement_goes_on_after_a_failure(place: Path, judge: Judged) -> None:
    assert bench(place, *SAMPLED).exit_code == 0
    words = ["report", str(newest(place)), "--judge", judge.url, "--judge-model", "wise"]
    judge.status = 401
    failed = medusa(*words)
    assert failed.exit_code == 1 and "401" in failed.stderr and "--judge-model" in failed.stderr
    judge.status = 200
    log = newest(place).with_suffix("") / "judgement.jsonl"
    assert medusa(*words).exit_code == 0
    lines = log.read_text().splitlines()
    log.write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])  # killed while it wrote the fourth
    judge.asked.clear()
    assert medusa(*words).exit_code == 0
    assert len(judge.asked) == len(lines) - 3 and len(log.read_text().splitlines()) == len(lines)
    judge.asked.clear()
    assert medusa(*words[:-1], "other").exit_code == 0
    assert len(judge.asked) == len(lines)  # another judge's verdicts are its own


def test_pairs_count_where_both_orders_agree_and_same_answers_are_ties() -> None:
    questions = [Question(str(i), "c", ("ask",), ("known",) if i == 0 else ()) for i in range(4)]
    texts = {
        "ar": {str(i): ["plain"] for i in range(4)},
        "medusa": {str(i): ["other"] for i in range(3)} | {"3": ["plain"]},
    }
    asked = list(tasks(questions, texts, "ar"))
    assert len([task for task in asked if task.order == 0]) == 8
    assert {task.question for task in asked if task.order} == {"0", "1", "2"}
    assert "known" in asked[0].text and "known" not in next(task for task in asked if task.question == "1").text
    verdicts = {tuple(task.key): task.read("[[6.5]]") for task in asked if not task.order}
    for question, (first, second) in {"0": ("B", "A"), "1": ("A", "B"), "2": ("A", "A")}.items():
        for order, said in ((1, first), (2, second)):
            task = next(one for one in asked if (one.question, one.order) == (question, order))
            verdicts[tuple(task.key)] = task.read(f"So [[{said}]]")
    found = tally(verdicts, questions, texts, "ar")
    assert found["single"]["medusa"]["score"] == 6.5
    assert found["pairs"]["medusa"] == {"wins": 1, "ties": 2, "losses": 1, "answers": 4}


def test_words_without_a_verdict_count_for_nothing(place: Path, judge: Judged) -> None:
    task = Task("medusa", "1", 0, 0, "")
    assert task.read("no grade") is None and task.read("[[11]]") is None and task.read("[[3]] no, [[4]]") == 4
    judge.say = lambda text: "I would rather not."
    done = bench(place, *SAMPLED, "--judge", f"{judge.url}/v1/", "--judge-model", "shy")
    assert done.exit_code == 0 and "shy" in done.stderr
    found = json.loads(done.stdout)["judge"]
    assert found["single"] == {} and found["unread"] == len(judge.asked) and found["pairs"]["medusa"]["answers"] == 0


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["--judge", "http://127.0.0.1:9"], 2, "--judge-model"),
        (["--judge-model", "wise"], 2, "--judge URL"),
        (["--judge", "nowhere", "--judge-model", "wise"], 1, "--judge nowhere"),
    ],
)
def test_mistakes_end_in_one_line_and_cost_nothing_measured(
    place: Path, words: list[str], code: int, part: str
) -> None:
    done = bench(place, "--methods", "ar,medusa", *words)
    assert done.exit_code == code and part in done.stderr, done.stderr
    assert bool(done.stdout) is (code == 1)  # what was measured is printed all the same


def test_a_bench_without_answers_cannot_be_judged(place: Path, tmp_path: Path) -> None:
    assert bench(place, "--methods", "ar,medusa").exit_code == 0
    (tmp_path / "old.json").write_text(newest(place).read_text())
    words = ["report", str(tmp_path / "old.json"), "--judge", "http://127.0.0.1:9", "--judge-model", "wise"]
    done = medusa(*words)
    assert done.exit_code == 1 and "medusa bench" in done.stderr
