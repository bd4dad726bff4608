"""Training data: conversations -> answers with the hidden state that emitted each of their tokens -> packed batches."""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_cli.backbone import Backbone
from medusa_cli.drafters.base import Batch
from medusa_cli.errors import UserError
from medusa_cli.training.tokenize import Malformed, encode, messages_of


@dataclass(frozen=True)
class Record:
    """One conversation: id, token ids, assistant spans [start, end), and the first of its state rows (None: not kept)."""

    id: str
    tokens: list[int]
    spans: list[tuple[int, int]]
    first_row: int | None

    @property
    def answer_tokens(self) -> int:
        return sum(end - start for start, end in self.spans)


@dataclass
class ReadReport:
    """How many records were read and skipped, by reason."""

    read: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    def skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def __str__(self) -> str:
        return ", ".join(
            [f"{self.read:,} conversations read"]
            + [f"{n:,} skipped ({why})" for why, n in sorted(self.skipped.items())]
        )


@dataclass(frozen=True)
class Answer:
    """One answer (or a piece of one): its record's id, tokens [n] and the number of its first state row."""

    id: str
    tokens: Tensor
    first_row: int


@dataclass
class Dataset:
    """Answers for training and held out, and the state rows [rows, H * taps] they point into."""

    train: list[Answer]
    held_out: list[Answer]
    states: Tensor
    report: ReadReport
    digest: str  # names this data: the same conversations in the same order

    def batch(
        self, answers: Sequence[Answer], device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> Batch:
        """Answers side by side: hidden [P, H * taps], next [P], and which answer each position belongs to, segment [P]."""
        hidden = torch.cat([self.states[a.first_row : a.first_row + len(a.tokens)] for a in answers])
        segment = torch.cat([torch.full((len(a.tokens),), i) for i, a in enumerate(answers)])
        tokens = torch.cat([a.tokens for a in answers])
        return Batch(hidden=hidden.to(device, dtype), next=tokens.to(device), segment=segment.to(device))


def read_records(
    path: Path, backbone: Backbone, on_progress: Callable[[int], None] = lambda n: None
) -> tuple[list[Record], ReadReport]:
    """Read a JSONL (or JSON array) of conversations; those without token ids are tokenised with the chat template.

    Malformed and truncated records are counted and skipped. UserError for a missing or empty file, or if none is left.
    """
    report = ReadReport()
    records: list[Record] = []
    seen: set[str] = set()
    for raw in _parse(path, report):
        on_progress(1)
        try:
            record = _record(raw, backbone)
        except Malformed as reason:
            report.skip(str(reason))
            continue
        if record.id in seen:
            report.skip("same id as an earlier one")
            continue
        seen.add(record.id)
        records.append(record)
        report.read += 1
    if not records:
        raise UserError(
            f"{path} holds no usable conversation ({report})",
            "make data with `medusa distill`, or give --data",
        )
    return records, report


def _parse(path: Path, report: ReadReport) -> Iterator[Any]:
    remedy = "make it with `medusa distill`, or give other data with --data"
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
        for line in stream:
            if not line.strip():
                report.skip("empty line")
                continue
            try:
                yield json.loads(line)
            except ValueError:  # no JSON or no UTF-8
                report.skip("no JSON" if line.endswith(b"\n") else "cut off")


def _parse_array(path: Path, data: bytes, report: ReadReport) -> Iterator[Any]:
    """The records of a JSON array; one that is cut off still gives those before the cut."""
    decoder = json.JSONDecoder()
    text = data.decode("utf-8", errors="replace").lstrip()[1:]
    at = 0
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at >= len(text) or text[at] == "]":
            return
        try:
            record, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            report.skip("cut off")
            return
        yield record


def _record(raw: Any, backbone: Backbone) -> Record:
    if not isinstance(raw, dict):
        raise Malformed("not an object")
    name = str(raw.get("id") or hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()[:16])
    if "tokens" not in raw:
        return _fitted(Record(name, *encode(backbone, messages_of(raw)), None), backbone)
    tokens, spans, rows = raw["tokens"], raw.get("spans"), raw.get("state_rows")
    if not (
        isinstance(tokens, list) and all(isinstance(t, int) and 0 <= t < backbone.vocab_size for t in tokens)
    ):
        raise Malformed("token ids outside the model's vocabulary")
    if not isinstance(spans, list) or not spans:
        raise Malformed("no assistant spans")
    last = 1
    for span in spans:
        if not (isinstance(span, list) and len(span) == 2 and last <= span[0] < span[1] <= len(tokens)):
            raise Malformed("assistant spans out of order or range")
        last = span[1]
    record = Record(name, tokens, [(s, e) for s, e in spans], rows[0] if rows else None)
    if rows and (len(rows) != 2 or rows[1] != record.answer_tokens):
        raise Malformed("state rows that do not match the spans")
    return record if rows else _fitted(record, backbone)


def _fitted(record: Record, backbone: Backbone) -> Record:
    """Cut a conversation to the model's context: states past it cannot be computed."""
    end = min(len(record.tokens), backbone.max_positions)
    spans = [(start, min(stop, end)) for start, stop in record.spans if start < end]
    if not spans:
        raise Malformed("answers past the model's context")
    return Record(record.id, record.tokens[:end], spans, None)


def is_held_out(id: str, fraction: float) -> bool:
    """Whether a conversation is kept from training: decided by its id alone, so that more data moves none of it."""
    return int.from_bytes(hashlib.sha256(id.encode()).digest()[:8], "big") < fraction * 2**64


def split(records: Sequence[Record], states: Tensor, report: ReadReport, fraction: float) -> Dataset:
    """Answers of two tokens or more, held out by record; records without kept rows take theirs in order, from row 0.

    The record with the smallest hash is held out where the fraction would hold out none of at least two.
    """
    held = {record.id for record in records if is_held_out(record.id, fraction)}
    if fraction > 0 and not held and len(records) > 1:
        held = {min(records, key=lambda one: hashlib.sha256(one.id.encode()).digest()).id}
    if len(held) == len(records) > 1:
        held.discard(records[0].id)
    parts: dict[bool, list[Answer]] = {False: [], True: []}
    digest = hashlib.sha256()
    row = 0
    for record in records:
        row = row if record.first_row is None else record.first_row
        digest.update(json.dumps([record.id, record.tokens, record.spans]).encode())
        for start, end in record.spans:
            if end - start > 1:
                parts[record.id in held].append(
                    Answer(record.id, torch.tensor(record.tokens[start:end]), row)
                )
            row += end - start
    return Dataset(parts[False], parts[True], states, report, digest.hexdigest()[:16])


def pack(answers: Sequence[Answer], positions: int) -> list[list[Answer]]:
    """Micro-batches of at most `positions` positions from whole answers in order; a longer answer is cut into pieces."""
    batches: list[list[Answer]] = []
    room = 0
    for answer in answers:
        for at in range(0, len(answer.tokens), positions):
            piece = Answer(answer.id, answer.tokens[at : at + positions], answer.first_row + at)
            if len(piece.tokens) > room:
                batches.append([])
                room = positions
            batches[-1].append(piece)
            room -= len(piece.tokens)
    return batches


def plan(
    answers: Sequence[Answer], positions: int, epochs: int, seed: int, max_tokens: int | None
) -> list[list[Answer]]:
    """Every micro-batch of a training in order: each epoch shuffled anew; the same for the same seed, so that a resumed
    run needs only its place in it. At most max_tokens positions in all, but one batch at least."""
    batches: list[list[Answer]] = []
    left = max_tokens if max_tokens is not None else sum(len(a.tokens) for a in answers) * epochs
    for epoch in range(epochs):
        order = list(answers)
        random.Random(f"{seed}:{epoch}").shuffle(order)
        for batch in pack(order, positions):
            if left <= 0:
                return batches
            batches.append(batch)
            left -= sum(len(answer.tokens) for answer in batch)
    return batches


def frequent_tokens(answers: Sequence[Answer], size: int, vocab_size: int) -> tuple[Tensor, float]:
    """The `size` most frequent answer tokens [size] (ties by id) and the share of all answer tokens they cover."""
    counts = torch.bincount(torch.cat([answer.tokens for answer in answers]), minlength=vocab_size)
    order = counts.argsort(descending=True, stable=True)[:size]
    return order, float(counts[order].sum() / counts.sum())
