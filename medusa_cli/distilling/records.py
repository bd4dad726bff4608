"""The distilled conversations on disk: append-only JSONL plus state rows, whole again after any crash."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from medusa_cli.distilling.distilled import Distilled
from medusa_cli.errors import UserError
from medusa_cli.runs.files import write_json
from medusa_cli.runs.line import Dropped, Line, as_line
from medusa_cli.runs.reading import check_regular, convert, json_or_none, read_lines, read_object
from medusa_cli.runs.run import Run
from medusa_cli.states import StateStore, seal

DROPPED = "distill-dropped.jsonl"


class RecordWriter:
    """Appends conversations so that kill -9 at any moment loses only those not yet finished, and doubles none.

    The state rows go to disk before the line that names them; on opening, a cut-off last line and rows that no
    line names are dropped. `done` holds the ids of the conversations already there, `tokens` their answer tokens.
    One with an answer of fewer than `least` tokens is not kept: `dropped` says how many tokens that one had.
    UserError, and the files as they were, where any other line is no conversation.
    """

    def __init__(self, run: Run, width: int, header: dict[str, Any], least: int = 0) -> None:
        self.path, self.header, self.least = run.distill_path, header, least
        self.done: set[str] = set()
        self.tokens = 0
        self._dropped_path = self.path.with_name(DROPPED)
        rows = self._recover()
        header_path = header_of(run)
        if (self.done or self._dropped_path.exists()) and header_path.exists():
            changed = _changed(read_object(header_path, "the distillation's header"), header)
            if changed and self.done:
                raise UserError(
                    f"{self.path} was distilled with {changed}",
                    "repeat the earlier settings to resume it, or choose another @run",
                )
            if changed:  # what was dropped would be answered otherwise now
                self._dropped_path.unlink(missing_ok=True)
        write_json(header_path, header)
        self.states = StateStore(run.states_path, width)
        if self.states.rows < rows:
            raise UserError(
                f"{run.states_path} holds {self.states.rows} state rows, but {self.path} names {rows}",
                "the two files do not belong together: distil into another @run",
            )
        self.states.truncate(rows)
        self.stream = self.path.open("a", encoding="utf-8")
        left = [convert(one, Dropped, f"{self._dropped_path}") for one in whole_lines(self._dropped_path)]
        self.dropped = {one.id: one.tokens for one in left}
        if self._dropped_path.exists():
            _end_line(self._dropped_path)

    @property
    def answered(self) -> set[str]:
        """The conversations that need not be asked again: those kept, and those that would be dropped again."""
        return self.done | {id for id, tokens in self.dropped.items() if tokens < self.least}

    def _recover(self) -> int:
        """Cut off a last line that cannot be read, what a crash leaves; return how many state rows the lines name."""
        for path in (self.path, self._dropped_path):
            check_regular(path)
        if not self.path.exists():
            return 0
        rows = whole = 0
        size = self.path.stat().st_size
        for number, text in enumerate(read_lines(self.path), 1):
            record = json_or_none(text)
            if record is None and whole + len(text) == size:
                break
            try:
                rows = max(rows, self._count(as_line(record), rows))
            except ValueError as reason:
                raise UserError(
                    f"{self.path} line {number} is no conversation of `medusa distill`",
                    "mend or delete that line, or choose another @run",
                ) from reason
            whole += len(text)
        os.truncate(self.path, whole)
        _end_line(self.path)
        return rows

    def _count(self, line: Line, rows: int) -> int:
        """Count a conversation that is there; return where its state rows end, or `rows` where it has none.

        ValueError where it is none.
        """
        if not isinstance(line.id, str) or not line.spans or not all(start < end for start, end in line.spans):
            raise ValueError("no conversation")
        self.tokens += sum(end - start for start, end in line.spans)
        first, count = line.state_rows or (rows, 0)
        self.done.add(line.id)
        return first + count

    def write(self, sample: Distilled) -> None:
        """Append one conversation, its states first, then its line; or drop it."""
        shortest = min(end - start for start, end in sample.spans)
        if shortest < self.least:
            self.drop(sample.id, shortest)
            return
        line = Line(sample.id, sample.messages, sample.tokens, list(sample.spans))
        if len(sample.states):  # a server's answers come without
            kept = (self.states.append(sample.states), len(sample.states))
            line = replace(line, state_rows=kept, seal=seal(sample.id, sample.tokens, sample.spans, sample.states))
        self.stream.write(line.to_json() + "\n")
        self.stream.flush()
        self.done.add(sample.id)
        self.tokens += sum(end - start for start, end in sample.spans)

    def drop(self, id: str, tokens: int) -> None:
        """Note a conversation that is not kept, so that it is not asked again."""
        self.dropped[id] = tokens
        with self._dropped_path.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"id": id, "tokens": tokens}) + "\n")

    def sync(self) -> None:
        """Wait until everything is on disk."""
        self.states.sync()
        os.fsync(self.stream.fileno())

    def close(self) -> None:
        self.stream.close()
        self.states.close()


def whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file, if there is one; a line that was cut off is passed over."""
    if not path.is_file():
        return
    for line in read_lines(path):
        record = json_or_none(line)
        if isinstance(record, dict):
            yield record


def header_of(run: Run) -> Path:
    """Where the distillation says what made it."""
    return run.path / "distill.json"


def _changed(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What conversations of one file must share and differs, in words; "" where nothing does."""
    for key in ("seed", "settings"):
        if old.get(key) != new.get(key):
            return f"{key} {json.dumps(old.get(key))}, not {json.dumps(new.get(key))}"
    return ""


def _end_line(path: Path) -> None:
    """Give the last line of a file the break that a crash may have kept from it."""
    with path.open("r+b") as out:
        out.seek(max(0, out.seek(0, 2) - 1))
        if out.read(1) not in b"\n":
            out.write(b"\n")
