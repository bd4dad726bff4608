"""Tensors of untrusted checkpoints: nothing in them is executed; names, shapes, types and values are checked."""

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_cli.errors import UserError, first_line, shown
from medusa_cli.runs.io import FLOATS, INTEGERS, read_weights

# Faults that an error lists.
LISTED = 4
TYPES = {torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.int8, torch.bool}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a .safetensors file, or of a torch file (.pt, .bin) without executing its pickle.

    Raises UserError for a file that is neither, or that holds more than tensors.
    """
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
    except UserError:
        raise
    except Exception as reason:  # torch and zipfile raise a dozen types for damaged files
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


def check_tensors(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises UserError, naming tensors, unless they have exactly these names and shapes and are finite floats."""
    faults = [f"{name} is missing" for name in shapes if name not in tensors]
    faults += [f"{name} is unknown" for name in tensors if name not in shapes]
    faults += [
        f"{name} is {_size(tensors[name].shape)} instead of {_size(shape)}"
        for name, shape in shapes.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if not faults:  # only now: a tensor of another shape may be too large to look at
        faults = [f"{name} holds integers" for name, tensor in tensors.items() if not tensor.is_floating_point()]
        faults = faults or [f"{name} is not finite" for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if faults:
        more = f" and {len(faults) - LISTED} more" if len(faults) > LISTED else ""
        text = f"the checkpoint does not fit the model: {'; '.join(faults[:LISTED])}{more}"
        raise UserError(text, "give the drafter's own @model, or fetch the checkpoint again")


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a single number"


def count_notes(stated: Any, count: int) -> list[str]:
    """Returns a note if a config counts fewer heads than the file holds; raises UserError if it counts more."""
    if not isinstance(stated, int) or stated == count:
        return []
    if stated > count:
        raise UserError(f"config.json counts {stated} heads, the file holds {count}", "fetch the checkpoint again")
    return [f"config.json counts {stated} heads, the file holds {count}: all are imported"]
