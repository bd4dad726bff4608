"""Drafters by name, and loading the drafter that a folder holds."""

from pathlib import Path
from typing import TypeVar

import torch

from medusa_cli.drafters.amphista import Amphista
from medusa_cli.drafters.eagle import Eagle
from medusa_cli.drafters.firp import Firp
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.drafters.hydra import HydraHeads
from medusa_cli.drafters.medusa import MedusaHeads
from medusa_cli.engine.kernels import Kernel
from medusa_cli.errors import UserError, shown
from medusa_cli.model import Backbone
from medusa_cli.runs.io import convert, read_object, read_weights
from medusa_cli.runs.provenance import WHAT, describe_drafter
from medusa_cli.runs.run import check_backbone

DRAFTERS: dict[str, type[HeadDrafter]] = {kind.name: kind for kind in (MedusaHeads, HydraHeads, Amphista, Eagle, Firp)}
T = TypeVar("T", bound=HeadDrafter)


def drafter_kind(folder: Path) -> type[HeadDrafter]:
    """Returns the class of the drafter in a folder; raises UserError if there is none."""
    name = describe_drafter(folder).drafter
    if name not in DRAFTERS:
        raise UserError(f"{folder} holds no known drafter ({shown(name)})", f"known are {', '.join(DRAFTERS)}")
    return DRAFTERS[name]


def load_drafter(folder: Path, backbone: Backbone) -> HeadDrafter:
    """Loads the drafter in a folder; raises UserError, naming both models, if it was trained for another backbone."""
    kind, config = drafter_kind(folder), describe_drafter(folder)
    if (config.hidden_size, config.vocab_size) != (backbone.hidden_size, backbone.vocab_size):
        raise UserError(
            f"the drafter in {folder} is for hidden size {config.hidden_size} and vocabulary {config.vocab_size}, "
            f"the model {backbone.id!r} has {backbone.hidden_size} and {backbone.vocab_size}",
            "give the drafter's own @model or another @drafter",
        )
    identity = config.provenance.identity
    if identity:
        check_backbone(identity, backbone.identity, f"the drafter in {folder}")
        if identity.get("adapter") != backbone.adapter:
            adapters = (identity.get("adapter"), backbone.adapter)
            trained, loaded = (f"adapter {name}" if name else "no adapter" for name in adapters)
            raise UserError(
                f"the drafter in {folder} was trained for the model with {trained}, which was loaded with {loaded}",
                "give the @run that holds drafter and adapter together",
            )
    return load_kind(kind, Path(folder), backbone)


def load_kind(kind: type[T], folder: Path, backbone: Backbone) -> T:
    """Reads a drafter of a known kind in the backbone's dtype, ready to draft; raises UserError for unusable files."""
    drafter = load_drafter_weights(kind, folder, backbone)
    kernel = backbone.engine.kernel
    # Beside an int8 or int4 backbone, unquantised heads would take most of a step; drafts need not be exact.
    drafter._kernel = kernel if kernel.exact else Kernel("int8")
    return drafter.to(backbone.device, backbone.dtype).eval().requires_grad_(False)


def load_drafter_weights(kind: type[T], folder: Path, backbone: Backbone) -> T:
    """Reads a drafter in fp32 on the CPU; raises UserError for unusable files."""
    path, remedy = folder / "config.json", "train it again, or give another @drafter"
    config = convert(kind.read_config(read_object(path, WHAT)), kind.config_class, f"{WHAT} {path}", remedy)
    if (config.hidden_size, config.vocab_size) != (backbone.hidden_size, backbone.vocab_size):
        raise UserError(f"{WHAT} {path} has other sizes than the model {backbone.id!r}", "give its own @model")
    kind.check_fit(config, backbone)
    with torch.device("meta"):  # the sizes that the file must have, before there is any memory for them
        shapes = {name: tuple(weight.shape) for name, weight in kind(config).named_weights().items()}
    weights, ids = folder / kind.weights_file, kind.id_shapes(config)
    tensors = read_weights(weights, "the drafter's weights", shapes, ids)
    draft_ids = kind.draft_ids_of(tensors) if ids else None
    outside = draft_ids is not None and (draft_ids.min() < 0 or draft_ids.max() >= config.vocab_size)
    if draft_ids is not None and (outside or len(draft_ids.unique()) < len(draft_ids)):
        raise UserError(f"{', '.join(ids)} in {weights} are no set of the model's tokens", remedy)
    drafter = kind(config)
    with torch.no_grad():
        for name, tensor in drafter.named_weights().items():
            tensor.copy_(tensors[name])
        if draft_ids is not None:
            drafter.draft_ids.copy_(draft_ids)
    return drafter
