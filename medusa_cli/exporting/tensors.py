"""Tensors from files that are not trusted: nothing in them is executed, and every name, shape and type is checked."""

import pickle
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from medusa_cli.errors import UserError, first_line, shown

# How many names an error gives of those that are missing or too many.
NAMED = 4
TYPES = {torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.int8, torch.bool}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a torch one (.pt, .bin) read without executing what is pickled in it.

    UserError for a file that is neither, or that holds more than tensors.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist", "check the path")
    if path.suffix == ".safetensors":
        try:
            return _usable(load_file(path), path)
        except (SafetensorError, OSError, ValueError) as reason:
            raise UserError(f"{path} is no whole safetensors file: {first_line(reason)}", "fetch it again") from reason
    try:
        _check_unpacked(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as reason:
        raise UserError(
            f"{path} holds more than tensors, which would be executed on reading: it is refused",
            "save its tensors as .safetensors where you trust it",
        ) from reason
    except (
        *(RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError, IndexError, TypeError),
        zipfile.BadZipFile,
    ) as reason:
        raise UserError(f"{path} is no whole torch file: {first_line(reason)}", "fetch it again") from reason
    if not isinstance(found, Mapping) or not all(
        isinstance(name, str) and isinstance(one, Tensor) for name, one in found.items()
    ):
        raise UserError(f"{path} holds no table of named tensors", "give the file with the heads' state dict")
    return _usable(found, path)


def _check_unpacked(path: Path) -> None:
    """UserError for a torch file that holds more than its size: torch packs nothing, and a packed one may be vast."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return
    with zipfile.ZipFile(path) as archive:
        if sum(one.file_size for one in archive.infolist()) > path.stat().st_size:
            raise UserError(f"{path} is packed, which torch's own files are not", "save it again with torch.save")


def _usable(found: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The tensors of a file; UserError where one is sparse, quantised, elsewhere, or of a type no weight has."""
    for name, one in found.items():
        if one.layout != torch.strided or one.device.type != "cpu" or one.dtype not in TYPES:
            raise UserError(f"{path}: the tensor {shown(name)} is of no plain type", "save it as plain floats")
    return dict(found)


def check_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]], what: str) -> None:
    """UserError, naming them, unless the tensors are exactly the wanted names in the wanted shapes."""
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted]
    faults = [f"{word} {_some(names)}" for word, names in (("missing", missing), ("unknown", extra)) if names]
    wrong = [
        f"{name} is {_shape(found[name].shape)} where {_shape(shape)} is wanted"
        for name, shape in wanted.items()
        if name in found and tuple(found[name].shape) != tuple(shape)
    ]
    if faults or wrong:
        raise UserError(f"{what} does not fit: {'; '.join([*faults, *wrong[:NAMED]])}", "give one made for this model")
    broken = [name for name in wanted if found[name].is_floating_point() and not found[name].isfinite().all()]
    if broken:
        raise UserError(f"{what} has numbers that are not finite in {_some(broken)}", "fetch it again")


def inside(folder: Path, name: str) -> Path:
    """The path of a file that a config names, which must lie in the folder; else UserError."""
    path, root = (folder / name).resolve(), folder.resolve()
    if root.parent.name == "snapshots":  # in the hub's cache files are links to where it keeps them
        root = root.parents[1]
    if not path.is_relative_to(root):
        raise UserError(f"{folder} names the file {name!r}, which lies outside of it", "do not trust this folder")
    return folder / name


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - NAMED
    return ", ".join(listed[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a number"
