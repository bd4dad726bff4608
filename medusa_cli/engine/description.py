"""The record that describes a transformers decoder to the native library: its weights and its computation."""

from dataclasses import dataclass

from medusa_cli.engine.experts import Part, Routing
from medusa_cli.native.library import MIXERS

# The library's numbers for the activations that have constants.
CLAMPED_SWIGLU, XIELU = 3, 4
# The constants of xIELU that are weights.
XIELU_VECTORS = ("alpha_p", "alpha_n", "beta")


@dataclass(frozen=True)
class LayerNames:
    """The parts of one layer: the library's names, mapped to the names in transformers' network.

    norms: a name is empty if the norm has no gain. vectors: all vectors that are not norms. kind: the kind of
    attention, such as full or sliding. table: the kind of rotary embeddings, None if the layer rotates nothing.
    experts: the number of experts, 0 for a single MLP. kv, dim: the number of key heads and their width, 0 without
    attention. mixer: the index of the layer's mixer in MIXERS. place: the layer's index in the cache among layers with
    the same mixer. An attention layer without a key matrix shares the place of another layer.
    """

    matrices: dict[str, str]
    norms: dict[str, str]
    vectors: dict[str, str]
    kind: str
    table: str | None
    experts: int
    kv: int
    dim: int
    mixer: int
    place: int


@dataclass(frozen=True)
class Activation:
    """An activation: the library's number of its kind, and the constants that are not weights; see structures.def."""

    kind: int
    alpha: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True)
class Inputs:
    """The additional inputs of layers: `width` floats per token and layer.

    The inputs are a sum, multiplied by `factor`. Its terms are an embedding, multiplied by `embedding_scale`, and a
    projection of the states before the first layer, multiplied by `scale` and then normalized. embedding, projection
    and norm are names.
    """

    width: int
    embedding: str
    embedding_scale: float
    projection: str
    norm: str
    scale: float
    factor: float


@dataclass(frozen=True)
class Description:
    """A decoder: its sizes, the names of its parts, and the constants used in computing them.

    parts: matrices that are some rows of a stored weight. norm: the name of the final norm, empty if it has no gain.
    activation: the activation of all MLPs. flags: the library's flags by name. one_more: True if norms multiply by
    1 + w. residual: the factor of the outputs of attention and MLP. cap: the soft cap of attention scores, 0 for none.
    clip: the limit for queries, keys and values, 0 for none. routing: the choice of experts. window: the window of
    sliding layers, 0 for none. tables: the kinds of rotary embeddings. inputs: the additional inputs of layers.
    """

    sizes: dict[str, int]
    layers: list[LayerNames]
    parts: dict[str, Part]
    embedding: str
    head: str
    norm: str
    eps: float
    scale: float
    embedding_scale: float
    residual: float
    cap: float
    clip: float
    activation: Activation
    flags: dict[str, bool]
    one_more: bool
    routing: Routing
    window: int
    tables: list[str]
    inputs: Inputs | None

    @property
    def matrix_names(self) -> list[str]:
        """Returns the names of all matrices, each once."""
        of_layers = [name for layer in self.layers for name in layer.matrices.values()]
        of_inputs = [] if self.inputs is None else [self.inputs.embedding, self.inputs.projection]
        return list(dict.fromkeys([self.embedding, self.head, *of_inputs, *of_layers]))

    @property
    def norm_names(self) -> list[str]:
        """Returns the names of all norms with a gain, each once."""
        of_layers = [name for layer in self.layers for name in layer.norms.values()]
        of_inputs = [] if self.inputs is None else [self.inputs.norm]
        names = dict.fromkeys([self.norm, *of_inputs, *of_layers])
        return [name for name in names if name]

    @property
    def looked_up(self) -> set[str]:
        """Returns the names of the matrices that a step uses only to look up rows."""
        of_inputs = set() if self.inputs is None else {self.inputs.embedding}
        return ({self.embedding} | of_inputs) - {self.head}

    def places(self, mixer: str) -> int:
        """Returns how many places the layers with a given mixer have in the cache."""
        number = MIXERS.index(mixer)
        return len({layer.place for layer in self.layers if layer.mixer == number})

    @property
    def vector_names(self) -> list[str]:
        """Returns the names of all vectors that are not norms."""
        return [name for layer in self.layers for name in layer.vectors.values()]

    @property
    def convolutions(self) -> set[str]:
        """Returns the names of the convolution weights."""
        return {layer.vectors["conv"] for layer in self.layers if "conv" in layer.vectors}

    @property
    def routers(self) -> set[str]:
        """Returns the names of the matrices that choose and weight experts."""
        return {
            name
            for layer in self.layers
            for own, name in layer.matrices.items()
            if own in ("router", "shared_router")
        }
