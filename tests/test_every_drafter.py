"""Every drafter through every command: trained beside one another on what a run distilled, then set side by side."""

import json
from pathlib import Path

import pytest
from typer.testing import Result

from medusa_cli.drafters import DRAFTERS
from tests.helpers import medusa, save_model, save_questions, write_lines
from tests.test_training import SETTINGS

OWN = {
    "medusa": [],
    "hydra": ["drafter.prefix_layers=1", "drafter.matrices=one"],
    "amphista": ["drafter.matrices=one"],
    "eagle": [],
    "firp": ["train.batch_tokens=128"],
}


def succeed(*words: str) -> Result:
    return medusa(*words, exit_code=0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A distilled run, and inside it one trained run for each drafter, calibrated and with a tree."""
    folder = tmp_path_factory.mktemp("every")
    model = save_model(folder / "model", layers=4)
    seeds = [{"id": f"s{n}", "messages": [{"role": "user", "content": f"w{n}"}]} for n in range(40)]
    seed, outer = write_lines(folder / "seeds.jsonl", seeds), ["--run", str(folder / "run"), "--quiet"]
    succeed("distill", "--seed", str(seed), "--model", model, "--dtype", "fp32", "--max-new-tokens", "24", *outer)
    save_questions(folder / "q.jsonl")
    for name, own in OWN.items():
        run = ["--run", str(folder / "run" / name), "--quiet"]
        succeed("train", f"drafter={name}", *SETTINGS, *own, *run, "--model", model, "--dtype", "fp32")
        succeed("calibrate", *run, "--dtype", "fp32", "--top", "4")
        succeed("tree", *run, "--budget", "9")
    return folder


def test_no_drafter_is_left_out() -> None:
    assert set(OWN) == set(DRAFTERS)


@pytest.mark.parametrize("name", OWN)
def test_each_answers_in_chat_what_the_model_does(place: Path, name: str) -> None:
    words = [
        "--run",
        str(place / "run" / name),
        "--dtype",
        "fp32",
        "--prompt",
        "w3",
        "--max-new-tokens",
        "20",
        "--json",
    ]
    plain = json.loads(succeed("chat", *words, "--baseline").stdout)
    for tree in ([], ["--tree", "dynamic"]):
        drafted = json.loads(succeed("chat", *words, *tree).stdout)
        assert drafted["answer"] == plain["answer"] != ""
        assert drafted["acceptance_rate"] >= 1


def test_all_are_set_side_by_side_in_one_bench(place: Path) -> None:
    words = ["--run", str(place / "run"), "--questions", str(place / "q.jsonl"), "--dtype", "fp32"]
    methods = ["ar", *sorted(OWN)]
    shown = succeed(
        "bench",
        *words,
        "--methods",
        ",".join(methods),
        "--max-new-tokens",
        "20",
        "--tree",
        "static",
        "--json",
        "--quiet",
    )
    found = json.loads(shown.stdout)["methods"]
    assert list(found) == methods
    for name in OWN:
        one = found[name]
        assert one["identical"] == one["questions"] == 4 and one["tokens"] == found["ar"]["tokens"], name
        assert one["acceptance_length"] > 1 and one["speedup"] > 0, name  # each learnt something
    assert found["ar"]["acceptance_length"] == 1
