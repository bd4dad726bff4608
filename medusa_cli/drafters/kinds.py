"""The drafter classes by name, and the shapes of their weights."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from medusa_cli.drafters.amphista import Amphista
from medusa_cli.drafters.assistant import Assistant
from medusa_cli.drafters.dflash import Dflash
from medusa_cli.drafters.eagle import Eagle
from medusa_cli.drafters.firp import Firp
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.drafters.hydra import HydraHeads
from medusa_cli.drafters.medusa import MedusaHeads
from medusa_cli.drafters.mtp import Mtp
from medusa_cli.errors import UserError, first_line
from medusa_cli.runs.run import DRAFTER_CONFIG

REMEDY = "train it again, or give another @drafter"
KINDS: tuple[type[HeadDrafter], ...] = (
    MedusaHeads,
    HydraHeads,
    Amphista,
    Eagle,
    Firp,
    Mtp,
    Dflash,
    Assistant,
)
DRAFTERS: dict[str, type[HeadDrafter]] = {kind.name: kind for kind in KINDS}


class Uninitialized(TorchFunctionMode):
    """Makes the functions of torch.nn.init do nothing, so that the weights of new layers stay uninitialized.

    On the meta device, some of these functions import torch's compiler, which takes over a second.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"]
        return func(*args, **kwargs)


def weight_shapes(kind: type[HeadDrafter], config: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the weights of a drafter with this config, without allocating memory.

    Raises UserError for impossible sizes.
    """
    try:
        with torch.device("meta"), Uninitialized():
            return {
                name: tuple(weight.shape) for name, weight in kind(config).named_weights().items()
            }
    except RuntimeError as reason:  # sizes that overflow
        fault = f"{DRAFTER_CONFIG} asks for impossible sizes: {first_line(reason)}"
        raise UserError(fault, REMEDY) from reason
