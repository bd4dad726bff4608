"""Reads the records of how a file was made: by which version, for which model, of which data."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medusa_cli.runs.io import convert, read_as

# A model's id, architecture, sizes, and the digest of its weights.
Identity = dict[str, str | int | None]
WHAT = "the drafter's config"


@dataclass(frozen=True)
class Data:
    """The conversations that something was made of."""

    path: str | None = None
    digest: str | None = None


@dataclass(frozen=True)
class TrainSection:
    """The part of a recipe's section `train` that is read again."""

    validation_fraction: float | None = None


@dataclass(frozen=True)
class Provenance:
    """The part of a file's provenance that is read again."""

    created: str | None = None
    backbone: Identity | str | None = None
    data: Data | None = None
    recipe: dict[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> Identity:
        """Returns the model's identity; empty if only its name was written."""
        return self.backbone if isinstance(self.backbone, dict) else {}

    def held_out(self, otherwise: float) -> float:
        """Returns the share of the conversations that training held out, `otherwise` if unknown."""
        section = convert(self.recipe.get("train", {}), TrainSection, "the recipe of the drafter")
        return otherwise if section.validation_fraction is None else section.validation_fraction


@dataclass(frozen=True)
class Described:
    """A drafter's config.json, of whatever kind; that of another tool names no kind."""

    drafter: str | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    num_heads: int | None = None
    medusa_num_heads: int | None = None
    provenance: Provenance = field(default_factory=Provenance)

    @property
    def heads(self) -> int | None:
        return self.medusa_num_heads if self.num_heads is None else self.num_heads


@dataclass(frozen=True)
class Distillation:
    """A run's distill.json: the seed, and the settings that all its conversations share."""

    seed: str | None = None
    settings: dict[str, str | int | float | bool | list[int] | None] = field(default_factory=dict)

    @property
    def taps(self) -> tuple[int, ...]:
        """Returns the layers whose states were kept before the final ones in each row."""
        taps = self.settings.get("taps")
        return tuple(taps) if isinstance(taps, list) else ()


def describe_distillation(folder: Path) -> Distillation:
    """Returns how a run's conversations were distilled; empty if unknown."""
    path = folder / "distill.json"
    return read_as(path, Distillation, "the distillation's header") if path.is_file() else Distillation()


def describe_drafter(folder: Path) -> Described:
    """Returns a drafter's config; raises UserError if it is missing or invalid."""
    return read_as(Path(folder) / "config.json", Described, WHAT)
