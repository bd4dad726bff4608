"""The training's record, one JSON object a line: what happened at which step."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from medusa_cli.runs.files import write_atomic
from medusa_cli.training.events import Event

NAME = "train.jsonl"


class TrainLog:
    """Appends events to a JSONL file; a resumed training first drops the lines past its checkpoint."""

    def __init__(self, path: Path, resumed_at: int | None = None) -> None:
        self.path = path
        kept = [line for line in read_log(path) if line["step"] <= resumed_at] if resumed_at is not None else []
        write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._stream = path.open("a", encoding="utf-8")

    def write(self, event: Event) -> None:
        """Append one event, named by its class, and flush it."""
        line = {"event": type(event).__name__.lower(), **dataclasses.asdict(event)}
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a log; a last one that was cut off is left out."""
    lines = []
    if path.is_file():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                break
    return lines
