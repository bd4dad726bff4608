"""What a training shows and keeps beside its loss: TensorBoard's scalars, the live table, memory; and a full disk."""

import errno
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch

from medusa_cli.runs.run import Run
from medusa_cli.train import Saved, Stepped, Validated
from medusa_cli.train.checkpoint import checkpoint_path, load
from medusa_cli.train.log import Board, TrainLog, read_log
from tests.helpers import conversation, tiny_backbone, write_lines
from tests.test_joint import place as joint_place
from tests.test_joint import train as train_tiny
from tests.test_training import trainer

STEP = Stepped(
    3, 9, 1.5, [1.0, 2.0], [0.43, 0.27], 1e-3, 0.5, 200, 600, 0.5, {"lambda_0": 0.1, "lm": 0.2}, 2_000_000_000
)
place = joint_place


@pytest.fixture
def run(tmp_path: Path) -> Run:
    found = Run.open(f"{tmp_path}/run", create=True)
    write_lines(found.distill_path, [conversation(n, turns=1 + n % 2) for n in range(40)])
    return found


class Writer:
    """Stands for TensorBoard's."""

    made: list["Writer"] = []

    def __init__(self, folder: str, purge_step: int | None = None) -> None:
        self.folder, self.purge_step = folder, purge_step
        self.seen: dict[tuple[str, int], float] = {}
        self.closed = False
        Writer.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.seen[name, step] = value

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def tensorboard(monkeypatch: pytest.MonkeyPatch) -> type[Writer]:
    Writer.made.clear()
    package = types.ModuleType("tensorboard")
    package.__spec__ = importlib.machinery.ModuleSpec("tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard", package)
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return Writer


def test_tensorboard_gets_every_number_of_every_step(tensorboard: type[Writer], tmp_path: Path) -> None:
    board = Board(tmp_path, resumed_at=2)
    board.write(STEP)
    board.write(Validated(3, 1.6, [1.1, 2.1], [0.4, 0.2], 50, 600, {"kl": 0.01}))
    board.write(Saved(3))
    board.close()
    (writer,) = tensorboard.made
    assert writer.purge_step == 3 and writer.closed
    assert writer.seen["train/loss", 3] == 1.5 and writer.seen["train/head_2/top_1", 3] == 0.27
    assert writer.seen["train/lambda_0", 3] == 0.1 and writer.seen["train/memory_gb", 3] == 2.0
    assert writer.seen["train/tokens_per_s", 3] == 400 and writer.seen["held_out/kl", 3] == 0.01
    assert {name.split("/")[0] for name, _ in writer.seen} == {"train", "held_out"}


def test_the_command_writes_it_where_it_is_installed(tensorboard: type[Writer], place: tuple[str, str]) -> None:
    assert train_tiny(place).exit_code == 0
    (writer,) = tensorboard.made
    assert writer.folder == f"{place[1]}/tensorboard" and writer.closed
    logged = [line for line in read_log(Path(place[1]) / "train.jsonl") if line["event"] == "stepped"]
    assert [writer.seen["train/loss", line["step"]] for line in logged] == [line["loss"] for line in logged]
    assert all(line["memory"] > 50_000_000 for line in logged)  # torch alone takes more


def test_without_tensorboard_there_is_the_log_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    board = Board(tmp_path / "tensorboard")
    board.write(STEP)
    board.close()
    assert not (tmp_path / "tensorboard").exists()
    log = TrainLog(tmp_path / "train.jsonl")
    log.write(STEP)
    log.close()
    assert read_log(tmp_path / "train.jsonl")[0]["memory"] == 2_000_000_000


def test_tensorboards_own_reader_finds_them(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = Board(tmp_path)
    board.write(STEP)
    board.close()
    found = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert found.Scalars("train/loss")[0].value == 1.5


@pytest.mark.parametrize(
    "fault",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed"),
    ],
)
def test_a_full_disk_keeps_the_last_good_checkpoint(
    run: Run, fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [e.loss for e in trainer(run, tiny_backbone("llama")).events() if isinstance(e, Stepped)]
    checkpoint_path(run).unlink()
    save, saved = torch.save, []

    def full(obj: object, path: Path) -> None:
        saved.append(path)
        if len(saved) == 1:
            save(obj, path)
            return
        Path(path).write_bytes(b"half of a checkp")  # what had been written when the disk was full
        raise fault

    monkeypatch.setattr(torch, "save", full)
    events = trainer(run, tiny_backbone("llama")).events()
    with pytest.raises(Exception, match="No space left|could not be written"):
        list(events)
    monkeypatch.setattr(torch, "save", save)
    assert len(saved) == 2 and load(checkpoint_path(run)).step == 4
    assert not [path for path in run.path.iterdir() if "checkpoint" in path.name and path != checkpoint_path(run)]
    rest = trainer(run, tiny_backbone("llama"), resume=True)
    assert rest.step == 4
    assert [e.loss for e in rest.events() if isinstance(e, Stepped)] == expected[4:]
