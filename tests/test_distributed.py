"""Two processes train what one process trains, and one of them writes."""

import json
import sys
from datetime import timedelta
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from medusa_cli.errors import UsageError
from medusa_cli.model.distributed import Distributed
from tests import forked
from tests.helpers import save_conversations, save_model

COMMON = ["--device", "cpu", "--dtype", "fp32", "--json", "drafter.num_heads=2", "drafter.vocabulary=own"]
SMALL = ["train.batch_tokens=64", "train.accumulation=2", "train.validation_every=2", "train.lora_rank=4"]


def training(model: str, run: Path, *words: str) -> list[str]:
    return ["train", "--run-dir", str(run), "--model", model, "train.epochs=1", *COMMON, *SMALL, *words]


def train(size: int, model: str, run: Path, *words: str) -> CompletedProcess[str]:
    """Trains by so many processes: forked, as each would else spend seconds on its imports."""
    return forked.run(training(model, run, *words), run.parent / f"{run.name}-output", size)


def losses(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "train.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def assert_equal_losses(split: Path, whole: Path) -> None:
    ours, theirs = losses(split), losses(whole)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] and len(ours) > 3
    for line, expected in zip(ours, theirs, strict=True):
        for key in {"loss", "accuracies", "grad_norm", "positions"} & set(line):
            assert line[key] == pytest.approx(expected[key], rel=1e-4), key
        assert line["parts"] == pytest.approx(expected["parts"], rel=1e-3, abs=1e-6)


# As a user starts two processes: what a test that kills one of them needs.
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.mark.parametrize(
    "words",
    [
        ["train.accumulation=1"],
        ["train.accumulation=3"],
        ["--stage", "2", "--schedule", "sine", "train.lora_dropout=0.3"],
    ],
    ids=["fewer", "uneven", "stage-2"],
)
def test_two_processes_equal_one(tmp_path: Path, words: list[str]) -> None:
    model = save_model(tmp_path / "model")
    warned = []
    for name, size in (("one", 1), ("two", 2)):
        run = save_conversations(tmp_path / name)
        done = train(size, model, run, *words)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["steps"] > 2  # one document: the second process is silent
        assert (run / "drafter" / "config.json").is_file()
        warned.append("1 of 2 processes have nothing to do" in done.stderr)
    assert warned == [False, words == ["train.accumulation=1"]]
    assert_equal_losses(tmp_path / "two", tmp_path / "one")
    # Whoever computed them, the states are the same.
    kept = [{path.name: path.read_bytes() for path in (tmp_path / name / "cache").glob("*")} for name in ("one", "two")]
    assert kept[0] == kept[1] and len(kept[0]) == ("--stage" not in words)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The second of two processes on a machine with GPUs, and what it asks of them and of torch."""
    asked: dict[str, Any] = {"gpus": 2}
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: asked["gpus"])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.update(device=device))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda name, **more: asked.update(name=name, **more))
    return asked


@pytest.mark.parametrize(
    ("device", "backend", "name", "place"),
    [
        ("auto", None, "cpu:gloo,cuda:nccl", "cuda:1"),
        ("cuda", "gloo", "gloo", "cuda:1"),
        ("cpu", None, "gloo", "cpu"),
        ("cuda:0", None, "gloo", "cuda:0"),
    ],
)
def test_processes_talk_where_the_asked_device_is(
    joined: dict[str, Any], device: str, backend: str | None, name: str, place: str
) -> None:
    assert Distributed.join(device, backend).device(device) == place
    assert joined["name"] == name and joined.get("device") == (1 if place == "cuda:1" else None)
    assert joined["timeout"] > timedelta(days=1)  # a first pass over real data takes hours


def test_more_processes_than_gpus_are_refused(joined: dict[str, Any]) -> None:
    joined["gpus"] = 1
    with pytest.raises(UsageError, match=r"process 2 .*--nproc_per_node 1"):
        Distributed.join()
    assert Distributed.join("cpu").rank == 1
