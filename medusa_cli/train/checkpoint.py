"""Checkpoints of a training under way, and the drafter it ends with; each appears whole or not at all."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec import convert

from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.engine.kernels import BITS
from medusa_cli.errors import UsageError, UserError, first_line
from medusa_cli.model import Backbone
from medusa_cli.model.load import DTYPES
from medusa_cli.runs.io import replacing, replacing_folder
from medusa_cli.runs.recipe import Recipe, differences, from_dict
from medusa_cli.runs.run import Run, check_backbone
from medusa_cli.train.log import NAME

# What a resumed training may set anew: when something is looked at and where weights lie, not what is learnt.
MAY_CHANGE = ("train.checkpoint_every", "train.validation_every", "train.validation_tokens", "train.shard")


@dataclass(frozen=True)
class Checkpoint:
    """A training between two steps: weights and buffers, optimizer, steps done, and what it belongs to."""

    drafter: dict[str, Any]
    optimizer: dict[str, Any]
    step: int
    recipe: dict[str, Any]
    backbone: dict[str, Any]
    data: str  # digest of the data set
    backbone_weights: dict[str, Any] = field(default_factory=dict)  # those that stage 2 trains
    arithmetic: dict[str, str | None] = field(default_factory=dict)  # of the states; earlier versions did not say


def arithmetic_of(backbone: Backbone, kept: bool) -> dict[str, str | None]:
    """In which numbers states are made: by which engine that rounds weights, if one does, and in which type.

    kept: by distilling, for weights rounded alike, so that the type of this backbone says nothing of them.
    """
    kernel = backbone.engine.kernel.name
    made = {"quantize": kernel if kernel in BITS else None}  # first: such an engine brings its own type
    if not kept:
        made["dtype"] = next(name for name, kind in DTYPES.items() if kind == backbone.dtype)
    return made


def checkpoint_path(run: Run) -> Path:
    """Where a run keeps the checkpoint its training resumes from."""
    return run.path / "checkpoint.pt"


def earlier_path(path: Path) -> Path:
    """Where a file of an earlier training lies until a new one in the same run has a checkpoint of its own."""
    return path.with_name(f"{path.stem}.earlier{path.suffix}")


def _of_training(run: Run) -> tuple[Path, ...]:
    """What a training is gone on with, the checkpoint last: while that is in its place, the others are yet to move."""
    return run.recipe_path, run.path / NAME, checkpoint_path(run)


def set_aside(run: Run) -> None:
    """Rename what a new training finds of an earlier one, for who is then to write the recipe and the log anew.

    It is not deleted before the new one has saved its first checkpoint: a start by mistake, or one that fails at once,
    costs nothing that renaming it back would not mend.
    """
    if checkpoint_path(run).is_file():
        for path in _of_training(run):
            _rename(path)


def set_checkpoint_aside(run: Run) -> None:
    """As `set_aside`, the checkpoint alone: a resumed training must not take it for the new one's."""
    _rename(checkpoint_path(run))


def _rename(path: Path) -> None:
    if path.is_file():
        path.replace(earlier_path(path))


def save(run: Run, checkpoint: Checkpoint) -> None:
    """Write under a temporary name, then rename, and drop what was set aside; UserError where the disk refuses."""
    path = checkpoint_path(run)
    try:
        with replacing(path) as part:
            torch.save(vars(checkpoint), part)
        for left in _of_training(run):
            earlier_path(left).unlink(missing_ok=True)
    except RuntimeError as reason:  # so torch reports a full disk
        raise UserError(
            f"the checkpoint {path} could not be written: {first_line(reason)}",
            "free disk space or choose another @run",
        ) from reason


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; UserError if there is none or it is no checkpoint."""
    if not path.is_file():
        earlier = earlier_path(path)
        again = f", or take {earlier} and the other `.earlier` files beside it back by renaming them"
        aside = again if earlier.is_file() else ""
        raise UserError(f"@resume: {path} does not exist", f"train without @resume{aside}")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        found.pop("rng", None)  # of a version whose steps drew on from one another's random numbers
        return convert(found, Checkpoint)
    except Exception as reason:  # torch and pickle raise many types for a damaged file
        raise UserError(f"@resume: {path} is damaged", "delete it and train without @resume") from reason


def check(
    checkpoint: Checkpoint, identity: dict[str, Any], made: dict[str, str | None], data: str, recipe: Recipe
) -> None:
    """Raise UserError where a checkpoint was made with another backbone, states of other numbers, recipe or data."""
    changed = differences(from_dict(checkpoint.recipe, "the checkpoint"), recipe, ("drafter", "train"))
    changed = [key for key in changed if key not in MAY_CHANGE]
    if changed:
        raise UsageError(
            f"@resume: {', '.join(changed)} changed since the checkpoint",
            "resume with the recipe as it was, or train without @resume",
        )
    check_backbone(checkpoint.backbone, identity, "the checkpoint")
    before, now = checkpoint.backbone.get("rounding"), identity.get("rounding")
    if before != now and "weights" in checkpoint.backbone:  # earlier versions did not say
        raise UsageError(
            f"@resume: the model was loaded with @quantize {before or 'none'} before the checkpoint, now with {now}",
            f"give @quantize {before or 'none'}",
        )
    for key, now_made in made.items():
        known = checkpoint.arithmetic.get(key, now_made)
        if known != now_made:
            raise UsageError(
                f"@resume: the model's states were made with @{key} {known or 'none'} before the checkpoint, and would "
                f"be made with {now_made or 'whole weights'}",
                f"give @{key} {known or 'none'}",
            )
    if checkpoint.data != data:
        raise UserError(
            "@resume: the training data changed since the checkpoint",
            "train without @resume to use the data as it is",
        )


def save_drafter(drafter: HeadDrafter, folder: Path, provenance: dict[str, Any]) -> None:
    """Save a drafter into a folder that replaces an earlier one only when it is complete."""
    with replacing_folder(folder) as part:
        drafter.save(part, provenance)
