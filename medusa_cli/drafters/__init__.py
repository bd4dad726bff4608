"""Drafters, which guess the next tokens of a backbone."""

from medusa_cli.drafters.amphista import Amphista
from medusa_cli.drafters.base import Batch, Drafter, NewTokens
from medusa_cli.drafters.eagle import Eagle
from medusa_cli.drafters.firp import Firp
from medusa_cli.drafters.hydra import HydraHeads
from medusa_cli.drafters.io import drafter_kind, load_drafter
from medusa_cli.drafters.kinds import DRAFTERS
from medusa_cli.drafters.medusa import MedusaHeads

__all__ = [
    "DRAFTERS",
    "Amphista",
    "Batch",
    "Drafter",
    "Eagle",
    "Firp",
    "HydraHeads",
    "MedusaHeads",
    "NewTokens",
    "drafter_kind",
    "load_drafter",
]
