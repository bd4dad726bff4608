"""Tensors of checkpoints that are not trusted: nothing in them is executed, every name, shape and type is checked."""

import pickle
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_cli.errors import UserError, first_line, shown
from medusa_cli.runs.io import FLOATS, INTEGERS, read_weights

# Names of missing or unknown tensors that an error lists.
NAMED = 4
TYPES = {torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.int8, torch.bool}


@dataclass(frozen=True)
class Base:
    """The model that a drafter is for, by its config alone; its weights are not loaded."""

    id: str
    architecture: str
    hidden_size: int
    vocab_size: int
    layers: int


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a .safetensors file, or of a torch file (.pt, .bin) without executing its pickle.

    UserError for a file that is neither, or that holds more than tensors.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist", "check the path")
    if path.suffix == ".safetensors":
        return read_weights(path, "the checkpoint", types=(*FLOATS, *INTEGERS, "I8", "BOOL"))
    try:
        _check_unpacked(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as reason:
        raise UserError(
            f"{path} holds more than tensors, which reading would execute; it was not read",
            "save its tensors as .safetensors where you trust it",
        ) from reason
    except (
        *(RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError, IndexError, TypeError),
        zipfile.BadZipFile,
    ) as reason:
        raise UserError(f"{path} is not a complete torch file: {first_line(reason)}", "fetch it again") from reason
    if not isinstance(tensors, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
    ):
        raise UserError(f"{path} is not a state dict of named tensors", "give the file with the heads' state dict")
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.dtype not in TYPES:
            raise UserError(f"{path}: the tensor {shown(name)} is sparse or quantised", "save it as plain floats")
    return dict(tensors)


def _check_unpacked(path: Path) -> None:
    """Raises UserError for a compressed torch file: torch compresses nothing, and such a file may unpack endlessly."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return
    with zipfile.ZipFile(path) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
            raise UserError(f"{path} is compressed, which torch files are not", "save it again with torch.save")


def check_tensors(tensors: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]], what: str) -> None:
    """Raises UserError, naming tensors, unless they have exactly the wanted names and shapes and finite values."""
    missing = [name for name in wanted if name not in tensors]
    unknown = [name for name in tensors if name not in wanted]
    faults = [f"{word} {_listed(names)}" for word, names in (("missing", missing), ("unknown", unknown)) if names]
    wrong = [
        f"{name} is {_shape(tensors[name].shape)} instead of {_shape(shape)}"
        for name, shape in wanted.items()
        if name in tensors and tuple(tensors[name].shape) != tuple(shape)
    ]
    if faults or wrong:
        raise UserError(f"{what} does not fit the model: {'; '.join([*faults, *wrong[:NAMED]])}", "give its own @model")
    broken = [name for name in wanted if tensors[name].is_floating_point() and not tensors[name].isfinite().all()]
    if broken:
        raise UserError(f"{what} has numbers that are not finite in {_listed(broken)}", "fetch it again")


def weight_shapes(kind: Any, config: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every weight of a kind of drafter by its config; nothing is allocated."""
    with torch.device("meta"):
        return {name: tuple(weight.shape) for name, weight in kind(config).named_weights().items()}


def count_notes(config: dict[str, Any], keys: tuple[str, ...], count: int) -> list[str]:
    """Returns a note if a config counts fewer heads than the file holds; UserError if it counts more."""
    stated = next((config[key] for key in keys if isinstance(config.get(key), int)), count)
    if stated > count:
        raise UserError(f"config.json counts {stated} heads, the file holds {count}", "fetch the checkpoint again")
    return [f"config.json counts {stated} heads, the file holds {count}: all are imported"] if stated < count else []


def inside(folder: Path, name: str) -> Path:
    """Returns the path of a file that a config names; UserError unless it lies in the folder."""
    path, root = (folder / name).resolve(), folder.resolve()
    if root.parent.name == "snapshots":  # in the hub's cache files are links to its blobs
        root = root.parents[1]
    if not path.is_relative_to(root):
        raise UserError(f"{folder} names the file {name!r} outside of itself", "do not trust this folder")
    return folder / name


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - NAMED
    return ", ".join(listed[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a single number"
