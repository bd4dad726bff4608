"""Checkpoints of a training under way, and the drafter it ends with; each appears whole or not at all."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from medusa_cli.drafters.base import Drafter
from medusa_cli.errors import UsageError, UserError
from medusa_cli.recipe import Recipe, differences, from_dict
from medusa_cli.run import Run, check_backbone, replacing, replacing_folder

# What a resumed training may set anew: when something is looked at and where weights lie, not what is learnt.
MAY_CHANGE = ("train.checkpoint_every", "train.validation_every", "train.validation_tokens", "train.shard")


@dataclass(frozen=True)
class Checkpoint:
    """A training between two steps: weights, optimizer, steps done, random state, and what it belongs to."""

    drafter: dict[str, Any]
    optimizer: dict[str, Any]
    step: int
    rng: torch.Tensor
    recipe: dict[str, Any]
    backbone: dict[str, Any]
    data: str  # digest of the data set
    backbone_weights: dict[str, Any] = field(default_factory=dict)  # those that stage 2 trains


def checkpoint_path(run: Run) -> Path:
    """Where a run keeps the checkpoint its training resumes from."""
    return run.path / "checkpoint.pt"


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write under a temporary name, then rename; UserError where the disk refuses."""
    try:
        with replacing(path) as part:
            torch.save(vars(checkpoint), part)
    except RuntimeError as reason:  # so torch reports a full disk
        raise UserError(
            f"the checkpoint {path} could not be written: {str(reason).splitlines()[0]}",
            "free disk space or choose another --run",
        ) from reason


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; UserError if there is none or it is no checkpoint."""
    if not path.is_file():
        raise UserError(f"--resume: {path} does not exist", "train without --resume")
    try:
        return Checkpoint(**torch.load(path, map_location="cpu", weights_only=True))
    except Exception as reason:  # torch and pickle raise many types for a damaged file
        raise UserError(f"--resume: {path} is damaged", "delete it and train without --resume") from reason


def check(checkpoint: Checkpoint, backbone: dict[str, Any], data: str, recipe: Recipe) -> None:
    """Raise UserError where a checkpoint was made with another backbone, recipe or data."""
    changed = differences(from_dict(checkpoint.recipe, "the checkpoint"), recipe, ("drafter", "train"))
    changed = [key for key in changed if key not in MAY_CHANGE]
    if changed:
        raise UsageError(
            f"--resume: {', '.join(changed)} changed since the checkpoint",
            "resume with the recipe as it was, or train without --resume",
        )
    check_backbone(checkpoint.backbone, backbone, "the checkpoint")
    if checkpoint.data != data:
        raise UserError(
            "--resume: the training data changed since the checkpoint",
            "train without --resume to use the data as it is",
        )


def save_drafter(drafter: Drafter, folder: Path, provenance: dict[str, Any]) -> None:
    """Save a drafter into a folder that replaces an earlier one only when it is complete."""
    with replacing_folder(folder) as part:
        drafter.save(part, provenance)
