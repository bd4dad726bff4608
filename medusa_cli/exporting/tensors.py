"""Tensors from files that are not trusted: nothing in them is executed, and every name, shape and type is checked."""

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from medusa_cli.errors import UserError

# How many names an error gives of those that are missing or too many.
NAMED = 4


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a torch one (.pt, .bin) read without executing what is pickled in it.

    UserError for a file that is neither, or that holds more than tensors.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist", "check the path")
    if path.suffix == ".safetensors":
        try:
            return dict(load_file(path))
        except (SafetensorError, OSError, ValueError) as reason:
            raise UserError(f"{path} is no whole safetensors file: {_first_line(reason)}", "fetch it again") from reason
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as reason:
        raise UserError(
            f"{path} holds more than tensors, which would be executed on reading: it is refused",
            "save its tensors as .safetensors where you trust it",
        ) from reason
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError, IndexError, TypeError) as reason:
        raise UserError(f"{path} is no whole torch file: {_first_line(reason)}", "fetch it again") from reason
    if not isinstance(found, Mapping) or not all(
        isinstance(name, str) and isinstance(one, Tensor) for name, one in found.items()
    ):
        raise UserError(f"{path} holds no table of named tensors", "give the file with the heads' state dict")
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
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise UserError(f"{folder} names the file {name!r}, which lies outside of it", "do not trust this folder")
    return path


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - NAMED
    return ", ".join(listed[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a number"


def _first_line(reason: Exception) -> str:
    return (str(reason).strip().splitlines() or [type(reason).__name__])[0]
