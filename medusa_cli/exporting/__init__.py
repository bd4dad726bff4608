"""Drafters in the layouts of other tools: one file a format, in and out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from medusa_cli.exporting.eagle3 import export_eagle3
from medusa_cli.exporting.folder import Exported
from medusa_cli.exporting.hf import export_hf
from medusa_cli.exporting.medusa import export_medusa
from medusa_cli.exporting.source import Source

FORMATS: dict[str, Callable[..., Exported]] = {"hf": export_hf, "eagle3": export_eagle3, "medusa": export_medusa}


def export_as(format: str, source: Source, output: Path, overwrite: bool = False, **more: Any) -> Exported:
    """Write a drafter in a format by its name into a new folder, or in the place of an earlier export; more: what that
    format alone takes."""
    return FORMATS[format](source, output, overwrite=overwrite, **more)
