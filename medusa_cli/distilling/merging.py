"""Several distillations of one model as one: their conversations copied, states and all, into a run of their own."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from medusa_cli.distilling.distilled import Distilled
from medusa_cli.distilling.records import RecordWriter, header_of, whole_lines
from medusa_cli.errors import UserError
from medusa_cli.runs.files import write_json
from medusa_cli.runs.line import as_line
from medusa_cli.runs.made import SEVERAL, describe_distillation
from medusa_cli.runs.run import Run, check_backbone, provenance
from medusa_cli.states import read_rows, seal

# What becomes of a conversation: copied, passed over as its id is there already, or as its states are another's.
TAKEN, KNOWN, BROKEN = "taken", "known", "broken"
# Settings that say whose words the conversations are, and which states: all of one file share them.
SHARED = ("rounding", "chat_template", "self_talk", "taps")


def copied(source: Run, writer: RecordWriter, width: int) -> Iterator[str]:
    """Copy a run's conversations to a writer's, one by one, and say what became of each; UserError for a bad line."""
    for number, record in enumerate(whole_lines(source.distill_path), 1):
        try:
            line = as_line(record)
            if line.id is None or not line.spans:
                raise ValueError("no conversation")
        except ValueError as reason:
            raise UserError(
                f"{source.distill_path} line {number} is no conversation of `medusa distill`",
                "mend or delete that line",
            ) from reason
        id = str(line.id)
        if id in writer.done:
            yield KNOWN
            continue
        rows = line.state_rows
        states = read_rows(source.states_path, width, *rows) if rows else torch.empty(0, 0)
        if rows and line.seal not in (None, seal(id, line.tokens, line.spans, states)):
            yield BROKEN
            continue
        writer.write(Distilled(id, line.messages, line.tokens, list(line.spans), states))
        yield TAKEN


class Merge:
    """Runs to copy from, checked to be of one model and of one way to ask it, and the run to copy into."""

    def __init__(self, sources: Sequence[Run], target: Run) -> None:
        self.sources, self.target = sources, target
        for one in sources:
            if not one.distill_path.is_file():
                raise UserError(f"{one.path} holds no distillation", "name runs of `medusa distill`")
            if one.path.resolve() == target.path.resolve():
                raise UserError(f"{one.path} is the run to merge into", "name another @run")
        owners = [(one, one.owner) for one in (*sources, target)]
        known = [(one, owner) for one, owner in owners if owner is not None]
        if not known or not isinstance(known[0][1].get("hidden_size"), int):
            raise UserError(f"{sources[0].path} does not say which model it is of", "run `medusa distill` in it once")
        first, self._owner = known[0]
        for one, owner in known[1:]:
            try:
                check_backbone(self._owner, owner, f"{first.path}")
            except UserError as reason:
                raise UserError(f"{reason.message}, which {one.path} is of", "merge runs of one model") from reason
        self.header = self._header()

    def _header(self) -> dict[str, Any]:
        """What the merged file says: the settings that all agree in; UserError where they must and do not."""
        made = [describe_distillation(one.path) for one in self.sources]
        if self.target.distill_path.is_file():
            old = describe_distillation(self.target.path)
            if old.seed != SEVERAL:
                raise UserError(
                    f"{self.target.path} was distilled by itself", "merge into another @run, this one among those named"
                )
            made.append(old)
        first = made[0].settings
        for other, one in zip(made[1:], (*self.sources, self.target)[1:], strict=False):
            for key in SHARED:
                if first.get(key) != other.settings.get(key):
                    raise UserError(
                        f"{one.path} was distilled with {key} {other.settings.get(key)!r}, {self.sources[0].path} with "
                        f"{first.get(key)!r}",
                        "merge runs whose conversations were made alike",
                    )
        alike = {key: value for key, value in first.items() if all(one.settings.get(key) == value for one in made)}
        return provenance(self._owner, seed=SEVERAL, settings=alike)

    def run(self) -> Iterator[str]:
        """Copy all; killed at any moment, the same again ends the work."""
        self.target.bind(self._owner)
        self.target.keep_template(self.sources[0].chat_template)
        write_json(header_of(self.target), self.header)
        width = self._owner["hidden_size"] * (1 + len(self.header["settings"].get("taps", ())))
        self.writer = RecordWriter(self.target, width, self.header)
        try:
            for one in self.sources:
                yield from copied(one, self.writer, width)
                self.writer.sync()
        finally:
            self.writer.close()

    def outcome(self, counts: Counter[str]) -> dict[str, Any]:
        """What came of it, for machines."""
        held = {
            "run": str(self.target.path),
            "conversations": len(self.writer.done),
            "answer_tokens": self.writer.tokens,
        }
        return {**held, **{key: counts[key] for key in (TAKEN, KNOWN, BROKEN)}}
