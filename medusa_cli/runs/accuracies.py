"""What is known of a drafter's heads without loading it: accuracies, their number, their backbone."""

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from medusa_cli.assets import DEFAULT_MODEL
from medusa_cli.errors import UsageError, UserError
from medusa_cli.runs.io import read_as
from medusa_cli.runs.provenance import Identity, describe_drafter
from medusa_cli.runs.run import DEFAULT_RUN, Run


@dataclass(frozen=True)
class Heads:
    """Calibration file, accuracies [K][top] (empty: not measured), K (None: unknown), backbone identity.

    drafter: the stamp of the drafter that was measured. stale: the run has another drafter by now. temperatures: those
    at which the heads' confidences fit, where they were measured.
    """

    source: Path | None
    accuracies: list[list[float]]
    count: int | None
    backbone: Any = ""
    drafter: str | None = None
    stale: bool = False
    temperatures: tuple[float, ...] = ()

    def first(self, number: int | None) -> "Heads":
        """The first `number` heads (None: all); UsageError where there are fewer."""
        if number is None:
            return self
        if number < 1 or (self.count is not None and number > self.count):
            there = f"1 to {self.count}" if self.count is not None else "1 or more"
            raise UsageError(f"@heads {number} cannot be", f"use {there}")
        return replace(self, accuracies=self.accuracies[:number], count=number)


UNKNOWN = Heads(None, [], None)
# The key under which a file made for a drafter keeps its stamp; files of earlier versions have none.
STAMP = "drafter_stamp"


def stamp_of(folder: Path) -> str | None:
    """What tells a trained drafter from any other: a digest of its config, which says when and how it was made.

    None where the folder holds none.
    """
    config = folder / "config.json"
    return hashlib.sha256(config.read_bytes()).hexdigest()[:16] if config.is_file() else None


def outdated(stamp: str | None, folder: Path) -> bool:
    """Whether a stamp is that of another drafter than the folder's; what is not known does not differ."""
    now = stamp_of(folder)
    return stamp is not None and now is not None and stamp != now


def find_heads(run: str | None, calibration: Path | None) -> tuple[Run | None, Heads, str]:
    """The run whose tree this will be (None: no run's), what is known of its heads, and words for where from.

    A calibration file that is named comes first, then the run that is named, then the default run once it is
    calibrated, then the drafter that ships.
    """
    if calibration is not None:
        return Run.open(run) if run else None, read_calibration(calibration), str(calibration)
    if run is not None:
        target = Run.open(run)
        return target, _of_run(target), f"the run {target.path}"
    default = _default_run()
    if default is not None:
        return default, _of_run(default), f"the run {default.path}"
    shipped = Run.pretrained(DEFAULT_MODEL)
    if shipped is not None and shipped.calibration_path.is_file():
        said = f"the drafter that ships for {DEFAULT_MODEL}, as runs/{DEFAULT_RUN} is not calibrated"
        return None, read_calibration(shipped.calibration_path), said
    return None, UNKNOWN, f"the run runs/{DEFAULT_RUN}"


@dataclass(frozen=True)
class Calibrated:
    """The part of a calibration's file that is read again."""

    accuracies: list[list[float]]
    temperatures: list[float] = field(default_factory=list)
    backbone: Identity | str = ""
    drafter_stamp: str | None = None

    def __post_init__(self) -> None:
        if not self.accuracies or not all(row and all(0 <= one <= 1 for one in row) for row in self.accuracies):
            raise ValueError("it has no table of accuracies between 0 and 1")
        if not all(one > 0 for one in self.temperatures):
            raise ValueError("it has temperatures that are not above 0")


def read_calibration(path: Path) -> Heads:
    """Read a calibration; UserError unless it holds a share between 0 and 1 for every head and rank."""
    found = read_as(path, Calibrated, "the calibration", "write it with `medusa calibrate`")
    rows, heat = found.accuracies, tuple(found.temperatures)
    return Heads(path, rows, len(rows), found.backbone, found.drafter_stamp, temperatures=heat)


def check_current(heads: Heads) -> None:
    """UserError where the run's drafter was trained again after these accuracies were measured."""
    if heads.stale and heads.source is not None:
        raise UserError(
            f"{heads.source} was measured on an earlier drafter of this run",
            f"run `medusa calibrate --run {heads.source.parent}` again",
        )


def _default_run() -> Run | None:
    """The default run, once it has been calibrated."""
    try:
        found = Run.open(DEFAULT_RUN)
    except UserError:
        return None
    return found if found.calibration_path.is_file() else None


def _of_run(target: Run) -> Heads:
    """The run's calibration; where it has none, the number of heads its drafter has."""
    if target.calibration_path.is_file():
        found = read_calibration(target.calibration_path)
        return replace(found, stale=outdated(found.drafter, target.drafter_dir))
    config = target.drafter_dir / "config.json"
    if not config.is_file():
        return UNKNOWN
    said = describe_drafter(target.drafter_dir)
    return UNKNOWN if said.heads is None else Heads(None, [], said.heads, said.provenance.backbone or "")
