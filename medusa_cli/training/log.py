"""The training's record, one JSON object a line: what happened at which step."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from msgspec import convert

from medusa_cli.runs.files import write_atomic
from medusa_cli.runs.reading import read_lines
from medusa_cli.training.events import Event, Saved, Stepped, Stopped, Validated

NAME = "train.jsonl"
# What a line may be of, by the name that it has there.
KINDS = {kind.__name__.lower(): kind for kind in (Stepped, Validated, Saved, Stopped)}


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
    """The lines of a log up to the first that is none, such as a last one that was cut off."""
    lines: list[dict[str, Any]] = []
    heads = 0
    for text in read_lines(path) if path.is_file() else ():
        try:
            line = json.loads(text)
            event = convert(line, KINDS[line["event"]])
        except (ValueError, RecursionError, TypeError, KeyError):
            break
        if isinstance(event, Stepped | Validated):
            heads = heads or len(event.head_losses)
            if not len(event.head_losses) == len(event.accuracies) == heads > 0:
                break
        lines.append(line)
    return lines
