"""What an import passes along: the model that a checkpoint is for, and the drafter that it becomes."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from medusa_cli.errors import UserError


@dataclass(frozen=True)
class Base:
    """The model that a drafter is for, known by its config alone: nothing is loaded to import."""

    id: str
    architecture: str
    hidden_size: int
    vocab_size: int
    layers: int

    @property
    def identity(self) -> dict[str, Any]:
        """What names it in a run; the fingerprint of its weights is added by the first command that loads them."""
        return dict(vars(self))


@dataclass(frozen=True)
class Imported:
    """A drafter as it is on disk here: its kind, config.json without the provenance, and tensors by their names.

    calibration, tree: what an export of ours had beside it. notes: what was changed or could not be kept.
    """

    kind: str
    config: dict[str, Any]
    tensors: dict[str, Tensor] = field(repr=False)
    calibration: dict[str, Any] | None = None
    tree: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


def count_said(config: dict[str, Any], keys: tuple[str, ...], held: int, what: str) -> tuple[str, ...]:
    """A note where a config counts fewer than the file holds, as FasterDecoding's does; UserError where more."""
    said = next((config[key] for key in keys if isinstance(config.get(key), int)), held)
    if said > held:
        raise UserError(f"config.json counts {said} {what}, the file holds {held}", "fetch the checkpoint again")
    return (f"config.json counts {said} {what}, the file holds {held}: all of them are taken",) if said < held else ()
