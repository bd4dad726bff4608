"""Two processes train what one process trains, and one of them writes."""

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.errors import UsageError
from medusa_cli.train import Distributed
from medusa_cli.train.prefill import merge_partial, partial_path, partial_states
from tests import forked
from tests.helpers import save_model
from tests.test_joint import records

COMMON = [
    "--device",
    "cpu",
    "--dtype",
    "fp32",
    "--json",
    "drafter.num_heads=2",
    "drafter.vocabulary=own",
    "train.epochs=1",
]
SMALL = ["train.batch_tokens=64", "train.accumulation=2", "train.validation_every=2", "train.lora_rank=4"]


def prepared(folder: Path) -> Path:
    folder.mkdir()
    lines = [json.dumps({"id": r.id, "tokens": r.tokens, "spans": [list(s) for s in r.spans]}) for r in records(30)]
    (folder / "distill.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def training(model: str, run: Path, *words: str) -> list[str]:
    return ["train", "--run-dir", str(run), "--model", model, *COMMON, *SMALL, *words]


def train(size: int, model: str, run: Path, *words: str) -> forked.Done:
    """Train by so many processes: forked, as each would else spend seconds on its imports."""
    return forked.run(training(model, run, *words), run.parent / f"{run.name}-said", size)


# As a user starts two processes: what a test that kills one of them needs.
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.mark.parametrize(
    "words",
    [
        ["train.accumulation=1"],
        ["train.accumulation=3", "train.optimizer=muon"],
        ["--stage", "2", "--schedule", "sine", "train.lora_dropout=0.3"],
    ],
    ids=["fewer", "uneven", "stage-2"],
)
def test_two_processes_equal_one(tmp_path: Path, words: list[str]) -> None:
    model = save_model(tmp_path / "model")
    logs, said = [], []
    for name, size in (("one", 1), ("two", 2)):
        run = prepared(tmp_path / name)
        done = train(size, model, run, *words)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["steps"] > 2  # one document: the second process is silent
        assert (run / "drafter" / "config.json").is_file()
        logs.append([json.loads(line) for line in (run / "train.jsonl").read_text().splitlines()])
        said.append("1 of 2 processes have nothing to do" in done.stderr)
    assert said == [False, words == ["train.accumulation=1"]]
    one, two = ([line for line in log if "loss" in line] for log in logs)
    assert len(one) == len(two)
    for ours, theirs in zip(one, two, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["positions"] == theirs["positions"] and ours["accuracies"] == pytest.approx(theirs["accuracies"])
    # Whoever computed them, the states are the same.
    kept = [{path.name: path.read_bytes() for path in (tmp_path / name / "cache").glob("*")} for name in ("one", "two")]
    assert kept[0] == kept[1] and len(kept[0]) == ("--stage" not in words)


def test_parts_of_states_become_one_file_and_none_is_left(tmp_path: Path) -> None:
    whole = tmp_path / "states-x.bin"
    for rank, size, data in ((0, 3, b"of the first"), (1, 3, b""), (2, 3, b" and the third"), (7, 8, b"interrupted")):
        partial_path(whole, rank, size).write_bytes(data)
    merge_partial(whole, 3)
    assert whole.read_bytes() == b"of the first and the third" and list(tmp_path.iterdir()) == [whole]
    merge_partial(whole, 3)  # by one who had waited for another
    assert whole.read_bytes() == b"of the first and the third"


def test_a_join_that_was_killed_leaves_a_part_that_is_cut(tmp_path: Path) -> None:
    """Whatever a part holds, what counts is its whole conversations: of five rows here, those of 2 and 1 rows."""
    part = partial_path(tmp_path / "cache" / "states-x.bin", 0, 2)
    for held, whole in ((0, 0), (1, 0), (2, 1), (3, 2), (5, 2)):
        part.parent.mkdir(exist_ok=True)
        part.write_bytes(torch.arange(4 * held).bfloat16().view(torch.uint8).numpy().tobytes() + b"half")
        with partial_states(part, 4, [2, 1]) as (store, there):
            assert store is not None and (there, store.rows) == (whole, [0, 2, 3][whole])
            store.append(torch.zeros(1, 4))
        assert part.stat().st_size == 8 * ([0, 2, 3][whole] + 1)


def while_waiting(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Let something happen between the opening of a part and the lock on it."""
    waited = [happens]
    monkeypatch.setattr("fcntl.flock", lambda file, how: waited.pop()() if waited else None)


@pytest.mark.parametrize("size", [1, 2])
def test_who_waited_for_another_to_make_the_whole_has_nothing_left_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    whole, rows = tmp_path / "states-x.bin", [bytes([rank + 1]) * 3 * 8 for rank in range(size)]

    def joined() -> None:
        for rank, data in enumerate(rows):
            partial_path(whole, rank, size).write_bytes(data)
        merge_partial(whole, size)

    while_waiting(monkeypatch, joined)
    with partial_states(partial_path(whole, 0, size), 4, [2, 1]) as (store, there):
        assert (store, there) == (None, 2)
    merge_partial(whole, size)
    assert whole.read_bytes() == b"".join(rows) and list(tmp_path.iterdir()) == [whole]


def test_who_waited_for_a_part_that_is_gone_writes_one_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = partial_path(tmp_path / "states-x.bin")
    while_waiting(monkeypatch, part.unlink)
    with partial_states(part, 4, [2, 1]) as (store, there):
        assert store is not None and there == 0
        store.append(torch.zeros(3, 4))
    assert part.read_bytes() == bytes(24)


@pytest.mark.parametrize("count", range(8))
@pytest.mark.parametrize("size", [1, 2, 3])
def test_stretches_are_the_items_in_order_and_of_like_size(count: int, size: int) -> None:
    items = [f"i{n}" for n in range(count)]
    parts = [Distributed(rank, size).contiguous_shard(items) for rank in range(size)]
    assert sum(parts, []) == items and max(map(len, parts)) - min(map(len, parts)) <= 1


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
