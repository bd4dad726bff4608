"""`medusa merge`: several distillations as one, with their states; foreign runs are refused; any stop is resumed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.data.states import read_rows
from medusa_cli.distill.distillation import merge_runs
from medusa_cli.doctor.checks import Case
from medusa_cli.runs.run import Run
from tests.helpers import medusa, medusa_json, save_model, write_lines

HIDDEN = 32
SEEDS = {"day": range(0, 5), "night": range(3, 8)}  # two of them in both
SHORT = ("--dtype", "fp32", "--quiet", "--max-new-tokens", "6", "--context", "96")


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with two distillations of a tiny model from seeds that overlap."""
    place = tmp_path_factory.mktemp("merge")
    model = save_model(place / "model")
    for name, numbers in SEEDS.items():
        seeds = [{"id": f"s{i}", "messages": [{"role": "user", "content": f"w{i} w{i + 1}"}]} for i in numbers]
        seed = write_lines(place / f"{name}.jsonl", seeds)
        medusa("distill", "--seed", seed, "--run", place / name, "--model", model, *SHORT, exit_code=0)
    return place


@pytest.fixture
def place(distilled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(distilled, tmp_path / "place"))


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "distill.jsonl").read_text().splitlines()]


def conversations(run: Path) -> dict[str, tuple[list[int], torch.Tensor]]:
    """Returns the tokens of each conversation and the states beside them, by id."""
    return {
        line["id"]: (line["tokens"], read_rows(run / "states.bin", HIDDEN, *line["state_rows"])) for line in lines(run)
    }


def test_merged_runs_train_without_a_pass(place: Path) -> None:
    counts = medusa_json("merge", place / "day", place / "night", "--run", place / "all")
    assert (counts["conversations"], counts["taken"], counts["known"], counts["broken"]) == (8, 8, 2, 0)
    assert counts["answer_tokens"] == sum(end - start for line in lines(place / "all") for start, end in line["spans"])
    merged = conversations(place / "all")
    assert list(merged) == list(dict.fromkeys(line["id"] for name in SEEDS for line in lines(place / name)))
    for name in SEEDS:
        for id, (tokens, states) in conversations(place / name).items():
            assert merged[id][0] == tokens and torch.equal(merged[id][1], states)
    words = ("drafter.num_heads=2", "train.max_tokens=40", "train.batch_tokens=16", "train.warmup_steps=1")
    medusa("train", "--run", place / "all", "--dtype", "fp32", "--quiet", *words, exit_code=0)
    assert not (place / "all" / "cache").exists()  # the states that came along were taken


def test_merge_resumes_and_takes_more_runs_later(place: Path) -> None:
    sources, target = [Run.open(f"{place / name}/") for name in SEEDS], Run.open(f"{place / 'all'}/", create=True)
    copied = iter(range(3))
    with pytest.raises(StopIteration):  # as a process that ends here
        merge_runs(sources, target, on_copied=lambda: next(copied))
    with target.distill_path.open("a") as out:
        out.write('{"id": "s9", "tok')  # and the line that it was about to write
    medusa("merge", place / "day", "--run", place / "all", exit_code=0)
    assert list(conversations(place / "all")) == [line["id"] for line in lines(place / "day")]
    counts = medusa_json("merge", place / "day", place / "night", "--run", place / "all")
    assert (counts["conversations"], counts["taken"], counts["known"]) == (8, 3, 7)


def test_states_of_another_conversation_stay_behind(place: Path) -> None:
    states = place / "night" / "states.bin"
    states.write_bytes(bytes(len(states.read_bytes())))
    done = medusa("merge", place / "day", place / "night", "--run", place / "all", exit_code=0)
    assert "3 conversations" in done.stderr
    assert sorted(conversations(place / "all")) == ["s0", "s1", "s2", "s3", "s4"]


def test_runs_that_do_not_belong_together_are_refused(place: Path) -> None:
    def refused(part: str, *words: Any) -> None:
        error = medusa("merge", *words, exit_code=1).stderr
        assert part in error and len(error.strip().splitlines()) == 1

    refused("no distillation", place / "day", f"{place}/", "--run", place / "all")
    refused("distilled by itself", place / "day", "--run", place / "night")
    refused("does not exist", place / "dusk", "--run", place / "all")
    model, seed = save_model(place / "wider", hidden=2 * HIDDEN), place / "day.jsonl"
    medusa("distill", "--seed", seed, "--run", place / "wide", "--model", model, *SHORT, exit_code=0)
    refused("model", place / "day", place / "wide", "--run", place / "all")
    header = json.loads((place / "night" / "distill.json").read_text())
    header["settings"]["rounding"] = "int8"
    (place / "night" / "distill.json").write_text(json.dumps(header))
    refused("rounding", place / "day", place / "night", "--run", place / "all")
    assert not (place / "all" / "distill.jsonl").exists()  # refused before anything is written
    (place / "day" / "distill.jsonl").write_text('{"id": 3, "tokens": "x"}\n')
    refused("line 1", place / "day", "--run", place / "all")


def test_merged_run_is_not_distilled_into(place: Path) -> None:
    medusa("merge", place / "day", "--run", place / "all", "--quiet", exit_code=0)
    medusa("distill", "--seed", place / "day.jsonl", "--run", place / "all", *SHORT, exit_code=1)
    case = Case(Run(place / "all"), "all", "m")
    assert case.distill() == "medusa distill --run all-new --model m"
