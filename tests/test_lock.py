"""One writer a run: a second one is refused at once and by name, readers are not, and a killed one holds nothing."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from medusa_cli.errors import UserError
from medusa_cli.runs.io import TEMPORARY
from medusa_cli.runs.run import LOCK, Run, sole_writer
from tests.helpers import conversation, medusa, save_model, save_run, write_lines

HOLD = """
import pathlib, sys
from medusa_cli.runs.io import replacing
from medusa_cli.runs.run import sole_writer
folder = pathlib.Path(sys.argv[1])
with sole_writer(folder, "medusa distill", print), replacing(folder / "train.png") as part:
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen]:
    """Another process that writes the run, and a file in it, until its input ends."""
    writer = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None and writer.stdout.readline() == "held\n"
        yield writer
    finally:
        writer.kill()
        writer.communicate()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = save_run(tmp_path / "run", save_model(tmp_path / "model"), calibrated=True)
    write_lines(made.distill_path, [conversation(n) for n in range(20)])
    return made


def test_a_second_writer_is_refused_by_name_and_readers_are_not(run: Run, tmp_path: Path) -> None:
    seeds = tmp_path / "seeds.json"
    seeds.write_text(json.dumps([{"id": "a", "messages": [{"role": "user", "content": "w1"}]}]))
    before = {path: path.read_bytes() for path in run.path.rglob("*.json*")}
    with held(run.path) as writer:
        for words in (["distill", "--seed", str(seeds)], ["train"], ["calibrate"], ["tree", "--budget", "4"]):
            done = medusa(*words, "--run", str(run.path), "--quiet")
            assert done.exit_code == 1, done.output
            said = f"is being written by `medusa distill` (process {writer.pid})"
            assert said in done.stderr and done.stderr.count("\n") == 1
        place = ["--run", str(run.path), "--dtype", "fp32"]
        assert medusa("chat", *place, "--prompt", "w1", "--max-new-tokens", "2").exit_code == 0
        elsewhere = ["--output", str(tmp_path / "other.json")]
        assert medusa("tree", "--run", str(run.path), "--budget", "4", *elsewhere).exit_code == 0
    assert {path: path.read_bytes() for path in before} == before


def test_a_killed_writer_holds_nothing_and_its_half_written_files_go(run: Run) -> None:
    with held(run.path) as writer:
        assert list(run.path.glob(TEMPORARY + "*.train.png"))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert medusa("tree", "--run", str(run.path), "--budget", "4", "--quiet").exit_code == 0
    assert not list(run.path.glob(TEMPORARY + "*"))


def test_a_run_can_be_written_again_after_a_command_that_failed(run: Run) -> None:
    for _ in range(2):
        done = medusa("train", "train.lr=x", "--run", str(run.path))
        assert done.exit_code == 2 and "train.lr='x'" in done.stderr


def test_a_holder_that_has_not_said_who_it_is_is_another_process(tmp_path: Path) -> None:
    with sole_writer(tmp_path, "medusa train", print):
        (tmp_path / LOCK).write_text("")
        with pytest.raises(UserError, match="is being written by another process"), sole_writer(tmp_path, "x", print):
            raise AssertionError("two writers")


def test_a_file_system_without_locks_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", none)
    said: list[str] = []
    with sole_writer(tmp_path, "medusa train", said.append):
        pass
    assert len(said) == 1 and "cannot be locked" in said[0] and "no second command" in said[0]
