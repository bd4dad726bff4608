"""What is known of a drafter's heads without loading it: accuracies, their number, their backbone."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_cli.assets import DEFAULT_MODEL
from medusa_cli.errors import UsageError, UserError
from medusa_cli.run import DEFAULT_RUN, Run, read_json


@dataclass(frozen=True)
class Heads:
    """Calibration file, accuracies [K][top] (empty: not measured), K (None: unknown), backbone identity."""

    source: Path | None
    accuracies: list[list[float]]
    count: int | None
    backbone: Any = ""

    def first(self, number: int | None) -> "Heads":
        """The first `number` heads (None: all); UsageError where there are fewer."""
        if number is None:
            return self
        if number < 1 or (self.count is not None and number > self.count):
            there = f"1 to {self.count}" if self.count is not None else "1 or more"
            raise UsageError(f"--heads {number} cannot be", f"use {there}")
        return Heads(self.source, self.accuracies[:number], number, self.backbone)


UNKNOWN = Heads(None, [], None)


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


def read_calibration(path: Path) -> Heads:
    """Read a calibration; UserError unless it holds a share between 0 and 1 for every head and rank."""
    data = read_json(path, "the calibration")
    rows = data.get("accuracies") if isinstance(data, dict) else None
    if (
        not isinstance(rows, list)
        or not rows
        or not all(isinstance(row, list) and row and all(map(_is_share, row)) for row in rows)
    ):
        raise UserError(
            f"the calibration {path} has no table of accuracies between 0 and 1",
            "write it with `medusa calibrate`",
        )
    return Heads(path, rows, len(rows), data.get("backbone", ""))


def _is_share(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and 0 <= value <= 1


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
        return read_calibration(target.calibration_path)
    config = target.drafter_dir / "config.json"
    if not config.is_file():
        return UNKNOWN
    data = read_json(config, "the drafter's config")
    count = data.get("num_heads", data.get("medusa_num_heads")) if isinstance(data, dict) else None
    if not isinstance(count, int):
        return UNKNOWN
    return Heads(None, [], count, data.get("provenance", {}).get("backbone", ""))
