"""A model in the structures of the native library."""

from collections.abc import Callable
from ctypes import POINTER, cast
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medusa_cli.engine.description import Description
from medusa_cli.engine.packed import Packed
from medusa_cli.model.attention import FULL
from medusa_cli.model.backbone import Layers, Unsupported
from medusa_cli.native import PackedMatrix
from medusa_cli.native.library import MATRICES, NORMS, UNIT, Layer, Model
from medusa_cli.native.matrix import Floats

# Rows of rotary tables at first; they grow.
FIRST_POSITIONS = 2048
# Gives the cosines and sines [1, n, D] of positions [1, n] for layers of a kind.
Rotary = Callable[[Tensor, str], tuple[Tensor, Tensor]]


def padded(size: int, multiple: int) -> int:
    """Returns the smallest multiple of a number that is not below `size`."""
    return -(-size // multiple) * multiple


class NativeModel:
    """A model in the library's structures, which keeps all memory that these point to."""

    def __init__(self, description: Description, packed: Packed, rotary: Rotary) -> None:
        self.description = description
        self.packed = packed
        self._rotary = rotary
        self._tables: list[Floats] = []
        self._check_shapes()

        self.layers = (Layer * len(description.layers))()
        for layer, names in zip(self.layers, description.layers, strict=True):
            for name in MATRICES:
                setattr(layer, name, packed.matrices[names.matrices[name]].struct)
            for name in NORMS:
                if name in names.norms:
                    setattr(layer, name, packed.vectors[names.norms[name]].ctypes.data)
            layer.window = 0 if names.kind == FULL else description.window
            layer.table = (
                description.tables.index(names.table) if len(description.tables) > 1 else 0
            )

        self.struct = Model(**description.sizes)
        self.struct.activation = description.activation
        self.struct.eps = description.eps
        self.struct.scale = description.scale
        self.struct.embedding_scale = description.embedding_scale
        self.struct.norm = packed.vectors[description.norm].ctypes.data
        self.struct.embedding = self.embedding.struct
        self.struct.head = self.head.struct
        self.struct.layer = cast(self.layers, POINTER(Layer))

    @property
    def embedding(self) -> PackedMatrix:
        return self.packed.matrices[self.description.embedding]

    @property
    def head(self) -> PackedMatrix:
        return self.packed.matrices[self.description.head]

    def _check_shapes(self) -> None:
        """Raises Unsupported unless every matrix and norm has the size that the library will read."""
        sizes = self.description.sizes
        hidden = sizes["hidden"]
        heads = sizes["heads"] * sizes["dim"]
        inner = sizes["inner"]
        keys = sizes["kv"] * sizes["dim"]
        outputs = {
            "query": heads,
            "key": keys,
            "value": keys,
            "out": hidden,
            "gate": inner,
            "up": inner,
            "down": hidden,
        }
        inputs = {"out": heads, "down": inner}

        def has_inputs(matrix: PackedMatrix, wanted: int) -> bool:
            # Rounded matrices are filled up to whole groups.
            return 0 <= matrix.shape[1] - wanted < UNIT

        for names in self.description.layers:
            for name, stored in names.matrices.items():
                matrix = self.packed.matrices[stored]
                if matrix.shape[0] != outputs[name] or not has_inputs(
                    matrix, inputs.get(name, hidden)
                ):
                    raise Unsupported(f"its {stored} has the shape {matrix.shape}")
            for name, stored in names.norms.items():
                wide = sizes["dim"] if name in ("query_norm", "key_norm") else hidden
                if len(self.packed.vectors[stored]) != padded(wide, UNIT):
                    raise Unsupported(f"its {stored} has another size")
        for matrix in (self.embedding, self.head):
            if matrix.shape[0] < sizes["vocab"] or not has_inputs(matrix, hidden):
                raise Unsupported("its vocabulary has another size")

    def reserve(self, positions: int) -> None:
        """Makes rotary tables of at least `positions` positions."""
        if positions <= self.struct.positions:
            return
        count = max(positions, 2 * self.struct.positions, FIRST_POSITIONS)
        tables = []
        for number, kind in enumerate(self.description.tables):
            cos, sin = self._rotary(torch.arange(count)[None], kind)
            width = cos.shape[-1]
            # Both halves of a row are equal.
            cosines = np.ascontiguousarray(cos[0, :, : width // 2].float().numpy())
            sines = np.ascontiguousarray(sin[0, :, : width // 2].float().numpy())
            tables += [cosines, sines]
            self.struct.cos[number] = cosines.ctypes.data
            self.struct.sin[number] = sines.ctypes.data
            self.struct.rotary = width
        self.struct.positions = count
        self._tables = tables


def rotary_of(network: Any) -> Rotary:
    """Returns a network's rotary tables as a function; it runs on the CPU even if the network has no weights."""
    parts = Layers(network)
    config = network.config.get_text_config()
    with torch.device("cpu"):
        module = type(parts.base.rotary_emb)(config)
    like = torch.empty(1)

    def rotary(positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            cos, sin = module(like, positions, kind) if parts.by_kind else module(like, positions)
        return cos, sin

    return rotary
