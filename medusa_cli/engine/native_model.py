"""A model in the native library's structures."""

import dataclasses
import threading
from ctypes import POINTER, Structure, cast

import numpy as np
import torch
from torch import Tensor

from medusa_cli.engine.description import XIELU, XIELU_VECTORS, Description, LayerNames
from medusa_cli.engine.kv_types import head_bytes
from medusa_cli.engine.packed import Packed
from medusa_cli.engine.probes import Rotary
from medusa_cli.engine.shapes import Shapes
from medusa_cli.files.layer_kinds import FULL
from medusa_cli.model.backbone import UNBOUNDED
from medusa_cli.native import Format, PackedMatrix
from medusa_cli.native.library import FLAGS, VECTORS, Activation, Layer, Model
from medusa_cli.native.matrix import Floats, padded_floats

# The initial number of rows in rotary tables, which grow as needed.
FIRST_POSITIONS = 2048


class NativeModel:
    """Holds a model in the library's structures, and owns all memory that they point to.

    max_positions: the maximum size of rotary tables, unless `reserve` asks for more.
    """

    def __init__(
        self,
        description: Description,
        packed: Packed,
        rotary: Rotary,
        max_positions: int = UNBOUNDED,
    ) -> None:
        self.description = description
        self.packed = packed
        self._rotary = rotary
        self._max_positions = max_positions
        self._tables: list[tuple[Floats, Floats]] = []
        self._lock = threading.Lock()  # guards the tables, which several decoders may use
        # By width: a gain of ones, for norms without a gain.
        self._ones: dict[int, Floats] = {}
        self.shapes = Shapes(
            description,
            {name: matrix.shape for name, matrix in packed.matrices.items()},
            {name: len(vector) for name, vector in packed.vectors.items()},
        )
        self.shapes.check()

        self.layers = (Layer * len(description.layers))()
        for layer, names in zip(self.layers, description.layers, strict=True):
            for name, stored in names.matrices.items():
                setattr(layer, name, packed.matrices[stored].struct)
            widths = self.shapes.norm_widths(names)
            for name, stored in names.norms.items():
                setattr(layer, name, self.gain_of(stored, widths[name]).ctypes.data)
            for name in VECTORS:
                if name in names.vectors:
                    setattr(layer, name, packed.vectors[names.vectors[name]].ctypes.data)
            if description.flags["value_norms"]:
                layer.value_norm = self.gain_of("", names.dim).ctypes.data
            layer.activation = self._activation(names)
            layer.scalar = 1.0
            if "scalar" in names.vectors:
                layer.scalar = packed.vectors[names.vectors["scalar"]][0]
            layer.window = 0 if names.kind == FULL else description.window
            layer.table = self._table(names.table)
            for name in ("experts", "kv", "dim", "mixer", "place"):
                setattr(layer, name, getattr(names, name))

        flags = {name: description.flags[name] for name in FLAGS}
        self.struct = Model(**description.sizes, **flags, **dataclasses.asdict(description.routing))
        if description.inputs is not None:
            self.struct.inputs = description.inputs.width
            self.struct.inputs_scale = description.inputs.scale
            self.struct.inputs_factor = description.inputs.factor
            self.struct.inputs_projection = packed.matrices[description.inputs.projection].struct
            self.struct.inputs_norm = packed.vectors[description.inputs.norm].ctypes.data
        for name in ("eps", "scale", "residual", "cap", "clip"):
            setattr(self.struct, name, getattr(description, name))
        self.struct.norm = self.gain_of(description.norm, description.sizes["hidden"]).ctypes.data
        self.struct.layer = cast(self.layers, POINTER(Layer))

    @property
    def embedding(self) -> PackedMatrix:
        return self.packed.matrices[self.description.embedding]

    @property
    def head(self) -> PackedMatrix:
        return self.packed.matrices[self.description.head]

    def column_bytes(self, format: Format) -> tuple[int, int]:
        """Returns the bytes of a column's keys and of its values in the widest layer."""
        sizes = [
            (names.kv * key, names.kv * value)
            for names in self.description.layers
            for key, value in [head_bytes(format, names.dim)]
        ]
        return max(key for key, _ in sizes), max(value for _, value in sizes)

    @property
    def delta_state(self) -> int:
        """Returns the number of floats in a delta net's state per slot."""
        sizes = self.description.sizes
        state = sizes["value_heads"] * sizes["key_dim"] * sizes["value_dim"]
        return (sizes["kernel"] - 1) * self.shapes.delta_row[0] + state

    @property
    def bytes_read(self) -> int:
        """Returns the bytes of weights that a pass over one row reads, counting only the chosen experts."""
        total = self.head.nbytes
        if self.description.inputs is not None:
            total += self.packed.matrices[self.description.inputs.projection].nbytes
        for names in self.description.layers:
            for name, stored in names.matrices.items():
                size = self.packed.matrices[stored].nbytes
                if names.experts and name in ("gate", "up", "down"):
                    size = size * self.description.routing.top_experts // names.experts
                total += size
        return total

    def _table(self, kind: str | None) -> int:
        """Returns the index of the rotary table for layers of a kind, or -1 if they rotate nothing."""
        if kind is None:
            return -1
        tables = self.description.tables
        return tables.index(kind) if len(tables) > 1 else 0

    def gain_of(self, name: str, width: int) -> Floats:
        """Returns a norm's gain, followed by its bias if norms are centered; for an empty name, ones and zeros."""
        if name:
            return self.packed.vectors[name]
        if width not in self._ones:
            gain = padded_floats(np.ones(width))
            centered = self.description.flags["centered"]
            self._ones[width] = np.concatenate([gain, 0 * gain]) if centered else gain
        return self._ones[width]

    def _activation(self, names: LayerNames) -> Structure:
        """Returns the activation of a layer's MLP with its constants."""
        own = self.description.activation
        if own.kind != XIELU:
            return Activation(kind=own.kind, alpha=own.alpha, limit=own.limit)
        alpha_p, alpha_n, beta = (
            float(self.packed.vectors[names.vectors[name]][0]) for name in XIELU_VECTORS
        )
        # As in transformers, softplus keeps the trained constants positive.
        return Activation(
            kind=own.kind,
            alpha=np.logaddexp(0, alpha_p),
            alpha_below=beta + np.logaddexp(0, alpha_n),
            beta=beta,
        )

    def reserve(self, positions: int) -> None:
        """Extends the rotary tables to at least `positions` positions; several threads may call this."""
        with self._lock:
            if positions > self.struct.positions:
                self._grow(positions)

    def _grow(self, positions: int) -> None:
        """Replaces the rotary tables by longer ones; `positions` is set last, because passes may run meanwhile."""
        spare = max(2 * self.struct.positions, FIRST_POSITIONS)
        count = max(positions, min(spare, self._max_positions))
        tables = []
        for kind in self.description.tables:
            cos, sin = self._rotary(torch.arange(count)[None], kind)
            once = _once(sin[0])
            cosines = np.ascontiguousarray(cos[0][:, once].float().numpy())
            sines = np.ascontiguousarray(sin[0][:, once].float().numpy())
            if self.description.flags["reversed"]:
                sines = -sines
            tables.append((cosines, sines))
        self._tables += tables  # a pass in another thread may still read earlier tables
        for number, (cosines, sines) in enumerate(tables):
            self.struct.cos[number] = cosines.ctypes.data
            self.struct.sin[number] = sines.ctypes.data
            self.struct.rotary[number] = 2 * sines.shape[1]
        self.struct.positions = count


def _once(sines: Tensor) -> slice:
    """Returns the columns of a rotary table [n, D] that hold each frequency once."""
    half = sines.shape[1] // 2
    if torch.equal(sines[:, :half], sines[:, half:]):
        return slice(0, half)
    if torch.equal(sines[:, ::2], sines[:, 1::2]):  # Cohere: adjacent columns are equal
        return slice(0, None, 2)
    return slice(0, None)  # gpt-oss: no column is repeated
