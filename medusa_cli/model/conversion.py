"""The tensors of a checkpoint from which a network's weights are made.

In published files, tensors may have other names than the weights, and may be merged or transposed.
transformers' own rules convert these tensors, as they do when transformers loads the network.
"""

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)


@dataclass
class Source:
    """Names the tensors of a checkpoint that make one weight of a network, or several at once.

    name: the first of these weights. stored: the tensors' names in the checkpoint, by the converter's patterns; a
    pattern has several names if a module list is merged. converter: None for a tensor that is used unchanged.
    """

    name: str
    converter: Any = None
    stored: dict[str, list[str]] = field(default_factory=dict)

    @property
    def weights(self) -> list[str]:
        """Returns the names of all weights that the tensors make."""
        if self.converter is None:
            return [self.name]
        first, *others = self.converter.target_patterns
        return [self.name, *(self.name.replace(first, other) for other in others)]

    @property
    def stacks(self) -> list[list[str]]:
        """Returns the names of the matrices that are stacked, by pattern; an empty list for any other conversion."""
        if self.converter is None:
            return []
        merge, *more = self.converter.operations
        joins = not more or (len(more) == 1 and type(more[0]) is Concatenate and more[0].dim == 1)
        if type(merge) is not MergeModulelist or merge.dim != 0 or not joins:
            return []
        return [self.stored.get(pattern, []) for pattern in self.converter.source_patterns]

    def converted(self, read: Callable[[str], Tensor], network: Any) -> dict[str, Tensor]:
        """Returns the weights by name. read: returns a tensor of the checkpoint."""
        if self.converter is None:
            [[stored]] = self.stored.values()
            return {self.name: read(stored)}
        converter = deepcopy(self.converter)
        for pattern, names in self.stored.items():
            for name in names:
                converter.add_tensor(self.name, name, pattern, read(name))
        converted = converter.convert(self.name, model=network, config=network.config)
        return {name: own[0] if isinstance(own, list) else own for name, own in converted.items()}


def sources_of(stored: Iterable[str], network: Any) -> tuple[dict[str, Source], list[str]]:
    """Returns the source of each weight of a network, and the names of the tensors that the network does not use.

    stored: the names in the checkpoint. network: may be on the meta device.
    """
    conversions = get_model_conversion_mapping(network)
    renamings = [own for own in conversions if isinstance(own, WeightRenaming)]
    converters = [own for own in conversions if isinstance(own, WeightConverter)]
    by_pattern = {pattern: own for own in converters for pattern in own.source_patterns}
    weights = network.state_dict()
    of_base: dict[str, Any] = {
        "base_model_prefix": network.base_model_prefix,
        "meta_state_dict": weights,
    }

    sources: dict[str, Source] = {}
    unused = []
    for name in sorted(stored, key=dot_natural_key):
        weight, pattern = rename_source_key(name, renamings, converters, **of_base)
        if weight not in weights and name in weights:  # the tensor has its final name already
            weight, pattern = rename_source_key(name, [], [], **of_base)
        if weight not in weights:
            unused.append(name)
            continue
        converter = None if pattern is None else by_pattern[pattern]
        source = sources.setdefault(weight, Source(weight, converter))
        source.stored.setdefault(pattern or name, []).append(name)
    return {own: source for source in sources.values() for own in source.weights}, unused
