"""Checkpoints of a training run in progress, each written completely or not at all."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from msgspec import convert

from medusa_cli.data.packing import Dataset
from medusa_cli.data.states import rounding
from medusa_cli.errors import UsageError, UserError, first_line
from medusa_cli.files.io import replacing
from medusa_cli.model import Backbone
from medusa_cli.runs.recipe import Recipe
from medusa_cli.runs.recipe_files import differences
from medusa_cli.runs.run import Run, check_backbone
from medusa_cli.train.log import NAME

T = TypeVar("T")
# Settings that may change on resume, because they affect neither the learned weights nor the choice of the best
# weights.
MAY_CHANGE = ("train.checkpoint_every", "train.gradient_checkpointing", "train.shard")


@dataclass(frozen=True)
class Checkpoint:
    """Holds the state of a training run after `step` steps.

    data: the digest of the data set. arithmetic: the quantization and number type of the hidden states.
    """

    step: int
    tensors: dict[str, Any]
    optimizer: dict[str, Any]
    recipe: dict[str, Any]
    backbone: dict[str, Any]
    data: str
    arithmetic: dict[str, str | None]


def arithmetic_of(backbone: Backbone, kept: bool) -> dict[str, str | None]:
    """Returns the quantization of the hidden states, and their number type unless `kept` is True.

    kept: True if the states were stored during distillation, in the number type used then.
    """
    arithmetic = {"quantize": rounding(backbone)}
    if not kept:
        arithmetic["dtype"] = backbone.engine.number_type
    return arithmetic


def checkpoint_path(run: Run) -> Path:
    return run.path / "checkpoint.pt"


def best_path(run: Run) -> Path:
    return run.path / "checkpoint_best.pt"


@dataclass(frozen=True)
class Best:
    """Holds the weights after the step whose validation had the highest simulated acceptance length."""

    step: int
    acceptance: float
    tensors: dict[str, Any]


def earlier_path(path: Path) -> Path:
    """Returns the path to which `set_aside` renames a file of an earlier training run."""
    return path.with_name(f"{path.stem}.earlier{path.suffix}")


def _files(run: Run) -> tuple[Path, ...]:
    """Returns the files of a training run. The checkpoint comes last, so that it is renamed after the others."""
    return run.recipe_path, run.path / NAME, best_path(run), checkpoint_path(run)


def set_aside(run: Run) -> None:
    """Renames the files of an earlier training run, so that a run replaced by mistake can be restored.

    The new run deletes the renamed files at its first regular checkpoint or at its end. If the new run is stopped
    earlier, the renamed files stay, and the next run deletes the stopped run's files instead of renaming them.
    """
    stopped_early = earlier_path(checkpoint_path(run)).is_file()
    if checkpoint_path(run).is_file():
        for path in _files(run):
            if not path.is_file():
                continue
            if stopped_early:
                path.unlink()
            else:
                path.replace(earlier_path(path))
    # A run that was killed before its first checkpoint may have left a file of best weights.
    best_path(run).unlink(missing_ok=True)


def save(run: Run, checkpoint: Checkpoint, *, keep_earlier: bool = False) -> None:
    """Writes a checkpoint; raises UserError if the disk is full.

    Deletes the files that were set aside, unless `keep_earlier` is True.
    """
    _write(checkpoint_path(run), checkpoint)
    for file in () if keep_earlier else _files(run):
        earlier_path(file).unlink(missing_ok=True)


def save_best(run: Run, best: Best) -> None:
    """Writes the best weights so far; raises UserError if the disk is full."""
    _write(best_path(run), best)


def _write(path: Path, content: Checkpoint | Best) -> None:
    try:
        with replacing(path) as part:
            torch.save(vars(content), part)
    except RuntimeError as reason:  # torch reports a full disk this way
        raise UserError(
            f"the checkpoint {path} could not be written: {first_line(reason)}",
            "free disk space or choose another @run",
        ) from reason


def check_present(path: Path) -> None:
    """Raises UserError if there is no checkpoint."""
    if not path.is_file():
        earlier = earlier_path(path)
        back = (
            f", or rename {earlier} and the other `.earlier` files back"
            if earlier.is_file()
            else ""
        )
        raise UserError(f"@resume: {path} does not exist", f"train without @resume{back}")


def load(path: Path) -> Checkpoint:
    """Reads a checkpoint; raises UserError if there is none or it is damaged."""
    check_present(path)
    return _read(path, Checkpoint)


def load_best(run: Run) -> Best | None:
    """Reads the best weights of a training run, or returns None if it has none yet.

    Raises UserError if the weights are damaged.
    """
    path = best_path(run)
    return _read(path, Best) if path.is_file() else None


def _read(path: Path, kind: type[T]) -> T:
    try:
        return convert(torch.load(path, map_location="cpu", weights_only=True), kind)
    except Exception as reason:  # torch and pickle raise many types of errors here
        raise UserError(
            f"@resume: {path} is damaged", "delete it and train without @resume"
        ) from reason


def check(checkpoint: Checkpoint, backbone: Backbone, dataset: Dataset, recipe: Recipe) -> None:
    """Raises UserError if something that the checkpoint depends on has changed.

    A checkpoint depends on the data, the backbone, the quantization and number type of the hidden
    states, and the recipe except for the settings in MAY_CHANGE.
    """
    changed = differences(checkpoint.recipe, recipe, ("drafter", "train"))
    changed = [key for key in changed if key not in MAY_CHANGE]
    if changed:
        raise UsageError(
            f"@resume: {', '.join(changed)} changed since the checkpoint",
            "resume with the recipe as it was, or train without @resume",
        )
    check_backbone(checkpoint.backbone, backbone.identity, "the checkpoint")
    for key, now in arithmetic_of(backbone, dataset.kept).items():
        before = checkpoint.arithmetic.get(key, now)
        if before != now:
            raise UsageError(
                f"@resume: the model ran with @{key} {before or 'none'} before, now with {now or 'none'}",
                f"give @{key} {before or 'none'}",
            )
    if checkpoint.data != dataset.digest:
        raise UserError(
            "@resume: the training data changed since the checkpoint", "train without @resume"
        )
