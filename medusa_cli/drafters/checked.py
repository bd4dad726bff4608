"""A drafter's files, nothing in them taken on trust: the config's types and limits, the weights' shapes and numbers."""

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from medusa_cli.backbone import Backbone
from medusa_cli.errors import UserError
from medusa_cli.runs.made import WHAT
from medusa_cli.runs.reading import convert, read_object
from medusa_cli.runs.weights import read_weights

if TYPE_CHECKING:
    from medusa_cli.drafters.heads import HeadDrafter

T = TypeVar("T", bound="HeadDrafter")


def read_heads(kind: type[T], folder: Path, backbone: Backbone) -> T:
    """The drafter in a folder, in fp32 on the CPU; UserError where its files cannot be used."""
    path, remedy = folder / "config.json", "train it again, or give another @drafter"
    config = convert(kind.read_config(read_object(path, WHAT)), kind.config_class, f"{WHAT} {path}", remedy)
    if (config.hidden_size, config.vocab_size) != (backbone.hidden_size, backbone.vocab_size):
        raise UserError(f"{WHAT} {path} has other sizes than the model {backbone.id!r}", "give its own @model")
    kind.check_fit(config, backbone)
    with torch.device("meta"):  # the sizes that the file must have, before there is any memory for them
        shapes = {name: tuple(one.shape) for name, one in kind(config).named_weights().items()}
    weights = folder / kind.weights_file
    ids = kind.id_shapes(config)
    tensors = read_weights(weights, "the drafter's weights", shapes, ids)
    chosen = kind.draft_ids_of(tensors) if ids else None
    outside = chosen is not None and (chosen.min() < 0 or chosen.max() >= config.vocab_size)
    if chosen is not None and (outside or len(chosen.unique()) < len(chosen)):
        raise UserError(f"{', '.join(ids)} in {weights} are no set of the model's tokens", remedy)
    drafter = kind(config)
    with torch.no_grad():
        for name, tensor in drafter.named_weights().items():
            tensor.copy_(tensors[name])
        if chosen is not None:
            drafter.draft_ids.copy_(chosen)
    return drafter
