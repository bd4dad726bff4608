"""A model in the structures of the native library."""

import dataclasses
from collections import Counter
from ctypes import POINTER, cast

import numpy as np
import torch
from torch import Tensor

from medusa_cli.engine.description import Description, LayerNames, Rotary
from medusa_cli.engine.packed import Packed
from medusa_cli.model.attention import FULL
from medusa_cli.model.backbone import Unsupported
from medusa_cli.native import PackedMatrix
from medusa_cli.native.library import MATRICES, MIXERS, NORMS, TILE, UNIT, Layer, Model
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

        # Layers of each mixer.
        self.mixers: Counter[str] = Counter()
        self.layers = (Layer * len(description.layers))()
        for layer, names in zip(self.layers, description.layers, strict=True):
            for name in MATRICES:
                if name in names.matrices:
                    setattr(layer, name, packed.matrices[names.matrices[name]].struct)
            for name in NORMS:
                if name in names.norms:
                    setattr(layer, name, packed.vectors[names.norms[name]].ctypes.data)
            for name, stored in names.vectors.items():
                setattr(layer, name, packed.vectors[stored].ctypes.data)
            layer.window = 0 if names.kind == FULL else description.window
            layer.table = self._table(names.table)
            layer.experts = names.experts
            layer.mixer = names.mixer
            mixer = MIXERS[names.mixer]
            layer.place = self.mixers[mixer]
            self.mixers[mixer] += 1

        self.struct = Model(
            **description.sizes, **description.flags, **dataclasses.asdict(description.routing)
        )
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

    @property
    def delta_row(self) -> tuple[int, int]:
        """Returns the channels of a delta net's convolution, and the numbers of a row of its products."""
        sizes = self.description.sizes
        keys = sizes["key_heads"] * sizes["key_dim"]
        channels = 2 * keys + sizes["value_heads"] * sizes["value_dim"]
        return channels, channels + 2 * padded(sizes["value_heads"], TILE)

    @property
    def delta_state(self) -> int:
        """Returns the numbers of a delta net's state in one slot."""
        sizes = self.description.sizes
        state = sizes["value_heads"] * sizes["key_dim"] * sizes["value_dim"]
        return (sizes["kernel"] - 1) * self.delta_row[0] + state

    @property
    def bytes_read(self) -> int:
        """Returns the bytes of weights that a pass over one row reads: of experts, those that a row chooses."""
        total = self.head.nbytes
        for names in self.description.layers:
            for name, stored in names.matrices.items():
                size = self.packed.matrices[stored].nbytes
                if names.experts and name in ("gate", "up", "down"):
                    size = size * self.description.routing.top_experts // names.experts
                total += size
        return total

    def _table(self, kind: str | None) -> int:
        """Returns the number of the rotary table of layers of a kind, -1 for layers that turn nothing."""
        if kind is None:
            return -1
        tables = self.description.tables
        return tables.index(kind) if len(tables) > 1 else 0

    def _check_shapes(self) -> None:
        """Raises Unsupported unless every matrix and vector has the size that the library will read."""
        sizes = self.description.sizes
        whole = self.description.flags["whole_norms"]
        hidden = sizes["hidden"]
        dim = sizes["dim"]
        heads = sizes["heads"] * dim
        keys = sizes["kv"] * dim
        widths = dict.fromkeys(NORMS, hidden)
        widths |= {"query_norm": heads if whole else dim, "key_norm": keys if whole else dim}
        # A bias lies behind the gain.
        parts = 2 if self.description.flags["centered"] else 1

        for names in self.description.layers:
            shapes = self._mixer_shapes(MIXERS[names.mixer]) | self._mlp_shapes(names)
            for name, stored in names.matrices.items():
                matrix = self.packed.matrices[stored]
                outputs, inputs = shapes[name]
                if matrix.shape[0] != outputs or not _has_inputs(matrix, inputs):
                    raise Unsupported(f"its {stored} has the shape {matrix.shape}")
            for name, stored in names.norms.items():
                if len(self.packed.vectors[stored]) != parts * padded(widths[name], UNIT):
                    raise Unsupported(f"its {stored} has another size")
            channels = hidden if MIXERS[names.mixer] == "short_conv" else self.delta_row[0]
            counts = {
                "sinks": sizes["heads"],
                "router_bias": names.experts,
                "conv": sizes["kernel"] * channels,
                "decay_log": sizes["value_heads"],
                "decay_bias": sizes["value_heads"],
                "state_norm": sizes["value_dim"],
            }
            for name, stored in names.vectors.items():
                if len(self.packed.vectors[stored]) != padded(counts[name], UNIT):
                    raise Unsupported(f"its {stored} has another size")
        for matrix in (self.embedding, self.head):
            if matrix.shape[0] < sizes["vocab"] or not _has_inputs(matrix, hidden):
                raise Unsupported("its vocabulary has another size")

    def _mixer_shapes(self, mixer: str) -> dict[str, tuple[int, int]]:
        """Returns the shapes of what mixes a layer's rows."""
        sizes = self.description.sizes
        hidden = sizes["hidden"]
        if mixer == "short_conv":
            return {"input": (3 * hidden, hidden), "out": (hidden, hidden)}
        if mixer == "delta_net":
            values = sizes["value_heads"] * sizes["value_dim"]
            return {
                "input": (self.delta_row[0], hidden),
                "output_gate": (values, hidden),
                "beta": (sizes["value_heads"], hidden),
                "decay": (sizes["value_heads"], hidden),
                "out": (hidden, values),
            }
        heads = sizes["heads"] * sizes["dim"]
        keys = sizes["kv"] * sizes["dim"]
        return {
            "query": (heads, hidden),
            "key": (keys, hidden),
            "value": (keys, hidden),
            "output_gate": (heads, hidden),
            "out": (hidden, heads),
        }

    def _mlp_shapes(self, names: LayerNames) -> dict[str, tuple[int, int]]:
        """Returns the shapes of a layer's MLP, or of its experts' together; Unsupported if they fill no tiles."""
        hidden = self.description.sizes["hidden"]
        experts = names.experts or 1
        inner = self.packed.matrices[names.matrices["up"]].shape[0] // experts
        shapes = {
            "gate": (experts * inner, hidden),
            "up": (experts * inner, hidden),
            "down": (experts * hidden, inner),
        }
        if names.experts:
            shared = 0
            if "shared_up" in names.matrices:
                shared = self.packed.matrices[names.matrices["shared_up"]].shape[0]
            if inner % UNIT or shared % UNIT or hidden % TILE:
                raise Unsupported("its experts have sizes that fill no tiles")
            if not 0 < self.description.routing.top_experts <= names.experts:
                raise Unsupported("it chooses more experts than it has")
            shapes |= {
                "router": (experts, hidden),
                "shared_router": (1, hidden),
                "shared_gate": (shared, hidden),
                "shared_up": (shared, hidden),
                "shared_down": (hidden, shared),
            }
        return shapes

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


def _has_inputs(matrix: PackedMatrix, wanted: int) -> bool:
    """Returns True if a matrix has so many inputs: rounded ones are filled up to whole groups."""
    return 0 <= matrix.shape[1] - wanted < UNIT


def _once(sines: Tensor) -> slice:
    """Returns the columns of a rotary table [n, D] that hold each frequency once."""
    half = sines.shape[1] // 2
    if torch.equal(sines[:, :half], sines[:, half:]):
        return slice(0, half)
    if torch.equal(sines[:, ::2], sines[:, 1::2]):  # Cohere: neighbours are equal
        return slice(0, None, 2)
    return slice(0, None)  # gpt-oss
