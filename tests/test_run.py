"""The run directory: files appear whole or not at all, one writer at a time, and one model for good."""

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from medusa_cli.drafters.incoming import Checkpoint
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files.io import TEMPORARY, replacing, replacing_folder, restore, write_atomic
from medusa_cli.files.model_source import ModelSource, lasting_name
from medusa_cli.runs import resolve
from medusa_cli.runs.resolve import choose, find_drafter
from medusa_cli.runs.run import LOCK, Run, sole_writer
from tests.helpers import conversation, medusa, save_model, save_run, write_lines
from tests.test_gguf import write_gguf

WRITER = """
import pathlib, sys
from medusa_cli.files.io import replacing
from medusa_cli.runs.run import sole_writer
folder = pathlib.Path(sys.argv[1])
with sole_writer(folder, "medusa distill"), replacing(folder / "train.png") as part:
    print("writing", flush=True)
    sys.stdin.read()
"""


@contextmanager
def writing(folder: Path) -> Iterator[subprocess.Popen]:
    """Runs another process that writes the run, and a file in it, until its input ends."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        yield writer
    finally:
        writer.kill()
        writer.communicate()


def test_content_is_on_disk_before_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "file.json", []
    monkeypatch.setattr(
        "os.fsync", lambda handle: seen.append((os.fstat(handle).st_size, path.exists()))
    )
    write_atomic(path, "12345")
    with replacing_folder(tmp_path / "folder") as part:
        (part / "weights").write_bytes(b"123")
    assert seen == [(5, False), (3, True)]


def test_files_of_a_killed_writer_are_removed_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    with writing(tmp_path) as writer:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    [left] = tmp_path.glob(f"{TEMPORARY}*")
    others = [
        tmp_path / name
        for name in (".checkpoint.pt.old", f"{TEMPORARY}notes.pt", ".other.abcdefgh.pt")
    ]
    for other in others:
        other.touch()
    with replacing(path) as first:  # while another writes, its file stays
        assert not left.exists()
        assert first.exists()
        with replacing(path) as second:
            assert first.exists()
            second.write_bytes(b"two")
        first.write_bytes(b"one")
    assert path.read_bytes() == b"one"
    assert sorted(tmp_path.iterdir()) == sorted([path, tmp_path / LOCK, *others])


def test_an_unwritable_file_is_named_by_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, *rest: int) -> None:
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(PermissionError) as raised:
        write_atomic(tmp_path / "tree.json", "1")
    assert raised.value.filename == str(tmp_path / "tree.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a drafter's folder in a run."""
    folder = tmp_path / "run" / "drafter"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("first")
    return folder


def test_a_folder_comes_back_when_the_second_move_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = Path.rename

    def fail(self: Path, to: Path) -> Path:
        if self.name.startswith(TEMPORARY):
            raise OSError("full")
        return move(self, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="full"), replacing_folder(folder) as part:
        (part / "config.json").write_text("second")
    assert (folder / "config.json").read_text() == "first"
    assert list(folder.parent.iterdir()) == [folder]


def test_a_folder_is_replaced_though_a_reader_put_the_old_one_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move, met = Path.rename, []

    def meet(self: Path, to: Path) -> Path:
        done = move(self, to)
        if to.name == ".drafter.old" and not met:
            met.append(to)
            restore(folder)  # as every command does that opens the run
        return done

    monkeypatch.setattr(Path, "rename", meet)
    with replacing_folder(folder) as part:
        (part / "config.json").write_text("second")
    assert met
    assert (folder / "config.json").read_text() == "second"
    assert list(folder.parent.iterdir()) == [folder]


def test_a_folder_comes_back_after_a_kill_between_the_moves(folder: Path) -> None:
    folder.rename(folder.with_name(".drafter.old"))
    assert (Run.open(str(folder.parent)).drafter_dir / "config.json").read_text() == "first"
    folder.rename(folder.with_name(".drafter.old"))
    # The next save does not begin by deleting it.
    with pytest.raises(KeyError), replacing_folder(folder):
        raise KeyError
    assert (folder / "config.json").read_text() == "first"


@pytest.mark.parametrize("text", ["{}", "[]", '{"backbone": "name"}', '{"backbone": {}}'])
def test_a_run_file_without_a_model_is_named(tmp_path: Path, text: str) -> None:
    run = Run.open(f"{tmp_path}/run", create=True)
    assert run.owner is run.model is None
    (run.path / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"run\.json"):
        run.bind({"id": "x"})
    for command in ("chat", "train"):
        assert "run.json" in medusa(command, "--run", run.path, exit_code=1).stderr


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = save_run(tmp_path / "run", save_model(tmp_path / "model"), calibrated=True)
    write_lines(run.distill_path, [conversation(n) for n in range(20)])
    return run


@pytest.mark.slow
def test_a_second_writer_is_refused_and_readers_are_not(run: Run, tmp_path: Path) -> None:
    seeds = tmp_path / "seeds.json"
    seeds.write_text(json.dumps([{"id": "a", "messages": [{"role": "user", "content": "w1"}]}]))
    before = {path: path.read_bytes() for path in run.path.rglob("*.json*")}
    with writing(run.path) as writer:
        for words in (
            ["distill", "--seed", str(seeds)],
            ["train"],
            ["calibrate"],
            ["tree", "--budget", "4"],
        ):
            refused = medusa(*words, "--run", run.path, "--quiet", exit_code=1).stderr
            assert f"`medusa distill` (process {writer.pid})" in refused
            assert refused.count("\n") == 1
        medusa(
            "chat", "--run", run.path, "--dtype", "fp32", "--prompt", "w1", "--max-new-tokens", "2"
        )
        elsewhere = ["--output", tmp_path / "other.json"]
        medusa("tree", "--run", run.path, "--budget", "4", *elsewhere)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.slow
def test_a_killed_writer_locks_nothing_and_its_files_are_removed(run: Run) -> None:
    with writing(run.path) as writer:
        assert list(run.path.glob(TEMPORARY + "*.train.png"))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        medusa("tree", "--run", run.path, "--budget", "4", "--quiet")
    assert not list(run.path.glob(TEMPORARY + "*"))


def test_a_run_can_be_written_after_a_command_that_failed(run: Run) -> None:
    for _ in range(2):
        assert "train.lr" in medusa("train", "train.lr=x", "--run", run.path, exit_code=2).stderr


def test_a_holder_without_a_name_yet_is_another_process(tmp_path: Path) -> None:
    with sole_writer(tmp_path, "medusa train"):
        (tmp_path / LOCK).write_text("")
        with pytest.raises(UserError, match="another process"), sole_writer(tmp_path, "x"):
            raise AssertionError("two writers")


def test_a_file_system_without_locks_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", none)
    with sole_writer(tmp_path, "medusa train"):
        pass
    shown = capsys.readouterr().err
    assert shown.startswith("warning: ")
    assert str(tmp_path) in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "drafter"),
    [
        ("qwen2.5-coder-0.5b", "qwen2.5-coder-0.5b"),
        ("Qwen/Qwen2.5-Coder-0.5B-Instruct", "qwen2.5-coder-0.5b"),
        ("/models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "qwen2.5-coder-0.5b"),
        ("Qwen2.5-Coder-1.5B-Instruct.Q4_1.gguf", "qwen2.5-coder-1.5b"),
        ("Qwen/Qwen2.5-Coder-0.5Beta", None),
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct", "qwen2.5-coder-1.5b"),
        ("Qwen/Qwen2.5-Coder-3B-Instruct", None),
        ("my/qwen2.5-coder-0.5b/other", None),
    ],
)
def test_shipped_drafter_is_found_by_a_model_file_s_name(model: str, drafter: str | None) -> None:
    shipped = Run.pretrained(model) or Run.shipped_by_name(model)
    assert (shipped and shipped.path.name) == drafter


def test_shipped_drafter_is_not_taken_for_another_size(tmp_path: Path) -> None:
    model = save_model(tmp_path / "qwen2.5-coder-0.5b-tiny")
    with pytest.raises(UserError, match="no drafter ships for the model"):
        choose(ModelSource.of(str(model)), None, None, None)
    assert choose(ModelSource.of(str(model)), None, None, None, lookup=True).drafter is None


def test_shipped_drafter_is_taken_for_a_gguf_file_of_its_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_cli.runs.run.SHIPPED", Path(__file__).parent / "pretrained")
    shipped = Run.pretrained("smollm2-135m")
    original = ModelSource.of("smollm2-135m").gguf
    assert shipped is not None
    assert original is not None
    file = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.symlink_to(original)
    assert choose(ModelSource.of(str(file)), None, None, None).drafter == shipped.drafter_dir
    other = tmp_path / "smollm2-135m-tiny.gguf"
    write_gguf(other)
    with pytest.raises(UserError, match="no drafter ships for the model"):
        choose(ModelSource.of(str(other)), None, None, None)


def test_the_drafter_of_a_model_of_the_same_shape_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path / "model")
    save_run(tmp_path / "shipped" / "related", model)
    monkeypatch.setattr(resolve, "SHIPPED", tmp_path / "shipped")
    with pytest.raises(UserError) as refused:
        choose(ModelSource.of(str(model)), None, None, None)
    assert "@drafter related" in refused.value.remedy


def test_a_run_with_only_an_adapter_takes_a_drafter_or_n_grams(tmp_path: Path) -> None:
    model = ModelSource.of(str(save_model(tmp_path / "model")))
    trained = save_run(tmp_path / "trained", model.name)
    bare = Run.open(f"{tmp_path}/bare/", create=True)
    bare.adapter_dir.mkdir()
    (bare.adapter_dir / "adapter_config.json").write_text("{}")
    choice = choose(model, f"{bare.path}/", f"{trained.path}/", None)
    assert choice.adapter == bare.adapter_dir
    assert choice.drafter == trained.drafter_dir
    choice = choose(model, f"{bare.path}/", None, None, lookup=True)
    assert choice.adapter == bare.adapter_dir
    assert choice.drafter is None
    with pytest.raises(UsageError):
        choose(model, f"{trained.path}/", f"{trained.path}/", None)


def test_shipped_drafter_is_not_exported_for_another_size(tmp_path: Path) -> None:
    model = save_model(tmp_path / "qwen2.5-coder-0.5b-tiny")
    words = ("export", "--to", "drafter", "--model", model, "--output", tmp_path / "out")
    assert "no drafter ships" in medusa(*words, exit_code=1).stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model", ["./qwen2.5-coder-0.5b-x", "/a/b/qwen2.5-coder-0.5b.gguf"])
def test_a_missing_path_with_a_shipped_drafter_s_name_is_named(model: str) -> None:
    with pytest.raises(UserError, match="qwen2.5-coder-0.5b"):
        choose(ModelSource.of(model), None, None, None)


def test_a_run_may_be_in_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Run.open("~/runs/mine", create=True).path == tmp_path / "runs" / "mine"


@pytest.fixture
def private() -> Iterator[None]:
    """Sets a umask under which nobody else can read what the process writes."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.usefixtures("private")
def test_new_files_obey_the_umask_and_old_ones_keep_their_mode(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    write_atomic(tmp_path / "file", "1")
    for number, modes in enumerate([(0o700, 0o600, 0o600), (0o750, 0o640, 0o600)]):
        with replacing_folder(folder) as part:
            # Makes its file with a mode of its own.
            save_file({"a": torch.ones(1)}, part / "weights")
            (part / f"new-{number}").touch()
            (part / "inner").mkdir()
        names = (folder, folder / "weights", folder / f"new-{number}")
        assert tuple(map(mode_of, names)) == modes
        assert mode_of(folder / "inner") == 0o700
        folder.chmod(0o750)
        (folder / "weights").chmod(0o640)
    assert mode_of(tmp_path / "file") == 0o600
    for mode in (0o640, 0o444, 0o755):
        (tmp_path / "file").chmod(mode)
        with replacing(tmp_path / "file") as part:
            save_file({"a": torch.ones(1)}, part)
        assert mode_of(tmp_path / "file") == mode


def test_new_weights_are_as_readable_as_other_new_files(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    run = save_run(tmp_path / "run", save_model(tmp_path / "model"))
    medusa("export", "--to", "drafter", "--run", f"{run.path}/", "--output", tmp_path / "out")
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {mode_of(path) for path in files} == {mode_of(tmp_path / "plain")}


def test_a_linked_file_is_replaced_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    target = tmp_path / "disk" / "notes.json"
    for link in (tmp_path / "linked", tmp_path / "again"):
        link.symlink_to(target)
        for text in ("one", "two"):
            write_atomic(link, text)
            assert link.is_symlink()
            assert target.read_text() == text
    assert [path.name for path in target.parent.iterdir()] == [target.name]


@pytest.mark.slow
def test_a_folder_left_between_two_moves_is_read(tmp_path: Path) -> None:
    """A model, a drafter, an adapter and an export are looked for where a killed writer left them."""
    model = save_model(tmp_path / "model")
    run = save_run(tmp_path / "run", model)
    medusa("export", "--to", "medusa", "--run", f"{run.path}/", "--output", tmp_path / "out")

    def leave(folder: Path) -> None:
        folder.rename(folder.with_name(f".{folder.name}.old"))

    leave(Path(model))
    assert Path(ModelSource.of(model).folder, "config.json").is_file()
    leave(run.drafter_dir)
    assert find_drafter(f"{run.path}/")[0] == run.drafter_dir
    leave(run.drafter_dir)
    assert find_drafter(str(run.drafter_dir))[0] == run.drafter_dir
    leave(run.drafter_dir)
    assert (Run.open(f"{run.path}/").drafter_dir / "config.json").is_file()
    leave(tmp_path / "out")
    words = ("export", "--to", "medusa", "--run", f"{run.path}/", "--output", tmp_path / "out")
    assert "not empty" in medusa(*words, exit_code=1).stderr
    leave(tmp_path / "out")
    Checkpoint.open(str(tmp_path / "out"))
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_linked_folder_is_replaced_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "run"
    link.symlink_to(tmp_path / "disk", target_is_directory=True)
    for text in ("one", "two", "three"):
        with replacing_folder(link) as part:
            (part / "file").write_text(text)
        assert link.is_symlink()
        assert (tmp_path / "disk" / "file").read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "run"]


def test_a_home_of_nobody_is_named() -> None:
    with pytest.raises(UserError, match="~nobody-here"):
        Run.open("~nobody-here/run/")


def test_a_model_in_a_folder_is_remembered_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert lasting_name("mine") == str(tmp_path / "mine") == lasting_name("./mine")
    assert lasting_name("org/name") == "org/name"


@pytest.mark.slow
def test_a_run_without_its_file_takes_the_drafter_s_model(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    run = save_run(tmp_path / "mine", model)
    (run.path / "run.json").write_text("{}")
    words = ("chat", "--run", f"{run.path}/", "--dtype", "fp32", "--prompt", "w1")
    refused = medusa(*words, exit_code=1).stderr
    assert "run.json" in refused
    assert "--model" in refused
    # The remedy: the next command that loads the model writes the file again.
    (run.path / "run.json").unlink()
    assert choose(None, f"{run.path}/", None, None).model == model
    medusa(*words, "--max-new-tokens", "2")
    assert Run.open(f"{run.path}/").owner["id"] == model


def test_a_model_that_was_moved_is_named_as_the_run_s(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    run = save_run(tmp_path / "mine", model)
    moved = (tmp_path / "model").rename(tmp_path / "moved")
    for command in (
        ("chat", "--prompt", "w1"),
        ("calibrate",),
        ("train",),
        ("distill",),
        ("doctor",),
    ):
        refused = medusa(*command, "--run", f"{run.path}/", exit_code=1).stderr
        assert str(run.path) in refused
        assert model in refused
        assert "--model" in refused
    words = ("chat", "--run", f"{run.path}/", "--dtype", "fp32", "--max-new-tokens", "2")
    assert medusa(*words, "--model", moved, "--prompt", "w1").stdout


@pytest.mark.parametrize(
    ("path", "argument"),
    [
        ("runs/mine", "mine"),
        ("runs/two words", "'two words'"),
        ("runs/mine/tuned", "runs/mine/tuned"),
        ("mine", "mine/"),
        ("/a/läuf 1", "'/a/läuf 1'"),
        ("/a/b'c", "'/a/b'\"'\"'c'"),
    ],
)
def test_a_run_is_named_on_a_command_line(path: str, argument: str) -> None:
    run = Run(Path(path))
    assert run.argument == argument
    assert Run(Run.folder(shlex.split(argument)[0])).path == run.path


def test_hints_can_be_pasted_where_paths_have_blanks(tmp_path: Path) -> None:
    folder = tmp_path / "Prüf lauf ñ"
    model = save_model(folder / "mo dell")
    run = save_run(folder / "läuf 1", model, tree=None)
    hint = f"--run {shlex.quote(str(run.path))}"
    refused = medusa("chat", "--run", run.path, "--tree", "static", "--prompt", "w1", exit_code=1)
    assert hint in refused.stderr
    refused = medusa("tree", "--run", run.path, "--budget", "4", exit_code=1)
    assert hint in refused.stderr
    refused = medusa("chat", "--model", model, "--prompt", "w1", "--tree", "static", exit_code=1)
    assert f"medusa tune {shlex.quote(model)}" in refused.stderr
    done = medusa("export", "--to", "drafter", "--run", run.path, "--output", folder / "aus gabe")
    line = done.stdout.splitlines()[-1]
    assert shlex.split(line)[-3:] == [model, "--drafter", str(folder / "aus gabe")]
