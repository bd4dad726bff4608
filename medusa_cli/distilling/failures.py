"""The seeds of a distillation that got no usable answer, and why."""

import json
from pathlib import Path

from medusa_cli.runs.run import Run


class Failures:
    """The side file of a run that names, as they come, the seeds that got no usable answer, and why.

    It is one distillation's alone: what failed earlier is asked again, so the first of several processes empties it.
    """

    def __init__(self, run: Run, first: bool = True) -> None:
        self.path: Path = run.failed_path
        self.count = 0
        if first:
            self.path.unlink(missing_ok=True)

    def add(self, id: str, reason: str) -> None:
        self.count += 1
        with self.path.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"id": id, "reason": reason}) + "\n")
