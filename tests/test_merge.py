"""`medusa merge`: several distillations as one, with their states; what does not belong together; going on."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.data.states import read_rows
from medusa_cli.distill.records import merge_runs
from medusa_cli.doctor.checks import Case
from medusa_cli.runs.run import Run
from tests.helpers import medusa, save_model

HIDDEN = 32
SEEDS = {"day": range(0, 5), "night": range(3, 8)}  # two of them in both


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two distillations of a tiny model from seeds that overlap."""
    place = tmp_path_factory.mktemp("merge")
    model = save_model(place / "model")
    for name, numbers in SEEDS.items():
        seeds = [{"id": f"s{i}", "messages": [{"role": "user", "content": f"w{i} w{i + 1}"}]} for i in numbers]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in seeds))
        distilled(place, name, "--model", model)
    return place


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "place"))


def distilled(place: Path, name: str, *words: str) -> None:
    done = medusa("distill", "--seed", place / f"{name}.jsonl", "--run", place / name, "--dtype", "fp32", "--quiet",
                  "--max-new-tokens", "6", "--context", "96", *words)  # fmt: skip
    assert done.exit_code == 0, done.output


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "distill.jsonl").read_text().splitlines()]


def conversations(run: Path) -> dict[str, tuple[list[int], torch.Tensor]]:
    """By id, what was said, and the states beside it."""
    return {one["id"]: (one["tokens"], read_rows(run / "states.bin", HIDDEN, *one["state_rows"])) for one in lines(run)}


def test_runs_become_one_that_training_learns_from_without_a_pass(place: Path) -> None:
    done = medusa("merge", place / "day", place / "night", "--run", place / "all", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["conversations"], told["taken"], told["known"], told["broken"]) == (8, 8, 2, 0)
    assert told["answer_tokens"] == sum(end - start for one in lines(place / "all") for start, end in one["spans"])
    found = conversations(place / "all")
    assert list(found) == list(dict.fromkeys(one["id"] for name in SEEDS for one in lines(place / name)))
    for name in SEEDS:
        for id, (tokens, states) in conversations(place / name).items():
            assert found[id][0] == tokens and torch.equal(found[id][1], states)
    words = ("drafter.num_heads=2", "train.max_tokens=40", "train.batch_tokens=16", "train.warmup_steps=1")
    trained = medusa("train", "--run", place / "all", "--dtype", "fp32", "--quiet", *words)
    assert trained.exit_code == 0, trained.output
    assert not (place / "all" / "cache").exists()  # the states that came along were taken


def test_it_goes_on_where_it_was_stopped_and_takes_more_runs_later(place: Path) -> None:
    sources, target = [Run.open(f"{place / name}/") for name in SEEDS], Run.open(f"{place / 'all'}/", create=True)
    copied = iter(range(3))
    with pytest.raises(StopIteration):  # as a process that ends here
        merge_runs(sources, target, on_copied=lambda: next(copied))
    with target.distill_path.open("a") as out:
        out.write('{"id": "s9", "tok')  # and the line that it was about to write
    assert medusa("merge", place / "day", "--run", place / "all").exit_code == 0
    assert list(conversations(place / "all")) == [one["id"] for one in lines(place / "day")]
    again = medusa("merge", place / "day", place / "night", "--run", place / "all")
    assert "8 conversations" in again.stdout and "3 copied now, 7 there already" in again.stdout
    assert "medusa train --run" in again.stdout and len(conversations(place / "all")) == 8


def test_states_of_something_else_stay_behind(place: Path) -> None:
    states = place / "night" / "states.bin"
    states.write_bytes(bytes(len(states.read_bytes())))
    done = medusa("merge", place / "day", place / "night", "--run", place / "all")
    assert done.exit_code == 0 and "3 conversations were left out" in done.stderr
    assert sorted(conversations(place / "all")) == ["s0", "s1", "s2", "s3", "s4"]


def test_what_does_not_belong_together_is_refused(place: Path) -> None:
    def refused(*words: Any) -> str:
        done = medusa("merge", *words)
        assert done.exit_code in (1, 2) and "Traceback" not in done.output
        assert len(done.stderr.strip().splitlines()) == 1
        return done.stderr

    assert "holds no distillation" in refused(place / "day", f"{place}/", "--run", place / "all")
    assert "is the run to merge into" in refused(place / "day", "--run", place / "day")
    assert "was distilled by itself" in refused(place / "day", "--run", place / "night")
    assert "does not exist" in refused(place / "dusk", "--run", place / "all")
    save_model(place / "wider", hidden=2 * HIDDEN)
    shutil.copy(place / "day.jsonl", place / "wide.jsonl")
    distilled(place, "wide", "--model", str(place / "wider"))
    assert "merge runs of one model" in refused(place / "day", place / "wide", "--run", place / "all")
    header = json.loads((place / "night" / "distill.json").read_text())
    header["settings"]["rounding"] = "int8"
    (place / "night" / "distill.json").write_text(json.dumps(header))
    assert "with rounding 'int8'" in refused(place / "day", place / "night", "--run", place / "all")
    assert not (place / "all" / "distill.jsonl").exists()  # refused before anything is written
    (place / "day" / "distill.jsonl").write_text('{"id": 3, "tokens": "x"}\n')
    assert "line 1 is no conversation" in refused(place / "day", "--run", place / "all")


def test_a_merged_run_is_not_distilled_into_and_the_doctor_knows(place: Path) -> None:
    assert medusa("merge", place / "day", "--run", place / "all", "--quiet").exit_code == 0
    words = ("--dtype", "fp32", "--context", "96", "--max-new-tokens", "6")
    more = medusa("distill", "--seed", place / "day.jsonl", "--run", place / "all", *words)
    assert more.exit_code == 1 and 'seed "several runs"' in more.stderr
    case = Case(Run(place / "all"), "all", "m")
    assert case.distill() == "medusa distill --run all-anew --model m --max-new-tokens 6"
