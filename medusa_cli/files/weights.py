"""Reads safetensors files: every tensor's name, shape and type is checked before any is read."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_cli.errors import UserError, first_line

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = ("BF16", "F16", "F32", "F64")
INTEGERS = ("I32", "I64")


def read_weights(
    path: Path,
    what: str,
    shapes: Mapping[str, Sequence[int]] | None = None,
    ids: Mapping[str, Sequence[int]] = {},
    types: Sequence[str] = FLOATS,
) -> "dict[str, Tensor]":
    """Returns the tensors named in `shapes` (None: all there are), of `types`, and in `ids`, integers; others are left.

    Raises UserError for the first tensor that is missing, of another shape or type, or not finite. Nothing is
    allocated before all names, shapes and types are right.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    name = f"{what} {path}"
    remedy = "make the file again with the command that made it, or give another"
    if not path.is_file():
        raise UserError(f"{name} does not exist or is not a file", remedy)
    try:
        with safe_open(path, framework="pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  (it is not a mapping)
            if shapes is None:
                shapes = {key: part.get_shape() for key, part in slices.items()}
            for key, shape in {**shapes, **ids}.items():
                tensor = f"{name}: the tensor {key!r}"
                kinds = INTEGERS if key in ids else types
                if key not in slices:
                    raise UserError(f"{tensor} is missing", remedy)
                if slices[key].get_dtype() not in kinds:
                    raise UserError(
                        f"{tensor} is of type {slices[key].get_dtype()}, not {' or '.join(kinds)}",
                        remedy,
                    )
                if list(slices[key].get_shape()) != list(shape):
                    raise UserError(
                        f"{tensor} is of shape {slices[key].get_shape()}, not {list(shape)}", remedy
                    )
            tensors = {key: file.get_tensor(key) for key in (*shapes, *ids)}
    except (SafetensorError, OSError) as reason:
        raise UserError(f"{name} cannot be read: {first_line(reason)}", remedy) from reason
    for key, value in tensors.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise UserError(f"{name}: the tensor {key!r} holds numbers that are not finite", remedy)
    return tensors
