"""Reads safetensors files; checks all names, shapes and types before it reads any tensor.

A matrix NAME [N, K] may be stored in 8 bits: NAME is int8, and NAME.scale [N, K / 32] has an fp16
factor for each group of 32 inputs. A row's last group may be shorter.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_cli.errors import UserError, first_line

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = ("BF16", "F16", "F32", "F64")
INTEGERS = ("I32", "I64")
INT8 = ("I8",)
GROUP = 32  # inputs that share a scale
LARGEST = 127
SCALE = ".scale"
# Endings of the files that may hold weights if the expected file is missing.
OTHER_WEIGHTS = (
    ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".npz", ".safetensors", ".gguf"
)  # fmt: skip


def read_weights(
    path: Path,
    what: str,
    shapes: Mapping[str, Sequence[int]] | None = None,
    ids: Mapping[str, Sequence[int]] = {},
    types: Sequence[str] = FLOATS,
) -> "dict[str, Tensor]":
    """Returns the tensors in `shapes` (None: all in the file) and the integer tensors in `ids`; reads no others.

    types: the types that tensors in `shapes` may have in the file. 8-bit matrices are accepted as well, and
    returned as fp32. Raises UserError for the first tensor that is missing, has another shape or type, or is
    not finite. Nothing is allocated before all names, shapes and types have been checked.
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
            stored = {
                key: (part.get_dtype(), list(part.get_shape())) for key, part in slices.items()
            }
            expected, rounded = _expected(stored, shapes, types)
            expected |= {key: (list(shape), INTEGERS) for key, shape in ids.items()}
            for key, (shape, kinds) in expected.items():
                tensor = f"{name}: the tensor {key!r}"
                if key not in stored:
                    raise UserError(f"{tensor} is missing", remedy)
                kind, stored_shape = stored[key]
                if kind not in kinds:
                    raise UserError(f"{tensor} is of type {kind}, not {' or '.join(kinds)}", remedy)
                if stored_shape != shape:
                    raise UserError(f"{tensor} is of shape {stored_shape}, not {shape}", remedy)
            tensors = {key: file.get_tensor(key) for key in expected}
    except (SafetensorError, OSError) as reason:
        raise UserError(f"{name} cannot be read: {first_line(reason)}", remedy) from reason
    for key, value in tensors.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise UserError(f"{name}: the tensor {key!r} holds numbers that are not finite", remedy)
    for key in rounded:
        tensors[key] = from_int8(tensors[key], tensors.pop(key + SCALE))
    return tensors


def _expected(
    stored: Mapping[str, tuple[str, list[int]]],
    shapes: Mapping[str, Sequence[int]] | None,
    types: Sequence[str],
) -> tuple[dict[str, tuple[list[int], Sequence[str]]], list[str]]:
    """Returns the shape and types that each tensor must have, and the names of the 8-bit matrices.

    stored: the type and shape of each tensor in the file. shapes: the shapes of the tensors to read,
    None for all tensors.
    """
    in_8_bits = {key for key, (kind, _) in stored.items() if kind in INT8 and key + SCALE in stored}
    if shapes is None:
        scales = {key + SCALE for key in in_8_bits}
        shapes = {key: shape for key, (_, shape) in stored.items() if key not in scales}
    rounded = [key for key, shape in shapes.items() if key in in_8_bits and len(shape) == 2]
    expected: dict[str, tuple[list[int], Sequence[str]]] = {
        key: (list(shape), types) for key, shape in shapes.items()
    }
    for key in rounded:
        outputs, inputs = shapes[key]
        expected[key] = ([outputs, inputs], INT8)
        expected[key + SCALE] = ([outputs, -(-inputs // GROUP)], ("F16",))
    return expected, rounded


def to_int8(matrix: "Tensor") -> "tuple[Tensor, Tensor]":
    """Rounds a matrix [N, K] to 8 bits; returns int8 [N, K] and fp16 scales [N, K / 32], as in GGUF's Q8_0."""
    import torch

    outputs, inputs = matrix.shape
    groups = -(-inputs // GROUP)
    values = torch.zeros(outputs, groups * GROUP)
    values[:, :inputs] = matrix.float()
    values = values.view(outputs, groups, GROUP)
    scales = values.abs().amax(-1) / LARGEST
    factors = torch.where(scales > 0, 1 / scales, 0)
    rounded = (values * factors.unsqueeze(-1)).round().clamp(-LARGEST, LARGEST).to(torch.int8)
    return rounded.view(outputs, -1)[:, :inputs].contiguous(), scales.half()


def from_int8(rounded: "Tensor", scales: "Tensor") -> "Tensor":
    """Returns the fp32 matrix [N, K] that int8 values and their scales represent."""
    spread = scales.float().repeat_interleave(GROUP, dim=1)
    return rounded.float() * spread[:, : rounded.shape[1]]


@contextmanager
def opened(
    files: Sequence[Path], framework: str, shards: Mapping[str, str] = {}
) -> Iterator[dict[str, Any]]:
    """Opens a checkpoint's files and yields slices of their tensors by name; a slice reads only the part asked for.

    If several files have a tensor of the same name, the file that `shards` names is used, else the last file.
    """
    from safetensors import safe_open

    with ExitStack() as stack:
        parts = [
            (path.name, stack.enter_context(safe_open(path, framework=framework))) for path in files
        ]
        yield {
            name: part.get_slice(name)
            for file, part in parts
            for name in part.keys()  # noqa: SIM118  (not a mapping)
            if shards.get(name, file) == file
        }
