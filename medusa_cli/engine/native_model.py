"""A model in the structures of the native library."""

from ctypes import POINTER, cast

import numpy as np
import torch
from torch import Tensor

from medusa_cli.engine.description import Description, Rotary
from medusa_cli.engine.packed import Packed
from medusa_cli.model.attention import FULL
from medusa_cli.model.backbone import Unsupported
from medusa_cli.native import PackedMatrix
from medusa_cli.native.library import MATRICES, NORMS, UNIT, Layer, Model
from medusa_cli.native.matrix import Floats

# Rows of rotary tables at first; they grow.
FIRST_POSITIONS = 2048


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
                if name in names.matrices:
                    setattr(layer, name, packed.matrices[names.matrices[name]].struct)
            for name in NORMS:
                if name in names.norms:
                    setattr(layer, name, packed.vectors[names.norms[name]].ctypes.data)
            if names.sinks is not None:
                layer.sinks = packed.vectors[names.sinks].ctypes.data
            layer.window = 0 if names.kind == FULL else description.window
            layer.table = self._table(names.table)

        self.struct = Model(**description.sizes, **description.flags)
        self.struct.activation = description.activation
        self.struct.eps = description.eps
        self.struct.scale = description.scale
        self.struct.embedding_scale = description.embedding_scale
        self.struct.residual = description.residual
        self.struct.cap = description.cap
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

    def _table(self, kind: str | None) -> int:
        """Returns the number of the rotary table of layers of a kind, -1 for layers that turn nothing."""
        if kind is None:
            return -1
        tables = self.description.tables
        return tables.index(kind) if len(tables) > 1 else 0

    def _check_shapes(self) -> None:
        """Raises Unsupported unless every matrix and norm has the size that the library will read."""
        sizes = self.description.sizes
        hidden = sizes["hidden"]
        count = sizes["heads"]
        dim = sizes["dim"]
        heads = count * dim
        keys = sizes["kv"] * dim
        inner = sizes["inner"]
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

        widths = dict.fromkeys(NORMS, hidden)
        whole = self.description.flags["whole_norms"]
        widths |= {"query_norm": heads if whole else dim, "key_norm": keys if whole else dim}
        # A bias lies behind the gain.
        parts = 2 if self.description.flags["centered"] else 1

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
                if len(self.packed.vectors[stored]) != parts * padded(widths[name], UNIT):
                    raise Unsupported(f"its {stored} has another size")
            if names.sinks and len(self.packed.vectors[names.sinks]) != padded(count, UNIT):
                raise Unsupported(f"its {names.sinks} has another size")
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
            once = _once(sin[0])
            cosines = np.ascontiguousarray(cos[0][:, once].float().numpy())
            sines = np.ascontiguousarray(sin[0][:, once].float().numpy())
            tables += [cosines, sines]
            self.struct.cos[number] = cosines.ctypes.data
            self.struct.sin[number] = sines.ctypes.data
            self.struct.rotary = 2 * sines.shape[1]
        self.struct.positions = count
        self._tables = tables


def _once(sines: Tensor) -> slice:
    """Returns the columns of a rotary table [n, D] that hold each frequency once."""
    half = sines.shape[1] // 2
    if torch.equal(sines[:, :half], sines[:, half:]):
        return slice(0, half)
    if torch.equal(sines[:, ::2], sines[:, 1::2]):  # Cohere: neighbours are equal
        return slice(0, None, 2)
    return slice(0, None)  # gpt-oss
