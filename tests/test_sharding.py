"""Distillation by two processes and with states of several layers: the same as one process makes, or a prefill."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.data.conversation import Conversation
from medusa_cli.data.states import read_rows
from medusa_cli.distill import Records, answer_locally
from medusa_cli.distill.distillation import merge_parts, part_of
from medusa_cli.drafters import MedusaHeads
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.runs.recipe import DistillRecipe
from medusa_cli.runs.run import Run
from tests import forked, helpers
from tests.helpers import forward, load_dataset, medusa, save_model, tiny_backbone, write_lines

COUNT = 24


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = [
        {"id": f"k{i}", "messages": [{"role": "user", "content": f"w{i} w1"}]} for i in range(COUNT)
    ]
    return str(write_lines(tmp_path_factory.mktemp("sharding") / "seed.jsonl", rows))


def distill(model: str, seed: str, run: Path) -> list[str]:
    words = [
        "distill",
        "--seed",
        seed,
        "--model",
        model,
        "--dtype",
        "fp32",
        "--json",
        "--device",
        "cpu",
    ]
    return [*words, "--max-new-tokens", "120", "distill.batch_size=2", "--run-dir", str(run)]


def finish(size: int, words: list[str], place: Path) -> dict:
    """Runs the command to its end by so many processes; returns its document."""
    done = forked.run(words, place, size)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def answers(run: Path) -> dict[str, list[int]]:
    """Tokens by id, after checking that none is doubled and every state is where its line says."""
    records = [json.loads(line) for line in (run / "distill.jsonl").read_text().splitlines()]
    assert len({item["id"] for item in records}) == len(records) == COUNT
    rows = sorted(tuple(item["state_rows"]) for item in records)
    assert [first for first, _ in rows] == [
        sum(count for _, count in rows[:i]) for i in range(len(rows))
    ]
    assert not list((run / "parts").glob("*"))
    return {item["id"]: item["tokens"] for item in records}


def check_states(run: Path, model: str) -> None:
    backbone = load_backbone(model, LoadOptions(dtype="fp32"))
    for line in (run / "distill.jsonl").read_text().splitlines()[:: COUNT // 4]:
        item = json.loads(line)
        rows = read_rows(run / "states.bin", backbone.hidden_size, *item["state_rows"]).float()
        assert torch.allclose(
            rows, helpers.forward(backbone, item["tokens"]).hidden[:-1], atol=0.02, rtol=0.02
        )


@pytest.mark.slow
def test_two_processes_answer_what_one_does_and_a_killed_one_costs_nothing(
    model: str, seed: str, tmp_path: Path
) -> None:
    single = finish(1, distill(model, seed, tmp_path / "one"), tmp_path / "output")
    words = distill(model, seed, tmp_path / "two")
    parts = [tmp_path / "two" / "parts" / f"00{rank}" / "distill.jsonl" for rank in (0, 1)]
    (tmp_path / "killed").mkdir()
    port = forked.free_port()
    children = [
        forked.start(words, tmp_path / "killed", die_at=None, rank=rank, size=2, port=port)
        for rank in (0, 1)
    ]
    forked.wait_until(
        lambda: all(part.is_file() and part.read_bytes().count(b"\n") >= 2 for part in parts),
        children,
    )
    os.kill(children[1].pid, signal.SIGKILL)
    # Like torchrun, it ends the other process.
    forked.end(children)
    kept = sum(part.read_bytes().count(b"\n") for part in parts)
    assert 4 <= kept < COUNT
    two = finish(2, words, tmp_path / "output")
    assert two["conversations"] == single["conversations"] == COUNT
    assert two["answer_tokens"] == single["answer_tokens"]
    assert two["new_tokens"] < single["new_tokens"]
    assert answers(tmp_path / "two") == answers(tmp_path / "one")
    check_states(tmp_path / "two", model)


def test_endpoint_needs_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--endpoint" in medusa("distill", "--endpoint", "http://127.0.0.1:9", exit_code=2).stderr


def test_a_merge_that_was_killed_is_ended_by_the_next(tmp_path: Path) -> None:
    backbone, run = tiny_backbone("llama"), Run.open(str(tmp_path / "r"), create=True)
    seeds = [Conversation.from_turns(f"s{i}", [f"w{i}"]) for i in range(5)]
    samples = list(
        answer_locally(backbone, seeds, DistillRecipe(max_new_tokens=8, batch_size=2, context=64))
    )
    header = {"seed": "x", "settings": {}}
    for rank in (0, 1):
        part = Records(part_of(run, rank), backbone.hidden_size, header)
        for sample in samples[rank::2]:
            part.write(sample.conversation, sample.states)
        part.close()
    whole = Records(run, backbone.hidden_size, header)
    whole.write(samples[0].conversation, samples[0].states)  # as far as an earlier merge had come
    whole.close()
    whole = Records(run, backbone.hidden_size, header)
    merge_parts(run, whole)
    assert whole.done == {seed.id for seed in seeds}
    whole.close()
    by_id = {sample.conversation.id: sample for sample in samples}
    for line in run.distill_path.read_text().splitlines():
        item = json.loads(line)
        assert item["tokens"] == by_id[item["id"]].conversation.tokens
        rows = read_rows(run.states_path, backbone.hidden_size, *item["state_rows"])
        assert torch.equal(rows, by_id[item["id"]].states.to(torch.bfloat16))
    other = Records(
        part_of(run, 0), backbone.hidden_size, {"seed": "x", "settings": {"temperature": 1}}
    )
    other.write(samples[0].conversation, samples[0].states)
    other.close()
    with pytest.raises(UserError, match="distilled with settings"):
        merge_parts(run, Records(run, backbone.hidden_size, header))


SHORT = (
    "train.max_tokens=60",
    "train.batch_tokens=32",
    "train.warmup_steps=1",
    "drafter.num_heads=2",
)


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Distillations of a model of four layers: `kept` keeps the states after two of them, `final` the last only."""
    place = tmp_path_factory.mktemp("taps")
    save_model(place / "model", layers=4)
    seeds = [
        {"id": f"s{i}", "messages": [{"role": "user", "content": f"w{i} w{i + 1}"}] * 2}
        for i in range(8)
    ]
    write_lines(place / "seeds.jsonl", seeds)
    medusa(*distill_words(place, "kept", "distill.taps=[1,3]"))
    medusa(*distill_words(place, "final"))
    return place


@pytest.fixture
def place(distilled: Path, tmp_path: Path) -> Path:
    place = Path(shutil.copytree(distilled, tmp_path / "place"))
    (place / "seeds.jsonl").unlink()
    # A resumed distillation needs the same seed.
    (place / "seeds.jsonl").symlink_to(distilled / "seeds.jsonl")
    return place


def distill_words(place: Path, name: str, *more: str) -> list[str]:
    flags = (
        "--seed",
        (place / "seeds.jsonl").resolve(),
        "--run",
        place / name,
        "--model",
        place / "model",
    )
    short = ("--quiet", "--dtype", "fp32", "--max-new-tokens", "8", "distill.context=96")
    return ["distill", *map(str, flags), *short, *more]


def tapping(backbone: Backbone, taps: tuple[int, ...]) -> MedusaHeads:
    heads = MedusaHeads.create(backbone, 1, 1, "own")
    heads.taps = taps
    return heads


@pytest.mark.slow
def test_row_holds_the_states_of_its_position_the_final_layer_last() -> None:
    backbone = tiny_backbone(layers=4)
    seeds = [Conversation.from_turns(f"s{i}", [f"w{i} w1", "w2 w3"]) for i in range(5)]
    settings = DistillRecipe(max_new_tokens=10, batch_size=2, context=96, taps=(1, 3))
    for sample in answer_locally(backbone, seeds, settings):
        whole = forward(backbone, sample.conversation.tokens, taps=(0, 2, -1)).hidden
        assert sample.states.shape == (
            len(sample.conversation.tokens) - 1,
            3 * backbone.hidden_size,
        )
        assert torch.allclose(sample.states.float(), whole[:-1], rtol=2**-7, atol=1e-3)


@pytest.mark.quick("taps2")
@pytest.mark.parametrize("taps", [(-1,), (2, -1), (0, 2, -1)])
def test_data_set_of_some_kept_layers_is_that_of_a_prefill(
    place: Path, taps: tuple[int, ...]
) -> None:
    backbone = load_backbone(str(place / "model"), LoadOptions(dtype="fp32"))
    passes: list[tuple] = []

    def seen(*progress: Any) -> None:
        passes.append(progress)

    kept = load_dataset(Run(place / "kept"), backbone, taps=taps, show=seen)
    assert kept.kept
    assert not passes
    (place / "kept" / "states.bin").unlink()
    fresh = load_dataset(Run(place / "kept"), backbone, taps=taps, show=seen)
    assert passes
    assert [item.id for item in kept.train] == [item.id for item in fresh.train]
    heads = tapping(backbone, taps)
    ours, theirs = (
        data.batch(backbone, heads, data.train, torch.float32) for data in (kept, fresh)
    )
    assert (
        ours.hidden.shape
        == theirs.hidden.shape
        == (len(ours.next), len(taps) * backbone.hidden_size)
    )
    assert torch.allclose(ours.hidden, theirs.hidden, rtol=2**-6, atol=1e-3)


def test_drafters_of_kept_layers_need_no_prefill(place: Path) -> None:
    kinds = {
        "medusa": ("drafter=medusa",),
        "low": ("drafter=eagle", "drafter.taps=[1]"),
        "eagle": ("drafter=eagle", "drafter.taps=[1,3]"),
    }
    common = ("--dtype", "fp32", *SHORT)
    for name, settings in kinds.items():
        medusa(
            "train", "--run", place / "kept" / name, "--from", place / "kept", *common, *settings
        )
    medusa("calibrate", "--top", "3", "--dtype", "fp32", "--run", place / "kept" / "eagle")
    assert not list(place.glob("kept/**/cache"))
    medusa("train", "--run", place / "kept", *common, "drafter=eagle", "drafter.taps=[2]")
    (cached,) = place.glob("kept/cache/states-*.bin")
    assert cached.stat().st_size > 0


def test_distillation_resumes_with_its_own_layers_only(place: Path) -> None:
    medusa(*distill_words(place, "kept", "distill.taps=[1,3]"))
    medusa(*distill_words(place, "kept", "distill.taps=[2]"), exit_code=1)


def test_joined_distillations_train(place: Path) -> None:
    """Joins conversations with states of other files, and of other layers: they are computed anew."""
    data = place / "all.jsonl"
    data.write_text(
        "".join((place / name / "distill.jsonl").read_text() for name in ("kept", "final"))
    )
    backbone = load_backbone(str(place / "model"), LoadOptions(dtype="fp32"))
    dataset = load_dataset(Run.open(f"{place / 'all'}/", create=True), backbone, data=data)
    assert dataset.report.read == sum(dataset.report.skipped.values()) == 8
    assert not dataset.kept


@pytest.mark.slow
def test_several_processes_keep_the_states_that_one_keeps(place: Path) -> None:
    done = forked.run(distill_words(place, "two", "distill.taps=[1,3]"), place / "output", size=2)
    assert done.returncode == 0, done.stderr
    backbone = load_backbone(str(place / "model"), LoadOptions(dtype="fp32"))
    batches = []
    for name in ("kept", "two"):
        data = load_dataset(Run(place / name), backbone, taps=(0, 2, -1))
        items = sorted([*data.train, *data.held_out], key=lambda item: item.id)
        heads = tapping(backbone, (0, 2, -1))
        batches.append(
            ([item.tokens for item in items], data.batch(backbone, heads, items, torch.float32))
        )
        assert data.kept
    assert batches[0][0] == batches[1][0]
    assert torch.allclose(batches[0][1].hidden, batches[1][1].hidden, rtol=2**-6, atol=1e-3)


@pytest.mark.quick("words2", "words3")
@pytest.mark.parametrize(
    "words", [["[4]"], ["[3,1]"], ["low"], ["[1]", "--endpoint", "http://127.0.0.1:9"]]
)
def test_layers_that_cannot_be_kept_are_refused(place: Path, words: list[str]) -> None:
    taps, *more = words
    done = medusa(*distill_words(place, "new", f"distill.taps={taps}", *more), exit_code=2)
    assert "taps" in done.stderr
    assert not (place / "new" / "distill.jsonl").exists()
