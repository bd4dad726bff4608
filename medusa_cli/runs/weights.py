"""Weights in safetensors files: names, types and shapes are checked before a tensor is read, then its numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_cli.errors import UserError, first_line

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = ("BF16", "F16", "F32", "F64")
INTEGERS = ("I32", "I64")


def read_weights(
    path: Path, what: str, shapes: Mapping[str, Sequence[int]] | None = None, ids: Mapping[str, Sequence[int]] = {}
) -> "dict[str, Tensor]":
    """The tensors named in `shapes` (None: all there are), finite floats, and in `ids`, whole numbers; others are left.

    UserError, naming the first tensor that is missing, of another shape or type, or not finite. Nothing is allocated
    before all names, shapes and types have been found right.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    remedy = "make the file again with the command that made it, or give another"
    if not path.is_file():
        raise UserError(f"{what} {path} does not exist or is no file", remedy)
    try:
        with safe_open(path, framework="pt") as file:
            there = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
            found = {name: (one.get_dtype(), tuple(one.get_shape())) for name, one in there.items()}
            wanted = {name: shape for name, (_, shape) in found.items()} if shapes is None else {**shapes, **ids}
            for name, shape in wanted.items():
                _check(f"{what} {path}: the tensor {name!r}", found.get(name), tuple(shape), name in ids, remedy)
            tensors = {name: file.get_tensor(name) for name in wanted}
    except (SafetensorError, OSError) as reason:
        raise UserError(f"{what} {path} cannot be read: {first_line(reason)}", remedy) from reason
    for name, tensor in tensors.items():
        if name not in ids and not torch.isfinite(tensor).all():
            raise UserError(f"{what} {path}: the tensor {name!r} holds numbers that are not finite", remedy)
    return tensors


def _check(
    name: str, found: tuple[str, tuple[int, ...]] | None, shape: tuple[int, ...], ids: bool, remedy: str
) -> None:
    """UserError unless a tensor is there, of this shape, and of floats (or, for ids, of whole numbers)."""
    if found is None:
        raise UserError(f"{name} is missing", remedy)
    kind, sizes = found
    if kind not in (INTEGERS if ids else FLOATS):
        raise UserError(f"{name} is of type {kind}, not {' or '.join(INTEGERS if ids else FLOATS)}", remedy)
    if sizes != shape:
        raise UserError(f"{name} is of shape {list(sizes)}, not {list(shape)}", remedy)
