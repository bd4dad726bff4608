"""What files say of their making: who made them, for which backbone, of which data."""

from dataclasses import dataclass, field
from pathlib import Path

from medusa_cli.runs.io import read_as

# What names a backbone: its id, architecture, sizes, and the fingerprint of its weights.
Identity = dict[str, str | int | None]


@dataclass(frozen=True)
class Data:
    """The conversations that something was made of."""

    path: str | None = None
    digest: str | None = None


@dataclass(frozen=True)
class HeldOut:
    """Of how something was trained: the share of the conversations that was held out."""

    validation_fraction: float | None = None


@dataclass(frozen=True)
class Trained:
    """Of the recipe that something was made by: its training."""

    train: HeldOut = field(default_factory=HeldOut)


@dataclass(frozen=True)
class Made:
    """The part of a file's provenance that is read again; older files have less of it."""

    created: str | None = None
    backbone: Identity | str | None = None
    data: Data | None = None
    recipe: Trained = field(default_factory=Trained)

    @property
    def identity(self) -> Identity:
        """What is known of the backbone; nothing where its name alone was written."""
        return self.backbone if isinstance(self.backbone, dict) else {}

    def held_out(self, otherwise: float) -> float:
        """The share of the conversations that was held out in training; `otherwise` where that is not said."""
        said = self.recipe.train.validation_fraction
        return otherwise if said is None else said


@dataclass(frozen=True)
class Described:
    """What a drafter's config.json says of it, whatever its kind; that of another tool names no kind."""

    drafter: str | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    num_heads: int | None = None
    medusa_num_heads: int | None = None
    provenance: Made = field(default_factory=Made)

    @property
    def heads(self) -> int | None:
        return self.medusa_num_heads if self.num_heads is None else self.num_heads


# In place of the seed of conversations that were distilled in several runs.
SEVERAL = "several runs"


@dataclass(frozen=True)
class Distillation:
    """How a run's conversations were distilled, as its distill.json says: all of one file by the same settings.

    Of merged ones (seed SEVERAL) the settings that all share."""

    seed: str | None = None
    settings: dict[str, str | int | float | bool | list[int] | None] = field(default_factory=dict)

    @property
    def taps(self) -> tuple[int, ...]:
        """After which layers states were kept, before the final ones in each row."""
        said = self.settings.get("taps")
        return tuple(said) if isinstance(said, list) else ()


def describe_distillation(folder: Path) -> Distillation:
    """What the conversations in a run's folder were distilled by; nothing where that is not said."""
    path = folder / "distill.json"
    return read_as(path, Distillation, "the distillation's header") if path.is_file() else Distillation()


def describe_drafter(folder: Path) -> Described:
    """What the config of the drafter in a folder says; UserError where there is none or it cannot be used."""
    return read_as(Path(folder) / "config.json", Described, WHAT)


WHAT = "the drafter's config"
