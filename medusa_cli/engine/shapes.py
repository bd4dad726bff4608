"""The shapes that weights must have for the native library, checked before or after the weights are packed."""

from collections.abc import Mapping
from dataclasses import dataclass

from medusa_cli.engine.description import XIELU_VECTORS, Description, LayerNames
from medusa_cli.model.backbone import Unsupported
from medusa_cli.native.library import MIXERS, NORMS, TILE, UNIT


def padded(size: int, multiple: int) -> int:
    """Returns `size` rounded up to a multiple of `multiple`."""
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class Shapes:
    """The shapes of a model's weights by name: matrices [outputs, inputs], and padded lengths of vectors."""

    description: Description
    matrices: Mapping[str, tuple[int, ...]]
    vectors: Mapping[str, int]

    @property
    def delta_row(self) -> tuple[int, int]:
        """Returns the channels of a delta net's convolution, and the floats per row of its projections."""
        sizes = self.description.sizes
        keys = sizes["key_heads"] * sizes["key_dim"]
        channels = 2 * keys + sizes["value_heads"] * sizes["value_dim"]
        return channels, channels + 2 * padded(sizes["value_heads"], TILE)

    def norm_widths(self, names: LayerNames) -> dict[str, int]:
        """Returns the widths of a layer's norms in floats."""
        sizes = self.description.sizes
        heads = sizes["heads"] * names.dim
        keys = names.kv * names.dim
        whole = self.description.flags["whole_norms"]
        return {
            **dict.fromkeys(NORMS, sizes["hidden"]),
            "query_norm": heads if whole else names.dim,
            "key_norm": keys if whole else names.dim,
            "attended_norm": heads,
            "inner_norm": self.matrices[names.matrices["up"]][0],
        }

    def check(self) -> None:
        """Raises Unsupported unless every matrix and vector has the size that the library reads."""
        sizes = self.description.sizes
        hidden = sizes["hidden"]
        given = 0 if self.description.inputs is None else self.description.inputs.width
        # The bias of a centered norm follows its gain.
        parts = 2 if self.description.flags["centered"] else 1

        for names in self.description.layers:
            widths = self.norm_widths(names)
            shapes = {
                "input_gate": (given, hidden),
                "input_out": (hidden, given),
                **self._mixer_shapes(names),
                **self._mlp_shapes(names),
            }
            for name, stored in names.matrices.items():
                shape = self.matrices[stored]
                outputs, inputs = shapes[name]
                if shape[0] != outputs or not _has_inputs(shape, inputs):
                    raise Unsupported(f"its {stored} has the shape {shape}")
            for name, stored in names.norms.items():
                if stored and self.vectors[stored] != parts * padded(widths[name], UNIT):
                    raise Unsupported(f"its {stored} has another size")
            channels = hidden if MIXERS[names.mixer] == "short_conv" else self.delta_row[0]
            counts = {
                "sinks": sizes["heads"],
                "router_bias": names.experts,
                "scalar": 1,
                **dict.fromkeys(XIELU_VECTORS, 1),
                "conv": sizes["kernel"] * channels,
                "decay_log": sizes["value_heads"],
                "decay_bias": sizes["value_heads"],
                "state_norm": sizes["value_dim"],
            }
            for name, stored in names.vectors.items():
                if self.vectors[stored] != padded(counts[name], UNIT):
                    raise Unsupported(f"its {stored} has another size")
        self._check_inputs()
        last = self.description.norm
        if last and self.vectors[last] != parts * padded(hidden, UNIT):
            raise Unsupported("its last norm has another size")
        vocab = sizes["vocab"]
        embedding = self.matrices[self.description.embedding]
        head = self.matrices[self.description.head]
        fits = embedding[0] >= vocab and head[0] == vocab
        if not (fits and _has_inputs(embedding, hidden) and _has_inputs(head, hidden)):
            raise Unsupported("its vocabulary has another size")

    def _check_inputs(self) -> None:
        """Raises Unsupported unless the weights for layers' additional inputs have the sizes the library reads."""
        inputs = self.description.inputs
        if inputs is None:
            return
        wide = self.description.sizes["layers"] * inputs.width
        embedding = self.matrices[inputs.embedding]
        projection = self.matrices[inputs.projection]
        fits = (
            inputs.width % TILE == 0
            and embedding[0] >= self.description.sizes["vocab"]
            and _has_inputs(embedding, wide)
            and projection[0] == wide
            and _has_inputs(projection, self.description.sizes["hidden"])
            and self.vectors[inputs.norm] == padded(inputs.width, UNIT)
            and not self.description.flags["centered"]
        )
        if not fits:
            raise Unsupported("its embeddings by layer have sizes that are not supported")

    def _mixer_shapes(self, names: LayerNames) -> dict[str, tuple[int, int]]:
        """Returns the shapes of the matrices of a layer's mixer."""
        sizes = self.description.sizes
        mixer = MIXERS[names.mixer]
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
        heads = sizes["heads"] * names.dim
        keys = names.kv * names.dim
        return {
            "query": (heads, hidden),
            "key": (keys, hidden),
            "value": (keys, hidden),
            "output_gate": (heads, hidden),
            "out": (hidden, heads),
        }

    def _mlp_shapes(self, names: LayerNames) -> dict[str, tuple[int, int]]:
        """Returns the shapes of the matrices of a layer's MLP, or of all its experts together.

        Raises Unsupported if the experts' sizes are not whole tiles, or if a row chooses more experts than there are.
        """
        hidden = self.description.sizes["hidden"]
        experts = names.experts or 1
        inner = self.matrices[names.matrices["up"]][0] // experts
        shapes = {
            "gate": (experts * inner, hidden),
            "up": (experts * inner, hidden),
            "down": (experts * hidden, inner),
        }
        if names.experts:
            shared = 0
            if "shared_up" in names.matrices:
                shared = self.matrices[names.matrices["shared_up"]][0]
            if inner % UNIT or shared % UNIT or hidden % TILE:
                raise Unsupported("its experts have sizes that fill no tiles")
            routing = self.description.routing
            if not 0 < routing.top_experts <= names.experts:
                raise Unsupported("it chooses more experts than it has")
            if routing.jitter and routing.top_experts != 2:
                raise Unsupported("it chooses other than two experts by sparsemixer")
            shapes |= {
                "router": (experts, hidden),
                "shared_router": (1, hidden),
                "shared_gate": (shared, hidden),
                "shared_up": (shared, hidden),
                "shared_down": (hidden, shared),
            }
        return shapes


def _has_inputs(shape: tuple[int, ...], wanted: int) -> bool:
    """Returns True if a matrix has `wanted` inputs or, as rounded matrices do, this number padded to whole groups."""
    return shape[1] in (wanted, padded(wanted, UNIT))
