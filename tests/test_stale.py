"""Calibrations and trees know which drafter they were made for, and commands say where it is another by now."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from medusa_cli.runs.accuracies import STAMP, stamp_of
from medusa_cli.runs.io import write_json
from medusa_cli.runs.run import Run, provenance
from medusa_cli.tree import Tree
from medusa_cli.tree.io import save_tree
from tests.helpers import TREE, medusa, save_model, save_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that was calibrated, given a tree and then trained again."""
    made = save_run(tmp_path / "run", save_model(tmp_path / "model"), calibrated=True)
    before = stamp_of(made.drafter_dir)
    calibration = json.loads(made.calibration_path.read_text())
    write_json(made.calibration_path, {**calibration, "temperatures": [1.0, 1.2, 1.4], STAMP: before})
    save_tree(made.tree_path, TREE, provenance({}, **{STAMP: before}))
    trained(made, "2001-01-01")
    return made


def trained(run: Run, when: str) -> None:
    """Let the drafter say that it was made at another time."""
    path = run.drafter_dir / "config.json"
    config = json.loads(path.read_text())
    config["provenance"]["created"] = when
    write_json(path, config)


def chat(run: Run, *words: str) -> Result:
    return medusa("chat", "--run", str(run.path), "--dtype", "fp32", "--prompt", "w1", "--max-new-tokens", "5", *words)


def warnings(shown: Result) -> list[str]:
    assert shown.exit_code == 0, shown.stderr
    return [line for line in shown.stderr.splitlines() if line.startswith("warning: ")]


def edit(path: Path, change: Any) -> None:
    document = json.loads(path.read_text())
    change(document)
    write_json(path, document)


def test_no_tree_is_searched_on_accuracies_of_an_earlier_drafter(run: Run) -> None:
    for budget in ("4", "auto"):
        shown = medusa("tree", "--run", str(run.path), "--budget", budget)
        assert shown.exit_code == 1 and "was measured on an earlier drafter" in shown.stderr
        assert f"`medusa calibrate --run {run.path}`" in shown.stderr
    judged = medusa("tree", "--run", str(run.path), "--shape", "2,1", "--json")
    assert "measured on an earlier drafter" in json.loads(judged.stdout)["warnings"][0]
    assert STAMP not in json.loads(run.tree_path.read_text())["provenance"]  # a shape is no drafter's


def test_decoding_warns_of_what_was_made_for_an_earlier_drafter(run: Run) -> None:
    [tree] = warnings(chat(run, "--tree", "static"))
    assert "tree.json was made for another drafter" in tree and "medusa tree" in tree
    for words in (["--tree", "static:4"], []):
        [searched] = warnings(chat(run, *words))
        assert "calibration.json was measured on another drafter" in searched and "medusa calibrate" in searched
    assert len(warnings(chat(run, "--tree", "dynamic"))) == 2
    edit(run.tree_path, lambda document: document["provenance"].pop(STAMP))
    edit(run.calibration_path, lambda document: document.pop(STAMP))
    assert warnings(chat(run)) == warnings(chat(run, "--tree", "dynamic")) == []  # files of earlier versions


def test_calibrate_and_tree_stamp_what_they_write(run: Run) -> None:
    edit(run.calibration_path, lambda document: document.update({STAMP: stamp_of(run.drafter_dir)}))
    assert medusa("tree", "--run", str(run.path), "--budget", "4").exit_code == 0
    assert json.loads(run.tree_path.read_text())["provenance"][STAMP] == stamp_of(run.drafter_dir)
    assert warnings(chat(run, "--tree", "dynamic")) == []


def test_times_of_an_earlier_drafter_are_taken_again(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_cli.decode.costs.home", lambda: tmp_path / "home")
    run.calibration_path.write_text(json.dumps({"accuracies": [[0.5, 0.2, 0.1]] * 3}))
    words = ["tree", "--run", str(run.path), "--budget", "auto"]
    said = "timing decoding steps"
    assert said in medusa(*words).stderr
    assert said not in medusa(*words).stderr
    trained(run, "2002-02-02")
    assert said in medusa(*words).stderr


def test_another_drafter_takes_nothing_of_the_one_that_ships(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(tmp_path / "model")
    shipped = save_run(tmp_path / "shipped", model, calibrated=True)
    monkeypatch.setattr(Run, "pretrained", classmethod(lambda cls, name: shipped))
    words = ["chat", "--model", model, "--dtype", "fp32", "--prompt", "w1", "--max-new-tokens", "5"]
    other = str(shutil.copytree(run.drafter_dir, tmp_path / "other"))
    refused = medusa(*words, "--drafter", other)
    assert refused.exit_code == 1 and f"there is no tree for {other}; give the --run" in refused.stderr
    refused = medusa(*words, "--drafter", other, "--tree", "static:3")
    assert refused.exit_code == 1 and f"{other} is not calibrated; give the --run" in refused.stderr
    save_tree(tmp_path / "chain.json", Tree.chain(2), {})
    for tree in (str(tmp_path / "chain.json"), "dynamic:5"):
        assert medusa(*words, "--drafter", other, "--tree", tree).exit_code == 0
    assert medusa(*words, "--drafter", str(shipped.drafter_dir)).exit_code == 0
    assert "5 nodes" in medusa(*words, "--drafter", str(shipped.drafter_dir), "--tree", "static:5").stderr
