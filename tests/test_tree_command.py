"""`medusa tree`: what it finds, draws, saves and refuses; files that were made for an earlier drafter."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from medusa_cli.decode import step_times
from medusa_cli.files.io import write_json
from medusa_cli.runs.run import STAMP, Run, provenance, stamp_of
from medusa_cli.tree import Tree
from medusa_cli.tree.io import load_tree, save_tree
from tests.helpers import TREE, change_json, medusa, save_model, save_run

ACCURACIES = [[0.5 / (rank + 1) ** 2 / (head + 1) for rank in range(4)] for head in range(3)]
POSSIBLE = 1 + 4 + 16 + 64


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the calibrated runs mine and small; nothing ships."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Run, "pretrained", classmethod(lambda cls, model: None))
    for name, accuracies in (("mine", ACCURACIES), ("small", [[0.4, 0.1], [0.2, 0.1]])):
        calibrate(tmp_path / "runs" / name, accuracies)
    return tmp_path


def calibrate(path: Path, accuracies: Any = ACCURACIES) -> Path:
    path.mkdir(parents=True)
    write_json(
        path / "calibration.json",
        {"accuracies": accuracies, "backbone": {"id": "tiny"}, "version": "0"},
    )
    return path


def report(*words: str) -> dict[str, Any]:
    return json.loads(medusa("tree", "--json", *words).stdout)


@pytest.mark.slow
@pytest.mark.drawn
def test_a_budget_searches_draws_and_saves_in_the_run(folder: Path) -> None:
    shown = medusa("tree", "--run", "mine", "--budget", "10")
    saved = json.loads((folder / "runs/mine/tree.json").read_text())
    assert load_tree(folder / "runs/mine/tree.json").size == 10
    assert saved["provenance"]["backbone"] == {"id": "tiny"}
    assert saved["provenance"]["budget"] == 10
    assert (
        f"{saved['provenance']['expected_acceptance_length']:.2f} tokens per step" in shown.stdout
    )
    assert (folder / "runs/mine/tree.png").read_bytes().startswith(b"\x89PNG")
    document = report("--run", "mine", "--budget", "6")
    assert document["nodes"] == 6 == len(document["parents"]) == len(document["choices"]) + 1
    assert document["nodes_per_depth"][0] == 1
    assert sum(document["nodes_per_depth"]) == 6
    assert document["output"] == "runs/mine/tree.json"
    assert document["warnings"] == []


def test_bare_takes_64_nodes_of_the_default_run_or_all_of_fewer(folder: Path) -> None:
    shutil.copytree("runs/mine", "runs/default")
    assert report()["nodes"] == 64
    assert Path("runs/default/tree.json").is_file()
    assert report("--run", "small")["nodes"] == 7
    for budget in (1, POSSIBLE):
        assert report("--run", "mine", "--budget", str(budget))["nodes"] == budget


def test_bare_without_runs_takes_the_drafter_that_ships_and_leaves_it_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = calibrate(folder / "package")
    monkeypatch.setattr(Run, "pretrained", classmethod(lambda cls, model: cls(shipped)))
    shown = medusa("tree")
    assert "64 nodes" in shown.stderr
    assert "not saved" in shown.stdout
    assert [path.name for path in shipped.iterdir()] == ["calibration.json"]


def test_a_calibration_file_alone_saves_only_to_given_paths(folder: Path) -> None:
    elsewhere = calibrate(folder / "elsewhere")
    words = ["--calibration", str(elsewhere / "calibration.json")]
    document = report(*words, "--budget", "5")
    assert document["output"] is None
    assert document["picture"] is None
    assert [path.name for path in elsewhere.iterdir()] == ["calibration.json"]
    report(*words, "--output", "new/t.json")
    assert load_tree(folder / "new/t.json").size == 64
    assert (folder / "new/t.png").is_file()


def test_an_output_that_its_picture_would_replace_is_refused(folder: Path) -> None:
    for words in (["tree", "--shape", "2,1"], ["calibrate"]):
        assert "x.png" in medusa(*words, "--output", "x.png", exit_code=2).stderr


def test_a_shape_needs_no_calibration_and_is_judged_by_the_runs_own(folder: Path) -> None:
    document = report("--shape", "4,3,2", "--output", "dense.json")
    assert document["nodes_per_depth"] == [1, 4, 12, 24]
    assert document["expected_acceptance_length"] is None
    assert load_tree(folder / "dense.json").size == 41
    a, b, c = (row[0] for row in ACCURACIES)
    document = report("--run", "mine", "--shape", "1,1,1")
    assert document["expected_acceptance_length"] == pytest.approx(1 + a + a * b + a * b * c)


def test_medusa_choices_are_taken_and_heads_limit_the_depth(folder: Path) -> None:
    (folder / "choices.json").write_text("[[0], [1], [0, 0], [0, 1], [0, 0, 0]]")
    assert report("--choices", "choices.json")["nodes_per_depth"] == [1, 2, 2, 1]
    assert len(report("--run", "mine", "--heads", "1", "--budget", "5")["nodes_per_depth"]) == 2
    assert report("--run", "mine", "--heads", "2", "--shape", "2,2,2")["nodes"] == 7


def test_what_the_heads_lack_is_warned_of(folder: Path) -> None:
    [deep] = report("--run", "mine", "--shape", "1,1,1,1")["warnings"]
    assert "4" in deep
    assert "--heads 3" in deep
    [wide] = report("--run", "mine", "--shape", "2,6")["warnings"]
    assert wide.startswith("head 2")
    assert "6" in wide
    (folder / "runs/bare/drafter").mkdir(parents=True)
    (folder / "runs/bare/drafter/config.json").write_text('{"medusa_num_heads": 2}')
    assert "--heads 2" in report("--run", "bare", "--shape", "1,1,1")["warnings"][0]


@pytest.mark.parametrize("accuracies", ["", "{", "[]", "[[]]", "[[2.0]]", '[["a"]]'])
def test_a_broken_calibration_is_named(folder: Path, accuracies: str) -> None:
    (folder / "c.json").write_text(f'{{"accuracies": {accuracies}}}')
    assert "c.json" in medusa("tree", "--calibration", "c.json", exit_code=1).stderr


# Files of an earlier drafter


@pytest.fixture
def stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run that was calibrated, given a tree and then trained again."""
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    run = save_run(tmp_path / "run", save_model(tmp_path / "model"), calibrated=True)
    before = {STAMP: stamp_of(run.drafter_dir)}
    change_json(
        run.calibration_path,
        lambda document: document.update(temperatures=[1.0, 1.2, 1.4], **before),
    )
    save_tree(run.tree_path, TREE, provenance({}, **before))
    train_again(run, "2001-01-01")
    return run


def train_again(run: Run, day: str) -> None:
    change_json(
        run.drafter_dir / "config.json", lambda config: config["provenance"].update(created=day)
    )


def chat(*words: str, exit_code: int = 0) -> Result:
    rules = ["--dtype", "fp32", "--prompt", "w1", "--max-new-tokens", "5"]
    return medusa("chat", *words, *rules, exit_code=exit_code)


def warnings(run: Run, *words: str) -> list[str]:
    shown = chat("--run", str(run.path), *words)
    return [line for line in shown.stderr.splitlines() if line.startswith("warning: ")]


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times steps as on an idle machine: a busy one is warned of."""
    monkeypatch.setattr(step_times, "watched", lambda measure: (measure(), None))


def test_no_tree_is_searched_on_accuracies_of_an_earlier_drafter(stale: Run) -> None:
    for budget in ("4", "auto"):
        shown = medusa("tree", "--run", stale.path, "--budget", budget, exit_code=1)
        assert f"`medusa calibrate --run {stale.path}`" in shown.stderr
    assert "earlier drafter" in report("--run", str(stale.path), "--shape", "2,1")["warnings"][0]
    # A shape is no drafter's.
    assert STAMP not in json.loads(stale.tree_path.read_text())["provenance"]


def test_decoding_warns_of_files_of_an_earlier_drafter(stale: Run) -> None:
    [tree] = warnings(stale, "--tree", "static")
    assert "tree.json" in tree
    assert "medusa tree" in tree
    for words in (["--tree", "static:4"], []):
        [searched] = warnings(stale, *words)
        assert "calibration.json" in searched
        assert "medusa calibrate" in searched
    assert len(warnings(stale, "--tree", "dynamic")) == 2
    change_json(
        stale.calibration_path,
        lambda document: document.update({STAMP: stamp_of(stale.drafter_dir)}),
    )
    medusa("tree", "--run", stale.path, "--budget", "4")
    assert json.loads(stale.tree_path.read_text())["provenance"][STAMP] == stamp_of(
        stale.drafter_dir
    )
    assert warnings(stale, "--tree", "dynamic") == []


@pytest.mark.slow
def test_step_times_of_an_earlier_drafter_are_taken_again(stale: Run) -> None:
    change_json(stale.calibration_path, lambda document: document.pop(STAMP))
    words = ["tree", "--run", str(stale.path), "--budget", "auto"]
    assert "timing" in medusa(*words).stderr
    assert "timing" not in medusa(*words).stderr
    train_again(stale, "2002-02-02")
    assert "timing" in medusa(*words).stderr


def test_another_drafter_takes_nothing_of_the_drafter_that_ships(
    stale: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(tmp_path / "model")
    shipped = save_run(tmp_path / "shipped", model, calibrated=True)
    monkeypatch.setattr(Run, "pretrained", classmethod(lambda cls, name: shipped))
    other = str(shutil.copytree(stale.drafter_dir, tmp_path / "other"))
    save_tree(tmp_path / "chain.json", Tree.chain(2), {})
    for drafter, tree, code in (
        (other, "auto", 0),  # chains, by no calibration
        (other, "static:3", 1),
        (other, str(tmp_path / "chain.json"), 0),
        (other, "dynamic:5", 0),
        (str(shipped.drafter_dir), "auto", 0),
        (str(shipped.drafter_dir), "static:5", 0),
    ):
        shown = chat("--model", model, "--drafter", drafter, "--tree", tree, exit_code=code)
        assert code == 0 or drafter in shown.stderr, (drafter, tree)
