"""Drafters by name, and loading whichever a folder holds."""

from pathlib import Path

from medusa_cli.backbone import Backbone
from medusa_cli.drafters.amphista import Amphista
from medusa_cli.drafters.base import Batch, Confirmed, Draft, Drafter, Losses
from medusa_cli.drafters.eagle import Eagle
from medusa_cli.drafters.firp import Firp
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.drafters.hydra import HydraHeads
from medusa_cli.drafters.medusa import MedusaHeads
from medusa_cli.errors import UserError, shown
from medusa_cli.runs.made import describe_drafter
from medusa_cli.runs.run import check_backbone

DRAFTERS: dict[str, type[HeadDrafter]] = {one.name: one for one in (MedusaHeads, HydraHeads, Amphista, Eagle, Firp)}

__all__ = [
    "DRAFTERS",
    "Amphista",
    "Batch",
    "Confirmed",
    "Draft",
    "Drafter",
    "Eagle",
    "Firp",
    "HydraHeads",
    "Losses",
    "MedusaHeads",
    "drafter_kind",
    "load_drafter",
]


def drafter_kind(folder: Path) -> type[HeadDrafter]:
    """The class of the drafter a folder holds; UserError where it holds none."""
    name = describe_drafter(folder).drafter
    if name not in DRAFTERS:
        raise UserError(f"{folder} holds no known drafter ({shown(name)})", f"known are {', '.join(DRAFTERS)}")
    return DRAFTERS[name]


def load_drafter(folder: Path, backbone: Backbone) -> HeadDrafter:
    """Load the drafter a folder holds; UserError, naming both models, if it was trained for another backbone."""
    kind = drafter_kind(folder)
    config = describe_drafter(folder)
    widths = (config.hidden_size, config.vocab_size)
    if widths != (backbone.hidden_size, backbone.vocab_size):
        raise UserError(
            f"the drafter in {folder} is for hidden size {widths[0]} and vocabulary {widths[1]}, "
            f"the model {backbone.id!r} has {backbone.hidden_size} and {backbone.vocab_size}",
            "give the drafter's own @model or another @drafter",
        )
    made_for = config.provenance.identity
    if made_for:
        check_backbone(made_for, backbone.identity, f"the drafter in {folder}")
        if made_for.get("adapter") != backbone.adapter:
            both = (made_for.get("adapter"), backbone.adapter)
            had, has = (f"adapter {one}" if one else "no adapter" for one in both)
            raise UserError(
                f"the drafter in {folder} was trained for the model with {had}, which was loaded with {has}",
                "give the @run that holds drafter and adapter together",
            )
    return kind.load(Path(folder), backbone)
