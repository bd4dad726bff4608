"""`medusa tree` from the command line: what it finds, draws, saves, and refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from medusa_cli.runs.run import Run
from medusa_cli.tree.io import load_tree
from tests.helpers import medusa

ACCURACIES = [[0.5 / (rank + 1) ** 2 / (head + 1) for rank in range(4)] for head in range(3)]
POSSIBLE = 1 + 4 + 16 + 64


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory where nothing ships."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Run, "pretrained", classmethod(lambda cls, model: None))
    return tmp_path


def calibrated(path: Path, accuracies: Any = ACCURACIES) -> Path:
    path.mkdir(parents=True)
    document = {"accuracies": accuracies, "heads": 3, "top": 4, "backbone": {"id": "tiny"}, "version": "0"}
    (path / "calibration.json").write_text(json.dumps(document))
    return path


def tree(*words: str) -> Result:
    return medusa("tree", *words)


def report(*words: str) -> dict[str, Any]:
    shown = tree("--json", *words)
    assert shown.exit_code == 0, shown.stderr
    return json.loads(shown.stdout)


def refused(*words: str, code: int) -> str:
    shown = tree(*words)
    assert shown.exit_code == code
    assert shown.stdout == ""
    assert shown.stderr.startswith("error: ") and shown.stderr.count("\n") == 1
    return shown.stderr


def test_a_budget_searches_draws_and_saves_in_the_run(folder: Path) -> None:
    run = calibrated(folder / "runs" / "mine")
    shown = tree("--run", "mine", "--budget", "10")
    assert shown.exit_code == 0, shown.stderr
    assert shown.stderr.splitlines()[0].startswith("10 nodes (--budget 10) for the run runs/mine: 3 heads, top 4")
    assert "Nodes per depth" in shown.stdout
    saved = json.loads((run / "tree.json").read_text())
    made = load_tree(run / "tree.json")
    assert made.size == 10
    assert saved["provenance"]["backbone"] == {"id": "tiny"} and saved["provenance"]["budget"] == 10
    expected = saved["provenance"]["expected_acceptance_length"]
    assert f"expected acceptance length: {expected:.2f} tokens a step" in shown.stdout
    assert (run / "tree.png").read_bytes().startswith(b"\x89PNG")


def test_bare_takes_the_default_run_and_64_nodes(folder: Path) -> None:
    calibrated(folder / "runs" / "default")
    assert report()["nodes"] == 64
    assert (folder / "runs" / "default" / "tree.json").is_file()


def test_bare_takes_all_nodes_where_there_are_fewer_than_64(folder: Path) -> None:
    calibrated(folder / "runs" / "default", [[0.4, 0.1], [0.2, 0.1]])
    assert report()["nodes"] == 7


def test_bare_falls_back_to_what_ships_and_leaves_it_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = calibrated(folder / "package")
    monkeypatch.setattr(Run, "pretrained", classmethod(lambda cls, model: cls(shipped)))
    shown = tree()
    assert shown.exit_code == 0, shown.stderr
    assert "the drafter that ships" in shown.stderr.splitlines()[0]
    assert "not saved" in shown.stdout
    assert [path.name for path in shipped.iterdir()] == ["calibration.json"]


def test_json_holds_the_whole_report(folder: Path) -> None:
    run = calibrated(folder / "runs" / "mine")
    found = report("--run", "mine", "--budget", "6")
    assert found["nodes"] == 6 == len(found["parents"]) == len(found["choices"]) + 1
    assert found["nodes_per_depth"][0] == 1 and sum(found["nodes_per_depth"]) == 6
    assert 1 < found["expected_acceptance_length"] < 3
    assert found["output"] == str(Path("runs/mine/tree.json")) and found["warnings"] == []
    assert (run / "tree.json").is_file()


def test_a_calibration_file_alone_saves_nothing_but_what_is_asked(folder: Path) -> None:
    where = calibrated(folder / "elsewhere")
    found = report("--calibration", str(where / "calibration.json"), "--budget", "5")
    assert found["output"] is None and found["picture"] is None
    assert [path.name for path in where.iterdir()] == ["calibration.json"]
    report("--calibration", str(where / "calibration.json"), "--output", "new/t.json", "--picture", "other/t.svg")
    assert load_tree(folder / "new" / "t.json").size == 64
    assert "<svg" in (folder / "other" / "t.svg").read_text()


def test_a_shape_needs_no_calibration(folder: Path) -> None:
    found = report("--shape", "4,3,2", "--output", "dense.json")
    assert found["nodes_per_depth"] == [1, 4, 12, 24]
    assert found["expected_acceptance_length"] is None
    assert load_tree(folder / "dense.json").size == 41
    assert "unknown without a calibration" in tree("--shape", "2,2").stdout


def test_a_shape_is_judged_by_the_runs_calibration(folder: Path) -> None:
    calibrated(folder / "runs" / "mine")
    a, b, c = (row[0] for row in ACCURACIES)
    found = report("--run", "mine", "--shape", "1,1,1")
    assert found["expected_acceptance_length"] == pytest.approx(1 + a + a * b + a * b * c)


def test_medusa_choices_are_taken(folder: Path) -> None:
    (folder / "choices.json").write_text("[[0], [1], [0, 0], [0, 1], [0, 0, 0]]")
    assert report("--choices", "choices.json")["nodes_per_depth"] == [1, 2, 2, 1]


def test_heads_limit_the_depth(folder: Path) -> None:
    calibrated(folder / "runs" / "mine")
    assert len(report("--run", "mine", "--heads", "1", "--budget", "5")["nodes_per_depth"]) == 2
    assert report("--run", "mine", "--heads", "2", "--shape", "2,2,2")["nodes"] == 7


def test_what_the_heads_lack_is_warned_of(folder: Path) -> None:
    calibrated(folder / "runs" / "mine")
    deep = tree("--run", "mine", "--shape", "1,1,1,1")
    assert deep.exit_code == 0
    assert "warning: the tree is 4 deep but there are 3 heads" in deep.stderr
    wide = report("--run", "mine", "--shape", "2,6")
    assert wide["warnings"] == [
        "head 2: the tree uses 6 guesses, 4 were calibrated; the others count 0 in the expected length"
    ]


def test_depth_is_judged_by_the_drafter_where_nothing_is_calibrated(folder: Path) -> None:
    drafter = folder / "runs" / "mine" / "drafter"
    drafter.mkdir(parents=True)
    (drafter / "config.json").write_text('{"medusa_num_heads": 2}')
    assert "3 deep but there are 2 heads" in report("--run", "mine", "--shape", "1,1,1")["warnings"][0]
    assert "medusa calibrate --run mine" in refused("--run", "mine", code=1)


@pytest.mark.parametrize("budget", ["0", "-5", str(POSSIBLE + 1), "1000000"])
def test_an_impossible_budget_names_the_possible_ones(folder: Path, budget: str) -> None:
    calibrated(folder / "runs" / "mine")
    said = refused("--run", "mine", "--budget", budget, code=2)
    assert f"--budget {budget}" in said and str(POSSIBLE) in said


def test_the_largest_budgets_are_fine(folder: Path) -> None:
    calibrated(folder / "runs" / "mine")
    assert report("--run", "mine", "--budget", str(POSSIBLE))["nodes"] == POSSIBLE
    assert report("--run", "mine", "--budget", "1")["nodes"] == 1


def test_a_tree_too_large_to_verify_is_refused(folder: Path) -> None:
    calibrated(folder / "runs" / "wide", [[0.01] * 100] * 3)
    assert "1,024" in refused("--run", "wide", "--budget", "5000", code=2)
    assert "1,024" in refused("--shape", "100,100,100", code=2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shape", "4,x"], "--shape"),
        (["--shape", ""], "--shape"),
        (["--shape", "4,0"], "--shape"),
        (["--shape", "2", "--budget", "3"], "--budget and --shape exclude each other"),
        (["--heads", "0", "--shape", "2"], "--heads 0"),
        (["--picture", "tree.bmp", "--shape", "2"], "--picture 'tree.bmp'"),
    ],
)
def test_flags_that_cannot_be(words: list[str], said: str) -> None:
    assert said in refused(*words, code=2)


def test_more_heads_than_there_are(folder: Path) -> None:
    calibrated(folder / "runs" / "mine")
    assert "1 to 3" in refused("--run", "mine", "--heads", "4", code=2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"accuracies": []}',
        '{"accuracies": [[]]}',
        '{"accuracies": [[2.0]]}',
        '{"accuracies": [["a"]]}',
    ],
)
def test_a_broken_calibration_is_named(folder: Path, text: str) -> None:
    (folder / "c.json").write_text(text)
    assert "c.json" in refused("--calibration", "c.json", code=1)


def test_nothing_to_start_from() -> None:
    assert "medusa calibrate" in refused(code=1)
    assert "runs/none" in refused("--run", "none", code=1)
    assert "none.json" in refused("--calibration", "none.json", code=1)
    assert "none.json" in refused("--choices", "none.json", code=1)
