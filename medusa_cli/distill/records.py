"""Distilled conversations on disk: an append-only file beside its hidden states, parts of processes, merged runs."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from medusa_cli.data.conversation import Conversation, Count, distilled_of
from medusa_cli.data.states import StateStore, read_rows, seal
from medusa_cli.errors import UserError
from medusa_cli.runs.io import check_regular, read_jsonl, read_object, repair_jsonl, write_json
from medusa_cli.runs.provenance import SEVERAL, describe_distillation
from medusa_cli.runs.run import Run, check_backbone, provenance


@dataclass(frozen=True)
class Answered:
    """Finished conversation, and the states [len(tokens) - 1, H * taps] at its positions; a server sends none."""

    conversation: Conversation
    states: Tensor | None = None


@dataclass(frozen=True)
class Failed:
    """Seed that got no usable answer, and why."""

    id: str
    reason: str


@dataclass(frozen=True)
class TooLong:
    """Seed whose first prompt leaves no room for an answer in the context."""

    id: str


Outcome = Answered | Failed | TooLong


@dataclass(frozen=True)
class Dropped:
    """Line of distill-dropped.jsonl: a conversation that was not kept, and the tokens of its shortest answer."""

    id: str
    tokens: Count


class RecordWriter:
    """Appends conversations so that kill -9 at any moment loses only those not yet finished, and doubles none.

    State rows go to disk before the line that names them. On opening, a cut-off last line and rows that no line names
    are dropped. done: ids of the conversations in the file; tokens: their answer tokens. A conversation with an answer
    of fewer than `min_answer_tokens` is not kept: dropped holds that answer's tokens by id. Raises UserError, and
    leaves the files alone, where any other line is no conversation.
    """

    def __init__(self, run: Run, width: int, header: dict[str, Any], min_answer_tokens: int = 0) -> None:
        self.path, self.header, self.min_answer_tokens = run.distill_path, header, min_answer_tokens
        self._dropped_path = self.path.with_name("distill-dropped.jsonl")
        self.done: set[str] = set()
        self.tokens = 0
        rows = self._recover()
        self._check_header(header_path(run))
        self.states = StateStore(run.states_path, width)
        if self.states.rows < rows:
            raise UserError(
                f"{run.states_path} holds {self.states.rows} state rows, but {self.path} names {rows}",
                "the two files do not belong together: distil into another @run",
            )
        self.states.truncate(rows)
        self.stream = self.path.open("a", encoding="utf-8")
        self.dropped: dict[str, int] = {}
        if self._dropped_path.exists():
            repair_jsonl(self._dropped_path)
            lines = read_jsonl(self._dropped_path, make=lambda line: msgspec.convert(line, Dropped))
            self.dropped = {line.id: line.tokens for line in lines}

    @property
    def answered(self) -> set[str]:
        """Ids that need not be asked again: those kept, and those that would be dropped again."""
        return self.done | {id for id, tokens in self.dropped.items() if tokens < self.min_answer_tokens}

    def _recover(self) -> int:
        """Reads the conversations in the file; returns how many state rows their lines name."""
        for path in (self.path, self._dropped_path):
            check_regular(path)
        if not self.path.exists():
            return 0
        repair_jsonl(self.path)
        rows = 0
        for conversation in _distilled(self.path):
            self.done.add(conversation.id)
            self.tokens += conversation.positions
            rows = max(rows, sum(conversation.state_rows or ()))
        return rows

    def _check_header(self, path: Path) -> None:
        """Writes the header; raises UserError where the file was made with another seed or other settings."""
        old = read_object(path, "the distillation's header") if path.exists() else self.header
        for key in ("seed", "settings"):
            before, now = old.get(key), self.header.get(key)
            if before == now:
                continue
            if self.done:
                raise UserError(
                    f"{self.path} was distilled with {key} {json.dumps(before)}, not {json.dumps(now)}",
                    "repeat the earlier settings to resume it, or choose another @run",
                )
            self._dropped_path.unlink(missing_ok=True)  # those answers would be others now
        write_json(path, self.header)

    def write(self, conversation: Conversation, states: Tensor | None = None) -> None:
        """Appends a conversation, its states [n, W] first, then its line; or drops it."""
        shortest = min(end - start for start, end in conversation.spans)
        if shortest < self.min_answer_tokens:
            self.drop(conversation.id, shortest)
            return
        if states is not None:
            rows = (self.states.append(states), len(states))
            conversation = replace(conversation, state_rows=rows, seal=seal(conversation, states))
        self.stream.write(conversation.to_json() + "\n")
        self.stream.flush()
        self.done.add(conversation.id)
        self.tokens += conversation.positions

    def drop(self, id: str, tokens: int) -> None:
        """Notes a conversation that is not kept, so that it is not asked again."""
        self.dropped[id] = tokens
        with self._dropped_path.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"id": id, "tokens": tokens}) + "\n")

    def sync(self) -> None:
        """Waits until everything is on disk."""
        self.states.sync()
        os.fsync(self.stream.fileno())

    def close(self) -> None:
        self.stream.close()
        self.states.close()


def header_path(run: Run) -> Path:
    """Returns where a run's distillation says what made it."""
    return run.path / "distill.json"


def _distilled(path: Path) -> Iterator[Conversation]:
    """Yields the conversations of a distillation; raises UserError for any other line."""

    def refuse(number: int, reason: str) -> None:
        raise UserError(
            f"{path} line {number} is no conversation of `medusa distill` ({reason})", "mend or delete that line"
        )

    return read_jsonl(path, refuse, distilled_of)


def part_of(run: Run, rank: int) -> Run:
    """Returns the folder in which one process of several keeps its conversations, laid out as a run."""
    return Run.open(str(run.path / "parts" / f"{rank:03d}") + os.sep, create=True)


def parts_of(run: Run) -> list[Run]:
    """Returns the parts of a distillation by several processes that has not ended."""
    return [Run(folder) for folder in sorted((run.path / "parts").glob("*"))]


def merge_parts(run: Run, writer: RecordWriter, width: int) -> None:
    """Moves the conversations of all parts into the run's own file.

    A part is removed only when all of it is on disk, and conversations in the file already are passed over: killed at
    any moment, the next merge ends the work. Raises UserError for parts of another seed or other settings.
    """
    for source in parts_of(run):
        part = RecordWriter(source, width, writer.header, writer.min_answer_tokens)
        for _ in copy_conversations(source, writer, width):
            pass
        for id, tokens in part.dropped.items():
            if id not in writer.dropped:
                writer.drop(id, tokens)
        part.close()
        writer.sync()
        shutil.rmtree(source.path)


# What becomes of a conversation: copied, passed over because its id is there, or because its states are another's.
TAKEN, KNOWN, BROKEN = "taken", "known", "broken"
# Settings that say whose words the conversations are, and which states: all of one file share them.
SHARED = ("rounding", "chat_template", "taps")


def copy_conversations(source: Run, writer: RecordWriter, width: int) -> Iterator[str]:
    """Copies a run's conversations with their states; yields TAKEN, KNOWN or BROKEN for each."""
    for conversation in _distilled(source.distill_path):
        if conversation.id in writer.done:
            yield KNOWN
            continue
        states = None
        if conversation.state_rows is not None:
            states = read_rows(source.states_path, width, *conversation.state_rows)
            if conversation.seal != seal(conversation, states):
                yield BROKEN
                continue
        writer.write(replace(conversation, state_rows=None, seal=None), states)
        yield TAKEN


def merge_runs(sources: Sequence[Run], target: Run, on_copied: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Copies the conversations of several runs of one model into another; returns counts.

    Killed at any moment, the same call ends the work. Raises UserError for runs that do not belong together.
    """
    owner, header = _merged_header(sources, target)
    target.bind(owner)
    target.keep_template(sources[0].chat_template)
    write_json(header_path(target), header)
    width = owner["hidden_size"] * (1 + len(header["settings"].get("taps", ())))
    writer = RecordWriter(target, width, header)
    counts = Counter[str]({TAKEN: 0, KNOWN: 0, BROKEN: 0})
    try:
        for source in sources:
            for outcome in copy_conversations(source, writer, width):
                counts[outcome] += 1
                on_copied()
            writer.sync()
    finally:
        writer.close()
    return {"run": str(target.path), "conversations": len(writer.done), "answer_tokens": writer.tokens, **counts}


def _merged_header(sources: Sequence[Run], target: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the identity of the runs' model, and the merged file's header: the settings that all runs share."""
    for source in sources:
        if not source.distill_path.is_file():
            raise UserError(f"{source.path} holds no distillation", "name runs of `medusa distill`")
        if source.path.resolve() == target.path.resolve():
            raise UserError(f"{source.path} is the run to merge into", "name another @run")
    owners = [(run, run.owner) for run in (*sources, target)]
    known = [(run, owner) for run, owner in owners if owner is not None]
    if not known or not isinstance(known[0][1].get("hidden_size"), int):
        raise UserError(f"{sources[0].path} does not say which model it is of", "run `medusa distill` in it once")
    first, owner = known[0]
    for run, other in known[1:]:
        try:
            check_backbone(owner, other, f"{first.path}")
        except UserError as reason:
            raise UserError(f"{reason.message}, the model of {run.path}", "merge runs of one model") from reason
    runs = list(sources)
    if target.distill_path.is_file():
        if describe_distillation(target.path).seed != SEVERAL:
            raise UserError(
                f"{target.path} was distilled by itself", "merge into another @run, this one among those named"
            )
        runs.append(target)
    settings = [describe_distillation(run.path).settings for run in runs]
    for run, other in zip(runs, settings, strict=True):
        for key in SHARED:
            if settings[0].get(key) != other.get(key):
                raise UserError(
                    f"{run.path} was distilled with {key} {other.get(key)!r}, {runs[0].path} with "
                    f"{settings[0].get(key)!r}",
                    "merge runs whose conversations were made alike",
                )
    shared = {key: value for key, value in settings[0].items() if all(other.get(key) == value for other in settings)}
    return owner, provenance(owner, seed=SEVERAL, settings=shared)
