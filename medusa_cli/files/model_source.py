"""The files of a model, found by its name."""

import hashlib
import os
from functools import cache
from pathlib import Path

from medusa_cli.errors import UsageError, UserError
from medusa_cli.files import gguf
from medusa_cli.files.catalogue import DEFAULT_MODEL, MODELS
from medusa_cli.files.fetch import ReadOnlyCache, build_once, named_file, place_of
from medusa_cli.files.gguf_header import is_gguf, read_header
from medusa_cli.files.hub import check_hub, hub_gguf, kept_gguf, names_gguf
from medusa_cli.files.io import restore
from medusa_cli.files.paths import expanded, home, temporary_home

RANDOM = "random:"  # precedes the name of a shape, for a model with random weights
# Number of samples that represent a file's content, and bytes per sample.
STAMPED = 64
STAMP_BYTES = 4096


def must_be_fetched(model: str) -> bool:
    """Returns True for a model in a GGUF file that is not on this machine."""
    if model in MODELS:
        return not place_of(MODELS[model]).exists()
    return names_gguf(model) and kept_gguf(model) is None


def in_gguf(model: str) -> bool:
    """Returns True for a model in a GGUF file, which is not fetched for that."""
    return must_be_fetched(model) or gguf_path(model) is not None


def gguf_path(name: str) -> Path | None:
    """Returns a model's GGUF file, which is fetched if necessary for a named model; None for other models."""
    if name in MODELS:
        return named_file(MODELS[name])
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
        return str(_unpacked(named_file(MODELS[name])))
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


def _unpacked(path: Path) -> Path:
    """Returns the folder with the config and tokenizer of a GGUF file, which each version of the reader writes once.

    If the cache cannot be written, the folder is a temporary one of this process.
    """

    def make(part: Path) -> None:
        gguf.write_metadata(path, read_header(path), part)

    name = f"gguf-{file_stamp(path)}-{_reader_stamp()}"
    try:
        return build_once(home() / "models" / name, make)
    except ReadOnlyCache:
        return build_once(temporary_home() / "models" / name, make)


@cache
def _reader_stamp() -> str:
    """Returns a digest of the code that reads GGUF files: our modules, and transformers' version."""
    from importlib.metadata import version

    digest = hashlib.sha256(version("transformers").encode())
    for module in sorted(Path(gguf.__file__).parent.glob("gguf*.py")):
        digest.update(module.read_bytes())
    return digest.hexdigest()[:8]


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
