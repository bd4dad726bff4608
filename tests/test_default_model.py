"""The default model, with the drafter that ships and with one of each kind trained here: real weights and questions."""

from pathlib import Path

import pytest

from medusa_cli.assets import DEFAULT_MODEL
from medusa_cli.runs.io import read_json
from medusa_cli.runs.run import Run
from medusa_cli.tree.io import load_tree
from medusa_cli.tree.search import expected_length
from tests.helpers import medusa_json


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports go where the test runs."""
    monkeypatch.chdir(tmp_path)


def shipped() -> Run:
    run = Run.pretrained(DEFAULT_MODEL)
    assert run is not None
    return run


def test_shipped_drafter_is_small_whole_and_has_provenance() -> None:
    run = shipped()
    assert sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file()) <= 60_000_000
    config = read_json(run.drafter_dir / "config.json")
    provenance = config["provenance"]
    assert provenance["backbone"]["id"] == DEFAULT_MODEL and provenance["recipe"]["train"]["stage"] == 1
    calibration = read_json(run.calibration_path)
    tree = load_tree(run.tree_path)
    assert tree.max_depth <= config["num_heads"] == calibration["heads"] == len(calibration["temperatures"])
    assert expected_length(tree, calibration["accuracies"]) > 2.2


def test_drafted_answers_equal_plain_ones_in_fp32_and_take_fewer_steps() -> None:
    words = ["chat", "--dtype", "fp32", "--max-new-tokens", "48", "--prompt", "Name three primary colours and why."]
    drafted, plain = medusa_json(*words, "--tree", "static"), medusa_json(*words, "--baseline")
    assert drafted["answer"] == plain["answer"] and drafted["tokens"] == plain["tokens"]
    assert drafted["acceptance_length"] > 1.3 and plain["acceptance_length"] == 1


def test_bf16_runs_on_real_questions() -> None:
    words = ["--limit", "2", "--max-new-tokens", "20", "--methods", "ar,medusa", "--tree", "static"]
    document = medusa_json("bench", "--mt-bench", *words)
    methods = document["methods"]
    assert methods["medusa"]["acceptance_length"] > 1.3 and methods["medusa"]["overhead"] > 0
    assert {len(method["per_category"]) for method in methods.values()} == {2}


@pytest.mark.slow
def test_twenty_questions_are_token_identical_in_fp32() -> None:
    words = ["--limit", "20", "--max-new-tokens", "256", "--methods", "ar,medusa", "--dtype", "fp32"]
    document = medusa_json("bench", "--mt-bench", *words)
    assert document["methods"]["medusa"]["identical"] == 20


KINDS = {
    "medusa": [],
    "hydra": ["drafter=hydra", "drafter.matrices=one"],
    "hydra++": ["drafter=hydra", "drafter.matrices=one", "drafter.prefix_layers=1"],
    "amphista": ["drafter=amphista", "drafter.matrices=one"],
    "firp": ["drafter=firp", "train.lr=1e-2"],
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with some of the default model's own answers, which every drafter learns from a little."""
    run = tmp_path_factory.mktemp("answers")
    medusa_json("distill", "--run", f"{run}/", "--max-samples", "192", "--max-new-tokens", "96", "--max-turns", "1")
    return run


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_drafter_is_token_identical_in_fp32_and_takes_fewer_steps(kind: str, answers: Path) -> None:
    run = f"{answers}/{kind}"
    medusa_json("train", *KINDS[kind], "train.max_tokens=15000", "train.warmup_steps=2", "--run", run)
    medusa_json("calibrate", "--run", run)
    words = ["--limit", "4", "--max-new-tokens", "64", "--methods", "ar,medusa", "--tree", "static:16"]
    document = medusa_json("bench", "--mt-bench", "--run", run, "--dtype", "fp32", *words)
    measured = document["methods"]["medusa"]
    assert measured["identical"] == measured["questions"] == 4
    assert measured["acceptance_length"] > 1.05
