"""`medusa bench --sweep`: its points, and going on after kill -9 with none measured twice."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import Result

from medusa_cli.bench import sweep as sweeping
from medusa_cli.bench.questions import Question
from medusa_cli.bench.sweep import fill, parse_values
from medusa_cli.errors import UsageError
from tests.helpers import medusa, save_model, save_questions, save_run, tiny_tokenizer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    save_run(folder / "mine", save_model(folder / "model"), calibrated=True)
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "mine", tmp_path / "mine")
    save_questions(tmp_path / "q.jsonl")
    return tmp_path


def kept(place: Path) -> list[Path]:
    """The points on disk."""
    folder = place / "mine/bench/sweep"
    return [path for path in folder.glob("*.json") if len(path.stem) == 20] if folder.is_dir() else []


def words(place: Path, *more: str) -> list[str]:
    common = ["bench", "--questions", str(place / "q.jsonl"), "--run", str(place / "mine"), "--dtype", "fp32"]
    return [*common, "--max-new-tokens", "8", "--limit", "1", *more]


def sweep(place: Path, axis: str, *more: str) -> Result:
    return medusa(*words(place, "--sweep", axis, "--json", *more))


def series(document: dict) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for point in document["points"]:
        found.setdefault(point["series"], []).append(point["x"])
    return found


def test_nodes_are_swept_over_static_and_dynamic_trees(place: Path) -> None:
    done = sweep(place, "nodes", "--values", "2,13")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert series(document) == {
        "ar": [2, 13],
        "medusa, static": [2, 13],
        "medusa, dynamic": [2, 13],
    }
    assert all(point["acceptance_length"] >= 1 and point["questions"] == 1 for point in document["points"])
    benches = [json.loads(path.read_text())["bench"] for path in kept(place)]
    assert sorted(one["drafting"]["medusa"]["nodes"] for one in benches) == [2, 2, 13, 13]
    # The report draws the sweep beside the run's bench.
    assert medusa(*words(place, "--methods", "ar,medusa", "--report")).exit_code == 0
    (page,) = (place / "mine/bench").glob("*.html")
    assert "medusa, dynamic" in page.read_text()


@pytest.mark.parametrize(
    ("axis", "more", "expected"),
    [
        ("epsilon", ["--values", "0.05,0.2"], {"ar": [0.05, 0.2], "medusa": [0.05, 0.2]}),
        ("temperature", ["--values", "0,0.7"], {"ar": [0, 0.7], "medusa, exact": [0, 0.7], "medusa, typical": [0.7]}),
        ("heads", [], {"ar": [1, 2, 3], "medusa": [1, 2, 3]}),
        ("batch", ["--values", "1,2"], {"ar": [1, 2], "medusa": [1, 2]}),
        ("context", ["--values", "40,90"], {"ar": [40, 90], "medusa": [40, 90]}),
    ],
)
def test_every_axis_has_its_points(place: Path, axis: str, more: list[str], expected: dict) -> None:
    done = sweep(place, axis, *more)
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert series(document) == expected
    sampled = [point["nll"] is not None for point in document["points"] if point["x"]]
    assert all(sampled) if axis in ("epsilon", "temperature") else not any(sampled)
    again = sweep(place, axis, *more)
    assert json.loads(again.stdout)["points"] == document["points"]
    count = len({(p["x"], p["series"].partition(", ")[2]) for p in document["points"] if p["series"] != "ar"})
    assert f"{count} points, {count} of them measured before" in again.stderr


def test_what_was_measured_decides_what_is_measured_again(place: Path) -> None:
    assert "2 points, 0 of them" in sweep(place, "batch", "--values", "1,2").stderr
    assert "3 points, 2 of them" in sweep(place, "batch", "--values", "1,2,3").stderr
    assert "2 points, 0 of them" in sweep(place, "batch", "--values", "1,2", "--max-new-tokens", "9").stderr
    (place / "q.jsonl").write_text('{"turns": ["w3"]}')
    assert "1 points, 0 of them" in sweep(place, "batch", "--values", "2").stderr


def test_lookups_the_calibration_and_the_weights_make_a_point_another(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["--values", "2", "--no-lookup"]
    assert "1 points, 0 of them" in sweep(place, "batch", "--values", "2").stderr
    assert "1 points, 0 of them" in sweep(place, "batch", *asked).stderr
    (place / "mine/calibration.json").write_text('{"accuracies": [[0.4, 0.2, 0.1]]}')
    assert "1 points, 0 of them" in sweep(place, "batch", *asked).stderr
    monkeypatch.setattr(sweeping, "weights_of", lambda model: "trained further")
    assert "1 points, 0 of them" in sweep(place, "batch", *asked).stderr
    assert "1 points, 1 of them" in sweep(place, "batch", *asked).stderr


@pytest.mark.parametrize(("axis", "asked"), [("nodes", []), ("heads", []), ("nodes", ["--lookup"])])
def test_trees_are_swept_without_lookups_unless_these_are_asked_for(place: Path, axis: str, asked: list[str]) -> None:
    assert sweep(place, axis, "--values", "2", *asked).exit_code == 0
    benches = [json.loads(path.read_text())["bench"] for path in kept(place)]
    assert benches and all(one["drafting"]["medusa"]["lookup"] == bool(asked) for one in benches)


def test_a_sweep_killed_at_any_point_goes_on_and_measures_none_twice(place: Path) -> None:
    command = [sys.executable, "-m", "medusa_cli", *words(place, "--sweep", "nodes", "--values", "2,5")]

    def points() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in kept(place)}

    began = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wanted = random.randint(1, 3)
    while began.poll() is None and len(points()) < wanted:
        time.sleep(0.01)
    time.sleep(random.random() / 2)
    os.kill(began.pid, signal.SIGKILL)
    began.wait()
    before = points()
    assert len(before) >= wanted
    done = sweep(place, "nodes", "--values", "2,5")
    assert done.exit_code == 0, done.stderr
    after, document = points(), json.loads(done.stdout)
    assert {name: after[name] for name in before} == before and len(after) == document["of"]
    assert len({(point["series"], point["x"]) for point in document["points"]}) == len(document["points"])
    assert series(document)["medusa, static"] == series(document)["medusa, dynamic"] == [2, 5]
    assert f"{len(before)} of them measured before" in done.stderr


def test_prompts_are_filled_to_a_length_and_end_with_the_question() -> None:
    tokenizer = tiny_tokenizer()
    questions = [Question(str(i), "c", (f"w{i} w{i}", "w9")) for i in range(3)]
    for question, long in zip(questions, fill(questions, tokenizer, 20), strict=True):
        assert len(long.turns) == 1 and long.turns[0].endswith(question.turns[0])
        assert len(tokenizer(long.turns[0])["input_ids"]) == 20
    assert fill(questions, tokenizer, 1)[0].turns == ("w0 w0",)


@pytest.mark.parametrize(
    ("more", "code", "part"),
    [
        (["--sweep", "width"], 2, "--sweep 'width'"),
        (["--sweep", "nodes", "--values", "2,x"], 2, "--values '2,x'"),
        (["--sweep", "nodes", "--values", "2.5"], 2, "--values"),
        (["--sweep", "nodes", "--values", "9999"], 2, "--values 9999"),
        (["--sweep", "heads", "--values", "7"], 2, "--values 7"),
        (["--sweep", "context", "--values", "5000"], 2, "--values 5000"),
        (["--sweep", "nodes", "--tree", "static"], 2, "--tree"),
        (["--sweep", "batch", "--batch-size", "2"], 2, "--batch-size"),
        (["--sweep", "nodes", "--methods", "ar"], 2, "--methods"),
    ],
)
def test_mistakes_end_in_one_line(place: Path, more: list[str], code: int, part: str) -> None:
    done = medusa(*words(place, *more))
    assert done.exit_code == code and part in done.stderr, done.stderr
    assert sum(line.startswith("error:") for line in done.stderr.splitlines()) == 1


def test_values_are_sorted_and_said_once() -> None:
    assert parse_values("nodes", "8,2,8") == [2, 8] and parse_values("heads", None) == []
    with pytest.raises(UsageError, match="values"):
        parse_values("temperature", "-1")
