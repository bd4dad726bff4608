"""Reads a calibration, and checks that its drafter is the present one."""

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from medusa_cli.assets import DEFAULT_MODEL
from medusa_cli.errors import UsageError, UserError
from medusa_cli.runs.io import read_as
from medusa_cli.runs.provenance import Identity, describe_drafter
from medusa_cli.runs.run import DEFAULT_RUN, RUNS, Run

STAMP = "drafter_stamp"  # the key under which a file that was made for a drafter keeps its stamp


@dataclass(frozen=True)
class Heads:
    """Calibration file, accuracies [K][top] (empty: not measured), number of heads (None: unknown), model's identity.

    drafter: the stamp of the measured drafter. stale: the run has another drafter by now. temperatures: those at which
    the heads' confidences fit.
    """

    source: Path | None = None
    accuracies: list[list[float]] = field(default_factory=list)
    count: int | None = None
    backbone: Any = ""
    drafter: str | None = None
    stale: bool = False
    temperatures: tuple[float, ...] = ()

    def first(self, number: int | None) -> "Heads":
        """Returns the first `number` heads (None: all); raises UsageError if there are fewer."""
        if number is None:
            return self
        if number < 1 or (self.count is not None and number > self.count):
            known = f"1 to {self.count}" if self.count is not None else "1 or more"
            raise UsageError(f"@heads {number} is not valid", f"use {known}")
        return replace(self, accuracies=self.accuracies[:number], count=number)


UNKNOWN = Heads()


@dataclass(frozen=True)
class Calibrated:
    """The part of a calibration's file that is read again."""

    accuracies: list[list[float]]
    temperatures: list[float] = field(default_factory=list)
    backbone: Identity | str = ""
    drafter_stamp: str | None = None

    def __post_init__(self) -> None:
        if not self.accuracies or not all(row and all(0 <= value <= 1 for value in row) for row in self.accuracies):
            raise ValueError("it has no table of accuracies between 0 and 1")
        if not all(value > 0 for value in self.temperatures):
            raise ValueError("it has temperatures that are not above 0")


def read_calibration(path: Path) -> Heads:
    """Reads a calibration; raises UserError unless it holds a share between 0 and 1 for every head and rank."""
    file = read_as(path, Calibrated, "the calibration", "write it with `medusa calibrate`")
    rows, temperatures = file.accuracies, tuple(file.temperatures)
    return Heads(path, rows, len(rows), file.backbone, file.drafter_stamp, temperatures=temperatures)


def stamp_of(folder: Path) -> str | None:
    """Returns a digest of a drafter's config, which differs for each training; None without a drafter."""
    config = folder / "config.json"
    return hashlib.sha256(config.read_bytes()).hexdigest()[:16] if config.is_file() else None


def outdated(stamp: str | None, folder: Path) -> bool:
    """Returns True if a stamp is known and that of another drafter than the folder's."""
    now = stamp_of(folder)
    return stamp is not None and now is not None and stamp != now


def check_current(heads: Heads) -> None:
    """Raises UserError if the run's drafter was trained again after the calibration."""
    if heads.stale and heads.source is not None:
        raise UserError(
            f"{heads.source} was measured on an earlier drafter of this run",
            f"run `medusa calibrate --run {heads.source.parent}` again",
        )


def find_heads(run: str | None, calibration: Path | None) -> tuple[Run | None, Heads, str]:
    """Returns the run whose tree is made, its heads, and their source in words.

    A named calibration comes first, then the named run, the default run once it is calibrated, and what ships.
    """
    if calibration is not None:
        return Run.open(run) if run else None, read_calibration(calibration), str(calibration)
    default = RUNS / DEFAULT_RUN
    if run is not None or (default / "calibration.json").is_file():
        target = Run.open(run or DEFAULT_RUN)
        return target, _heads_of(target), f"the run {target.path}"
    shipped = Run.pretrained(DEFAULT_MODEL)
    if shipped is not None and shipped.calibration_path.is_file():
        source = f"the drafter that ships for {DEFAULT_MODEL}, as {default} is not calibrated"
        return None, read_calibration(shipped.calibration_path), source
    return None, UNKNOWN, f"the run {default}"


def _heads_of(target: Run) -> Heads:
    """Returns the run's calibration; without one, the number of heads of its drafter."""
    if target.calibration_path.is_file():
        heads = read_calibration(target.calibration_path)
        return replace(heads, stale=outdated(heads.drafter, target.drafter_dir))
    if not (target.drafter_dir / "config.json").is_file():
        return UNKNOWN
    config = describe_drafter(target.drafter_dir)
    return UNKNOWN if config.heads is None else Heads(None, [], config.heads, config.provenance.backbone or "")
