"""The run directory: files and folders that appear whole or not at all, whatever was killed, and whose run it is."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_cli.errors import UserError
from medusa_cli.runs.io import TEMPORARY, replacing, replacing_folder, restore, write_atomic
from medusa_cli.runs.run import Run
from tests.helpers import medusa


def test_what_is_written_is_on_disk_before_it_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "file.json", []
    monkeypatch.setattr("os.fsync", lambda handle: seen.append((os.fstat(handle).st_size, path.exists())))
    write_atomic(path, "12345")
    with replacing_folder(tmp_path / "folder") as part:
        (part / "weights").write_bytes(b"123")
    assert seen == [(5, False), (3, True)]


def test_what_a_killed_writer_left_goes_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    code = f"""
import os, pathlib, signal
from medusa_cli.runs.io import replacing
with replacing(pathlib.Path({str(path)!r})) as part:
    part.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    others = [tmp_path / name for name in (".checkpoint.pt.old", f"{TEMPORARY}notes.pt", ".other.abcdefgh.pt")]
    for one in others:
        one.touch()
    with replacing(path) as first:  # while another writes, its file stays
        assert not left.exists() and first.exists()
        with replacing(path) as second:
            assert first.exists()
            second.write_bytes(b"two")
        first.write_bytes(b"one")
    assert path.read_bytes() == b"one" and sorted(tmp_path.iterdir()) == sorted([path, *others])


def test_a_place_that_takes_no_file_is_named_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(dir: Path, prefix: str, suffix: str) -> None:
        raise PermissionError(13, "Permission denied", f"{dir}/{prefix}12345678{suffix}")

    monkeypatch.setattr("tempfile.mkstemp", full)
    with pytest.raises(PermissionError) as raised:
        write_atomic(tmp_path / "tree.json", "1")
    assert raised.value.filename == str(tmp_path / "tree.json")


def drafter(run: Path) -> Path:
    folder = run / "drafter"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("first")
    return folder


def test_a_folder_comes_back_when_the_second_move_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = drafter(tmp_path)
    move = Path.rename

    def fail(self: Path, to: Path) -> Path:
        if self.name.startswith(TEMPORARY):
            raise OSError("full")
        return move(self, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="full"), replacing_folder(folder) as part:
        (part / "config.json").write_text("second")
    assert (folder / "config.json").read_text() == "first" and list(tmp_path.iterdir()) == [folder]


def test_a_folder_takes_its_place_though_a_reader_put_the_old_one_back(tmp_path: Path) -> None:
    folder = drafter(tmp_path)
    move, met = Path.rename, []

    def meet(self: Path, to: Path) -> Path:
        done = move(self, to)
        if to.name == ".drafter.old" and not met:
            met.append(to)
            restore(folder)  # what every command does that opens the run
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", meet)
        with replacing_folder(folder) as part:
            (part / "config.json").write_text("second")
    assert met and (folder / "config.json").read_text() == "second" and list(tmp_path.iterdir()) == [folder]


def test_a_folder_comes_back_after_a_kill_between_the_moves(tmp_path: Path) -> None:
    folder = drafter(tmp_path / "run")
    folder.rename(folder.with_name(".drafter.old"))
    assert (Run.open(f"{tmp_path}/run").drafter_dir / "config.json").read_text() == "first"
    folder.rename(folder.with_name(".drafter.old"))
    with pytest.raises(KeyError), replacing_folder(folder):  # the next save does not begin by deleting it
        raise KeyError
    assert (folder / "config.json").read_text() == "first"


@pytest.mark.parametrize("text", ["{}", "[]", '{"backbone": "name"}', '{"backbone": {}}'])
def test_a_run_file_that_names_no_backbone_is_named(tmp_path: Path, text: str) -> None:
    run = Run.open(f"{tmp_path}/run", create=True)
    assert run.owner is run.model is None
    (run.path / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"run\.json names no backbone"):
        run.bind({"id": "x"})
    for command in ("chat", "calibrate", "train"):
        done = medusa(command, "--run", str(run.path))
        assert done.exit_code == 1 and "run.json names no backbone" in " ".join(done.stderr.split()), done.output


def test_training_before_distilling_says_to_distil(tmp_path: Path) -> None:
    done = medusa("train", "--run", f"{tmp_path}/none")
    assert done.exit_code == 1 and done.stderr.rstrip().endswith("run `medusa distill` first")
