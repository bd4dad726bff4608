"""States of several layers kept while distilling: those of a prefill, for every drafter that reads some of them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from medusa_cli.data.conversation import Conversation
from medusa_cli.distill import answer_locally
from medusa_cli.engine import load_backbone
from medusa_cli.runs.recipe import DistillRecipe
from medusa_cli.runs.resolve import LoadOptions
from medusa_cli.runs.run import Run
from medusa_cli.train import load_dataset
from tests import forked, helpers
from tests.helpers import medusa, save_model, tiny_backbone

SHORT = ("train.max_tokens=60", "train.batch_tokens=32", "train.warmup_steps=1", "drafter.num_heads=2")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A distillation of a tiny model of four layers that kept the states after two of them, and one that did not."""
    place = tmp_path_factory.mktemp("taps")
    save_model(place / "model", layers=4)
    seeds = [{"id": f"s{i}", "messages": [{"role": "user", "content": f"w{i} w{i + 1}"}] * 2} for i in range(8)]
    (place / "seeds.jsonl").write_text("".join(json.dumps(one) + "\n" for one in seeds))
    for name, more in (("kept", ["--taps", "1,3"]), ("final", [])):
        done = distilled(place, place, name, *more)
        assert done.exit_code == 0, done.output
    return place


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "place"))


def words(made: Path, place: Path, name: str, *more: str) -> list[str]:
    places = ("--seed", made / "seeds.jsonl", "--run", place / name, "--model", place / "model")
    short = ("--quiet", "--dtype", "fp32", "--max-new-tokens", "8", "--context", "96")
    return ["distill", *map(str, places), *short, *more]


def distilled(made: Path, place: Path, name: str, *more: str) -> Result:
    return medusa(*words(made, place, name, *more))


def test_every_row_holds_the_states_of_its_position_the_final_ones_last() -> None:
    backbone = tiny_backbone("llama", layers=4)
    seeds = [Conversation.from_turns(f"s{i}", [f"w{i} w1", "w2 w3"]) for i in range(5)]
    settings = DistillRecipe(max_new_tokens=10, batch_size=2, context=96, taps=(1, 3))
    for sample in answer_locally(backbone, seeds, settings):
        whole = helpers.forward(backbone, sample.conversation.tokens, taps=(0, 2, -1)).hidden
        assert sample.states.shape == (len(sample.conversation.tokens) - 1, 3 * backbone.hidden_size)
        assert torch.allclose(sample.states.float(), whole[:-1], rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("taps", [(-1,), (0, -1), (2, -1), (0, 2, -1)])
def test_a_data_set_of_some_of_the_kept_layers_is_that_of_a_prefill(place: Path, taps: tuple[int, ...]) -> None:
    backbone = load_backbone(str(place / "model"), LoadOptions(dtype="fp32"))
    passes_made: list[tuple[int, int]] = []

    def seen(*event: int) -> None:
        passes_made.append(event)

    ours = load_dataset(Run(place / "kept"), backbone, taps=taps, on_progress=seen)
    assert ours.kept and not passes_made
    (place / "kept" / "states.bin").unlink()
    fresh = load_dataset(Run(place / "kept"), backbone, taps=taps, on_progress=seen)
    assert passes_made and [one.id for one in ours.train] == [one.id for one in fresh.train]
    found, expected = (one.batch(one.train, backbone.device, torch.float32) for one in (ours, fresh))
    assert found.hidden.shape == expected.hidden.shape == (len(found.next), len(taps) * backbone.hidden_size)
    assert torch.allclose(found.hidden, expected.hidden, rtol=2**-6, atol=1e-3)


def test_drafters_of_any_of_them_learn_without_a_pass_and_of_others_with_one(place: Path) -> None:
    kinds = {"low": ("drafter=eagle", "drafter.taps=[1]"), "medusa": ("drafter=medusa",),
             "eagle": ("drafter=eagle", "drafter.taps=[1,3]")}  # fmt: skip
    for name, settings in kinds.items():
        done = medusa("train", "--run", place / "kept" / name, "--from", place / "kept", "--dtype", "fp32", "--quiet",
                      *settings, *SHORT)  # fmt: skip
        assert done.exit_code == 0, done.output
        assert not list(place.glob("kept/**/cache"))
    for command in (("calibrate", "--top", "3", "--dtype", "fp32"), ("tree", "--budget", "4")):
        assert medusa(*command, "--run", place / "kept" / "eagle").exit_code == 0
    assert not list(place.glob("kept/**/cache"))
    other = ("drafter=eagle", "drafter.taps=[2]", *SHORT)
    assert medusa("train", "--run", place / "kept", "--dtype", "fp32", "--quiet", *other).exit_code == 0
    (made,) = place.glob("kept/cache/states-*.bin")
    more = medusa("train", "--run", place / "kept", "--dtype", "fp32", *SHORT, "drafter=eagle", "drafter.taps=[1,2]")
    assert more.exit_code == 0 and "GB of states of other layers" in more.stderr
    assert made in place.glob("kept/cache/states-*.bin")  # it is not ours to delete


def test_a_distillation_goes_on_with_its_own_layers_and_merges_with_no_others(made: Path, place: Path) -> None:
    assert json.loads((place / "kept" / "distill.json").read_text())["settings"]["taps"] == [1, 3]
    again = distilled(made, place, "kept", "--taps", "1,3")
    assert again.exit_code == 0, again.output
    other = distilled(made, place, "kept", "--taps", "2")
    assert other.exit_code == 1 and "was distilled with settings" in other.stderr
    mixed = medusa("merge", place / "kept", place / "final", "--run", place / "all")
    assert mixed.exit_code == 1 and "was distilled with taps" in mixed.stderr
    alike = medusa("merge", place / "kept", "--run", place / "all", "--json")
    assert alike.exit_code == 0 and json.loads(alike.stdout)["taken"] == 8
    assert (place / "all" / "states.bin").read_bytes() == (place / "kept" / "states.bin").read_bytes()
    backbone = load_backbone(str(place / "model"), LoadOptions(dtype="fp32"))
    assert load_dataset(Run(place / "all"), backbone, taps=(0, 2, -1)).kept


def test_several_processes_keep_the_states_that_one_keeps(made: Path, place: Path) -> None:
    done = forked.run(words(made, place, "two", "--taps", "1,3"), place / "said", size=2)
    assert done.returncode == 0, done.stderr
    assert not list((place / "two").glob("parts/*"))
    backbone = load_backbone(str(place / "model"), LoadOptions(dtype="fp32"))
    held = []
    for name in ("kept", "two"):
        data = load_dataset(Run(place / name), backbone, taps=(0, 2, -1))
        assert data.kept
        found = sorted([*data.train, *data.held_out], key=lambda one: one.id)
        held.append(([one.tokens.tolist() for one in found], data.batch(found, backbone.device, torch.float32).hidden))
    assert held[0][0] == held[1][0]
    assert torch.allclose(held[0][1], held[1][1], rtol=2**-6, atol=1e-3)


@pytest.mark.parametrize("said", ["4", "3,1", "0", "low"])
def test_layers_that_cannot_be_kept_are_refused(place: Path, said: str) -> None:
    done = distilled(place, place, "new", "--taps", said)
    assert done.exit_code == 2 and "distill.taps=" in done.stderr
    assert not (place / "new" / "distill.jsonl").exists()


def test_servers_tell_no_states(place: Path) -> None:
    done = distilled(place, place, "new", "--taps", "1", "--endpoint", "http://127.0.0.1:9")
    assert done.exit_code == 2 and "--taps" in done.stderr
