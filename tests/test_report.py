"""The report of a bench, hostile figures, and a judge over its answers: grades, pairs, going on, bad servers."""

import base64
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import Result

from medusa_cli.bench.judge import Task, tally, tasks
from medusa_cli.bench.questions import Question
from medusa_cli.bench.report import lines
from tests.helpers import (
    ChatServer,
    bench,
    medusa,
    medusa_json,
    save_bench,
    save_model,
    save_questions,
    save_run,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, each with a bench: `mine` with --report."""
    folder = tmp_path_factory.mktemp("report")
    model = save_model(folder / "model")
    save_questions(folder / "q.jsonl", 6)
    methods = ["--methods", "hf,ar,medusa,medusa-alone"]
    for name, words in (("mine", ["--report"]), ("other", [])):
        save_run(folder / name, model, calibrated=True)
        bench(folder, "--run", folder / name, "--tree", "static", *methods, *words)
    return folder


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


@pytest.mark.slow
def test_the_page_needs_nothing_beside_it(place: Path) -> None:
    page = only(place / "mine/bench", "*.html").read_text()
    addresses = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(addresses) >= 4
    assert all(address.startswith("data:") for address in addresses)
    assert "| medusa |" in only(place / "mine/bench", "*.md").read_text()
    assert not list((place / "other/bench").glob("*.html"))  # only --report writes one


@pytest.mark.slow
def test_the_same_bench_gives_the_same_page(place: Path, tmp_path: Path) -> None:
    written = only(place / "mine/bench", "*.html")
    medusa("report", only(place / "mine/bench", "*.json"), "--output", tmp_path / written.name)
    assert (tmp_path / written.name).read_bytes() == written.read_bytes()


def test_runs_stand_side_by_side(place: Path) -> None:
    output = place / "both.html"
    assert medusa_json("report", place / "mine", place / "other", "--output", output)[
        "written"
    ] == [
        str(output),
        str(output.with_suffix(".md")),
    ]
    text = output.with_suffix(".md").read_text()
    assert "| mine: medusa |" in text
    assert "| other: medusa |" in text
    again = only(place / "other/bench", "*.json")
    second = Path(shutil.copy(again, again.with_name("2026.json")))
    medusa("report", again, second, "--output", output)
    second.unlink()
    assert f"other {again.stem}" in output.read_text()


def test_names_of_any_characters_are_shown_as_they_are(place: Path, tmp_path: Path) -> None:
    asked = [
        {"question_id": i, "category": name, "turns": ["w1"]}
        for i, name in enumerate(["$a$ | <b>", "c\nd & $"])
    ]
    (tmp_path / "q&a $x$.jsonl").write_text("\n".join(map(json.dumps, asked)))
    shutil.copytree(place / "mine", tmp_path / "mine", ignore=shutil.ignore_patterns("bench"))
    words = [
        "--questions",
        str(tmp_path / "q&a $x$.jsonl"),
        "--run",
        str(tmp_path / "mine"),
        "--dtype",
        "fp32",
    ]
    medusa("bench", *words, "--max-new-tokens", "4", "--methods", "ar,medusa", "--report")
    assert "$a$ | &lt;b&gt;" in only(tmp_path / "mine/bench", "*.html").read_text()
    lines = only(tmp_path / "mine/bench", "*.md").read_text().splitlines()
    assert lines[0] == "# q&amp;a $x$.jsonl"
    assert any(line.startswith(r"| $a$ \| &lt;b&gt; ") for line in lines)
    assert any(line.startswith("| c d &amp; $ ") for line in lines)


def test_powers_on_an_axis_are_numbers() -> None:
    curves = {"$a$": [(2.0**power, 1.0, None) for power in range(12)], "b": []}
    address = lines("title", curves, "rows", "ms", log=True)["title"]
    drawn = base64.b64decode(address.partition(",")[2]).decode()
    assert ">64</text>" in drawn
    assert ">$a$</text>" in drawn


@pytest.mark.quick("facts-value0", "methods-value2")
@pytest.mark.parametrize(
    ("key", "value"),
    [("facts", [[0]]), ("drafting", 3), ("methods", {"ar": {"speedup": "x"}}), ("sampling", 3)],
)
def test_figures_that_no_bench_writes_are_refused_in_one_line(
    place: Path, tmp_path: Path, key: str, value: object
) -> None:
    document = json.loads(only(place / "mine/bench", "*.json").read_text())
    (tmp_path / "bench.json").write_text(json.dumps({**document, key: value}))
    done = medusa("report", tmp_path / "bench.json", exit_code=1)
    assert "bench" in done.stderr
    assert "internal error" not in done.stderr
    assert not list(tmp_path.glob("*.html"))


SAMPLED = [
    "--methods",
    "ar,medusa",
    "--tree",
    "static",
    "--sampling",
    "typical",
    "--temperature",
    "0.9",
]


@pytest.fixture
def judge() -> Iterator[ChatServer]:
    running = ChatServer(lambda body: ("Rating: [[7]] [[C]]", "stop"))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bench(tmp_path_factory.mktemp("judge"))


def ask(judged: Path, *words: str, exit_code: int = 0) -> Result:
    return bench(
        judged, "--limit", "2", "--max-new-tokens", "8", "--json", *words, exit_code=exit_code
    )


def newest(judged: Path) -> Path:
    return max((judged / "mine/bench").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)


def test_a_bench_keeps_its_answers_and_without_them_nothing_is_judged(judged: Path) -> None:
    document = json.loads(ask(judged, "--methods", "hf,ar").stdout)
    assert [question["id"] for question in document["questions"]] == ["0", "1"]
    hf, ar = (
        [answer["turns"] for answer in document["methods"][name]["answers"]]
        for name in ("hf", "ar")
    )
    assert hf == ar
    assert [len(turns) for turns in ar] == [2, 2]
    assert all(ar[0])
    del document["questions"]
    (judged / "old.json").write_text(json.dumps(document))
    words = [
        "report",
        judged / "old.json",
        "--judge",
        "http://127.0.0.1:9",
        "--judge-model",
        "wise",
    ]
    assert "medusa bench" in medusa(*words, exit_code=1).stderr


def test_a_judge_grades_every_turn_and_compares_in_both_orders(
    judged: Path, judge: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDUSA_API_KEY", "secret")
    judge.say = lambda body: (
        "The first. [[A]]"
        if "Assistant B" in body["messages"][-1]["content"]
        else "Good. Rating: [[8]]",
        "stop",
    )
    done = ask(judged, *SAMPLED, "--judge", f"{judge.url}/v1/", "--judge-model", "wise")
    outcome = json.loads(done.stdout)["judge"]
    assert outcome["single"] == {name: {"score": 8.0, "answers": 4} for name in ("ar", "medusa")}
    # A judge that always prefers what comes first prefers nobody.
    assert outcome["pairs"] == {"medusa": {"wins": 0, "ties": 4, "losses": 0, "answers": 4}}
    assert {call["path"] for call in judge.requests} == {"/v1/chat/completions"}
    assert {(call["model"], call["key"], call["temperature"]) for call in judge.requests} == {
        ("wise", "Bearer secret", 0)
    }
    count = len(judge.requests)
    medusa("report", newest(judged), "--judge", judge.url, "--judge-model", "wise")
    assert len(judge.requests) == count  # nothing is asked twice
    page = newest(judged).with_suffix(".md").read_text()
    assert "| mine | medusa against ar | - | 0 | 4 | 0 | 4 |" in page
    assert "| mine | medusa | 8.00 |" in page


def test_a_judgement_goes_on_after_a_failure(judged: Path, judge: ChatServer) -> None:
    ask(judged, *SAMPLED)
    words = ["report", str(newest(judged)), "--judge", judge.url, "--judge-model", "wise"]
    judge.fault = lambda number, body: 401
    failed = medusa(*words, exit_code=1)
    assert "401" in failed.stderr
    assert "--judge" in failed.stderr
    judge.fault = lambda number, body: None
    log = newest(judged).with_suffix(".judgement.jsonl")
    medusa(*words)
    lines = log.read_text().splitlines()
    log.write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])  # killed while it wrote the fourth
    judge.requests.clear()
    medusa(*words)
    assert len(judge.requests) == len(lines) - 3
    assert len(log.read_text().splitlines()) == len(lines)
    judge.requests.clear()
    medusa(*words[:-1], "other")
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
    assert "known" in asked[0].text
    assert "known" not in next(task for task in asked if task.question == "1").text
    replies = {
        ("0", 1): "B",
        ("0", 2): "A",
        ("1", 1): "A",
        ("1", 2): "B",
        ("2", 1): "A",
        ("2", 2): "A",
    }
    outcomes = {
        task[:4]: task.read(
            f"So [[{replies[task.question, task.order]}]]" if task.order else "[[6.5]]"
        )
        for task in asked
    }
    result = tally(outcomes, questions, texts, "ar")
    assert result["single"]["medusa"]["score"] == 6.5
    assert result["pairs"]["medusa"] == {"wins": 1, "ties": 2, "losses": 1, "answers": 4}


def test_a_later_turn_is_judged_after_the_references_earlier_answer() -> None:
    questions = [Question("1", "c", ("ask", "more"))]
    texts = {"ar": {"1": ["plain", "rest"]}, "medusa": {"1": ["other", "end"]}}
    asked = [task for task in tasks(questions, texts, "ar") if task.method == "medusa"]
    assert [(task.turn, task.order) for task in asked] == [
        (turn, order) for turn in (0, 1) for order in (0, 1, 2)
    ]
    for task in asked[3:]:
        assert "plain" in task.text
        assert "end" in task.text
        assert "other" not in task.text
    result = tally({task[:4]: "method" for task in asked[1:3]}, questions, texts, "ar")
    assert result["pairs"]["medusa"] == {"wins": 1, "ties": 0, "losses": 0, "answers": 1}


def test_the_judge_reads_a_questions_system_prompt() -> None:
    question = Question("1", "c", ("ask",), system="Answer in rhymes.")
    texts = {"ar": {"1": ["plain"]}, "medusa": {"1": ["other"]}}
    for task in tasks([question], texts, "ar"):
        place = task.text.index("Answer in rhymes.")
        assert place < task.text.index("ask")


def test_replies_without_a_grade_count_for_nothing(judged: Path, judge: ChatServer) -> None:
    task = Task("medusa", "1", 0, 0, "")
    assert task.read("no grade") is None
    assert task.read("[[11]]") is None
    assert task.read("[[3]] no, [[4]]") == 4
    judge.say = lambda body: ("I would rather not.", "stop")
    done = ask(judged, *SAMPLED, "--judge", judge.url, "--judge-model", "shy")
    assert "shy" in done.stderr
    outcome = json.loads(done.stdout)["judge"]
    assert outcome["single"] == {}
    assert outcome["unread"] == len(judge.requests)
    assert outcome["pairs"]["medusa"]["answers"] == 0


@pytest.mark.quick("http://127.0.0.1:9")
@pytest.mark.parametrize("address", ["nowhere", "http://127.0.0.1:9"])
def test_a_judge_that_is_not_there_costs_nothing_measured(judged: Path, address: str) -> None:
    done = ask(
        judged, "--methods", "ar,medusa", "--judge", address, "--judge-model", "wise", exit_code=1
    )
    assert f"--judge {address}" in done.stderr
    assert done.stdout
