"""States of several layers kept while distilling: those of a prefill, for drafters that read some of them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.data.conversation import Conversation
from medusa_cli.distill import answer_locally
from medusa_cli.drafters import MedusaHeads
from medusa_cli.engine import load_backbone
from medusa_cli.model import Backbone
from medusa_cli.runs.recipe import DistillRecipe
from medusa_cli.runs.resolve import LoadOptions
from medusa_cli.runs.run import Run
from tests import forked
from tests.helpers import forward, load_dataset, medusa, save_model, tiny_backbone, write_lines

SHORT = ("train.max_tokens=60", "train.batch_tokens=32", "train.warmup_steps=1", "drafter.num_heads=2")


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Distillations of a model of four layers: `kept` keeps the states after two of them, `final` the last only."""
    place = tmp_path_factory.mktemp("taps")
    save_model(place / "model", layers=4)
    seeds = [{"id": f"s{i}", "messages": [{"role": "user", "content": f"w{i} w{i + 1}"}] * 2} for i in range(8)]
    write_lines(place / "seeds.jsonl", seeds)
    medusa(*distill_words(place, "kept", "--taps", "1,3"), exit_code=0)
    medusa(*distill_words(place, "final"), exit_code=0)
    return place


@pytest.fixture
def place(distilled: Path, tmp_path: Path) -> Path:
    place = Path(shutil.copytree(distilled, tmp_path / "place"))
    (place / "seeds.jsonl").unlink()
    (place / "seeds.jsonl").symlink_to(distilled / "seeds.jsonl")  # a resumed distillation needs the same seed
    return place


def distill_words(place: Path, name: str, *more: str) -> list[str]:
    flags = ("--seed", (place / "seeds.jsonl").resolve(), "--run", place / name, "--model", place / "model")
    short = ("--quiet", "--dtype", "fp32", "--max-new-tokens", "8", "--context", "96")
    return ["distill", *map(str, flags), *short, *more]


def tapping(backbone: Backbone, taps: tuple[int, ...]) -> MedusaHeads:
    heads = MedusaHeads.create(backbone, 1, 1, "own")
    heads.taps = taps
    return heads


def test_row_holds_the_states_of_its_position_the_final_layer_last() -> None:
    backbone = tiny_backbone(layers=4)
    seeds = [Conversation.from_turns(f"s{i}", [f"w{i} w1", "w2 w3"]) for i in range(5)]
    settings = DistillRecipe(max_new_tokens=10, batch_size=2, context=96, taps=(1, 3))
    for sample in answer_locally(backbone, seeds, settings):
        whole = forward(backbone, sample.conversation.tokens, taps=(0, 2, -1)).hidden
        assert sample.states.shape == (len(sample.conversation.tokens) - 1, 3 * backbone.hidden_size)
        assert torch.allclose(sample.states.float(), whole[:-1], rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("taps", [(-1,), (2, -1), (0, 2, -1)])
def test_data_set_of_some_kept_layers_is_that_of_a_prefill(place: Path, taps: tuple[int, ...]) -> None:
    backbone = load_backbone(str(place / "model"), LoadOptions(dtype="fp32"))
    passes: list[tuple] = []

    def seen(*progress: Any) -> None:
        passes.append(progress)

    kept = load_dataset(Run(place / "kept"), backbone, taps=taps, show=seen)
    assert kept.kept and not passes
    (place / "kept" / "states.bin").unlink()
    fresh = load_dataset(Run(place / "kept"), backbone, taps=taps, show=seen)
    assert passes and [item.id for item in kept.train] == [item.id for item in fresh.train]
    heads = tapping(backbone, taps)
    ours, theirs = (data.batch(backbone, heads, data.train, torch.float32) for data in (kept, fresh))
    assert ours.hidden.shape == theirs.hidden.shape == (len(ours.next), len(taps) * backbone.hidden_size)
    assert torch.allclose(ours.hidden, theirs.hidden, rtol=2**-6, atol=1e-3)


def test_drafters_of_kept_layers_need_no_prefill(place: Path) -> None:
    kinds = {
        "medusa": ("drafter=medusa",),
        "low": ("drafter=eagle", "drafter.taps=[1]"),
        "eagle": ("drafter=eagle", "drafter.taps=[1,3]"),
    }
    common = ("--dtype", "fp32", *SHORT)
    for name, settings in kinds.items():
        medusa("train", "--run", place / "kept" / name, "--from", place / "kept", *common, *settings, exit_code=0)
    medusa("calibrate", "--top", "3", "--dtype", "fp32", "--run", place / "kept" / "eagle", exit_code=0)
    assert not list(place.glob("kept/**/cache"))
    medusa("train", "--run", place / "kept", *common, "drafter=eagle", "drafter.taps=[2]", exit_code=0)
    (cached,) = place.glob("kept/cache/states-*.bin")
    assert cached.stat().st_size > 0


def test_distillation_resumes_with_its_own_layers_only(place: Path) -> None:
    medusa(*distill_words(place, "kept", "--taps", "1,3"), exit_code=0)
    medusa(*distill_words(place, "kept", "--taps", "2"), exit_code=1)


def test_joined_distillations_train(place: Path) -> None:
    """Joins conversations with states of other files, and of other layers: they are computed anew."""
    data = place / "all.jsonl"
    data.write_text("".join((place / name / "distill.jsonl").read_text() for name in ("kept", "final")))
    backbone = load_backbone(str(place / "model"), LoadOptions(dtype="fp32"))
    dataset = load_dataset(Run.open(f"{place / 'all'}/", create=True), backbone, data=data)
    assert dataset.report.read == sum(dataset.report.skipped.values()) == 8 and not dataset.kept


def test_several_processes_keep_the_states_that_one_keeps(place: Path) -> None:
    done = forked.run(distill_words(place, "two", "--taps", "1,3"), place / "output", size=2)
    assert done.returncode == 0, done.stderr
    backbone = load_backbone(str(place / "model"), LoadOptions(dtype="fp32"))
    batches = []
    for name in ("kept", "two"):
        data = load_dataset(Run(place / name), backbone, taps=(0, 2, -1))
        items = sorted([*data.train, *data.held_out], key=lambda item: item.id)
        heads = tapping(backbone, (0, 2, -1))
        batches.append(([item.tokens for item in items], data.batch(backbone, heads, items, torch.float32)))
        assert data.kept
    assert batches[0][0] == batches[1][0]
    assert torch.allclose(batches[0][1].hidden, batches[1][1].hidden, rtol=2**-6, atol=1e-3)


@pytest.mark.parametrize("words", [["4"], ["3,1"], ["low"], ["1", "--endpoint", "http://127.0.0.1:9"]])
def test_layers_that_cannot_be_kept_are_refused(place: Path, words: list[str]) -> None:
    done = medusa(*distill_words(place, "new", "--taps", *words), exit_code=2)
    assert "taps" in done.stderr and not (place / "new" / "distill.jsonl").exists()
