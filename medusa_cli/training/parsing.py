"""Conversations read from a file, their faults counted; those without token ids are tokenised."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from medusa_cli.backbone import Backbone
from medusa_cli.backbone.dialogue import HALF, encode, is_whole, messages_of
from medusa_cli.errors import UserError
from medusa_cli.runs.line import as_line
from medusa_cli.runs.reading import MOST_BYTES, parse_json, unique
from medusa_cli.runs.usable import Malformed, ReadReport, usable


@dataclass(frozen=True)
class Record:
    """One conversation: id, token ids, assistant spans [start, end), its first state row (None: not kept), its seal.

    whole: its rows are those of every position but the last; else those alone that emitted the answers' tokens.
    """

    id: str
    tokens: list[int]
    spans: list[tuple[int, int]]
    first_row: int | None
    seal: str | None = None
    whole: bool = False

    @property
    def answer_tokens(self) -> int:
        return sum(end - start for start, end in self.spans)

    @property
    def rows(self) -> int:
        """How many state rows it has."""
        return len(self.tokens) - 1 if self.whole else self.answer_tokens

    @property
    def rows_of_answers(self) -> list[int]:
        """Where each answer's rows begin among its own."""
        if self.whole:
            return [start - 1 for start, _ in self.spans]
        return [0, *accumulate(end - start for start, end in self.spans)][:-1]


def read_records(path: Path, backbone: Backbone) -> tuple[list[Record], ReadReport]:
    """Read a JSONL (or JSON array) of conversations; the chat template tokenises those without token ids.

    Malformed and truncated records are counted and skipped. UserError for a missing or empty file, or if no
    record is left.
    """
    report = ReadReport()
    records = usable(parse(path, report), partial(record_of, backbone=backbone), report)
    if not records:
        raise UserError(
            f"{path} holds no usable conversation ({report})",
            "make data with `medusa distill`, or give @data",
        )
    return records, report


def parse(path: Path, report: ReadReport) -> Iterator[Any]:
    """The JSON values of a JSONL file or an array, whatever they are; the report counts what is none.

    UserError for a missing or empty file.
    """
    remedy = "make it with `medusa distill`, or give other data with @data"
    if not path.is_file():
        raise UserError(f"{path} does not exist", remedy)
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty", remedy)
    with path.open("rb") as stream:
        head = stream.read(4096).lstrip()
        stream.seek(0)
        if head.startswith(b"["):
            yield from _parse_array(path, stream.read(), report)
            return
        while line := stream.readline(MOST_BYTES):
            if not line.strip():
                report.skip("empty line")
                continue
            try:
                yield parse_json(line)
            except ValueError:  # no JSON or no UTF-8
                report.skip("no JSON" if line.endswith(b"\n") else "cut off")


def _parse_array(path: Path, data: bytes, report: ReadReport) -> Iterator[Any]:
    """The records of a JSON array; one that is cut off still gives those before the cut."""
    decoder = json.JSONDecoder(object_pairs_hook=unique)
    text = data.decode("utf-8", errors="replace").lstrip()[1:]
    at = 0
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at >= len(text) or text[at] == "]":
            return
        try:
            record, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            report.skip("cut off")
            return
        yield record


def record_of(raw: Any, backbone: Backbone) -> Record:
    """A parsed line as a record, tokenised where it has no token ids; Malformed, with the reason, where it is none."""
    if not isinstance(raw, dict):
        raise Malformed("not an object")
    try:
        line = as_line({key: one for key, one in raw.items() if key != "messages"})
    except ValueError as reason:
        raise Malformed("a field of another type") from reason
    name = name_of(raw)
    if not is_whole(name):
        raise Malformed(HALF)
    if "tokens" not in raw:
        return _fitted(Record(name, *encode(backbone, messages_of(raw)), None), backbone)
    tokens, spans, rows = raw["tokens"], raw.get("spans"), raw.get("state_rows")
    if not (isinstance(tokens, list) and all(isinstance(t, int) and 0 <= t < backbone.vocab_size for t in tokens)):
        raise Malformed("token ids outside the model's vocabulary")
    if not isinstance(spans, list) or not spans:
        raise Malformed("no assistant spans")
    last = 1
    for span in spans:
        if not (isinstance(span, list) and len(span) == 2 and last <= span[0] < span[1] <= len(tokens)):
            raise Malformed("assistant spans out of order or range")
        last = span[1]
    record = Record(name, tokens, [(s, e) for s, e in spans], rows[0] if rows else None, line.seal)
    if rows and len(rows) == 2 and rows[1] == len(tokens) - 1:
        return replace(record, whole=True)
    if rows and (len(rows) != 2 or rows[1] != record.answer_tokens):
        raise Malformed("state rows that do not match the spans")
    return record if rows else _fitted(record, backbone)


def name_of(raw: dict[str, Any]) -> str:
    """What a conversation is called: its id, or a digest of it where it has none."""
    return str(raw.get("id") or hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()[:16])


def _fitted(record: Record, backbone: Backbone) -> Record:
    """Cut a conversation to the model's context: states past it cannot be computed."""
    end = min(len(record.tokens), backbone.max_positions)
    spans = [(start, min(stop, end)) for start, stop in record.spans if start < end]
    if not spans:
        raise Malformed("answers past the model's context")
    return Record(record.id, record.tokens[:end], spans, None)
