"""A model as a value: its files and their contents, each found and read once."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from medusa_cli.errors import UsageError, UserError
from medusa_cli.files import adapter, gguf
from medusa_cli.files.catalogue import DEFAULT_MODEL, MODELS
from medusa_cli.files.fetch import ReadOnlyCache, build_once, named_file, place_of
from medusa_cli.files.gguf_header import Header, file_names, is_gguf, read_header
from medusa_cli.files.hub import check_hub, hub_folder, hub_gguf, kept_gguf, names_gguf
from medusa_cli.files.io import convert, read_as, read_object, restore
from medusa_cli.files.paths import expanded, home, temporary_home
from medusa_cli.files.safetensors_files import opened

RANDOM = "random:"  # precedes the name of a shape, for a model with random weights
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
CONFIG, AGAIN = "the model's config", "download the model again"
# Number of samples that represent a file's content, and bytes per sample.
STAMPED = 64
STAMP_BYTES = 4096
# Patterns of the files in a hub repository that loading a model needs.
MODEL_FILES = ("*.safetensors", *(f"*{ending}" for ending in adapter.COPIED))
log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Config:
    """Declares the fields of a model's config.json: their types, and bounds far above the sizes of any model."""

    model_type: str = ""
    num_hidden_layers: Annotated[int, Meta(ge=1, le=1024)] | None = None
    hidden_size: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    intermediate_size: Annotated[int, Meta(ge=1, le=1 << 24)] | list[int] | None = None
    num_attention_heads: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    num_key_value_heads: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    head_dim: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    vocab_size: Annotated[int, Meta(ge=1, le=1 << 26)] | None = None
    max_position_embeddings: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None
    layer_types: list[str] | None = None
    text_config: "Config | None" = None


@dataclass(frozen=True)
class Shards:
    """Declares the index of a checkpoint that has several files."""

    weight_map: dict[str, Annotated[str, Meta(min_length=1, max_length=255)]]


class _read_once(cached_property[T]):
    """Keeps a property's value, except for a model of the hub, because its files may be fetched later."""

    def __get__(self, source: Any, owner: Any = None) -> T:  # type: ignore[override]
        value = super().__get__(source, owner)
        if source is not None and source.kind == "hub":
            del source.__dict__[self.attrname]
        return value


@dataclass(frozen=True)
class ModelSource:
    """Finds and reads the files of a model, each when it is first needed.

    name: a named model, a GGUF file, OWNER/NAME:TAG, the folder of a model or of a LoRA adapter, a hub id or
    "random:SHAPE". kind: "gguf", "safetensors" (a folder), "hub" or "random".
    """

    name: str
    kind: str

    @classmethod
    def of(cls, name: str) -> "ModelSource":
        """Returns the source of a model, without fetching the model."""
        return cls(name, _kind_of(name))

    @property
    def must_be_fetched(self) -> bool:
        """Returns True if the GGUF file, or the model of the adapter, is not on this machine."""
        if self.name in MODELS:
            return not place_of(MODELS[self.name]).exists()
        if adapter.is_adapter(expanded(self.name)):
            return self.base.kind == "hub" and not self.base.checkpoint
        return names_gguf(self.name) and kept_gguf(self.name) is None

    @_read_once
    def gguf(self) -> Path | None:
        """Returns the GGUF file, which is fetched if necessary; None for other kinds."""
        if self.kind != "gguf":
            return None
        if self.name in MODELS:
            return named_file(MODELS[self.name])
        return hub_gguf(self.name) if names_gguf(self.name) else expanded(self.name)

    @_read_once
    def header(self) -> Header:
        """Returns the header of the GGUF file."""
        assert self.gguf is not None
        return read_header(self.gguf)

    @_read_once
    def folder(self) -> str:
        """Returns the folder or hub id that from_pretrained can load; the folder of a GGUF file is written once.

        Raises UserError for a path without a model, and, within seconds, for a hub id that is not available.
        """
        name = self.name
        if not name.strip():
            raise UsageError(
                "@model is empty",
                f"give a folder, a GGUF file or a hub id, or the name {DEFAULT_MODEL!r}",
            )
        if self.gguf is not None:
            return str(self._extracted(self.gguf))
        path = expanded(name)
        if adapter.is_adapter(path):
            return str(self._merged(path))
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

    def _extracted(self, path: Path) -> Path:
        """Returns the folder with the config and tokenizer of a GGUF file; each version of the reader writes it once.

        If the cache cannot be written, the folder is temporary, for this process only.
        """

        def make(part: Path) -> None:
            gguf.write_metadata(path, self.header, part)

        return _built(f"gguf-{file_stamp(path)}-{_reader_stamp()}", make)

    def _merged(self, path: Path) -> Path:
        """Returns the folder of a LoRA adapter merged into its base; merges again only if files of either have changed.

        Raises UserError if the base has no safetensors files, or if the adapter does not fit the base.
        """
        base = self.base
        if base.kind == "hub":
            base = ModelSource.of(str(hub_folder(base.name, MODEL_FILES, "the adapter's model")))
        folder = Path(base.folder)

        def make(part: Path) -> None:
            log.info("merging the adapter %s into its model %s, once", path, base.name)
            adapter.merge_files(path, folder, base.checkpoint, part)
            for earlier in part.parent.glob(f"{prefix}-*"):
                if earlier.is_dir() and earlier != part:
                    shutil.rmtree(earlier)

        files = [adapter.weights_in(path), path / adapter.CONFIG, *adapter.tokenizer_files(path)]
        state = [*map(file_stamp, files), *base.stamp, str(folder)]
        prefix = f"adapter-{_digest(str(path.absolute()))}"
        return _built(f"{prefix}-{_digest(json.dumps(state))}", make)

    @_read_once
    def base(self) -> "ModelSource":
        """Returns the model that an adapter belongs to; raises UserError for an adapter that cannot be merged."""
        path = expanded(self.name)
        name = adapter.read_config(path).base_model_name_or_path
        if not name:
            fault = f"@model {self.name!r} is an adapter whose {adapter.CONFIG} names no base_model_name_or_path"
            raise UserError(fault, "write the model's folder or hub id there")
        base = ModelSource.of(name)
        fault = f"@model {self.name!r} is an adapter of {name!r}"
        if base.kind == "hub":
            try:
                check_hub(name, named="it")
            except UserError as reason:
                remedy = f"write the model's folder or hub id into {path / adapter.CONFIG}"
                raise UserError(f"{fault}: {reason.message}", remedy) from reason
        if base.kind in ("gguf", "random") or adapter.is_adapter(expanded(name)):
            kind = {"gguf": "a GGUF file", "random": "a random model"}.get(base.kind, "an adapter")
            raise UserError(f"{fault}, which is {kind}", adapter.MERGE)
        if base.kind == "safetensors" and not base.checkpoint:
            raise UserError(f"{fault}, which has no safetensors files", adapter.MERGE)
        return base

    def file(self, name: str) -> Path | None:
        """Returns a file in the folder or in the hub's cache; None if there is no such file."""
        if Path(self.folder).is_dir():
            path = Path(self.folder) / name
            return path if path.is_file() else None
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(self.folder, name)
        return Path(cached) if isinstance(cached, str) else None

    @_read_once
    def fields(self) -> dict[str, Any] | None:
        """Returns the fields of config.json, None if it is not on this machine; raises UserError for wrong values."""
        if (path := self.file("config.json")) is None:
            return None
        fields = read_object(path, CONFIG)
        convert(fields, Config, f"{CONFIG} {path}", AGAIN)
        return fields

    @property
    def text_fields(self) -> dict[str, Any]:
        """Returns the fields of config.json for the text part; an empty dict without the file."""
        fields = self.fields or {}
        return fields.get("text_config") or fields

    @_read_once
    def index(self) -> dict[str, str]:
        """Returns the name of each tensor's file in the checkpoint's index; an empty dict if the index is unused."""
        single, index = (self.file(name) for name in WEIGHTS)
        if single is not None or index is None:
            return {}
        return read_as(index, Shards, "the model's index", AGAIN).weight_map

    @_read_once
    def checkpoint(self) -> list[Path]:
        """Returns the safetensors files in the folder or the hub's cache; an empty list if some are missing."""
        if (single := self.file(WEIGHTS[0])) is not None:
            return [single]
        parts = [self.file(name) for name in sorted(set(self.index.values()))]
        return [] if None in parts else [part for part in parts if part is not None]

    @property
    def weights_in_gguf(self) -> bool:
        """Returns True if the weights are in the GGUF file, and not in the folder that is made of it."""
        return self.kind == "gguf" and not self.checkpoint

    @_read_once
    def weights(self) -> list[Path]:
        """Returns the files on this machine that hold the weights."""
        if self.gguf is None or not self.weights_in_gguf:
            return [] if self.kind == "random" else self.checkpoint
        files = [self.gguf.with_name(name) for name in file_names(self.gguf.name)]
        return [file for file in files if file.is_file()]  # loading reports missing files

    @_read_once
    def tensors(self) -> dict[str, tuple[list[int], str]]:
        """Returns the shape and type ("BF16") of each tensor in the checkpoint; an empty dict if it is unreadable."""
        from safetensors import SafetensorError

        try:
            with opened(self.checkpoint, "numpy") as slices:
                return {
                    name: (shape, part.get_dtype())
                    for name, part in slices.items()
                    if (shape := part.get_shape())
                }
        except SafetensorError:  # loading reports the damage
            return {}

    @_read_once
    def stamp(self) -> list[str]:
        """Returns the stamps of the files that hold the weights, and a digest of the config."""
        files = [file_stamp(path) for path in self.weights if path != self.gguf]
        # The name of the folder that a GGUF file is unpacked into contains the file's stamp.
        unpacked = [] if self.gguf is None else [Path(self.folder).name]
        return [*unpacked, *files, hashlib.sha256(json.dumps(self.fields).encode()).hexdigest()]


def _kind_of(name: str) -> str:
    if name.startswith(RANDOM):
        return "random"
    if name in MODELS or names_gguf(name):
        return "gguf"
    path = expanded(name)
    restore(path)
    if is_gguf(path):
        return "gguf"
    return "safetensors" if path.is_dir() else "hub"


def lasting_name(name: str) -> str:
    """Returns a model's name that means the same in any working directory: a local path becomes absolute."""
    path = expanded(name)
    return os.path.abspath(path) if name not in MODELS and path.exists() else name


def _no_model(name: str, path: Path) -> UserError:
    """Returns the error for a folder without config.json, which depends on what the folder has instead."""
    if files := sorted(path.glob("*.gguf")):
        fault = f"@model {name!r} holds GGUF files and no config.json"
        return UserError(fault, f"give a file, such as {files[0]}")
    fault = f"@model {name!r} has no config.json"
    return UserError(fault, "give the folder of a Hugging Face causal LM")


def _built(name: str, make: Callable[[Path], None]) -> Path:
    """Returns a folder in the cache, or a temporary one if the cache cannot be written; `make` writes it once."""
    try:
        return build_once(home() / "models" / name, make)
    except ReadOnlyCache:
        return build_once(temporary_home() / "models" / name, make)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _reader_stamp() -> str:
    """Returns a digest of the code that reads GGUF files: this program's modules, and transformers' version."""
    from importlib.metadata import version

    digest = hashlib.sha256(version("transformers").encode())
    for module in sorted(Path(gguf.__file__).parent.glob("gguf*.py")):
        digest.update(module.read_bytes())
    return digest.hexdigest()[:8]


def file_stamp(path: Path) -> str:
    """Returns a digest of a large file's size, inode, times and samples of its content.

    The times include the ctime, because programs can set a file's mtime, but not its ctime.
    """
    stat = path.stat()
    facts = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
    digest = hashlib.sha256(f"{facts}".encode())
    with path.open("rb") as file:
        for number in range(STAMPED):
            file.seek(max(0, stat.st_size - STAMP_BYTES) * number // (STAMPED - 1))
            digest.update(file.read(STAMP_BYTES))
    return digest.hexdigest()[:16]
