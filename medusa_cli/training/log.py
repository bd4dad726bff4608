"""The training's record, one JSON object a line: what happened at which step."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from msgspec import convert

from medusa_cli.runs.files import write_atomic
from medusa_cli.runs.reading import read_lines
from medusa_cli.training.events import Event

NAME = "train.jsonl"
FULL = ("stepped", "validated")


@dataclasses.dataclass(frozen=True)
class Logged:
    """What every line has, and those of steps and validations too."""

    event: str
    step: int
    loss: float = 0.0
    head_losses: list[float] = dataclasses.field(default_factory=list)
    accuracies: list[float] = dataclasses.field(default_factory=list)
    total_positions: int = 0
    parts: dict[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.head_losses) != len(self.accuracies) or (self.event in FULL and not self.head_losses):
            raise ValueError("not every head has its loss and its accuracy")


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
    lines: list[dict[str, Any]] = []
    for text in read_lines(path) if path.is_file() else ():
        try:
            line = json.loads(text)
            heads = len(convert(line, Logged).head_losses)
        except (ValueError, RecursionError):
            break
        if heads and heads != len(next((one["head_losses"] for one in lines if "head_losses" in one), [0] * heads)):
            break
        lines.append(line)
    return lines
