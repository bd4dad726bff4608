"""A judge over a bench's answers: grades, pairs in both orders, going on, bad servers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import Result

from medusa_cli.bench.judge import Task, tally, tasks
from medusa_cli.bench.questions import Question
from tests.helpers import ChatServer, medusa, save_bench
from tests.helpers import bench as run_bench

SAMPLED = ["--methods", "ar,medusa", "--tree", "static", "--sampling", "typical", "--temperature", "0.9"]


@pytest.fixture
def judge() -> Iterator[ChatServer]:
    running = ChatServer(lambda body: ("Rating: [[7]] [[C]]", "stop"))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bench(tmp_path_factory.mktemp("judge"))


def bench(place: Path, *words: str) -> Result:
    return run_bench(place, "--limit", "2", "--max-new-tokens", "8", "--json", *words)


def newest(place: Path) -> Path:
    return max((place / "mine/bench").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)


def test_a_bench_keeps_its_answers_and_without_them_nothing_is_judged(place: Path) -> None:
    document = json.loads(bench(place, "--methods", "hf,ar").stdout)
    assert [question["id"] for question in document["questions"]] == ["0", "1"]
    hf, ar = ([answer["turns"] for answer in document["methods"][name]["answers"]] for name in ("hf", "ar"))
    assert hf == ar and [len(turns) for turns in ar] == [2, 2] and all(ar[0])
    del document["questions"]
    (place / "old.json").write_text(json.dumps(document))
    refused = medusa("report", place / "old.json", "--judge", "http://127.0.0.1:9", "--judge-model", "wise")
    assert refused.exit_code == 1 and "medusa bench" in refused.stderr


def test_a_judge_grades_every_turn_and_compares_in_both_orders(
    place: Path, judge: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDUSA_API_KEY", "secret")
    judge.say = lambda body: (
        "The first. [[A]]" if "Assistant B" in body["messages"][-1]["content"] else "Good. Rating: [[8]]",
        "stop",
    )
    done = bench(place, *SAMPLED, "--judge", f"{judge.url}/v1/", "--judge-model", "wise")
    assert done.exit_code == 0, done.stderr
    outcome = json.loads(done.stdout)["judge"]
    assert outcome["single"] == {name: {"score": 8.0, "answers": 4} for name in ("ar", "medusa")}
    # A judge that always prefers what comes first prefers nobody.
    assert outcome["pairs"] == {"medusa": {"wins": 0, "ties": 2, "losses": 0, "answers": 2}}
    assert {call["path"] for call in judge.requests} == {"/v1/chat/completions"}
    assert {(call["model"], call["key"], call["temperature"]) for call in judge.requests} == {
        ("wise", "Bearer secret", 0)
    }
    count = len(judge.requests)
    again = medusa("report", newest(place), "--judge", judge.url, "--judge-model", "wise")
    assert again.exit_code == 0 and len(judge.requests) == count  # nothing is asked twice
    page = newest(place).with_suffix(".md").read_text()
    assert "| mine | medusa against ar | - | 0 | 2 | 0 | 2 |" in page and "| mine | medusa | 8.00 |" in page


def test_a_judgement_goes_on_after_a_failure(place: Path, judge: ChatServer) -> None:
    assert bench(place, *SAMPLED).exit_code == 0
    words = ["report", str(newest(place)), "--judge", judge.url, "--judge-model", "wise"]
    judge.fault = lambda number, body: 401
    failed = medusa(*words)
    assert failed.exit_code == 1 and "401" in failed.stderr and "--judge" in failed.stderr
    judge.fault = lambda number, body: None
    log = newest(place).with_suffix(".judgement.jsonl")
    assert medusa(*words).exit_code == 0
    lines = log.read_text().splitlines()
    log.write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])  # killed while it wrote the fourth
    judge.requests.clear()
    assert medusa(*words).exit_code == 0
    assert len(judge.requests) == len(lines) - 3 and len(log.read_text().splitlines()) == len(lines)
    judge.requests.clear()
    assert medusa(*words[:-1], "other").exit_code == 0
    assert len(judge.requests) == len(lines)  # another judge's grades are its own


def test_pairs_count_if_both_orders_agree_and_same_answers_are_ties() -> None:
    questions = [Question(str(i), "c", ("ask",), ("known",) if i == 0 else ()) for i in range(4)]
    texts = {
        "ar": {str(i): ["plain"] for i in range(4)},
        "medusa": {str(i): ["other"] for i in range(3)} | {"3": ["plain"]},
    }
    asked = list(tasks(questions, texts, "ar"))
    assert len([task for task in asked if task.order == 0]) == 8
    assert {task.question for task in asked if task.order} == {"0", "1", "2"}
    assert "known" in asked[0].text and "known" not in next(task for task in asked if task.question == "1").text
    replies = {("0", 1): "B", ("0", 2): "A", ("1", 1): "A", ("1", 2): "B", ("2", 1): "A", ("2", 2): "A"}
    outcomes = {
        task[:4]: task.read(f"So [[{replies[task.question, task.order]}]]" if task.order else "[[6.5]]")
        for task in asked
    }
    result = tally(outcomes, questions, texts, "ar")
    assert result["single"]["medusa"]["score"] == 6.5
    assert result["pairs"]["medusa"] == {"wins": 1, "ties": 2, "losses": 1, "answers": 4}


def test_replies_without_a_grade_count_for_nothing(place: Path, judge: ChatServer) -> None:
    task = Task("medusa", "1", 0, 0, "")
    assert task.read("no grade") is None and task.read("[[11]]") is None and task.read("[[3]] no, [[4]]") == 4
    judge.say = lambda body: ("I would rather not.", "stop")
    done = bench(place, *SAMPLED, "--judge", judge.url, "--judge-model", "shy")
    assert done.exit_code == 0 and "shy" in done.stderr
    outcome = json.loads(done.stdout)["judge"]
    assert outcome["single"] == {} and outcome["unread"] == len(judge.requests)
    assert outcome["pairs"]["medusa"]["answers"] == 0


@pytest.mark.parametrize("address", ["nowhere", "http://127.0.0.1:9"])
def test_a_judge_that_is_not_there_costs_nothing_measured(place: Path, address: str) -> None:
    done = bench(place, "--methods", "ar,medusa", "--judge", address, "--judge-model", "wise")
    assert done.exit_code == 1 and f"--judge {address}" in done.stderr and done.stdout
