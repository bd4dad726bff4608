"""Drafters in the layouts of other programs, out and in."""

from medusa_cli.export.eagle3_format import export_eagle3
from medusa_cli.export.hf import export_hf
from medusa_cli.export.medusa_format import export_medusa

# Each writes a drafter into a folder, and returns lines that tell its use and notes on changes.
FORMATS = {"hf": export_hf, "eagle3": export_eagle3, "medusa": export_medusa}
